"""Pooling: the vectors of a sequence's tokens as one vector.

| mode                 | the vector of a sequence                     |
|----------------------|----------------------------------------------|
| cls                  | that of its first token                      |
| max                  | the maximum over its tokens, feature by feature |
| mean                 | the mean over its tokens                     |
| mean_sqrt_len_tokens | the sum over its tokens, divided by √n       |
| weightedmean         | the mean over its tokens, token i with the weight i, counted from 1 |
| lasttoken            | that of its last token                       |

Legend: T tokens in the batch, B sequences, H hidden, n tokens of one sequence.
"""

from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.ragged import Ragged

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""In the order in which sentence-transformers concatenates several."""


def pool(x_TH: Tensor, batch: Ragged, mode: str) -> Tensor:
    """(T, H) → (B, H), in the type of `x_TH`; sums are taken in fp32."""
    if mode == "cls":
        return x_TH[batch.first_B]
    if mode == "lasttoken":
        return x_TH[batch.last_B]
    if mode == "max":
        return batch.reduce(x_TH, "max")
    if mode == "weightedmean":
        weight_T1 = (batch.positions_T[:, None] + 1).float()
        return (batch.reduce(x_TH.float() * weight_T1, "mean") / batch.reduce(weight_T1, "mean")).to(x_TH.dtype)
    mean_BH = batch.reduce(x_TH, "mean")
    return mean_BH * batch.counts_B.sqrt().to(mean_BH.dtype)[:, None] if mode == "mean_sqrt_len_tokens" else mean_BH


def check_mode(mode: str, where: str) -> None:
    """Raise an error that names `where` and the known modes, unless `mode` is one of them."""
    if mode not in MODES:
        raise EverybertError(f"{where}: there is no pooling {mode!r}; choose one of {', '.join(MODES)}")
