"""scikit-learn's conventions: parameters, clones, pipelines, cross-validation, grids, pickles without torch code."""

import pickle
import pickletools
import warnings

import numpy as np
import pytest
import scipy.sparse
import tiny_model

pytest.importorskip("sklearn")

from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks as checks
from sklearn.utils.validation import check_is_fitted

from everybert.errors import EverybertError
from everybert.sklearn import TextClassifier, TextEmbedder, TextRegressor, _weighted, as_texts

X = ["the film was good", "the food was bad", "a great song", "an awful day"] * 8
Y = np.array(["pos", "neg"] * 16)
FAST = {"epochs": 8, "lr": 5e-3, "batch_size": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(tiny_model.save(tmp_path_factory.mktemp("base") / "base", {"mlm": None}))


@pytest.fixture(scope="module")
def fitted(base):
    return TextClassifier(base, **FAST).fit(X, Y)


@pytest.mark.parametrize("kind", [TextClassifier, TextRegressor, TextEmbedder])
@pytest.mark.parametrize(
    "check",
    [
        checks.check_estimator_cloneable,
        checks.check_no_attributes_set_in_init,
        checks.check_get_params_invariance,
        checks.check_set_params,
        checks.check_estimator_repr,
        checks.check_estimator_tags_renamed,
        checks.check_valid_tag_types,
        checks.check_parameters_default_constructible,
    ],
)
def test_estimator_conventions(kind, check):
    check(kind.__name__, kind())


class Numbers:
    """Reads rows of numbers as texts, so that the checks of estimators of numbers run."""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = False, True
        return tags

    def fit(self, X, y=None, sample_weight=None):
        return super().fit(words(X), y, sample_weight)

    def predict(self, X):
        check_is_fitted(self)
        return super().predict(words(X))


def words(X):
    if scipy.sparse.issparse(X):
        raise TypeError("sparse rows are no texts")
    return [" ".join(WORDS[int(abs(v) * 7) % len(WORDS)] for v in row) for row in np.asarray(X)]


class NumbersClassifier(Numbers, TextClassifier):
    def predict_proba(self, X):
        check_is_fitted(self)
        return super().predict_proba(X if isinstance(X, list) else words(X))


class NumbersRegressor(Numbers, TextRegressor):
    pass


WORDS = ["the", "film", "food", "song", "day", "was", "good", "bad", "great", "awful"]
FEATURES = "texts have no features, NaN, objects or numbers of columns"
OF_NUMBERS = dict.fromkeys(
    [
        *("check_n_features_in", "check_n_features_in_after_fitting", "check_dataframe_column_names_consistency"),
        *("check_dtype_object", "check_estimators_nan_inf", "check_fit1d", "check_fit2d_predict1d"),
        "check_estimators_empty_data_messages",
    ],
    FEATURES,
)
OF_NUMBERS |= {
    "check_methods_subset_invariance": "in fp32 the last bit depends on the batch",
    "check_methods_sample_order_invariance": "in fp32 the last bit depends on the batch",
    "check_sample_weight_equivalence_on_dense_data": "weights resample the rows",
    "check_classifiers_train": "a tiny random model learns nothing",
    "check_class_weight_classifiers": "a tiny random model learns nothing",
    "check_fit2d_1sample": "the regressor's error is of the targets: all are equal",
    "check_regressors_train": "a tiny random model learns nothing",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NumbersClassifier, NumbersRegressor])
def test_scikit_learns_checks_of_estimators_of_numbers_pass_where_they_apply(kind, base):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = kind(base, epochs=1, batch_size=64, device="cpu")
        found = checks.check_estimator(made, on_skip=None, expected_failed_checks=OF_NUMBERS)
    assert sum(check["status"] == "passed" for check in found) > 40


@pytest.mark.parametrize(
    ("y", "weight", "options", "why"),
    [
        (["a"] * 32, None, {}, "1 class"),
        (["a"] * 32, None, {}, "two classes or more"),
        ([], None, {}, "0 class"),
        (Y[:-1], None, {}, "inconsistent numbers"),
        (Y, [1.0] * 3, {}, "inconsistent numbers"),
        (Y, np.zeros(32), {}, "not all zero"),
        *((Y, weight, {}, "sample weights") for weight in ([-1.0] * 32, [np.nan] * 32, [0] * 32)),
        (Y, None, {"validation_fraction": 2}, "validation_fraction"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_scikit_learns_words(base, y, weight, options, why):
    with pytest.raises(ValueError, match=why):
        TextClassifier(base, **FAST, **options).fit(X if len(y) else [], y, weight)


def test_fit_learns_and_predicts(fitted):
    np.testing.assert_allclose(fitted.predict_log_proba(X[:3]), np.log(fitted.predict_proba(X[:3])))
    assert is_classifier(fitted) and fitted.classes_.tolist() == ["neg", "pos"]
    p = fitted.predict_proba(X)
    assert p.shape == (len(X), 2) and p.sum(1) == pytest.approx(np.ones(len(X)))
    assert (fitted.predict(X) == fitted.classes_[p.argmax(1)]).all()
    assert fitted.score(X, Y) > 0.9 and 1 <= fitted.n_iter_ <= 8
    assert fitted.predict_proba([]).shape == (0, 2)


@pytest.mark.parametrize("labels", [[3, 7], [True, False], [0.0, 1.0]])
def test_labels_of_any_kind_come_back_as_they_were(base, labels):
    y = np.array(labels * 16)
    found = TextClassifier(base, **FAST | {"epochs": 1}).fit(X, y).predict(X[:3])
    assert found.dtype == y.dtype and set(found.tolist()) <= set(labels)


def test_a_clone_is_unfitted_with_the_same_parameters(fitted):
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(X)
    with pytest.raises(NotFittedError):
        TextEmbedder().transform(X)


def test_the_same_seed_gives_the_same_model(base, fitted):
    again = TextClassifier(base, **FAST).fit(X, Y)
    assert np.abs(again.predict_proba(X) - fitted.predict_proba(X)).max() < 1e-6


def test_pickles_hold_files_not_torch(fitted):
    data = pickle.dumps(fitted)
    named = {arg for op, arg, _ in pickletools.genops(data) if isinstance(arg, str)}
    assert not any("torch" in name for name in named)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= named
    again = pickle.loads(data)
    assert np.abs(again.predict_proba(X) - fitted.predict_proba(X)).max() == 0
    assert again.get_params() == fitted.get_params()


def test_cross_validation_and_grids_over_modes(base):
    assert len(cross_val_score(TextClassifier(base, **FAST | {"epochs": 1}), X, Y, cv=2)) == 2
    grid = GridSearchCV(
        TextClassifier(base, **FAST | {"epochs": 1}), {"mode": ["frozen", "lora"]}, cv=2, error_score="raise"
    ).fit(X, Y)
    assert set(grid.cv_results_["param_mode"]) == {"frozen", "lora"}
    assert (pickle.loads(pickle.dumps(grid)).predict(X) == grid.predict(X)).all()


def test_an_embedder_starts_a_pipeline(base):
    import pandas as pd

    pipe = make_pipeline(TextEmbedder(base, normalize=True, device="cpu"), LogisticRegression()).fit(pd.Series(X), Y)
    assert pipe.score(X, Y) > 0.9
    vectors = pipe[0].transform(X[:3])
    assert vectors.shape == (3, 32) and np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    assert pipe[0].get_feature_names_out().tolist()[:2] == ["everybert0", "everybert1"]
    assert (pickle.loads(pickle.dumps(pipe)).predict(X) == pipe.predict(X)).all()


def test_texts_of_many_shapes():
    import pandas as pd

    pairs = [("a", "b"), ("c", "d")]
    assert as_texts(np.array([["a"], ["b"]], dtype=object)) == ["a", "b"] == as_texts(pd.DataFrame({"x": ["a", "b"]}))
    assert as_texts(pairs) == pairs == as_texts(pd.DataFrame(pairs)) == as_texts([list(p) for p in pairs])
    for wrong in ("one text", [1, 2], [("a", "b", "c")], [None]):
        with pytest.raises(EverybertError):
            as_texts(wrong)


def test_pairs_and_class_weights(base):
    pairs = [(text, "the day") for text in X]
    model = TextClassifier(base, **FAST | {"epochs": 1}, class_weight={"pos": 2.0}, validation_fraction=0.25).fit(
        pairs, Y
    )
    assert model.predict(pairs[:2]).shape == (2,)


def test_several_labels_per_text(base):
    y = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1], [0, 1, 1]] * 8)
    model = TextClassifier(base, **FAST | {"epochs": 12}).fit(X, y)
    found, p = model.predict(X), model.predict_proba(X)
    assert found.shape == p.shape == y.shape and set(np.unique(found)) <= {0, 1}
    assert (found == (p >= 0.5)).all() and (found[:, :2] == y[:, :2]).mean() > 0.9
    assert model.score(X, y) >= 0.5
    sparse = TextClassifier(base, **FAST | {"epochs": 1}).fit(X, scipy.sparse.csr_matrix(y))
    assert sparse.predict(X).shape == y.shape


def test_a_regressor_learns_numbers(base):
    y = np.where(Y == "pos", 12.0, -3.0)
    model = TextRegressor(base, **FAST | {"epochs": 12}).fit(X, y)
    assert model.score(X, y) > 0.8 and model.predict(X[:2]).dtype == np.float64
    assert np.abs(pickle.loads(pickle.dumps(model)).predict(X) - model.predict(X)).max() == 0
    with pytest.raises(ValueError, match="y should be"):
        TextRegressor(base).fit(X, None)


def test_weights_resample_rows():
    rows = np.arange(6)
    assert _weighted(rows, np.array([2.0, 0, 4, 0, 0, 6]), 0).tolist() == [0, 2, 2, 5, 5, 5]
    assert _weighted(rows, np.ones(6), 0).tolist() == rows.tolist()
    weights = np.array([0.5, 1.5, 0.25, 0.75, 0.0, 3.0])
    counts = np.mean([np.bincount(_weighted(rows, weights, seed), minlength=6) for seed in range(500)], axis=0)
    np.testing.assert_allclose(counts, weights / weights.mean(), atol=0.1)
    assert {len(_weighted(rows, weights, seed)) for seed in range(20)} <= {5, 6, 7}


def test_sample_weights_and_seeds(base):
    turned = np.where(Y == "pos", "neg", "pos")  # every text with both labels: the weights decide
    weights = np.r_[np.full(32, 3.0), np.zeros(32)]
    model = TextClassifier(base, **FAST).fit(X + X, np.r_[Y, turned], sample_weight=weights)
    assert (model.predict(X) == Y).mean() > 0.9
    seeds = FAST | {"epochs": 1, "random_state": None}
    one, two = (TextClassifier(base, **seeds).fit(X, Y).predict_proba(X[:1]) for _ in range(2))
    assert not np.array_equal(one, two)  # None draws a new seed for every fit
