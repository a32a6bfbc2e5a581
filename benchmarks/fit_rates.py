"""Fit the factors of `everybert plan` to measured training speeds, and write them to training/rates.json.

    python benchmarks/fit_rates.py

Matrix products, logits and the optimizer have factors known from a profile. Those of attention, element-wise work,
dropout and Muon are found by least squares over the relative errors of the points below. Each of the four occurs in
two points or more, so that every point can be left out and predicted from the others (tests/training/test_plan.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everybert.model.config import EncoderConfig, preset
from everybert.training import plan
from everybert.training.plan import GPUS, Work

KNOWN = {"products": 989e12 / 740e12, "logits": 1.0, "optimizer": 1.0}
"""Matrix products reach 740 TFLOP/s of 989 (docs/LOG.md)."""
FITTED = ("attention", "elementwise", "dropout", "muon")


@dataclass(frozen=True)
class Point:
    """A measured speed; `text` is how docs/LOG.md writes it."""

    name: str
    work: Work
    tokens_per_second: float
    text: str


def base(**changes: float) -> EncoderConfig:
    """BERT-base without dropout, unless changed."""
    return preset("bert-base-uncased").replace(
        **{"vocab_size": 30528, "dropout": 0.0, "attention_dropout": 0.0, **changes}
    )


DROPOUT = base(dropout=0.1, attention_dropout=0.1)
SMALL = preset("prenorm-bert-base").replace(
    layers=6, hidden_size=512, heads=8, intermediate_size=2048, vocab_size=30016, dropout=0.0, attention_dropout=0.0
)
POINTS = (
    Point("BERT-base, 128", Work(base(), 128, 65536), 860e3, "**860k**"),
    Point("BERT-base, 512", Work(base(), 512, 65536), 760e3, "**760k**"),
    # log-normal lengths of at most 512 have mean 148 and Σn² / Σn = 232
    Point("BERT-base, natural lengths", Work(base(), 232, 65536), 807e3, "**807k**"),
    Point("BERT-base, 128, dropout", Work(DROPOUT, 128, 65536), 751e3, "751k"),
    Point("BERT-base, 512, dropout", Work(DROPOUT, 512, 65536), 655e3, "655k"),
    Point("BERT-base, 128, Muon", Work(base(), 128, 65536, muon=True), 809e3, "809k"),
    # the whole pipeline by the recipe small-20m, which masks a quarter; the middle of the range
    Point("6×512, 128, Muon", Work(SMALL, 128, 98304, masked=0.25, muon=True), 2.69e6, "2.66M–2.72M tokens/s"),
)
"""One H200, bf16, compiled, the whole step."""


def fit(points: Sequence[Point] = POINTS) -> dict[str, float]:
    """The factors of all parts of a step."""
    rows, left = [], []
    for point in points:
        seconds = point.work.tokens / point.tokens_per_second
        parts = point.work.at_peak(GPUS["h200"])
        rows.append([parts[name] / seconds for name in FITTED])
        left.append(1 - sum(factor * parts[name] for name, factor in KNOWN.items()) / seconds)
    found = np.linalg.lstsq(np.array(rows), np.array(left), rcond=None)[0]
    return KNOWN | dict(zip(FITTED, found.tolist()))


if __name__ == "__main__":
    path = Path(plan.__file__).with_name("rates.json")
    data = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(data | {"factors": fit()}, indent=2) + "\n", encoding="utf-8")
    print(f"{path} written")
