import pytest
from grammar import write_corpus
from toy import tiny_recipe


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture
def tiny_run():
    return tiny_recipe
