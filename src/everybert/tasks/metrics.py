"""Scores of classification and regression, calibration, and confidence intervals over seeds.

scikit-learn and SciPy compute them; both are imported when a score is asked for, not with the module.
Legend: N examples, C labels.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Numbers = Sequence[float] | np.ndarray


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────


def classification_scores(gold_N: Sequence[Any], guess_N: Sequence[Any], labels: Sequence[Any]) -> dict[str, float]:
    """accuracy, f1 (of the second label if there are two, as for MRPC; else macro), f1_macro, f1_micro, matthews."""
    from sklearn import metrics

    accuracy = float(metrics.accuracy_score(gold_N, guess_N))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single label on both sides: its correlation is 0 by definition
        macro = float(metrics.f1_score(gold_N, guess_N, average="macro", zero_division=0))
        second = float(metrics.f1_score(gold_N, guess_N, labels=labels[-1:], average="macro", zero_division=0))
        matthews = float(metrics.matthews_corrcoef(gold_N, guess_N))
    f1 = {"f1": second if len(labels) == 2 else macro, "f1_macro": macro}
    return {"accuracy": accuracy, **f1, "f1_micro": accuracy, "matthews": matthews}


def multilabel_scores(gold_NC: np.ndarray, guess_NC: np.ndarray) -> dict[str, float]:
    """accuracy (all labels of an example right), f1_micro, f1_macro, and f1 (the micro average)."""
    gold, guess = np.asarray(gold_NC, dtype=bool), np.asarray(guess_NC, dtype=bool)
    hit_C, guess_C, gold_C = (gold & guess).sum(0), guess.sum(0), gold.sum(0)
    micro = float(ratios(hit_C.sum(), guess_C.sum(), gold_C.sum())[2])
    macro = float(ratios(hit_C, guess_C, gold_C)[2].mean())
    return {"accuracy": float((gold == guess).all(1).mean()), "f1": micro, "f1_macro": macro, "f1_micro": micro}


def ratios(hit: Any, guessed: Any, true: Any) -> tuple[Any, Any, Any]:
    """Precision, recall and F1 from counts (numbers or arrays); 0 / 0 is 0."""
    return hit / np.maximum(guessed, 1), hit / np.maximum(true, 1), 2 * hit / np.maximum(guessed + true, 1)


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────


def pearson(a_N: Numbers, b_N: Numbers, kind: str = "pearsonr") -> float:
    """Linear correlation; 0 if either side is constant."""
    import scipy.stats

    constant = np.ptp(a_N) == 0 or np.ptp(b_N) == 0
    return 0.0 if constant else float(getattr(scipy.stats, kind)(a_N, b_N).statistic)


def spearman(a_N: Numbers, b_N: Numbers) -> float:
    """Rank correlation; 0 if either side is constant."""
    return pearson(a_N, b_N, "spearmanr")


def regression_scores(gold_N: np.ndarray, guess_N: np.ndarray) -> dict[str, float]:
    """pearson, spearman, mse, mae."""
    gap = np.asarray(guess_N, dtype=float) - np.asarray(gold_N, dtype=float)
    return {
        "pearson": pearson(gold_N, guess_N),
        "spearman": spearman(gold_N, guess_N),
        "mse": float((gap**2).mean()),
        "mae": float(np.abs(gap).mean()),
    }


def ranking_scores(gold_N: np.ndarray, guess_N: np.ndarray) -> dict[str, float]:
    """mrr (1 / the rank of the first text with a label above 0; a tie counts against it) and ndcg@10 of one query."""
    from sklearn.metrics import ndcg_score

    relevant = gold_N > 0
    before = (guess_N[~relevant] >= guess_N[relevant].max()).sum()
    return {"mrr": float(1 / (1 + before)), "ndcg@10": float(ndcg_score(gold_N[None], guess_N[None], k=10))}


# ── probabilities ────────────────────────────────────────────────────────────────────────────────────────────


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    return torch.from_numpy(np.asarray(logits, dtype=float)).softmax(-1).numpy()


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + e⁻ˣ) in float64, without overflow."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=float)))


def calibration_error(confidence_N: Numbers, right_N: Numbers, bins: int = 15) -> float:
    """ECE = Σ |bin| / N · |accuracy(bin) − confidence(bin)| over equal bins of (0, 1] (Guo et al. 2017, eq. 3).

    NaN if a confidence is: the model's outputs are not finite, as after training that diverged.
    """
    confidence, right = np.asarray(confidence_N, dtype=float), np.asarray(right_N, dtype=float)
    if np.isnan(confidence).any():
        return math.nan
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
