"""Our scores are scikit-learn's and SciPy's, on anything (what is theirs already is not compared)."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as sk
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.tasks import metrics

pytestmark = pytest.mark.filterwarnings("ignore")


@st.composite
def labelled(draw):
    labels = draw(st.integers(2, 5))
    n = draw(st.integers(1, 40))
    side = st.lists(st.integers(0, labels - 1), min_size=n, max_size=n)
    return np.array(draw(side)), np.array(draw(side)), labels


@settings(max_examples=100, deadline=None)
@given(labelled())
def test_classification_equals_scikit_learn(case):
    gold, guess, labels = case
    ours = metrics.classification_scores(gold, guess, range(labels))
    assert ours["f1_micro"] == pytest.approx(sk.f1_score(gold, guess, average="micro", zero_division=0))
    assert ours["matthews"] == pytest.approx(sk.matthews_corrcoef(gold, guess), abs=1e-12)
    if labels == 2:
        assert ours["f1"] == pytest.approx(sk.f1_score(gold, guess, zero_division=0))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_multilabel_equals_scikit_learn(n, labels, seed):
    draw = np.random.default_rng(seed)
    gold, guess = draw.integers(0, 2, (2, n, labels))
    ours = metrics.multilabel_scores(gold, guess)
    assert ours["accuracy"] == pytest.approx((gold == guess).all(1).mean())
    if labels > 1:  # scikit-learn reads one column as a binary problem
        assert ours["f1_micro"] == pytest.approx(sk.f1_score(gold, guess, average="micro", zero_division=0))
        assert ours["f1_macro"] == pytest.approx(sk.f1_score(gold, guess, average="macro", zero_division=0))


def test_a_constant_side_has_no_correlation():
    for correlation in (metrics.pearson, metrics.spearman):
        assert correlation([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == correlation([3.0, 3.0], [1.0, 2.0]) == 0.0
    assert metrics.pearson([1.0, 2.0, 4.0], [2.0, 4.0, 5.0]) == pytest.approx(13 / 14)
    assert metrics.spearman([1.0, 2.0, 4.0], [2.0, 4.0, 5.0]) == pytest.approx(1)


def test_regression_scores():
    gold, guess = np.array([1.0, 2.0, 4.0]), np.array([1.5, 2.0, 3.0])
    scores = metrics.regression_scores(gold, guess)
    assert scores["mse"] == pytest.approx(sk.mean_squared_error(gold, guess))
    assert scores["mae"] == pytest.approx(sk.mean_absolute_error(gold, guess))


def test_calibration_error_by_hand():
    # Bin (0.9333, 1]: confidence 0.95, right half the time. Bin (0.5333, 0.6]: 0.6, always right.
    assert metrics.calibration_error([0.95, 0.95, 0.6, 0.6], [1, 0, 1, 1]) == pytest.approx(0.5 * 0.45 + 0.5 * 0.4)
    assert metrics.calibration_error([1.0, 1.0], [1, 1]) == 0


def test_temperature_finds_the_scale_that_was_applied():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(4000, 3)) * 2
    gold = np.array([draw.choice(3, p=p) for p in metrics.softmax(logits)])
    for scale in (0.3, 1.0, 4.0):
        found = metrics.fit_temperature(logits * scale, gold)
        assert found == pytest.approx(scale, rel=0.08)
        near = [metrics.softmax(logits * scale / t)[np.arange(4000), gold] for t in (found, found * 1.01, found / 1.01)]
        losses = [-np.log(p).mean() for p in near]
        assert losses[0] == min(losses)


def test_interval():
    values = [90.1, 90.5, 89.9]
    ours = metrics.interval(values)
    low, high = scipy.stats.t.interval(0.95, 2, np.mean(values), scipy.stats.sem(values))
    assert ours.mean == pytest.approx(np.mean(values))
    assert ours.half == pytest.approx((high - low) / 2, rel=1e-3)
    assert "one run" in str(metrics.interval([90.0]))


def test_outputs_that_are_not_finite_have_no_calibration():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(metrics.calibration_error([0.5, float("nan")], [1, 0]))
