import pytest
import torch
from grammar import write_corpus
from toy import tiny_recipe


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture
def tiny():
    return tiny_recipe
