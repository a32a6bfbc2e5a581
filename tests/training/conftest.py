import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from grammar import write_corpus

from everybert.training.recipe import Recipe
from everybert.training.tables import Source

TINY = """
seed = 3
steps = 40
[model]
layers = 2
hidden_size = 32
heads = 2
intermediate_size = 64
max_positions = 64
[examples]
kind = "pairs"
[batch]
tokens = 512
pack = 256
length = 32
[schedule]
peak = 5e-3
warmup = 4
[run]
log_every = 5
evaluate_every = 0
save_every = 7
evaluate_packs = 2
tensorboard = false
"""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c")


@pytest.fixture
def tiny():
    return tiny_recipe


def tiny_recipe(**changes):
    return Recipe.parse(Source(TINY, "tiny.toml"), **changes)
