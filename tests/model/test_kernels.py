"""The fused kernels against plain torch, run by Triton's interpreter on the CPU in a process of its own."""

import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from everybert.model.encoder import product_gelu

SCRIPT = """
import torch
from everybert.model import kernels
from everybert.model.attention import grouped
from everybert.model.ragged import Ragged
torch.manual_seed(0)

torch.float8_e4m3fn = torch.float32  # the interpreter's conversion to fp8 is wrong: it loses carries

def near(rounded, want):
    torch.testing.assert_close(rounded.scale_T1, want.abs().amax(1, keepdim=True).clamp(min=1e-20) / 448)
    torch.testing.assert_close(rounded.rows_TI, want / rounded.scale_T1, atol=1e-3, rtol=1e-5)

for lengths in ([5, 33, 16], [5, 140, 64, 1]):
    batch = Ragged.of([[1] * n for n in lengths])
    qkv = torch.randn(sum(lengths), 3, 2, 16, requires_grad=True)
    grad = torch.randn(sum(lengths), 2, 16)
    offsets = torch.cat((batch.offsets_B1, batch.offsets_B1[-1:]))  # an empty sequence at the end, as filler is
    out, _ = kernels.attention(qkv, offsets, max(lengths))
    want = grouped(qkv.unbind(1), batch, 0.0)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(*(torch.autograd.grad(x, qkv, grad)[0] for x in (out, want)), atol=5e-6, rtol=1e-5)
x = (torch.randn(37, 100) * 3).requires_grad_()
bias = torch.randn(100, requires_grad=True)
grad = torch.randn(37, 100)
out, want = kernels.bias_gelu(x, bias), torch.nn.functional.gelu(x + bias)
torch.testing.assert_close(out, want, atol=3e-6, rtol=1e-5)
for mine, reference in zip(torch.autograd.grad(out, (x, bias), grad), torch.autograd.grad(want, (x, bias), grad)):
    torch.testing.assert_close(mine, reference, atol=2e-5, rtol=1e-5)
for width, bias in ((48, True), (100, False)):
    x, added = torch.randn(5, width) * 3 + 1, torch.randn(5, width)
    norm = torch.nn.LayerNorm(width, bias=bias)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        want = norm(x + added)
        torch.testing.assert_close(
            kernels.add_norm(x, added, norm.weight, norm.bias, norm.eps), want, atol=2e-6, rtol=1e-5
        )
        out = kernels.add_norm_rows(x, added, norm)
        torch.testing.assert_close(out.x, want, atol=2e-6, rtol=1e-5)
        near(out, want)
x = torch.randn(7, 200) * torch.logspace(-3, 3, 7)[:, None]
x[2] = 0.0
near(kernels.round_rows(x), x)
near(kernels.round_rows(x, gelu=True), torch.nn.functional.gelu(x, approximate="tanh"))
print("equal")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (it comes with torch's CUDA builds)")
def test_kernels_equal_plain_torch():
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (it comes with torch's CUDA builds)")
def test_kernels_start_on_the_device_of_their_tensors(monkeypatch):
    """`device="cuda:1"`: Triton would start them on the current device, which is cuda:0."""
    from everybert.model import kernels

    current, started = ["cuda:0"], []

    @contextmanager
    def guard(device):
        current.append(str(device))
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: started.append((current[-1], grid, arguments[1:]))

    monkeypatch.setattr(torch.cuda, "device", guard)
    kernels._launch(Kernel(), (1, 2), [SimpleNamespace(device=torch.device("cuda:1"))], [7])
    assert started == [("cuda:1", (1, 2), (7,))] and current == ["cuda:0"]


def errors(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Mean distances to fp32: of the product with its own GELU, and of the exact GELU of a product that was rounded."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(256, 512).to(device), torch.randn(300, 256, device=device)
    half = torch.nn.Linear(256, 512).to(device, dtype)
    with torch.no_grad():
        for to, source in zip(half.parameters(), linear.parameters()):
            source.copy_(source.to(dtype))  # the same weights on both sides
            to.copy_(source)
        x = x.to(dtype).float()
        want = torch.nn.functional.gelu(linear(x))
        ours = product_gelu(x.to(dtype), half)
        rounded = torch.nn.functional.gelu((x.to(dtype) @ half.weight.t()).float() + half.bias.float()).to(dtype)
    return float((ours.float() - want).abs().mean()), float((rounded.float() - want).abs().mean())


def test_a_product_with_its_own_gelu():
    ours, rounded = errors("cpu", torch.float32)
    assert ours < 1e-4 and rounded < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_with_its_own_gelu_is_no_farther_from_fp32_in_half_precision(dtype):
    ours, rounded = errors("cuda", dtype)
    assert ours < 1.1 * rounded
