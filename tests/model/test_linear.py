"""oneDNN's products are those of torch, with all gradients, wherever they are taken."""

import pytest
import torch
from torch.nn import functional as F

from everybert.model import linear as linears
from everybert.model.linear import Linear, Product, has_product, linear

wide = torch.ones(256, 256)
ours = pytest.mark.skipif(not has_product(wide, wide), reason="torch without oneDNN's product")


@pytest.fixture(autouse=True)
def small_products_too(monkeypatch):
    monkeypatch.setattr(linears, "SMALL", 0)


def operands(shape, out=24, bias=True):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=g)
    return x, torch.randn(out, shape[-1], generator=g), torch.randn(out, generator=g) if bias else None


@ours
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 16), (7, 16), (130, 48), (2, 3, 16), (16,), (0, 16)])
def test_values_and_gradients_are_those_of_torch(shape, bias):
    found = []
    for function in (linear, F.linear):
        leaves = [t.requires_grad_() for t in operands(shape, bias=bias) if t is not None]
        y = function(*leaves)
        (y.sin().sum() + 0.5 * y.sum()).backward()  # the second term's gradient has strides of 0
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@ours
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_asked_for(wanted):
    leaves = [t.requires_grad_(want) for t, want in zip(operands((5, 16)), wanted)]
    linear(*leaves).sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == list(wanted)


@ours
def test_rows_that_do_not_lie_side_by_side():
    rows, weight, bias = operands((9, 40))
    for x in (rows[:, 3:19], rows[::2, ::3][:, :12], rows.t()[:16].t()):
        w = weight[:, : x.shape[1]]
        torch.testing.assert_close(linear(x, w, bias), F.linear(x, w, bias))


def test_other_types_autocast_and_export_take_the_product_of_torch(monkeypatch):
    def never(*_):
        raise AssertionError("oneDNN's product was taken")

    monkeypatch.setattr(linears, "product", never)
    layer = Linear(8, 4)
    assert layer.double()(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64
    layer = Linear(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 8)).dtype == torch.bfloat16
    assert torch.export.export(layer, (torch.ones(2, 8),)).module()(torch.ones(2, 8)).shape == (2, 4)


def test_small_products_are_those_of_torch(monkeypatch):
    monkeypatch.setattr(linears, "SMALL", 100)
    assert not has_product(torch.ones(3, 9), torch.ones(11, 9))
    assert has_product(torch.ones(3, 10), torch.ones(10, 10)) == has_product(wide, wide)


@ours
def test_the_layer_takes_it(monkeypatch):
    taken = []
    monkeypatch.setattr(linears, "product", lambda *_: taken.append(1) or torch.zeros(2, 4))
    with torch.no_grad():
        Linear(8, 4)(torch.ones(2, 8))
    assert taken and isinstance(Product.apply(torch.ones(2, 8), torch.ones(4, 8), None), torch.Tensor)
