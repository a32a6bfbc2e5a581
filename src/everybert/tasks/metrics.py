"""Scores of classification and regression, calibration, and confidence intervals over seeds.

scikit-learn and SciPy compute them; both are imported when a score is asked for, not with the module.
Legend: N examples, C labels.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Numbers = Sequence[float] | np.ndarray


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────


def confusion(gold_N: np.ndarray, guess_N: np.ndarray, labels: int) -> np.ndarray:
    """(C, C) counts: row the true label, column the predicted one."""
    from sklearn.metrics import confusion_matrix

    return confusion_matrix(gold_N, guess_N, labels=range(labels))


def classification_scores(gold_N: np.ndarray, guess_N: np.ndarray, labels: int) -> dict[str, float]:
    """accuracy, f1 (of the second label if there are two, as for MRPC; else macro), f1_macro, f1_micro, matthews."""
    from sklearn import metrics

    accuracy = float(metrics.accuracy_score(gold_N, guess_N))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single label on both sides: its correlation is 0 by definition
        macro = float(metrics.f1_score(gold_N, guess_N, average="macro", zero_division=0))
        second = float(metrics.f1_score(gold_N, guess_N, labels=[1], average="macro", zero_division=0))
        matthews = float(metrics.matthews_corrcoef(gold_N, guess_N))
    return {
        "accuracy": accuracy,
        "f1": second if labels == 2 else macro,
        "f1_macro": macro,
        "f1_micro": accuracy,  # one prediction per example: as many false positives as false negatives
        "matthews": matthews,
    }


def multilabel_scores(gold_NC: np.ndarray, guess_NC: np.ndarray) -> dict[str, float]:
    """accuracy (all labels of an example right), f1_micro, f1_macro, and f1 (the micro average)."""
    gold, guess = np.asarray(gold_NC, dtype=bool), np.asarray(guess_NC, dtype=bool)
    hit_C, guess_C, gold_C = (gold & guess).sum(0), guess.sum(0), gold.sum(0)
    micro = float(ratios(hit_C.sum(), guess_C.sum(), gold_C.sum())[2])
    macro = float(ratios(hit_C, guess_C, gold_C)[2].mean())
    return {"accuracy": float((gold == guess).all(1).mean()), "f1": micro, "f1_macro": macro, "f1_micro": micro}


def ratios(hit, guessed, true) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision, recall and F1 from counts; 0 / 0 is 0."""

    def ratio(a, b):
        a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
        return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape), where=b > 0)

    return ratio(hit, guessed), ratio(hit, true), ratio(2 * np.asarray(hit, dtype=float), guessed + true)


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────


def pearson(a_N: Numbers, b_N: Numbers) -> float:
    """Linear correlation; 0 if either side is constant."""
    from scipy.stats import pearsonr

    return 0.0 if np.ptp(a_N) == 0 or np.ptp(b_N) == 0 else float(pearsonr(a_N, b_N).statistic)


def spearman(a_N: Numbers, b_N: Numbers) -> float:
    """Rank correlation; 0 if either side is constant."""
    from scipy.stats import spearmanr

    return 0.0 if np.ptp(a_N) == 0 or np.ptp(b_N) == 0 else float(spearmanr(a_N, b_N).statistic)


def regression_scores(gold_N: np.ndarray, guess_N: np.ndarray) -> dict[str, float]:
    """pearson, spearman, mse, mae."""
    gap = np.asarray(guess_N, dtype=float) - np.asarray(gold_N, dtype=float)
    return {
        "pearson": pearson(gold_N, guess_N),
        "spearman": spearman(gold_N, guess_N),
        "mse": float((gap**2).mean()),
        "mae": float(np.abs(gap).mean()),
    }


# ── probabilities ────────────────────────────────────────────────────────────────────────────────────────────


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = np.asarray(logits, dtype=float)
    shifted = np.exp(shifted - shifted.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + e⁻ˣ) in float64, without overflow."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=float)))


def calibration_error(confidence_N: Numbers, right_N: Numbers, bins: int = 15) -> float:
    """ECE = Σ |bin| / N · |accuracy(bin) − confidence(bin)| over equal bins of (0, 1] (Guo et al. 2017, eq. 3)."""
    confidence, right = np.asarray(confidence_N, dtype=float), np.asarray(right_N, dtype=float)
    bin_N = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gap = np.bincount(bin_N, right, bins) - np.bincount(bin_N, confidence, bins)  # |bin| · (accuracy − confidence)
    return float(np.abs(gap).sum() / max(len(confidence), 1))


def fit_temperature(logits_NC: np.ndarray, gold_N: np.ndarray) -> float:
    """The T in [1/20, 20] that minimises the negative log-likelihood of softmax(logits / T) (Guo et al. 2017, §4.2)."""
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    logits, gold = np.asarray(logits_NC, dtype=float), np.asarray(gold_N)

    def loss(log_t: float) -> float:
        return float(-log_softmax(logits / math.exp(log_t), axis=1)[np.arange(len(gold)), gold].mean())

    span = math.log(20)
    return math.exp(minimize_scalar(loss, bounds=(-span, span), method="bounded", options={"xatol": 1e-8}).x)


# ── several seeds ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Interval:
    """The mean over runs and half the width of its 95 % interval (None for a single run)."""

    mean: float
    half: float | None
    runs: int

    def __str__(self) -> str:
        if self.half is None:
            return f"{self.mean:.4g} (one run: no interval)"
        return f"{self.mean:.4g} ± {self.half:.2g} (95 %, {self.runs} runs)"


def interval(values: Sequence[float]) -> Interval:
    """mean ± t · s / √n, Student's interval at 95 %."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Interval(mean, None, n)
    from scipy.stats import t

    return Interval(mean, float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n)), n)
