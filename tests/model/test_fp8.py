"""Fp8: rounding keeps its bound, the layer computes what it says, the kernels' path is the plain one, and refusals.

torch's CPU build computes the products too, so most of this needs no GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from refusals import refuses
from torch import nn
from torch.nn import functional as F

from everybert.model import engine, fp8
from everybert.model.config import EncoderConfig
from everybert.model.fp8 import Fp8Layer, Fp8Linear, round_rows, to_fp8
from everybert.model.heads import Network
from everybert.model.linear import Rounded
from everybert.model.ragged import Ragged

E4M3 = torch.float8_e4m3fn
NUMBERS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False) | st.sampled_from([0.0, -0.0, 1e-19, -3e-18, 1e30])
BATCH = Ragged.of([[3, 4, 5, 6], [7, 8], [9] * 11])
OTHERS = [{}, {"norm": "pre"}, {"activation": "silu"}, {"feed_forward": "glu"}, {"positions": "rotary"}]


def products() -> bool:
    """Whether this torch has the product on the CPU, as 2.13 has."""
    try:
        one, many = torch.ones(2, 1), torch.ones(1, 16)
        ones = torch.ones(16, 16).to(E4M3)
        torch._scaled_mm(ones[:2], ones.t(), one, many, bias=many[0].bfloat16(), out_dtype=torch.bfloat16)
    except (RuntimeError, AttributeError):
        return False
    return True


computes = pytest.mark.skipif(not products(), reason="no fp8 products on this CPU")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a Hopper GPU without Triton."""
    monkeypatch.setattr(fp8, "device_of", lambda encoder: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fp8, "HAS_TRITON", False)


def network(**changes) -> Network:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 64, "layers": 3, "heads": 4, "intermediate_size": 128}
    config = EncoderConfig(**{**shape, "max_positions": 20, "init_range": 0.1, **changes})
    return Network(config, {"mlm": None}, pooler=True).eval().to(torch.bfloat16)


def cosines(one, two) -> torch.Tensor:
    return torch.cosine_similarity(one.float(), two.float(), dim=-1)


# ── the arithmetic ───────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=NUMBERS))
def test_a_number_keeps_four_bits_and_a_row_its_largest(matrix: np.ndarray):
    x = torch.from_numpy(matrix).double()
    rows, scale_T1, _ = round_rows(torch.from_numpy(matrix))
    assert rows.dtype == E4M3 and rows.float().isfinite().all()
    back = rows.double() * scale_T1.double()
    assert bool(((back - x).abs() <= x.abs() / 16 * 1.000001 + scale_T1 * 2**-10 * 1.000001).all())
    some = x.abs().amax(1) >= 1e-19
    assert bool((rows.float().abs().amax(1)[some] == 448).all())


@computes
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_its_own_formula(bias: bool):
    torch.manual_seed(0)
    base = nn.Linear(768, 256, bias=bias).to(torch.bfloat16)
    layer = Fp8Linear(base)
    x_TI = torch.randn(40, 768) * torch.logspace(-3, 3, 40)[:, None]
    rows, scale_T1, _ = round_rows(x_TI.to(torch.bfloat16))
    weight_OI = layer.rows_OI.double() * layer.scale_O.double()[:, None]
    expected_TO = rows.double() * scale_T1.double() @ weight_OI.T + (base.bias.detach().double() if bias else 0)
    with torch.inference_mode():
        y_TO = layer(x_TI.to(torch.bfloat16))
    assert y_TO.dtype == torch.bfloat16 and list(layer.state_dict()) == list(base.state_dict())
    torch.testing.assert_close(y_TO.double(), expected_TO, rtol=2**-8, atol=1e-5)
    exact_TO = F.linear(x_TI, base.weight.float(), None if base.bias is None else base.bias.float())
    assert cosines(y_TO, exact_TO).min() > 0.998 and cosines(y_TO, exact_TO).mean() > 0.999
    torch.testing.assert_close(layer.weight.float(), base.weight.float(), rtol=0.07, atol=1e-4)


@computes
def test_a_token_does_not_depend_on_its_neighbours():
    layer = Fp8Linear(nn.Linear(32, 48).to(torch.bfloat16))
    x_TI = (torch.randn(30, 32) * torch.logspace(-3, 3, 30)[:, None]).to(torch.bfloat16)
    x_TI[4] = 0
    with torch.inference_mode():
        together = layer(x_TI)
        for at in (0, 4, 29):
            assert torch.equal(together[at], layer(x_TI[at][None])[0])
    assert torch.equal(together[4], layer.bias)


@computes
@pytest.mark.parametrize("changes", [*OTHERS, {"norm_kind": "rms"}], ids=str)
def test_the_encoder_in_fp8_is_near_and_keeps_its_names(hopper, changes):
    plain, other = network(**changes), network(**changes)
    to_fp8(other.encoder)
    names = plain.state_dict()
    assert list(other.state_dict()) == list(names)
    for name, value in other.state_dict().items():
        assert value.dtype == names[name].dtype
        torch.testing.assert_close(value, names[name], atol=1e-3, rtol=0.07)
    with torch.inference_mode():
        one, two = plain(BATCH), other(BATCH)
        watched, states = {}, []
        other.encoder(BATCH, states, watched.__setitem__)
    assert min(cosines(one, two).min(), cosines(one, watched["output"]).min()) > 0.99
    assert len(states) == 4


# ── the kernels' path ────────────────────────────────────────────────────────────────────────────────────────


def plain_kernels(asked: list[str]) -> SimpleNamespace:
    """What the kernels compute, in plain torch."""

    def rounded(x_TN: torch.Tensor, gelu: bool = False) -> Rounded:
        asked.append("gelu" if gelu else "rows")
        return round_rows(F.gelu(x_TN.float(), approximate="tanh") if gelu else x_TN)

    def add_norm_rows(x_TH: torch.Tensor, added_TH: torch.Tensor, norm: nn.LayerNorm) -> Rounded:
        asked.append("norm")
        y_TH = norm(x_TH + added_TH)
        return round_rows(y_TH)._replace(x=y_TH)

    return SimpleNamespace(round_rows=rounded, add_norm_rows=add_norm_rows)


@computes
@pytest.mark.parametrize("changes", [{}, {"linear_bias": False, "norm_bias": False}, {"relative": "alibi"}], ids=str)
def test_layers_whose_kernels_round_give_what_plain_ones_give(hopper, monkeypatch: pytest.MonkeyPatch, changes):
    asked: list[str] = []
    monkeypatch.setattr(fp8, "HAS_TRITON", True)
    monkeypatch.setitem(sys.modules, "everybert.model.kernels", plain_kernels(asked))
    net = network(**changes)
    to_fp8(net.encoder)
    assert {type(layer) for layer in net.encoder.layers} == {Fp8Layer}
    states: list[torch.Tensor] = []
    with torch.inference_mode():
        found = net.encoder(BATCH, states)
        assert asked == ["norm", "gelu", "norm"] * 3
        one_by_one: list[torch.Tensor] = []
        watched = net.encoder(BATCH, one_by_one, lambda name, value: None)  # the plain path
    assert len(asked) == 9 and torch.equal(states[-1], found) and not isinstance(found, Rounded)
    for mine, want in zip(states, one_by_one, strict=True):
        assert cosines(mine, want).min() > 0.997
    assert cosines(found, watched).mean() > 0.998


@computes
def test_only_layers_like_bert_have_them(hopper, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fp8, "HAS_TRITON", True)
    for changes in ({"norm": "pre"}, {"activation": "relu"}, {"feed_forward": "glu"}, {"norm_kind": "rms"}):
        net = network(**changes)
        to_fp8(net.encoder)
        assert not any(isinstance(layer, Fp8Layer) for layer in net.encoder.layers), changes
    for changes in ({"activation": "gelu_tanh"}, {"linear_bias": False}, {"positions": "rotary"}):
        net = network(**changes)
        to_fp8(net.encoder)
        assert all(isinstance(layer, Fp8Layer) for layer in net.encoder.layers), changes


@computes
def test_adapters_lie_on_fp8_as_on_bf16(hopper, adapted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fp8, "HAS_TRITON", True)
    monkeypatch.setitem(sys.modules, "everybert.model.kernels", plain_kernels([]))
    plain, other = network(), network()
    to_fp8(other.encoder)
    before = list(other.state_dict())
    (one, _), (two, adapters) = (adapted(net, BATCH) for net in (plain, other))
    assert cosines(one, two).min() > 0.98
    assert [name for name in other.state_dict() if ".lora." not in name] == before
    refuses("without dtype", adapters.merge)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_devices_without_fp8_are_refused(hopper, monkeypatch: pytest.MonkeyPatch):
    encoder = network().encoder
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    refuses(r"compute capability 8\.9 .*this is NVIDIA A100 \(8\.0\).*bfloat16", to_fp8, encoder)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", None)  # built for AMD
    refuses("NVIDIA", to_fp8, encoder)
    monkeypatch.setattr(fp8, "device_of", engine.device_of)
    refuses("this is cpu,.*int8 on a CPU", to_fp8, encoder)


def test_a_torch_without_the_product_is_refused(hopper, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch, "_scaled_mm")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    refuses("_scaled_mm.*torch 2", to_fp8, network().encoder)


def test_odd_widths_are_refused(hopper):
    refuses("16 divides, not 64 → 100", to_fp8, network(intermediate_size=100).encoder)


@computes
def test_gradients_are_refused(hopper):
    net = network()
    to_fp8(net.encoder)
    token_TE = net.encoder.embeddings.token(BATCH.tokens_T).detach().requires_grad_()
    refuses("no gradients", net.encoder, replace(BATCH, token_TE=token_TE))


# ── on the device ────────────────────────────────────────────────────────────────────────────────────────────


def cuda(**changes) -> tuple[Network, Network]:
    """The same network in bf16 and in fp8."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    shape = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512, "max_positions": 600}
    plain, other = (network(**shape, init_range=0.05, **changes).to("cuda") for _ in range(2))
    to_fp8(other.encoder)
    return plain, other


def ragged(*lengths: int) -> Ragged:
    return Ragged.of([[(7 * i * j + i) % 500 + 5 for j in range(n)] for i, n in enumerate(lengths, 1)])


@pytest.mark.gpu
def test_kernels_round_as_torch_does():
    from everybert.model import kernels

    torch.manual_seed(0)
    for width in (64, 768, 3072):
        x_TN, added = (torch.randn(333, width, device="cuda", dtype=torch.bfloat16) * 4 for _ in range(2))
        norm = nn.LayerNorm(width).to("cuda", torch.bfloat16)
        nn.init.normal_(norm.weight)
        normed = F.layer_norm((x_TN + added).float(), (width,), norm.weight.float(), norm.bias.float(), norm.eps)
        with torch.inference_mode():
            pairs = [
                (kernels.round_rows(x_TN), x_TN.float()),
                (kernels.round_rows(x_TN, gelu=True), F.gelu(x_TN.float(), approximate="tanh")),
                (kernels.add_norm_rows(x_TN, added, norm), normed),
            ]
        torch.testing.assert_close(pairs[2][0].x.float(), normed, atol=0.03, rtol=0.01)
        for (rows, scale_T1, _), want in pairs:
            torch.testing.assert_close(scale_T1, want.abs().amax(1, keepdim=True) / 448, rtol=1e-4, atol=0)
            torch.testing.assert_close(rows.float() * scale_T1, want, rtol=0.0626, atol=float(scale_T1.max()) * 2**-9)
            assert float((rows.float() * scale_T1 - want).norm() / want.norm()) < 0.03


@pytest.mark.gpu
def test_the_product_on_the_device_is_its_own_formula():
    torch.manual_seed(0)
    for rows, inputs, outputs in ((1, 64, 48), (33, 768, 2304), (640, 3072, 768)):
        base = nn.Linear(inputs, outputs).to("cuda", torch.bfloat16)
        layer = Fp8Linear(base)
        x = round_rows(torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16))
        with torch.inference_mode():
            y_TO = layer(x)
        weight_OI = layer.rows_OI.double() * layer.scale_O.double()[:, None]
        want_TO = x.rows_TI.double() * x.scale_T1.double() @ weight_OI.T + base.bias.double()
        assert float((y_TO.double() - want_TO).norm() / want_TO.norm()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [*OTHERS, {"relative": "alibi"}], ids=str)
def test_the_encoder_on_the_device_is_near_bf16(changes):
    plain, other = cuda(**changes)
    batch = ragged(3, 130, 7, 64, 300).to("cuda")
    with torch.inference_mode():
        one, two, watched = plain(batch), other(batch), other.encoder(batch, None, lambda name, value: None)
    assert cosines(one, two).min() > 0.98 and cosines(one, two).mean() > 0.99
    assert cosines(two, watched).mean() > 0.997  # other sums are rounded to other neighbours here and there


@pytest.mark.gpu
def test_graphs_and_the_engine_give_what_the_encoder_gives():
    _, other = cuda()
    batches = [ragged(*lengths) for lengths in ((3, 30, 7), (20, 20), (32,) * 7, (9, 31), (5, 1, 4, 28))]
    with torch.inference_mode():
        wanted = [other.encoder(batch.to("cuda")) for batch in batches]
    for _ in range(3):
        for batch, want in zip(batches, wanted):
            assert cosines(engine.forward(other.encoder, batch), want).min() > 0.999
    recorder = other.encoder.recorder
    assert recorder.works and len(recorder.recordings) >= 2
