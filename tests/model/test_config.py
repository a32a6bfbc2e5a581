"""Configurations: what cannot be is refused with a reason; what is printed equals `transformers`, to the parameter."""

import pytest
import torch

from everybert.errors import EverybertError
from everybert.model.config import PRESETS, EncoderConfig, preset
from everybert.model.embeddings import sinusoids
from everybert.model.encoder import Encoder
from everybert.model.heads import Network
from everybert.model.ragged import Ragged

SMALL = {"vocab_size": 30, "hidden_size": 8, "layers": 2, "heads": 2, "intermediate_size": 8, "max_positions": 16}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"family": "gpt2"}, "not known"),
        ({"activation": "swish"}, "activation 'swish' is not known; choose one of gelu"),
        ({"norm": "Pre"}, "norm 'Pre' is not known"),
        ({"relative": "bucket"}, "relative 'bucket' is not known"),
        ({"causal": "both"}, "causal 'both' is not known"),
        ({"classifier_pooling": "mean"}, "classifier_pooling 'mean' is not for bert: cls"),
        ({"family": "modernbert", "classifier_pooling": "late"}, "not for modernbert: cls or mean"),
        ({"inner_layers": 0}, "inner_layers must be a whole number"),
        ({"heads": 3}, "not a multiple"),
        ({"layers": 0}, "at least 1"),
        ({"dropout": 1.0}, r"\[0, 1\)"),
        ({"windows": (1,)}, "1 entries for 2 layers"),
        ({"windows": (-1, 1)}, "at least 1"),
        ({"layer_groups": 3}, "layer_groups"),
        ({"positions": "rotary", "heads": 8}, "even head size"),
    ],
)
def test_impossible_settings_are_refused(changes, why):
    with pytest.raises(EverybertError, match=why):
        EncoderConfig(**{**SMALL, **changes})


def test_unknown_field_and_unknown_preset():
    with pytest.raises(EverybertError, match="no field 'width'"):
        EncoderConfig(**SMALL).replace(width=3)
    with pytest.raises(EverybertError, match="did you mean bert-base-uncased"):
        preset("bert-base-uncase")
    with pytest.raises(EverybertError, match="'bert-base'; did you mean bert-base-"):
        preset("bert-base")


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("segments", [0, 1, 2])
def test_positions_and_segments_act(positions, segments):
    torch.manual_seed(0)
    config = EncoderConfig(**SMALL, positions=positions, segments=segments, dropout=0.0, attention_dropout=0.0)
    encoder = Encoder(config).eval()
    torch.nn.init.normal_(encoder.layers[0].attention.qkv.weight)
    if positions != "rotary" and positions == "sinusoidal":
        encoder.embeddings.position.weight.data.copy_(sinusoids(16, 8))
    there, back = encoder(Ragged.of([[3, 4, 5]])), encoder(Ragged.of([[5, 4, 3]]))
    assert not torch.allclose(there, back.flip(0), atol=1e-4)  # order matters
    other = encoder(Ragged.of([[3, 4, 5]], [[1, 1, 1] if segments > 1 else [0, 0, 0]]))
    assert torch.equal(there, other) == (segments < 2)


def test_sinusoids_follow_the_paper():
    table = sinusoids(50, 8)
    assert table[7, 2] == pytest.approx(torch.sin(torch.tensor(7 / 10000 ** (2 / 8), dtype=torch.float64)).item())
    assert table[7, 3] == pytest.approx(torch.cos(torch.tensor(7 / 10000 ** (2 / 8), dtype=torch.float64)).item())
    weight = Network(EncoderConfig(**SMALL, positions="sinusoidal")).encoder.embeddings.position.weight
    assert torch.equal(weight, sinusoids(16, 8)) and not weight.requires_grad


def test_fresh_weights_are_as_bert_draws_them():
    torch.manual_seed(0)
    wide = EncoderConfig(**{**SMALL, "hidden_size": 128, "vocab_size": 500}, init_range=0.05)
    network = Network(wide, {"mlm": None, "classify": 3})
    assert network.encoder.embeddings.token.weight.std().item() == pytest.approx(0.05, rel=0.03)
    assert network.heads["classify"].output.weight.std().item() == pytest.approx(0.05, rel=0.15)
    assert network.encoder.layers[0].attention.qkv.bias.abs().max() == 0


@pytest.mark.parametrize(
    ("ids", "segments", "why"),
    [
        ([[1, 30]], None, "token id 30"),
        ([[-1]], None, "token id -1"),
        ([[1] * 17], None, "17 tokens"),
        ([[1]], [[2]], "segment id 2"),
        ([[1]], [[-1]], "segment id -1"),
    ],
)
def test_out_of_range_inputs_say_why(ids, segments, why):
    with pytest.raises(EverybertError, match=why):
        Encoder(EncoderConfig(**SMALL)).check(Ragged.of(ids, segments))


def test_checkpointing_gives_the_same_gradients():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(**SMALL, dropout=0.0, attention_dropout=0.0))
    batch, grads = Ragged.of([[1, 2, 3], [4, 5]]), []
    for on in (False, True):
        encoder.zero_grad()
        encoder.checkpointing = on
        encoder(batch).square().sum().backward()
        grads.append(encoder.layers[0].attention.qkv.weight.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_builds_without_memory(name):
    with torch.device("meta"):
        network = Network(PRESETS[name])
    assert sum(p.numel() for p in network.parameters()) > 1_000_000


@pytest.mark.parametrize(
    ("name", "layers"), [("modernbert-base", 6), ("modernbert-base", 40), ("longformer-base-4096", 3)]
)
def test_the_pattern_of_windows_follows_the_number_of_layers(name, layers):
    windows = PRESETS[name].replace(layers=layers).windows
    assert windows == tuple(None if i % 3 == 0 else 64 for i in range(layers)) or set(windows) == {256}
