"""A tiny random BERT for the tests of the model room."""

import pytest
import torch

from everybert.model.config import EncoderConfig
from everybert.model.heads import Network


@pytest.fixture
def tiny() -> Network:
    """Three layers, 32 positions, weights large enough that every token matters."""
    torch.manual_seed(1)
    config = EncoderConfig(vocab_size=60, layers=3, hidden_size=48, heads=4, intermediate_size=96, max_positions=32)
    return Network(config.replace(init_range=0.2), {"mlm": None, "nsp": None, "classify": 3, "tag": 5}).eval()
