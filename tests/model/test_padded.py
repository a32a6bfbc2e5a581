"""The rectangular form gives every real token what the ragged form gives, whatever stands in the padding."""

import pytest
import torch

from everybert.model.config import PRESETS
from everybert.model.heads import FeatureConfig, Network, add_feature_head, head_logits
from everybert.model.padded import Padded
from everybert.model.ragged import Ragged

SMALL = {"vocab_size": 40, "hidden_size": 16, "heads": 2, "intermediate_size": 24, "max_positions": 30}
CASES = {
    "bert-base-uncased": {},
    "roberta-base": {},
    "distilbert-base-uncased": {},
    "albert-base-v2": {"embedding_size": 8},
    "longformer-base-4096": {"windows": (2, 3, 2)},
    "modernbert-base": {"windows": (None, 2, 3), "classifier_pooling": "mean"},
    "prenorm-bert-base": {},
}
LENGTHS = (1, 14, 5, 9)


def network_of(name, heads):
    torch.manual_seed(0)
    config = PRESETS[name].replace(**{**SMALL, "layers": 3, **CASES[name]})
    network = Network(config, heads, pooler=True).eval()
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    return network


def batches(network, fill=0):
    """The same sequences, ragged and padded with `fill`."""
    torch.manual_seed(1)
    sequences = [torch.randint(40, (n,)).tolist() for n in LENGTHS]
    segments = [[int(i > n // 2) for i in range(n)] for n in LENGTHS] if network.config.segments > 1 else None
    marks = [[0, n - 1] if n > 5 else [] for n in LENGTHS] if network.config.global_attention else None
    ids_BN = torch.full((len(LENGTHS), max(LENGTHS)), fill)
    visible_BN, segments_BN, globals_BN = (torch.zeros_like(ids_BN) for _ in range(3))
    for b, n in enumerate(LENGTHS):
        ids_BN[b, :n], visible_BN[b, :n] = torch.tensor(sequences[b]), 1
        segments_BN[b, :n] = torch.tensor(segments[b]) if segments else 0
        globals_BN[b, marks[b] if marks else []] = 1
    rectangle = Padded.of(ids_BN, visible_BN > 0, segments_BN if segments else None, globals_BN > 0 if marks else None)
    return Ragged.of(sequences, segments, marks), rectangle


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def real(rectangle, x):
    """The rows of the tokens that are there."""
    return rectangle.square(x)[rectangle.visible_BN]


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_every_family_and_head(name):
    heads = {"classify": 3, "tag": 4, "answer": None, "choose": None, "mlm": None, "nsp": None}
    network = network_of(name, heads)
    ragged, rectangle = batches(network)
    close(real(rectangle, network.encoder(rectangle)), network.encoder(ragged))
    for head in ("classify", "choose", "nsp"):
        close(head_logits(network, rectangle, head), head_logits(network, ragged, head))
    for head in ("tag", "answer"):
        close(real(rectangle, head_logits(network, rectangle, head)), head_logits(network, ragged, head))


@pytest.mark.parametrize("name", ["longformer-base-4096", "modernbert-base"])
@torch.inference_mode()
def test_what_stands_in_the_padding_does_not_matter(name):
    network = network_of(name, {"classify": 2})
    one, other = (head_logits(network, batches(network, fill)[1], "classify") for fill in (0, 39))
    assert torch.equal(one, other)


@pytest.mark.parametrize("layers", ["last", "sum", "concat"])
@pytest.mark.parametrize("pool", ["mean", "cls"])
@torch.inference_mode()
def test_feature_heads(layers, pool):
    network = network_of("bert-base-uncased", {})
    add_feature_head(network, "classify", 3, FeatureConfig(layers, pool)).eval()
    ragged, rectangle = batches(network)
    close(head_logits(network, rectangle, "classify"), head_logits(network, ragged, "classify"))


@torch.inference_mode()
def test_a_sequence_of_padding_alone_spoils_nothing():
    network = network_of("modernbert-base", {})
    ids_BN, visible_BN = torch.ones(2, 8, dtype=torch.long), torch.tensor([[True] * 8, [False] * 8])
    x = network.encoder(Padded.of(ids_BN, visible_BN))
    assert x.isfinite().all()
