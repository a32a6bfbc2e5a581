import pytest
import torch
from grammar import write_corpus
from places import WORDS
from toy import tiny_recipe

from everybert.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture
def tiny_run():
    return tiny_recipe


@pytest.fixture(scope="module")
def one_thread():
    torch.set_num_threads(1)  # children are forked: no pools of threads


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch):
    """Processes die here, not machines: what is written can be read, synced or not."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    file.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return Tokenizer.load(file)
