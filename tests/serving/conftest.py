"""Models and servers that the tests of this room share."""

from __future__ import annotations

import pytest
import server as own


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The folders of tiny models, by name."""
    return own.make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def served(folders):
    """(address, service) of a server over all of them."""
    with own.running(folders) as found:
        yield found


@pytest.fixture(scope="session")
def url(served):
    """The address of that server."""
    return served[0]
