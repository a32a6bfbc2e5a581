"""LoRA: an adapter starts as nothing, merges exactly, and switches without moving weights."""

import pytest
import torch

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network, head_logits
from everybert.model.linear import Linear
from everybert.model.lora import TARGETS, AdapterSet, LoraConfig
from everybert.model.ragged import Ragged

BATCH = Ragged.of([[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]])


@pytest.fixture
def network():
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=60, layers=2, hidden_size=16, heads=2, intermediate_size=24, max_positions=40)
    return Network(config.replace(init_range=0.3), {"classify": 3}).eval()


def randomise(adapters, name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in adapters.state(name).values():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)


def logits(network):
    with torch.no_grad():
        return head_logits(network, BATCH, "classify")


@pytest.mark.parametrize("targets", [TARGETS, ("query", "value"), ("key",), ("feed_forward.output",)])
def test_a_fresh_adapter_changes_nothing_and_merging_changes_nothing_more(network, targets):
    before = logits(network)
    adapters = AdapterSet(network)
    adapters.add("a", LoraConfig(rank=3, targets=targets))
    adapters.use("a")
    assert torch.equal(logits(network), before)
    randomise(adapters, "a")
    adapted = logits(network)
    assert not torch.allclose(adapted, before, atol=1e-3)
    adapters.use(None)
    assert torch.equal(logits(network), before)
    adapters.use("a")
    adapters.merge()
    torch.testing.assert_close(logits(network), adapted, atol=1e-5, rtol=1e-5)


def test_many_adapters_with_heads_of_their_own(network):
    before = logits(network)
    adapters = AdapterSet(network)
    for seed, name in enumerate(("one", "two")):
        other = Network(network.config, {"classify": 4 + seed})
        adapters.add(name, LoraConfig(), {"classify": other.heads["classify"].eval()})
        randomise(adapters, name, seed)
    seen = {}
    for name in ("one", "two", "one", None, "two"):
        adapters.use(name)
        out = logits(network)
        assert torch.equal(seen.setdefault(name, out), out)
    assert seen["one"].shape[1] == 4 and seen["two"].shape[1] == 5 and torch.equal(seen[None], before)
    with pytest.raises(EverybertError, match="no adapter 'three'; this model has one, two"):
        adapters.use("three")
    with pytest.raises(EverybertError, match="already"):
        adapters.add("two", LoraConfig())


def test_only_the_adapter_learns(network):
    network.requires_grad_(False)
    adapters = AdapterSet(network)
    adapters.add("a", LoraConfig(dropout=0.1))
    adapters.use("a")
    head_logits(network.train(), BATCH, "classify").sum().backward()
    moved = [name for name, p in network.named_parameters() if p.grad is not None]
    assert moved == [name for name, _ in network.named_parameters() if ".lora.a." in name]


def test_settled_networks_are_plain(network):
    names = set(network.state_dict())
    adapters = AdapterSet(network)
    adapters.add("a", LoraConfig())
    adapters.use("a")
    randomise(adapters, "a")
    adapted = logits(network)
    adapters.merge()
    assert set(network.state_dict()) == names
    assert {type(m) for m in network.modules() if "Linear" in type(m).__name__} == {Linear}
    torch.testing.assert_close(logits(network), adapted, atol=1e-5, rtol=1e-5)


def test_bad_settings(network):
    with pytest.raises(EverybertError, match="rank"):
        LoraConfig(rank=0)
    with pytest.raises(EverybertError, match="adapter targets are"):
        LoraConfig(targets=("querry",))
    adapters = AdapterSet(network)
    adapters.add("a", LoraConfig(rank=2))
    with pytest.raises(EverybertError, match="does not fit"):
        adapters.load("a", {})
    with pytest.raises(EverybertError, match="merge needs"):
        adapters.merge()
