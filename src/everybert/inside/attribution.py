"""Which pieces of a text a prediction rests on: integrated gradients (Sundararajan et al. 2017), gradient × input.

IG(x) = (x − x′) ⊙ ∫₀¹ ∇f(x′ + α(x − x′)) dα over the token embeddings x, from a baseline x′ in which every piece is
[MASK]. Its sum over the text is f(x) − f(x′): nothing is left over ("completeness"), which `gap` measures.

Legend: n tokens of the text, K points on the way, E embedding width, C outputs of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.features import SEQUENCE_HEADS, head_logits
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.text.tokenizer import Encoding, Tokenizer

Target = Callable[[Tensor], Tensor]
"""(K, C) or (K, n, C) logits → (K): the number that is explained."""
METHODS = ("integrated", "gradient")
POINTS = (16, 48, 144)
"""Points of the integral; the next where the sum is off by more than a hundredth."""
BUDGET = 2048


@dataclass(frozen=True)
class Attribution:
    """How much each piece speaks for (+) or against (−) a prediction."""

    text: str
    pair: str | None
    tokens: list[str]
    offsets: list[tuple[int, int]] = field(repr=False)
    texts: list[int | None] = field(repr=False)
    """Which text a token came from, 0 or 1; None for special tokens."""
    scores: np.ndarray
    """float64 (n)."""
    target: str
    """What is explained."""
    value: float
    """f(x): of the text as it is."""
    baseline: float
    """f(x′): of the text with every piece masked."""
    method: str

    @property
    def gap(self) -> float:
        """f(x) − f(x′) − Σ scores: 0 but for the integral's rounding (of gradient × input it need not be)."""
        return self.value - self.baseline - float(self.scores.sum())

    def _repr_html_(self) -> str:
        """The text with its pieces shaded."""
        from everybert.inside.page import highlighted

        return highlighted(self)


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
    """Explain `target` of a head's logits for one text or pair."""
    if method not in METHODS:
        raise EverybertError(f"attribution is by {' or '.join(METHODS)}, not {method!r}")
    way = _Way(network, tokenizer, encoding, head, target, global_tokens)
    value, baseline = way.values([1.0, 0.0])
    if method == "gradient":
        scores_n = (way.gradients([1.0])[0] * way.end_nE).sum(-1).numpy()
    else:
        scores_n = way.integrated(value - baseline)
    return Attribution(
        text,
        pair,
        encoding.tokens,
        encoding.offsets,
        encoding.sequence,
        scores_n,
        named,
        value,
        baseline,
        method,
    )


class _Way:
    """The straight line from the masked text to the text, and the network along it."""

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

    def integrated(self, difference: float) -> np.ndarray:
        """(n): by Gauss-Legendre points, as many as the sum needs."""
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
        """f at some points of the way."""
        with torch.no_grad():
            return self._run(alphas)[1].tolist()

    def gradients(self, alphas: Sequence[float]) -> Tensor:
        """(K, n, E): ∇f at some points of the way, in batches."""
        size = max(1, BUDGET // len(self.encoding))
        out = []
        for first in range(0, len(alphas), size):
            with torch.enable_grad():
                x_TE, f_K = self._run(alphas[first : first + size])
                (gradient_TE,) = torch.autograd.grad(f_K.sum(), x_TE)
            out.append(gradient_TE.double().cpu().unflatten(0, (-1, len(self.encoding))))
        return torch.cat(out)

    def _run(self, alphas: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The token embeddings at some points, (K·n, E), and f of each, (K)."""
        count, e = len(alphas), self.encoding
        weight = self.table.weight
        alpha_K = torch.tensor(alphas, dtype=torch.float64)[:, None, None]
        x_KnE = self.start_nE + alpha_K * (self.end_nE - self.start_nE)
        x_TE = x_KnE.flatten(0, 1).to(weight.device, weight.dtype).requires_grad_(torch.is_grad_enabled())
        chosen = None if self.global_tokens is None else [self.global_tokens] * count
        batch = Ragged.of([e.ids] * count, [e.segments] * count, chosen, weight.device)
        self.network.encoder.check(batch)
        batch = replace(batch, token_TE=x_TE)
        logits = head_logits(self.network, batch, self.head).float()
        if self.head not in SEQUENCE_HEADS:
            logits = logits.unflatten(0, (count, len(e)))
        return x_TE, self.target(logits)


def log_odds(label: int, multi: bool = False, temperature: float = 1.0) -> Target:
    """ln p / (1 − p) of a label: the logit itself where labels are independent."""

    def target(logits_KC: Tensor) -> Tensor:
        z_KC = logits_KC / temperature
        if multi or z_KC.shape[1] == 1:
            return z_KC[:, label]
        others = torch.arange(z_KC.shape[1], device=z_KC.device) != label
        return z_KC[:, label] - z_KC[:, others].logsumexp(-1)

    return target


def log_span(start: int, end: int) -> Target:
    """ln p(start) + ln p(end) of an answer's first and last token."""

    def target(logits_Kn2: Tensor) -> Tensor:
        log_Kn2 = logits_Kn2.log_softmax(1)
        return log_Kn2[:, start, 0] + log_Kn2[:, end, 1]

    return target
