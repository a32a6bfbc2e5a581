"""Fp8 on GPUs that compute in it: weights with a scale per row, activations with a scale per token, both in E4M3.

    y = s_t · s_o · Σ_i q_ti · p_oi + b_o

E4M3 numbers have four significant bits and are at most 448. In layers like BERT's, kernels that compute the inputs of
products also round them (kernels.py); elsewhere they are rounded before each product. The rest stays in bf16.

Legend: T tokens in the batch, I inputs, O outputs.
"""

import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.model.attention import HAS_TRITON, Relative, Watch, fused
from everybert.model.encoder import Encoder, Layer
from everybert.model.engine import device_of
from everybert.model.int8 import TINY, RoundedLinear, round_layers
from everybert.model.linear import Rounded, exact
from everybert.model.ragged import Ragged


def round_rows(x_TI: Tensor) -> Rounded:
    """Round a matrix; the largest number of each row becomes 448."""
    if fused(x_TI):
        from everybert.model import kernels

        return kernels.round_rows(x_TI.contiguous())
    scale_T1 = x_TI.float().abs().amax(1, keepdim=True).clamp_(min=TINY) / 448
    return Rounded((x_TI / scale_T1).to(torch.float8_e4m3fn), scale_T1)


class Fp8Linear(RoundedLinear):
    """A linear layer in fp8. Its bias and its results are in bf16."""

    def __init__(self, base: nn.Linear) -> None:
        if base.in_features % 16 or base.out_features % 16:
            raise EverybertError(f"fp8 needs widths that 16 divides, not {base.in_features} → {base.out_features}")
        rows_OI, scale_O1, _ = round_rows(base.weight.detach())
        super().__init__(base, rows_OI, scale_O1[:, 0], torch.bfloat16)

    def forward(self, x: Tensor | Rounded) -> Tensor:
        """(T, I) → (T, O). Sums have 22 bits, which is fast and finer than what is summed."""
        if not isinstance(x, Rounded):
            self.check(x)
            x = round_rows(x)
        columns_IO, scale_1O = self.rows_OI.t(), self.scale_O[None]
        return torch._scaled_mm(
            x.rows_TI, columns_IO, x.scale_T1, scale_1O, bias=self.bias, out_dtype=self.dtype, use_fast_accum=True
        )


class Fp8Layer(Layer):
    """A layer like BERT's (post-norm, GELU): the kernels between its products also round."""

    def forward(  # type: ignore[override]
        self, x: Tensor | Rounded, batch: Ragged, window: int | None, relative: Relative, watch: Watch | None = None
    ) -> Tensor | Rounded:
        """(T, H) → (T, H), rounded for the next layer."""
        attention, block = self.attention, self.feed_forward
        plain = all(type(part) is Fp8Linear for part in (attention.qkv, block.input, block.output))  # no adapters
        if not plain or watch is not None or torch.is_grad_enabled() or self.training:
            return super().forward(exact(x), batch, window, relative, watch)
        from everybert.model.kernels import add_norm_rows, round_rows

        x = add_norm_rows(exact(x), attention(x, batch, window, relative), self.attention_norm)
        active = round_rows(block.input(x), gelu=True)
        return add_norm_rows(exact(x), block.output(active), self.feed_forward_norm)


def to_fp8(encoder: Encoder) -> None:
    """Replace the linear layers of an encoder by fp8 ones, in place."""
    config, device = encoder.config, device_of(encoder)
    can = torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else (0, 0)
    if can < (8, 9) or not hasattr(torch, "_scaled_mm"):
        name = f"{torch.cuda.get_device_name(device)} ({can[0]}.{can[1]})" if any(can) else str(device)
        needs = "fp8 needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper) and torch._scaled_mm"
        raise EverybertError(f"{needs}; this is {name}, torch {torch.__version__}: load in bfloat16, or int8 on a CPU")
    round_layers(encoder, lambda _, part: Fp8Linear(part))
    gelu = config.feed_forward != "glu" and config.activation in ("gelu", "gelu_tanh")
    if HAS_TRITON and gelu and config.norm == "post" and config.norm_kind == "layer":
        for layer in encoder.layers:
            layer.__class__ = Fp8Layer  # the same parts, another forward pass
