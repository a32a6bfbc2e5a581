"""The optimizer: AdamW for embeddings, biases and norms; AdamW or Muon for the matrices of the layers.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest semi-orthogonal matrix, computed by five
Newton–Schulz steps. Matrices of equal shape are orthogonalised in one batched product, since one launch per matrix
would cost more than its arithmetic; Q, K and V are three matrices in one parameter.

Legend: K matrices of one shape, m × n with m ≤ n.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    """Updates the fp32 parameters of a network.

    `scale(name)` multiplies AdamW's learning rate of a parameter (layer-wise decay); 0 freezes it.
    """

    def __init__(
        self, network: nn.Module, config: OptimizerConfig, scale: Callable[[str], float] | None = None
    ) -> None:
        self.config = config
        self.names: dict[Tensor, str] = {}
        groups: dict[tuple[float, float], list[Tensor]] = {}
        matrices: list[tuple[str, Tensor]] = []
        for name, parameter in network.named_parameters():
            factor = scale(name) if scale is not None else 1.0
            if factor == 0.0:
                parameter.requires_grad_(False)
            if not parameter.requires_grad:
                continue
            self.names[parameter] = name
            if config.kind == "muon" and parameter.dim() == 2 and ".layers." in f".{name}":
                matrices.append((name, parameter))
            else:
                decay = config.weight_decay if parameter.dim() >= 2 else 0.0
                groups.setdefault((decay, factor), []).append(parameter)
        if not self.names:
            raise EverybertError("nothing is left to train: every parameter is frozen")
        self.rates = [rate for _, rate in groups]
        self.adam = torch.optim.AdamW(
            [{"params": ps, "weight_decay": decay} for (decay, _), ps in groups.items()],
            lr=0.0,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.muon = [Muon(rows, config) for rows in _by_shape(matrices)]
        self.parameters = list(self.names)

    def zero(self) -> None:
        """Clear the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor | None = None) -> Tensor:
        """Clip the gradients and update. Nothing changes if the norm is not finite, or if `skip` (0-d bool) is true.

        Returns the norm of the gradients before clipping (0-d).
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        bad = (~torch.isfinite(norm) if skip is None else ~torch.isfinite(norm) | skip).float()
        if self.config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, norm)
        for group, rate in zip(self.adam.param_groups, self.rates):
            group["lr"] = lr * rate
        self.adam.found_inf = bad  # type: ignore[attr-defined]  # the fused kernel skips the update without a synchronisation
        self.adam.step()
        for muon in self.muon:
            muon.step(lr, bad)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Every buffer by name."""
        out: dict[str, Tensor] = {}
        for parameter, name in self.names.items():
            if kept := self.adam.state.get(parameter):
                out |= {f"adam.{short}.{name}": kept[key] for key, short in BUFFERS.items()}
        for muon in self.muon:
            out.update(muon.state())
        return out

    def load(self, state: dict[str, Tensor]) -> None:
        """Load the output of `state`; every buffer must be there."""
        try:
            for parameter, name in self.names.items():
                if f"adam.m.{name}" not in state:
                    continue
                kept = {key: state[f"adam.{short}.{name}"] for key, short in BUFFERS.items()}
                self.adam.state[parameter] = {key: value.to(parameter.device) for key, value in kept.items()}
            for muon in self.muon:
                muon.load(state)
        except KeyError as missing:
            raise EverybertError(
                f"the saved optimizer lacks {missing}; it belongs to another recipe, so start a new run folder"
            ) from None


class Rows(NamedTuple):
    """One matrix: `height` rows of a parameter from row `start`."""

    name: str
    parameter: Tensor
    start: int
    height: int


class Muon:
    """Muon for all matrices of one shape."""

    def __init__(self, rows: list[Rows], config: OptimizerConfig) -> None:
        self.config = config
        self.rows = rows
        self.height, width = rows[0].height, rows[0].parameter.shape[1]
        self.turned = self.height > width
        m, n = sorted((self.height, width))
        self.momentum_Kmn = torch.zeros(len(rows), m, n, device=rows[0].parameter.device)
        self.weights = [r.parameter.detach()[r.start : r.start + self.height] for r in rows]
        # Updates have the same size as AdamW's, so that one learning rate fits both (Liu et al. 2025, eq. 4).
        on_gpu = rows[0].parameter.is_cuda
        self.direction = torch.compile(_direction, dynamic=False) if on_gpu else _direction
        self.scale = torch.tensor(0.2 * math.sqrt(n), device=rows[0].parameter.device)

    def step(self, lr: float, bad: Tensor) -> None:
        """Add the orthogonalised Nesterov momentum to the weights; nothing changes if `bad` is 1."""
        rows = [(r.parameter if r.parameter.grad is None else r.parameter.grad, r) for r in self.rows]
        grad_Kmn = torch.stack([g[r.start : r.start + self.height] for g, r in rows])
        for k, r in enumerate(self.rows):
            if r.parameter.grad is None:  # not used by this objective (Longformer's global projections)
                grad_Kmn[k].zero_()
        step_Kmn = self.direction(grad_Kmn, self.momentum_Kmn, bad, self.config.momentum, self.turned)
        keep = 1.0 - lr * self.config.weight_decay
        torch._foreach_mul_(self.weights, torch.where(bad > 0, 1.0, torch.full_like(bad, keep)))
        torch._foreach_add_(self.weights, list((step_Kmn * self.scale * -lr).unbind()))

    def state(self) -> dict[str, Tensor]:
        """The momentum of each matrix, by parameter name and first row."""
        return {f"muon.{r.name}.{r.start}": self.momentum_Kmn[k].contiguous() for k, r in enumerate(self.rows)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load the output of `state`."""
        for k, r in enumerate(self.rows):
            self.momentum_Kmn[k].copy_(state[f"muon.{r.name}.{r.start}"])


def _by_shape(matrices: list[tuple[str, Tensor]]) -> list[list[Rows]]:
    """Split fused Q, K, V, and group matrices of equal shape."""
    groups: dict[tuple[int, int], list[Rows]] = {}
    for name, parameter in matrices:
        parts = 3 if "qkv" in name and parameter.shape[0] == 3 * parameter.shape[1] else 1
        height, width = parameter.shape[0] // parts, parameter.shape[1]
        for part in range(parts):
            groups.setdefault((height, width), []).append(Rows(name, parameter, part * height, height))
    return list(groups.values())


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
