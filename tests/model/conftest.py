"""A tiny random BERT for the tests of the model room."""

import pytest
import torch

from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.lora import AdapterSet, LoraConfig


@pytest.fixture
def tiny() -> Network:
    """Three layers, 32 positions, weights large enough that every token matters."""
    torch.manual_seed(1)
    config = EncoderConfig(vocab_size=60, layers=3, hidden_size=48, heads=4, intermediate_size=96, max_positions=32)
    return Network(config.replace(init_range=0.2), {"mlm": None, "nsp": None, "classify": 3, "tag": 5}).eval()


@pytest.fixture
def adapted():
    """The output of a network for a batch, with an adapter of random weights that changes it; and its adapters."""

    def output(network, batch):
        adapters = AdapterSet(network)
        adapters.add("a", LoraConfig(rank=2))
        torch.manual_seed(1)
        adapters.load("a", {name: torch.randn_like(value) * 0.3 for name, value in adapters.state("a").items()})
        with torch.inference_mode():
            bare = network(batch)
            adapters.use("a")
            changed = network(batch)
        assert not torch.allclose(bare, changed, atol=0.1)
        return changed, adapters

    return output
