"""Int8 on the CPU: int8 weights with a scale per row, activations rounded to 8 bits with a scale per token.

    y = s_t · s_o · Σ_i (u_ti − z) · w_oi + b_o

u and w are bytes and the sum is exact in int32, so a token's result does not depend on the rest of the batch. Numbers
are rounded by adding 1.5·2²³: the low byte of the sum is the nearest integer (ties to even). That is one pass over
memory; a conversion takes several. Embeddings, norms, attention and the heads stay in fp32.

Legend: T tokens in the batch, P the same padded, I inputs, O outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.model.encoder import Encoder

LEVELS = 127
"""The largest magnitude of a stored weight."""
TILE = 32
"""Rows are padded to a multiple of this, since oneDNN compiles a kernel for every number of rows."""
TINY = 1e-20
"""The smallest scale, for rows and tokens of zeros."""
FLOORS = {"gelu": 0.17, "gelu_tanh": 0.171, "gelu_sigmoid": 0.164, "silu": 0.279, "relu": 0.0}
"""The minimum of each activation function, negated: the range of the bytes starts there."""
ROUND = 1.5 * 2**23


def quantise_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8 (O, I) and fp32 scales (O): |w − s·q| ≤ s / 2.

    The scales are rounded up to 17 significant bits: then s·q is exact in fp32, and quantising it gives q and s again.
    """
    weight_OI = weight_OI.detach().float()
    scale_O = (weight_OI.abs().amax(1) / LEVELS).clamp_(min=TINY)
    scale_O = scale_O.view(torch.int32).add_(127).bitwise_and_(~127).view(torch.float32)
    return (weight_OI / scale_O[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scale_O


def dequantise_rows(rows_OI: Tensor, scale_O: Tensor) -> Tensor:
    """The matrix in fp32."""
    return rows_OI.float().mul_(scale_O[:, None])


def supported() -> bool:
    """Whether torch has the int8 product here: x86 with oneDNN."""
    onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_pointwise")
    return onednn and torch.cpu._is_avx2_supported()  # on other processors oneDNN wants other signs


class RoundedLinear(nn.Module):
    """A linear layer with rounded weights, without gradients. Its `state_dict` has the weight that they stand for."""

    def __init__(self, base: nn.Linear, rows_OI: Tensor, scale_O: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = base.in_features, base.out_features, dtype
        self.rows_OI: Tensor
        self.scale_O: Tensor
        self.register_buffer("rows_OI", rows_OI)
        self.register_buffer("scale_O", scale_O)
        self.bias = None if base.bias is None else nn.Parameter(base.bias.detach().to(dtype), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """A copy of the matrix, for inspection."""
        return dequantise_rows(self.rows_OI, self.scale_O).to(self.dtype)

    def check(self, x_TI: Tensor) -> None:
        """Refuse gradients."""
        if torch.is_grad_enabled() and x_TI.requires_grad:
            raise EverybertError("int8 and fp8 weights have no gradients; load the model without this dtype")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        prefix = prefix.removesuffix("rounded.")  # below an AdaptedLinear, keep the layer's own name
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()


class Int8Linear(RoundedLinear):
    """A linear layer in int8. The rest is fp32."""

    def __init__(self, base: nn.Linear, floor: float | None = None) -> None:
        rows_OI, scale_O = quantise_rows(base.weight)
        super().__init__(base, rows_OI, scale_O, torch.float32)
        # Without VNNI, pairs of products are added in 16 bits, which 7-bit activations cannot overflow.
        top = 255 if torch.cpu._is_vnni_supported() else 127
        self.floor = floor
        self.zero = (top + 1) // 2 if floor is None else (top + 1) // 4 if floor else 0
        self.levels = top - self.zero
        self.packed = torch.ops.onednn.qlinear_prepack(rows_OI, None)
        self.shift_O = rows_OI.sum(1).float().mul_(scale_O).mul_(-self.zero)  # subtracts z·Σw
        self.none_O = torch.zeros(self.out_features, dtype=torch.int64)

    def forward(self, x_TI: Tensor) -> Tensor:
        """(T, I) → (T, O)."""
        self.check(x_TI)
        byte_PI, scale_T1 = self.bytes(x_TI)
        y_PO = torch.ops.onednn.qlinear_pointwise(
            byte_PI, 1.0, 0, self.packed, self.scale_O, self.none_O, self.shift_O, 1.0, 0, torch.float32, "none", [], ""
        )
        y_TO = y_PO[: len(x_TI)].mul_(scale_T1)
        return y_TO if self.bias is None else y_TO.add_(self.bias)

    def bytes(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (P, I) and the scales (T, 1): x ≈ s·(u − z). The padding rows are arbitrary."""
        peak_T1 = x_TI.amax(1, keepdim=True)
        if self.floor is None:
            peak_T1 = torch.maximum(peak_T1, x_TI.amin(1, keepdim=True).neg_())
        least = self.floor * self.levels / self.zero if self.floor else TINY  # so that the minimum fits
        scale_T1 = peak_T1.clamp_(min=least).mul_(1 / self.levels)
        near_TI = (x_TI * scale_T1.reciprocal()).add_(ROUND + self.zero)
        byte_PI = torch.empty(-len(x_TI) // TILE * -TILE, self.in_features, dtype=torch.uint8)
        byte_PI[: len(x_TI)].copy_(near_TI.view(torch.int32))
        return byte_PI, scale_T1


def to_int8(encoder: Encoder) -> None:
    """Replace the linear layers of an encoder by int8 ones, in place."""
    if not supported():
        raise EverybertError("int8 needs an x86 processor with AVX2 and torch's oneDNN; load without dtype")
    floor = None if encoder.config.feed_forward == "glu" else FLOORS[encoder.config.activation]
    round_layers(encoder, lambda name, part: Int8Linear(part, floor if name == "feed_forward.output" else None))


def round_layers(encoder: Encoder, rounded: Callable[[str, nn.Linear], RoundedLinear]) -> None:
    """Replace the linear layers of an encoder, each given with its name, in place."""
    for layer in encoder.layers:
        for name, part in list(layer.named_modules()):
            if isinstance(part, nn.Linear):
                parent, _, last = name.rpartition(".")
                setattr(layer.get_submodule(parent), last, rounded(name, part))
