"""A padded batch, for what ragged attention cannot do: ONNX graphs, and tokens that no other token attends to.

Legend: T tokens in the batch, B sequences, N tokens of a padded sequence, H hidden, A heads, D head size.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from everybert.model.attention import QKV, Bias, Pattern
from everybert.model.ragged import Ragged


@dataclass(frozen=True, kw_only=True)
class Padded(Ragged):
    """B sequences padded to N tokens, concatenated.

    Positions count from the left, so the padding must be on the right, as it is for every tokenizer here.
    """

    visible_BN: Tensor
    """bool: False for padding."""

    @classmethod
    def of(  # type: ignore[override]
        cls, ids_BN: Tensor, visible_BN: Tensor, segments_BN: Tensor | None = None, globals_BN: Tensor | None = None
    ) -> "Padded":
        """A batch from the inputs of an ONNX model. Their sizes may be symbols."""
        count, size = ids_BN.shape
        return cls(
            tokens_T=ids_BN.flatten(),
            offsets_B1=torch.arange(count + 1, device=ids_BN.device) * size,
            lengths=(),
            positions_T=torch.arange(size, device=ids_BN.device)[None].expand(count, size).flatten(),
            segments_T=None if segments_BN is None else segments_BN.flatten(),
            globals_T=None if globals_BN is None else globals_BN.flatten(),
            visible_BN=visible_BN,
        )

    def square(self, x: Tensor) -> Tensor:
        """A per-token tensor (B·N, …) as (B, N, …)."""
        return x.unflatten(0, self.visible_BN.shape)

    @property
    def last_B(self) -> Tensor:
        """Index of each sequence's last token before the padding."""
        return self.first_B + self.visible_BN.sum(1) - 1

    @property
    def counts_B(self) -> Tensor:
        """fp32: tokens per sequence, without padding."""
        return self.visible_BN.sum(1).float()

    def reduce(self, x_TH: Tensor, how: Literal["mean", "max"]) -> Tensor:
        """(B·N, H) → (B, H): the mean or maximum over the tokens of each sequence, without padding."""
        x_BNH, visible_BN1 = self.square(x_TH), self.visible_BN[..., None]
        if how == "max":
            return x_BNH.masked_fill(~visible_BN1, torch.finfo(x_TH.dtype).min).amax(1)
        total_BH = (x_BNH.float() * visible_BN1).sum(1)
        return (total_BH / visible_BN1.sum(1).clamp(min=1)).to(x_TH.dtype)

    def attend(  # type: ignore[override]
        self, qkv: QKV, pattern: Pattern, global_qkv: QKV | None, bias: Bias | None = None
    ) -> Tensor:
        """Attention over all pairs of each padded sequence, with a mask. No dropout."""
        real = self.visible_BN[:, None, None]  # (B, 1, 1, N), over keys
        at = torch.arange(self.visible_BN.shape[1], device=real.device)
        if global_qkv is None or self.globals_T is None:
            mixed = self._attend(qkv, pattern.visible(at, at) & real, bias)
        else:
            marked = self.square(self.globals_T)
            mixed = self._attend(qkv, (pattern.visible(at, at) | marked[:, None, None]) & real)
            mixed = torch.where(marked[:, None, :, None], self._attend(global_qkv, real), mixed)
        return mixed.transpose(1, 2).flatten(0, 1)

    def _attend(self, qkv: QKV, seen: Tensor, bias: Bias | None = None) -> Tensor:
        """(B, A, N, D). Unseen scores get the least finite number: −∞ would make rows of padding NaN."""
        q, k, v = (self.square(x).transpose(1, 2) for x in qkv)
        least = torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
        added = torch.zeros_like(least) if bias is None else bias(q, k)
        return sdpa(q, k, v, attn_mask=torch.where(seen, added, least))
