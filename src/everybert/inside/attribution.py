"""Attribution of a prediction to tokens: integrated gradients (Sundararajan et al. 2017), gradient × input.

IG(x) = (x − x′) ⊙ ∫₀¹ ∇f(x′ + α(x − x′)) dα over the token embeddings x, from a baseline x′ in which every token is
[MASK]. Its sum over the text is f(x) − f(x′) ("completeness"); `gap` is the numerical error of that sum.

Legend: n tokens of the text, K points of the integral, E embedding width, C outputs of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.inside.attention import batch_of
from everybert.model.heads import SEQUENCE_HEADS, Network, head_logits
from everybert.text.tokenizer import Encoding, Tokenizer

Target = Callable[[Tensor], Tensor]
"""(K, C) or (K, n, C) logits → (K): the explained value."""
METHODS = ("integrated", "gradient")
POINTS = (16, 48, 144)
"""Numbers of points of the integral; the next is used if the error of the sum is more than a hundredth."""
BUDGET = 2048
"""Tokens per batch."""
FOR, AGAINST = "43, 77, 189", "163, 70, 10"
"""Colours of tokens with a positive and a negative score."""


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
    method: str

    @property
    def gap(self) -> float:
        """f(x) − f(x′) − Σ scores: the error of the integral. Gradient × input has no such sum."""
        return self.value - self.baseline - float(self.scores.sum())

    def _repr_html_(self) -> str:
        """The text with its tokens coloured by their scores."""
        top = float(np.abs(self.scores).max()) or 1.0
        texts = [text for text in (self.text, self.pair) if text is not None]
        body = "<br>".join(self._coloured(text, number, top) for number, text in enumerate(texts))
        note = f"{escape(self.target)}: {self.value:+.3f}, of which the text {self.scores.sum():+.3f}"
        return f'<div style="line-height: 1.9">{body}<br><small>{note}</small></div>'

    def _coloured(self, text: str, number: int, top: float) -> str:
        out, at = [], 0
        for (start, end), owner, score in zip(self.offsets, self.texts, self.scores):
            if owner != number or end <= at:
                continue
            start = max(start, at)
            out.append(escape(text[at:start]))
            colour = FOR if score > 0 else AGAINST
            style = f"background: rgba({colour}, {abs(score) / top * 0.55:.2f}); border-radius: 3px; padding: .1em 0"
            out.append(f'<span style="{style}" title="{score:+.3f}">{escape(text[start:end])}</span>')
            at = end
        return "".join(out) + escape(text[at:])


def attribute(
    network: Network,
    tokenizer: Tokenizer,
    encoding: Encoding,
    head: str,
    target: Target,
    named: str,
    *,
    text: str = "",
    pair: str | None = None,
    method: Literal["integrated", "gradient"] = "integrated",
    global_tokens: Sequence[int] | None = None,
) -> Attribution:
    """Attribute the value `target` of a head's logits to the tokens of one text or pair."""
    if method not in METHODS:
        raise EverybertError(f"attribution is by {' or '.join(METHODS)}, not {method!r}")
    path = _Path(network, tokenizer, encoding, head, target, global_tokens)
    value, baseline = path.values([1.0, 0.0])
    if method == "gradient":
        scores_n = (path.gradients([1.0])[0] * path.end_nE).sum(-1).numpy()
    else:
        scores_n = path.integrate(value - baseline)
    tokens = (encoding.tokens, encoding.offsets, encoding.sequence)
    return Attribution(text, pair, *tokens, scores_n, named, value, baseline, method)


class _Path:
    """The straight line from the masked text to the text, and the network's output along it."""

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer,
        encoding: Encoding,
        head: str,
        target: Target,
        global_tokens: Sequence[int] | None,
    ) -> None:
        self.network, self.encoding, self.head, self.target = network, encoding, head, target
        self.global_tokens = global_tokens
        self.table = network.encoder.embeddings.token
        nothing = next((i for i in (tokenizer.mask_id, tokenizer.pad_id, tokenizer.unk_id) if i is not None), 0)
        start = [i if special else nothing for i, special in zip(encoding.ids, encoding.special)]
        rows = self.table.weight.detach()
        self.start_nE, self.end_nE = rows[start].double().cpu(), rows[encoding.ids].double().cpu()

    def integrate(self, difference: float) -> np.ndarray:
        """(n): by Gauss-Legendre quadrature, with as many points as the sum needs."""
        scores_n = np.zeros(len(self.encoding))
        for count in POINTS:
            points, weights = np.polynomial.legendre.leggauss(count)
            gradients_KnE = self.gradients(((points + 1) / 2).tolist())
            mean_nE = torch.einsum("k,kne->ne", torch.from_numpy(weights / 2), gradients_KnE)
            scores_n = (mean_nE * (self.end_nE - self.start_nE)).sum(-1).numpy()
            if abs(difference - scores_n.sum()) <= 0.01 * max(abs(difference), 0.01):
                break
        return scores_n

    def values(self, alphas: Sequence[float]) -> list[float]:
        """f at some points of the path."""
        with torch.no_grad():
            return self._run(alphas)[1].tolist()

    def gradients(self, alphas: Sequence[float]) -> Tensor:
        """(K, n, E): ∇f at some points of the path, in batches."""
        size = max(1, BUDGET // len(self.encoding))
        out = []
        for first in range(0, len(alphas), size):
            with torch.enable_grad():
                x_TE, f_K = self._run(alphas[first : first + size])
                (gradient_TE,) = torch.autograd.grad(f_K.sum(), x_TE)
            out.append(gradient_TE.double().cpu().unflatten(0, (-1, len(self.encoding))))
        return torch.cat(out)

    def _run(self, alphas: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The token embeddings at some points, (K·n, E), and f at each, (K)."""
        count, e = len(alphas), self.encoding
        weight = self.table.weight
        alpha_K = torch.tensor(alphas, dtype=torch.float64)[:, None, None]
        x_KnE = self.start_nE + alpha_K * (self.end_nE - self.start_nE)
        x_TE = x_KnE.flatten(0, 1).to(weight.device, weight.dtype).requires_grad_(torch.is_grad_enabled())
        batch = replace(batch_of(self.network, e, self.global_tokens, count), token_TE=x_TE)
        logits = head_logits(self.network, batch, self.head).float()
        if self.head not in SEQUENCE_HEADS:
            logits = logits.unflatten(0, (count, len(e)))
        return x_TE, self.target(logits)


def log_odds(label: int, multi: bool = False, temperature: float = 1.0) -> Target:
    """ln p / (1 − p) of a label. If labels are independent, that is the logit."""

    def target(logits_KC: Tensor) -> Tensor:
        z_KC = logits_KC / temperature
        if multi or z_KC.shape[1] == 1:
            return z_KC[:, label]
        others = torch.arange(z_KC.shape[1], device=z_KC.device) != label
        return z_KC[:, label] - z_KC[:, others].logsumexp(-1)

    return target


def log_span(start: int, end: int) -> Target:
    """ln p(start) + ln p(end) of the first and last token of an answer."""

    def target(logits_Kn2: Tensor) -> Tensor:
        log_Kn2 = logits_Kn2.log_softmax(1)
        return log_Kn2[:, start, 0] + log_Kn2[:, end, 1]

    return target
