"""What is refused is refused in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from everybert.errors import EverybertError


def refuses(why: str, call: Callable[..., object], *given: object, **more: object) -> str:
    """The message of the error that the call raises: it matches, and is one line."""
    with pytest.raises(EverybertError, match=why) as caught:
        call(*given, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)
