"""Attribution of a prediction to tokens by integrated gradients (Sundararajan et al. 2017).

IG(x) = (x − x′) ⊙ ∫₀¹ ∇f(x′ + α(x − x′)) dα over the token embeddings x, from a baseline x′ in which every token is
[MASK]. Its sum over the text is f(x) − f(x′) ("completeness"); `gap` is the numerical error of that sum.

Legend: n tokens of the text, K points of the integral, T tokens of a batch, E embedding width, C outputs of the head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from everybert.inside.attention import batch_of
from everybert.model.heads import SEQUENCE_HEADS, Network, head_logits
from everybert.text.tokenizer import Encoding, Tokenizer

POINTS = (16, 48, 144)
"""Numbers of points of the integral; the next is used if the error of the sum is more than a hundredth."""
BUDGET = 512
"""Tokens per batch: what gradients need is kept for all layers at once."""


@dataclass(frozen=True)
class Attribution:
    """The contribution of each token to a prediction: positive for, negative against it."""

    text: str
    pair: str | None
    tokens: list[str]
    offsets: list[tuple[int, int]] = field(repr=False)
    texts: list[int | None] = field(repr=False)
    """The text of each token, 0 or 1; None for special tokens."""
    scores: np.ndarray
    """float64 (n)."""
    target: str
    """What is explained."""
    value: float
    """f(x), of the text."""
    baseline: float
    """f(x′), of the text with every token masked."""

    @property
    def gap(self) -> float:
        """f(x) − f(x′) − Σ scores: the error of the integral."""
        return self.value - self.baseline - float(self.scores.sum())


def attribute(
    network: Network,
    tokenizer: Tokenizer,
    encoding: Encoding,
    head: str,
    target: Callable[[Tensor], Tensor],
    global_tokens: Sequence[int] | None = None,
) -> tuple[np.ndarray, float, float]:
    """Attribute the value `target` of a head's logits, (K, C) or (K, n, C) → (K), to the tokens of a text or pair.

    Returns the scores (n), and the value for the text and for the baseline.
    """
    weight, n = network.encoder.embeddings.token.weight, len(encoding)
    nothing = next((i for i in (tokenizer.mask_id, tokenizer.pad_id, tokenizer.unk_id) if i is not None), 0)
    masked = [i if special else nothing for i, special in zip(encoding.ids, encoding.special)]
    start_nE, end_nE = (weight.detach()[ids].double().cpu() for ids in (masked, encoding.ids))

    def run(alphas: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The token embeddings at some points of the line from the masked text to the text, and f at each, (K)."""
        alpha_K = torch.tensor(alphas, dtype=torch.float64)[:, None, None]
        x_TE = (start_nE + alpha_K * (end_nE - start_nE)).flatten(0, 1).to(weight.device, weight.dtype)
        x_TE.requires_grad_(torch.is_grad_enabled())
        batch = replace(batch_of(network, encoding, global_tokens, len(alphas)), token_TE=x_TE)
        logits = head_logits(network, batch, head).float()
        return x_TE, target(logits if head in SEQUENCE_HEADS else logits.unflatten(0, (len(alphas), n)))

    def mean_gradient(count: int) -> Tensor:
        """(n, E): the integral of ∇f by Gauss-Legendre quadrature with `count` points, in batches."""
        points, weights = np.polynomial.legendre.leggauss(count)
        sum_nE, size = torch.zeros_like(end_nE), max(1, BUDGET // n)
        for first in range(0, count, size):
            some = slice(first, first + size)
            with torch.enable_grad():
                x_TE, f_K = run(((points[some] + 1) / 2).tolist())
                (gradient_TE,) = torch.autograd.grad(f_K.sum(), x_TE)
            gradient_KnE = gradient_TE.double().cpu().unflatten(0, (-1, n))
            sum_nE += torch.einsum("k,kne->ne", torch.from_numpy(weights[some] / 2), gradient_KnE)
        return sum_nE

    with torch.no_grad():
        value, baseline = run([1.0, 0.0])[1].tolist()
    for count in POINTS:
        scores_n = (mean_gradient(count) * (end_nE - start_nE)).sum(-1).numpy()
        if abs(value - baseline - scores_n.sum()) <= 0.01 * max(abs(value - baseline), 0.01):
            break
    return scores_n, value, baseline
