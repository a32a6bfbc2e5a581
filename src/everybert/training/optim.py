"""The optimizer: AdamW for embeddings, biases and norms; AdamW or Muon for the matrices of the layers.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest semi-orthogonal matrix, computed by five
Newton–Schulz steps. Matrices of equal shape are orthogonalised in one batched product, since one launch per matrix
would cost more than its arithmetic; Q, K and V are three matrices in one parameter.

Legend: K matrices of one shape, m × n with m ≤ n.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from everybert.errors import EverybertError

BUFFERS = {"exp_avg": "m", "exp_avg_sq": "v", "step": "step"}
"""AdamW's buffers and their names in checkpoints."""


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: how the weights are updated. The learning rate is a function of the step (schedule.py)."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw for everything, or muon for the encoder layers' matrices and adamw for the rest."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-6
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices and embeddings; biases and norms are never decayed."""
    clip: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    momentum: float = 0.95
    """Muon's momentum (Nesterov)."""

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip <= 0:
            raise EverybertError("optimizer clip must be positive; leave it out for none")


class Optimizer:
    """Updates the fp32 parameters of a network; `scale(name)` multiplies AdamW's learning rate of a parameter."""

    def __init__(
        self, network: nn.Module, config: OptimizerConfig, scale: Callable[[str], float] | None = None
    ) -> None:
        self.config = config
        self.names: dict[Tensor, str] = {}
        groups: dict[tuple[float, float], list[Tensor]] = {}
        shapes: dict[torch.Size, dict[str, Tensor]] = {}
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                continue
            self.names[parameter] = name
            if config.kind == "muon" and parameter.dim() == 2 and ".layers." in f".{name}":
                shapes.setdefault(_matrices(name, parameter)[0].shape, {})[name] = parameter
            else:
                decay = config.weight_decay if parameter.dim() >= 2 else 0.0
                groups.setdefault((decay, scale(name) if scale else 1.0), []).append(parameter)
        if not self.names:
            raise EverybertError("nothing is left to train: every parameter is frozen")
        self.adam = torch.optim.AdamW(
            [{"params": ps, "weight_decay": decay, "rate": rate} for (decay, rate), ps in groups.items()],
            lr=0.0,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.muon = [Muon(parameters, config) for parameters in shapes.values()]
        self.parameters = list(self.names)

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor | None = None) -> Tensor:
        """Clip the gradients and update. Nothing changes if the norm is not finite, or if `skip` (0-d bool) is true.

        Returns the norm of the gradients before clipping (0-d).
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        bad = (~torch.isfinite(norm) if skip is None else ~torch.isfinite(norm) | skip).float()
        if self.config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["rate"]
        self.adam.found_inf = bad  # type: ignore[attr-defined]  # the fused kernel skips the update without a synchronisation
        self.adam.step()
        for muon in self.muon:
            muon.step(lr, bad)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Every buffer by name."""
        out: dict[str, Tensor] = {}
        for parameter, name in self.names.items():
            if buffers := self.adam.state.get(parameter):
                out |= {f"adam.{short}.{name}": buffers[key] for key, short in BUFFERS.items()}
        for muon in self.muon:
            out.update(muon.state())
        return out

    def load(self, state: dict[str, Tensor]) -> None:
        """Load the output of `state`; every buffer must be there."""
        try:
            for parameter, name in self.names.items():
                if f"adam.m.{name}" not in state:
                    continue
                buffers = {key: state[f"adam.{short}.{name}"] for key, short in BUFFERS.items()}
                self.adam.state[parameter] = {key: value.to(parameter.device) for key, value in buffers.items()}
            for muon in self.muon:
                muon.load(state)
        except KeyError as missing:
            raise EverybertError(
                f"the saved optimizer lacks {missing}; it belongs to another recipe, so start a new run folder"
            ) from None


class Muon:
    """Muon for all matrices of one shape."""

    def __init__(self, parameters: dict[str, Tensor], config: OptimizerConfig) -> None:
        self.parameters, self.config = parameters, config
        parts = [(name, number, w) for name, p in parameters.items() for number, w in enumerate(_matrices(name, p))]
        self.weights = [w.detach() for *_, w in parts]
        height, width = self.weights[0].shape
        self.keys = [f"muon.{name}.{number * height}" for name, number, _ in parts]
        self.turned = height > width
        m, n = sorted((height, width))
        self.momentum_Kmn = self.weights[0].new_zeros(len(parts), m, n)
        # Updates have the same size as AdamW's, so that one learning rate fits both (Liu et al. 2025, eq. 4).
        self.scale = 0.2 * math.sqrt(n)
        self.direction = torch.compile(_direction, dynamic=False) if self.weights[0].is_cuda else _direction

    def step(self, lr: float, bad: Tensor) -> None:
        """Add the orthogonalised Nesterov momentum to the weights; nothing changes if `bad` is 1.

        As in AdamW, a parameter without a gradient stays as it is (Longformer's global projections, often).
        """
        graded = [p.grad is not None for name, p in self.parameters.items() for _ in _matrices(name, p)]
        used = [k for k, has_grad in enumerate(graded) if has_grad]
        if not used:
            return
        grads = ((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
        grad_Kmn = torch.stack([part for name, grad in grads for part in _matrices(name, grad)])
        momentum_Kmn = self.momentum_Kmn if all(graded) else self.momentum_Kmn[used]
        step_Kmn = self.direction(grad_Kmn, momentum_Kmn, bad, self.config.momentum, self.turned)
        if not all(graded):
            self.momentum_Kmn[used] = momentum_Kmn
        keep, weights = 1.0 - lr * self.config.weight_decay, [self.weights[k] for k in used]
        torch._foreach_mul_(weights, torch.where(bad > 0, 1.0, torch.full_like(bad, keep)))
        torch._foreach_add_(weights, list((step_Kmn * self.scale * -lr).unbind()))

    def state(self) -> dict[str, Tensor]:
        """The momentum of each matrix, by parameter name and first row."""
        return dict(zip(self.keys, self.momentum_Kmn))

    def load(self, state: dict[str, Tensor]) -> None:
        """Load the output of `state`."""
        for key, momentum_mn in zip(self.keys, self.momentum_Kmn):
            momentum_mn.copy_(state[key])


def _matrices(name: str, tensor: Tensor) -> tuple[Tensor, ...]:
    """The matrices of a parameter, or of its gradient: Q, K and V are three in one, if they are of equal size."""
    return tensor.chunk(3 if "qkv" in name and tensor.shape[0] == 3 * tensor.shape[1] else 1)


def _direction(grad_Kmn: Tensor, momentum_Kmn: Tensor, bad: Tensor, mu: float, turned: bool) -> Tensor:
    """Update the momentum in place and return the orthogonalised Nesterov step; zero, and no change, if bad is 1."""
    if turned:
        grad_Kmn = grad_Kmn.transpose(1, 2)
    good = 1.0 - bad
    grad_Kmn = torch.where(bad > 0, 0.0, grad_Kmn)
    mixed_Kmn = torch.lerp(momentum_Kmn, grad_Kmn, good * (1 - mu))
    momentum_Kmn.copy_(mixed_Kmn)
    step_Kmn = _orthogonalise(torch.lerp(grad_Kmn, mixed_Kmn, mu)).float() * good
    return step_Kmn.transpose(1, 2).contiguous() if turned else step_Kmn


def _orthogonalise(x_Kmn: Tensor) -> Tensor:
    """Five Newton–Schulz steps, x ← a·x + (b·xxᵀ + c·(xxᵀ)²)·x, which drive all singular values towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x_Kmn.bfloat16() if x_Kmn.is_cuda else x_Kmn
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
