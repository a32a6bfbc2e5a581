"""Int8: rounding keeps its bound, the layer computes what it says, and neighbours do not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import nn

from everybert.errors import EverybertError
from everybert.model import int8
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.int8 import FLOORS, Int8Linear, dequantise_rows, quantise_rows, supported, to_int8
from everybert.model.lora import AdapterSet, LoraConfig
from everybert.model.ragged import Ragged

computes = pytest.mark.skipif(not supported(), reason="no int8 products on this machine")
NUMBERS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False) | st.sampled_from([0.0, -0.0, 1e-20, -3e-30, 1e30])
MATRICES = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=NUMBERS)


@settings(deadline=None)
@given(MATRICES)
def test_a_weight_is_half_a_step_from_its_byte_at_most(weight: np.ndarray):
    given_OI = torch.from_numpy(weight)
    rows_OI, scale_O = quantise_rows(given_OI)
    assert rows_OI.dtype == torch.int8 and bool((scale_O > 0).all())
    off_OI = (given_OI.double() - rows_OI.double() * scale_O.double()[:, None]).abs()
    assert bool((off_OI <= scale_O.double()[:, None] * 0.5000001).all())


@settings(deadline=None)
@given(MATRICES)
def test_what_was_rounded_is_rounded_to_itself(weight: np.ndarray):
    rows_OI, scale_O = quantise_rows(torch.from_numpy(weight))
    exact_OI = rows_OI.double() * scale_O.double()[:, None]
    back_OI = dequantise_rows(rows_OI, scale_O)
    assert torch.equal(back_OI.double(), exact_OI)
    again_OI, scale_again_O = quantise_rows(back_OI)
    assert torch.equal(again_OI, rows_OI)
    some = rows_OI.any(1)  # a row of zeros has no scale of its own
    assert torch.equal(scale_again_O[some], scale_O[some])


@computes
@pytest.mark.parametrize("floor", [None, *sorted(FLOORS.values())])
@pytest.mark.parametrize("bias", [True, False])
@settings(deadline=None, max_examples=10)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**20))
def test_the_layer_is_its_own_formula(floor: float | None, bias: bool, tokens: int, inputs: int, outputs: int, seed):
    generator = torch.Generator().manual_seed(seed)
    base = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(base.weight, generator=generator)
    layer = Int8Linear(base, floor)
    x_TI = torch.randn(tokens, inputs, generator=generator) * 3
    if floor is not None:
        x_TI = x_TI.clamp(min=-floor)
    byte_PI, scale_T1 = layer.bytes(x_TI)
    near_TI = (byte_PI[:tokens].double() - layer.zero) * scale_T1.double()
    assert bool(((near_TI - x_TI).abs() <= scale_T1 * 0.501).all())
    with torch.inference_mode():
        y_TO = layer(x_TI)
    expected_TO = near_TI @ layer.weight.double().T + (base.bias.detach().double() if bias else 0)
    assert y_TO.shape == (tokens, outputs)
    torch.testing.assert_close(y_TO.double(), expected_TO, rtol=1e-4, atol=1e-4)


@computes
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 50), st.integers(0, 49), st.integers(0, 2**20))
def test_a_token_does_not_depend_on_its_neighbours(tokens: int, at: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    layer = Int8Linear(nn.Linear(24, 33))
    x_TI = torch.randn(tokens, 24, generator=generator) * torch.logspace(-3, 3, tokens)[:, None]
    with torch.inference_mode():
        assert torch.equal(layer(x_TI)[at % tokens], layer(x_TI[at % tokens][None])[0])


@computes
def test_zeros_large_and_lost_numbers():
    layer = Int8Linear(nn.Linear(8, 5))
    with torch.inference_mode():
        assert torch.equal(layer(torch.zeros(2, 8))[1], layer.bias)
        assert bool(layer(torch.full((1, 8), 1e30)).isfinite().all())
        lost = layer(torch.tensor([[float("nan")] + [1.0] * 7, [1.0] * 8]))
    assert bool(lost[0].isnan().all()) and bool(lost[1].isfinite().all())


def network(**changes) -> Network:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 32, "layers": 2, "heads": 4, "intermediate_size": 48, "max_positions": 20}
    return Network(EncoderConfig(**{**shape, "init_range": 0.1, **changes}), {"mlm": None}, pooler=True).eval()


BATCH = Ragged.of([[3, 4, 5, 6], [7, 8], [9] * 11])


@computes
def test_the_encoder_in_int8_is_near_and_keeps_its_names():
    plain, other = network(), network()
    to_int8(other.encoder)
    assert Int8Linear in map(type, other.encoder.modules()) and Int8Linear not in map(type, plain.encoder.modules())
    names = plain.state_dict()
    assert list(other.state_dict()) == list(names)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, names[name], atol=0.01, rtol=0)
    with torch.inference_mode():
        one, two = plain(BATCH), other(BATCH)
        watched = {}
        other.encoder(BATCH, watch=watched.__setitem__)
    assert torch.cosine_similarity(one, two).min() > 0.995
    torch.testing.assert_close(watched["output"], two, atol=1e-5, rtol=1e-5)
    assert watched["layers.1.feed_forward.active"].shape == (17, 48)


@computes
def test_gradients_and_merging_are_refused():
    net = network()
    to_int8(net.encoder)
    token_TE = net.encoder.embeddings.token(BATCH.tokens_T).detach().requires_grad_()
    with pytest.raises(EverybertError, match="no gradients"):
        net.encoder(replace(BATCH, token_TE=token_TE))
    adapters = AdapterSet(net)
    adapters.add("a", LoraConfig(rank=2))
    adapters.use("a")
    with pytest.raises(EverybertError, match="without dtype"):
        adapters.merge()


@computes
def test_adapters_lie_on_int8_as_on_fp32(adapted):
    plain, other = network(), network()
    to_int8(other.encoder)
    before = other.state_dict()
    outputs = [adapted(net, BATCH)[0] for net in (plain, other)]
    assert torch.cosine_similarity(*outputs).min() > 0.99
    assert [name for name in other.state_dict() if ".lora." not in name] == list(before)


def test_a_machine_without_int8_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(int8, "supported", lambda: False)
    with pytest.raises(EverybertError, match="AVX2"):
        to_int8(network().encoder)


@computes
def test_seven_bits_where_sums_would_overflow(monkeypatch: pytest.MonkeyPatch):
    """Without VNNI two products are added in 16 bits: 2·127·127 fits, 2·255·127 does not."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    for floor in (None, 0.17):
        layer = Int8Linear(nn.Linear(16, 8), floor)
        byte_PI, _ = layer.bytes(torch.rand(6, 16) * 9)
        assert byte_PI[:6].max() <= 127 and layer.zero + layer.levels == 127
