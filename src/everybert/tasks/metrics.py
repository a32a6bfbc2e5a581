"""Scores of classification and regression, calibration, and the interval over seeds, in plain numpy.

They equal scikit-learn's and SciPy's (the tests compare); numpy alone is enough for the training path.
Legend: N examples, C labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# ── one label an example ─────────────────────────────────────────────────────────────────────────────────────


def confusion(gold_N: np.ndarray, guess_N: np.ndarray, labels: int) -> np.ndarray:
    """(C, C) counts: row the true label, column the predicted one."""
    cells = np.asarray(gold_N, dtype=np.int64) * labels + np.asarray(guess_N, dtype=np.int64)
    return np.bincount(cells, minlength=labels * labels).reshape(labels, labels)


def prf(counts_CC: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(C,) precision, recall and F1 of each label; 0 where a ratio is 0 / 0."""
    hit_C = np.diag(counts_CC).astype(float)
    return ratios(hit_C, counts_CC.sum(0), counts_CC.sum(1))


def matthews(counts_CC: np.ndarray) -> float:
    """Matthews' correlation in Gorodkin's form for any number of labels; 0 where it is undefined."""
    counts = counts_CC.astype(float)
    total, hit = counts.sum(), np.trace(counts)
    gold_C, guess_C = counts.sum(1), counts.sum(0)
    covariance = hit * total - gold_C @ guess_C
    spread = math.sqrt((total**2 - guess_C @ guess_C) * (total**2 - gold_C @ gold_C))
    return float(covariance / spread) if spread else 0.0


def classification_scores(gold_N: np.ndarray, guess_N: np.ndarray, labels: int) -> dict[str, float]:
    """accuracy, f1 (of the last label where there are two, as for MRPC; else macro), f1_macro, f1_micro, matthews."""
    counts = confusion(gold_N, guess_N, labels)
    present = (counts.sum(0) + counts.sum(1)) > 0  # scikit-learn's macro average: labels seen on either side
    f1_C = prf(counts)[2]
    accuracy = float(np.trace(counts) / max(counts.sum(), 1))
    macro = float(f1_C[present].mean()) if present.any() else 0.0
    return {
        "accuracy": accuracy,
        "f1": float(f1_C[1]) if labels == 2 else macro,
        "f1_macro": macro,
        "f1_micro": accuracy,  # one guess an example: false positives and negatives are as many
        "matthews": matthews(counts),
    }


def multilabel_scores(gold_NC: np.ndarray, guess_NC: np.ndarray) -> dict[str, float]:
    """accuracy (all labels of an example right), f1_micro, f1_macro, and f1 (which is the micro one)."""
    gold, guess = np.asarray(gold_NC, dtype=bool), np.asarray(guess_NC, dtype=bool)
    hit_C, guess_C, gold_C = (gold & guess).sum(0), guess.sum(0), gold.sum(0)
    micro = float(ratios(hit_C.sum(), guess_C.sum(), gold_C.sum())[2])
    macro = float(ratios(hit_C, guess_C, gold_C)[2].mean())
    return {"accuracy": float((gold == guess).all(1).mean()), "f1": micro, "f1_macro": macro, "f1_micro": micro}


def ratios(hit, guessed, true) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision, recall, F1 from counts; 0 / 0 is 0."""

    def ratio(a, b):
        a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
        return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape), where=b > 0)

    return ratio(hit, guessed), ratio(hit, true), ratio(2 * np.asarray(hit, dtype=float), guessed + true)


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────


def pearson(a_N: Sequence[float] | np.ndarray, b_N: Sequence[float] | np.ndarray) -> float:
    """Linear correlation; 0 where either side is constant."""
    a, b = np.asarray(a_N, dtype=float), np.asarray(b_N, dtype=float)
    a, b = a - a.mean(), b - b.mean()
    size_a, size_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if size_a == 0 or size_b == 0:
        return 0.0
    return float(np.clip((a / size_a) @ (b / size_b), -1.0, 1.0))


def spearman(a_N: Sequence[float] | np.ndarray, b_N: Sequence[float] | np.ndarray) -> float:
    """Correlation of the ranks, equal values sharing their mean rank."""
    return pearson(ranks(a_N), ranks(b_N))


def ranks(x_N: Sequence[float] | np.ndarray) -> np.ndarray:
    """1 … N in order of size; ties share their mean."""
    _, inverse, counts = np.unique(np.asarray(x_N, dtype=float), return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[inverse]


def regression_scores(gold_N: np.ndarray, guess_N: np.ndarray) -> dict[str, float]:
    """pearson, spearman, mse, mae."""
    gap = np.asarray(guess_N, dtype=float) - np.asarray(gold_N, dtype=float)
    return {
        "pearson": pearson(gold_N, guess_N),
        "spearman": spearman(gold_N, guess_N),
        "mse": float((gap**2).mean()),
        "mae": float(np.abs(gap).mean()),
    }


# ── calibration ──────────────────────────────────────────────────────────────────────────────────────────────


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = np.asarray(logits, dtype=float)
    shifted = np.exp(shifted - shifted.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + e⁻ˣ) in float64, without overflow."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=float)))


def calibration_error(sure_N: np.ndarray, right_N: np.ndarray, bins: int = 15) -> float:
    """ECE = Σ |bin| / N · |accuracy(bin) − confidence(bin)| over equal bins of (0, 1] (Guo et al. 2017, eq. 3)."""
    sure, right = np.asarray(sure_N, dtype=float), np.asarray(right_N, dtype=float)
    at = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    gap = np.bincount(at, right, bins) - np.bincount(at, sure, bins)  # |bin| · (accuracy − confidence)
    return float(np.abs(gap).sum() / max(len(sure), 1))


def fit_temperature(logits_NC: np.ndarray, gold_N: np.ndarray) -> float:
    """The T > 0 that minimises the negative log-likelihood of softmax(logits / T) (Guo et al. 2017, §4.2).

    The loss is convex in 1 / T, so a golden-section search over log T in [1/20, 20] finds its one minimum.
    """
    logits, gold = np.asarray(logits_NC, dtype=float), np.asarray(gold_N)

    def loss(log_t: float) -> float:
        scaled = logits / math.exp(log_t)
        top = scaled.max(1)
        total = top + np.log(np.exp(scaled - top[:, None]).sum(1))
        return float((total - scaled[np.arange(len(gold)), gold]).mean())

    low, high, golden = -math.log(20), math.log(20), (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > 1e-6:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = loss(right)
    return math.exp((low + high) / 2)


# ── several seeds ────────────────────────────────────────────────────────────────────────────────────────────

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t at 97.5 %, 1 … 30 degrees of freedom; beyond that the normal's 1.96 is within 4 %."""


@dataclass(frozen=True)
class Interval:
    """The mean over runs and half the width of its 95 % interval (None for one run: there is none to give)."""

    mean: float
    half: float | None
    runs: int

    def __str__(self) -> str:
        if self.half is None:
            return f"{self.mean:.4g} (one run: no interval)"
        return f"{self.mean:.4g} ± {self.half:.2g} (95 %, {self.runs} runs)"


def interval(values: Sequence[float]) -> Interval:
    """mean ± t · s / √n, Student's interval at 95 %."""
    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return Interval(mean, None, n)
    t = T_975[n - 2] if n - 2 < len(T_975) else 1.96
    return Interval(mean, float(t * np.std(values, ddof=1) / math.sqrt(n)), n)
