"""Linear layers, whose products on the CPU in fp32 are oneDNN's.

torch itself uses MKL, which is half as fast as oneDNN on some AMD processors and as fast on others (docs/LOG.md; not
measured on Intel's). On other devices, in other types, and for export, the product is torch's own.

Legend: T tokens, I inputs, O outputs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = 1 << 15
"""With fewer weights, the product is too short to pay for oneDNN's preparation, once per number of tokens."""


class Linear(nn.Linear):
    """y = W·x + b."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, I) → (…, O)."""
        return linear(input, self.weight, self.bias)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """(T, I) → (T, O) by the fastest product there is for this device and type."""
    if not has_product(x_TI, weight_OI):
        return F.linear(x_TI, weight_OI, bias_O)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TI, weight_OI, bias_O)):
        return Product.apply(x_TI, weight_OI, bias_O)
    return product(x_TI, weight_OI, bias_O)


def has_product(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes this product: fp32 on an x86 processor, not small, outside autocast and export."""
    ours = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and x.dim() > 1 and x.numel() > 0
    ours = ours and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_exporting()
    return ours and weight.numel() >= SMALL and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """The product by oneDNN; it has no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")


class Product(torch.autograd.Function):
    """oneDNN's product with its gradients: dX = dY·W, dW = dYᵀ·X, db = Σ dY."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """(T, I) → (T, O)."""
        ctx.save_for_backward(x_TI, weight_OI)
        return product(x_TI, weight_OI, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_TO: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs that have one."""
        x_TI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows_TO, rows_TI = d_TO.flatten(0, -2), x_TI.flatten(0, -2)
        return (
            product(d_TO, weight_OI.t()) if wants_x else None,
            product(rows_TO.t(), rows_TI.t()) if wants_weight else None,
            rows_TO.sum(0) if wants_bias else None,
        )


# ── fp8 ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Rounded(NamedTuple):
    """The input of a product in fp8 (fp8.py): rows · scale ≈ x; and x itself, if that is needed too."""

    rows_TI: Tensor
    scale_T1: Tensor
    x: Tensor | None = None


def exact(x: Tensor | Rounded) -> Tensor:
    """Hidden states without rounding: everywhere but in fp8 the tensor itself."""
    return x.x if isinstance(x, Rounded) else x  # type: ignore[return-value]
