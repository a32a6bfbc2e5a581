"""The optimizers: AdamW equals torch's, Muon equals its definition, frozen stays frozen, bad gradients move nothing."""

import copy
import math

import pytest
import torch

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.training.optim import Optimizer, OptimizerConfig

SMALL = {"vocab_size": 30, "hidden_size": 8, "layers": 2, "heads": 2, "intermediate_size": 16, "max_positions": 16}


def network(seed=0, **changes):
    torch.manual_seed(seed)
    return Network(EncoderConfig(**{**SMALL, **changes}), {"mlm": None})


def with_gradients(net, seed=1, size=1.0):
    torch.manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn_like(p) * size
    return net


def test_adamw_equals_torch():
    mine, reference = network(), network()
    ours = Optimizer(mine, OptimizerConfig(clip=None, weight_decay=0.1))
    decayed = [p for p in reference.parameters() if p.dim() >= 2]
    plain = [p for p in reference.parameters() if p.dim() < 2]
    theirs = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], eps=1e-6
    )
    for step in range(5):
        with_gradients(mine, step)
        with_gradients(reference, step)
        for group in theirs.param_groups:
            group["lr"] = 0.01 * (step + 1)
        ours.step(0.01 * (step + 1))
        theirs.step()
    for a, b in zip(mine.parameters(), reference.parameters()):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def newton_schulz(x):
    """One matrix, by the definition."""
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if flip else x


def test_muon_equals_its_definition_matrix_by_matrix():
    net = network()
    before = copy.deepcopy(net)
    optimizer = Optimizer(net, OptimizerConfig(kind="muon", clip=None, weight_decay=0.1, momentum=0.9))
    momentum = {}
    for step in range(3):
        with_gradients(net, step)
        gradients = {n: p.grad.clone() for n, p in net.named_parameters()}
        optimizer.step(0.02)
        for name, p in before.named_parameters():
            if ".layers." not in name or p.dim() != 2:
                continue
            for part in range(3 if "qkv" in name else 1):
                height = p.shape[0] // (3 if "qkv" in name else 1)
                rows = slice(part * height, (part + 1) * height)
                g = gradients[name][rows]
                m = momentum[name, part] = 0.9 * momentum.get((name, part), torch.zeros_like(g)) + 0.1 * g
                update = newton_schulz(0.1 * g + 0.9 * m)
                p.data[rows] = p.data[rows] * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(max(g.shape)) * update
    for (name, a), b in zip(net.named_parameters(), before.parameters()):
        if ".layers." in name and a.dim() == 2:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_moves_nothing(kind):
    net = network()
    optimizer = Optimizer(net, OptimizerConfig(kind=kind))
    with_gradients(net)
    optimizer.step(0.01)
    weights, state = copy.deepcopy(net.state_dict()), {k: v.clone() for k, v in optimizer.state().items()}
    with_gradients(net)
    next(net.parameters()).grad[0, 0] = float("nan")
    assert not torch.isfinite(optimizer.step(0.01))
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())
    moments = {k: v for k, v in optimizer.state().items() if ".step." not in k}
    assert all(torch.equal(v, state[k]) for k, v in moments.items())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_goes_out_and_comes_back(kind):
    one, two = network(), network()
    first, second = (Optimizer(n, OptimizerConfig(kind=kind)) for n in (one, two))
    for step in range(3):
        with_gradients(one, step)
        first.step(0.01)
    two.load_state_dict(one.state_dict())
    second.load({k: v.clone() for k, v in first.state().items()})
    for net, optimizer in ((one, first), (two, second)):
        with_gradients(net, 9)
        optimizer.step(0.01)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    with pytest.raises(EverybertError, match="another recipe"):
        Optimizer(network(), OptimizerConfig(kind="muon")).load({"adam.m.x": torch.zeros(1)})


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_has_no_gradient_stays_as_it_is(kind):
    """A part that is not used for some steps comes back with the moments that it had, as if the steps had not been."""
    one, two = network(), network()
    first, second = (Optimizer(n, OptimizerConfig(kind=kind, clip=None, weight_decay=0.1)) for n in (one, two))
    idle = [name for name, _ in one.named_parameters() if ".layers.1." in name or name.startswith("heads.")]
    for step in range(4):
        for net, optimizer in ((one, first), (two, second)):
            with_gradients(net, step)
            for name, p in net.named_parameters():
                p.grad = None if name in idle and step in (1, 2) else p.grad
            if net is one or step in (0, 3):
                optimizer.step(0.01)
    for (name, a), b in zip(one.named_parameters(), two.parameters()):
        assert torch.equal(a, b) == (name in idle), name
    one.zero_grad()
    before = copy.deepcopy(one.state_dict())
    first.step(0.01)
    assert all(torch.equal(v, before[k]) for k, v in one.state_dict().items())


def test_clipping_and_the_norm():
    net = with_gradients(network(), size=10.0)
    want = math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters()))
    norm = Optimizer(net, OptimizerConfig(clip=1.0)).step(0.0)
    assert float(norm) == pytest.approx(want, rel=1e-5)
    assert math.sqrt(sum(float(p.grad.square().sum()) for p in net.parameters())) == pytest.approx(1.0, rel=1e-4)


def test_frozen_stays_and_scale_slows():
    net = with_gradients(network())
    before = copy.deepcopy(net.state_dict())
    net.encoder.layers[0].requires_grad_(False)
    scale = lambda name: 0.5 if "layers.1" in name else 1.0  # noqa: E731
    Optimizer(net, OptimizerConfig(clip=None, weight_decay=0.0), scale).step(0.01)
    moved = {k: float((v - before[k]).abs().max()) for k, v in net.state_dict().items()}
    assert max(v for k, v in moved.items() if "layers.0" in k) == 0.0
    assert moved["encoder.layers.1.attention.qkv.weight"] == pytest.approx(0.005, rel=0.01)
    assert moved["encoder.embeddings.token.weight"] == pytest.approx(0.01, rel=0.01)
    with pytest.raises(EverybertError, match="nothing is left"):
        Optimizer(network().requires_grad_(False), OptimizerConfig())
