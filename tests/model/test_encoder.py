import pytest
import torch
from torch import nn
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.config import PRESETS
from everybert.model.encoder import Encoder, activate, initialise
from everybert.model.ragged import Ragged

SMALL = {"vocab_size": 40, "hidden_size": 16, "heads": 2, "intermediate_size": 24, "layers": 3, "max_positions": 12}
FAMILIES = {
    "bert-tiny": {},
    "albert-base-v2": {"embedding_size": 8},
    "longformer-base-4096": {"windows": (2, 2, 2)},
    "modernbert-base": {"windows": (None, 2, 2)},
    "prenorm-bert-base": {},
}
ONE, TWO = [5, 6, 7, 8, 9, 10], [11, 12, 5]


def encoder(name, **changes):
    torch.manual_seed(0)
    config = PRESETS[name].replace(**{**SMALL, **FAMILIES[name], "init_range": 0.2, **changes})
    made = Encoder(config)
    initialise(made, config)
    return made.eval()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_each_other(name):
    model = encoder(name)
    together = Ragged.of([ONE, TWO])
    for x, ids in zip(together.split(model(together)), (ONE, TWO)):
        torch.testing.assert_close(x, model(Ragged.of([ids])), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_states_watch_and_checkpointing_change_nothing(name):
    model, batch = encoder(name), Ragged.of([ONE, TWO])
    states, seen = [], {}
    plain = model(batch, states)
    torch.testing.assert_close(model(batch, watch=lambda key, x: seen.setdefault(key, x)), plain, atol=1e-5, rtol=1e-5)
    assert len(states) == len(model.config.layer_order) + 1 and torch.equal(states[-1], plain)
    torch.testing.assert_close(seen["layers.0.output"], states[1], atol=1e-5, rtol=1e-5)
    plain.square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.checkpointing = True
    model(batch).square().sum().backward()
    for found, grad in zip([p.grad for p in model.parameters() if p.grad is not None], wanted, strict=True):
        torch.testing.assert_close(found, grad, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_layer_is_its_equations():
    for name, pre in (("bert-tiny", False), ("prenorm-bert-base", True)):
        model, batch, seen = encoder(name), Ragged.of([ONE]), {}
        model(batch, watch=seen.__setitem__)
        x, layer, at = seen["embeddings"], model.layers[0], "layers.0."
        attended = x + seen[at + "attention.output"]
        middle = attended if pre else layer.attention_norm(attended)
        added = layer.feed_forward(layer.feed_forward_norm(middle) if pre else middle)
        wanted = middle + added if pre else layer.feed_forward_norm(middle + added)
        torch.testing.assert_close(seen[at + "output"], wanted)
        assert (model.norm is not None) == pre


@torch.no_grad()
def test_albert_applies_one_set_of_weights_many_times():
    model = encoder("albert-base-v2")
    assert len(model.layers) == 1 and model.config.layer_order == (0, 0, 0)
    assert len(encoder("albert-base-v2", layer_groups=2, inner_layers=2).layers) == 4


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("gelu", lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("gelu_sigmoid", lambda x: x / (1 + torch.exp(-1.702 * x))),
        ("silu", lambda x: x / (1 + torch.exp(-x))),
        ("relu", lambda x: x.clamp(min=0)),
    ],
)
def test_activations(kind, formula):
    x = torch.linspace(-4, 4, 33)
    torch.testing.assert_close(activate(x, kind), formula(x))


def test_fresh_weights_are_as_in_bert():
    model = encoder("bert-tiny", hidden_size=128, vocab_size=2000)
    assert model.embeddings.token.weight.std().item() == pytest.approx(0.2, rel=0.02)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            assert not part.bias.any()
        if isinstance(part, nn.LayerNorm):
            assert (part.weight == 1).all() and not part.bias.any()


@pytest.mark.parametrize(
    ("ids", "segments", "message"),
    [
        ([[40]], None, "token id 40 is outside the vocabulary of 40"),
        ([[-1]], None, "token id -1"),
        ([[1] * 13], None, "longer than this model's 12 positions"),
        ([[1, 2]], [[0, 2]], "segment id 2 is outside this model's 2 segments"),
    ],
)
def test_what_lies_beyond_the_tables_is_refused(ids, segments, message):
    with pytest.raises(EverybertError, match=message):
        encoder("bert-tiny").check(Ragged.of(ids, segments))
    encoder("modernbert-base").check(Ragged.of([[1] * 13]))  # rotary positions have no table
