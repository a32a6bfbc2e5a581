"""scikit-learn estimators: a fine-tuned classifier and regressor, and an embedder, for pipelines, cross-validation and
grid search.

They follow scikit-learn's conventions. A pickle contains the model folder's files (safetensors, JSON) as bytes: it
loads without the folder, and no torch object is pickled.
"""

import tempfile
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target, unique_labels
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

from everybert.errors import EverybertError
from everybert.inference.model import load
from everybert.tasks import dataset

SETTINGS = ("mode", "epochs", "lr", "batch_size", "device", "window")
"""Parameters that are settings of `finetune`."""


class _Packed(BaseEstimator):
    """Base of the estimators: texts as input, and a model that is pickled as its folder's bytes."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if (model := state.pop("model_", None)) is not None:
            with tempfile.TemporaryDirectory(prefix="everybert-") as parent:
                model.save(folder := Path(parent) / "model")
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                state["files_"] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("files_", None)
        super().__setstate__(state)
        if files is not None:
            with tempfile.TemporaryDirectory(prefix="everybert-") as folder:
                for name, content in files.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                self.model_ = load(folder, device=self.device)  # type: ignore[attr-defined]


@dataclass(eq=False, repr=False)
class _FineTuned(_Packed):
    """Base of the classifier and the regressor."""

    model: str = "everybert-small"
    """A folder, a bundled model or a hub id."""
    _: KW_ONLY
    mode: str | None = None
    """full, top:K, frozen or lora. This and the next four are as in `everybert.finetune`; None is its choice."""
    epochs: int | None = None
    lr: float | None = None
    batch_size: int | None = None
    window: int | None = None
    validation_fraction: float = 0.1
    """The share of `fit`'s rows that is held out to choose the best epoch (0: choose on all rows)."""
    random_state: int | np.random.RandomState | None = 0
    """A seed; None draws one."""
    device: str | None = None
    verbose: bool = False

    def _fit(self, task: str, texts: Any, targets: Any, classes: Any, sample_weight: Any, **options: Any) -> None:
        """Fine-tune on rows of texts and targets; a share of every class is held out, if `classes` are given."""
        from everybert.training.finetune import finetune

        rows = [(*((text,) if isinstance(text, str) else text), target) for text, target in zip(texts, targets)]
        seed = self.random_state
        if not isinstance(seed, int):
            seed = int(check_random_state(seed).randint(2**31 - 1))
        train, dev = self._split(len(rows), classes, seed)
        if sample_weight is not None:
            train = _weighted(train, _weights(sample_weight, rows)[train], seed)
        with tempfile.TemporaryDirectory(prefix="everybert-") as folder:
            out, data, held = Path(folder) / "model", [rows[i] for i in train], [rows[i] for i in dev]
            settings = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
            settings |= {"seed": seed, "options": options, "quiet": not self.verbose}
            tuned = finetune(self.model, task, data, held, out, **settings)
            self.model_ = load(out, device=self.device)
            if self.model_.adapters is not None:
                self.model_.merge()
        self.n_iter_ = tuned.runs[0].epoch
        self.scores_ = dict(tuned.runs[0].scores)

    def _split(self, count: int, classes: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows to train on and those held out; all rows twice if they are few."""
        if not 0 <= self.validation_fraction < 1:
            raise EverybertError(f"validation_fraction lies in [0, 1), not {self.validation_fraction}")
        rows, size = np.arange(count), int(count * self.validation_fraction)
        few = size < 1 if classes is None else size <= classes.max() or np.bincount(classes).min() < 2
        if few:
            return rows, rows
        return tuple(train_test_split(rows, test_size=size, stratify=classes, random_state=seed))


def _weights(values: Any, rows: list[Any]) -> np.ndarray:
    """Sample weights as float64 (n)."""
    values = np.asarray(values)
    weights = column_or_1d(values if values.ndim else np.full(len(rows), values)).astype(np.float64)
    check_consistent_length(rows, weights)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise EverybertError("sample weights are finite, none below zero and not all zero; check them")
    return weights


def _weighted(rows: np.ndarray, weights: np.ndarray, seed: int) -> np.ndarray:
    """As many rows, in proportion to their weights w: systematic resampling takes each ⌊w⌋ or ⌈w⌉ times (mean w: 1)."""
    edges = np.cumsum(weights / weights.mean()) + np.random.default_rng(seed).random()
    return np.repeat(rows, np.diff(np.floor(edges), prepend=0.0).astype(int))


@dataclass(eq=False, repr=False)
class TextClassifier(ClassifierMixin, _FineTuned):
    """Fine-tunes a model on texts (or pairs of texts) with one label each, or with an indicator matrix of labels."""

    class_weight: str | dict[Any, float] | None = None
    """What an example of each class counts: None, balanced or a dictionary."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "TextClassifier":
        """Fine-tune on texts X with labels y: (n), or (n, classes) of 0 and 1. Weights resample the rows."""
        texts = as_texts(X)
        y = y.toarray() if hasattr(y, "toarray") else y  # a sparse matrix of indicators
        multi = type_of_target(y) == "multilabel-indicator"
        y = np.asarray(y) if multi else column_or_1d(y, warn=True)
        check_consistent_length(texts, y)
        check_classification_targets(y)
        self.classes_ = unique_labels(y)
        if len(self.classes_) < 2:
            raise EverybertError(f"y has {len(self.classes_)} class; rows of two classes or more are needed")
        names = [str(i) for i in range(len(self.classes_))]  # labels of any kind, by their number
        number = None if multi else np.searchsorted(self.classes_, y)
        if number is None:
            targets: list[Any] = [tuple(names[i] for i in np.flatnonzero(row)) for row in y]
        else:
            targets = [names[i] for i in number]
        weights: Any = self.class_weight
        if isinstance(weights, dict):
            weights = [float(weights.get(label, 1.0)) for label in self.classes_.tolist()]
        self._fit("classify", texts, targets, number, sample_weight, labels=names, class_weights=weights)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """(n, classes) probabilities, in the order of `classes_`."""
        check_is_fitted(self, "classes_")
        predictions = self.model_.classify(as_texts(X))
        return np.array([list(p.scores.values()) for p in predictions]).reshape(len(predictions), len(self.classes_))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """(n, classes): the logarithms of the probabilities."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each text; or (n, classes) of 0 and 1, as `fit` was given."""
        probability = self.predict_proba(X)
        task: Any = self.model_.task("classify")
        return (probability >= task.threshold).astype(int) if task.multi else self.classes_[probability.argmax(1)]


@dataclass(eq=False, repr=False)
class TextRegressor(RegressorMixin, _FineTuned):
    """Fine-tunes a model on texts (or pairs of texts) with a number each."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "TextRegressor":
        """Fine-tune on texts X with numbers y. Weights resample the rows."""
        texts = as_texts(X)
        y = column_or_1d(y, warn=True).astype(np.float64)
        check_consistent_length(texts, y)
        self._fit("regress", texts, y.tolist(), None, sample_weight)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(n) numbers."""
        check_is_fitted(self, "model_")
        return np.array(self.model_.regress(as_texts(X)), dtype=np.float64)


@dataclass(eq=False, repr=False)
class TextEmbedder(TransformerMixin, _Packed):
    """Texts to vectors by a pre-trained model: the first step of a pipeline. `fit` only loads the model."""

    model: str = "everybert-small"
    _: KW_ONLY
    pooling: str | None = None
    """This and the next four are as in `Model.embed`."""
    normalize: bool | None = None
    long: str = "window"
    prompt: str | None = None
    dimensions: int | None = None
    device: str | None = None

    def fit(self, X: Any = None, y: Any = None) -> "TextEmbedder":
        """Load the model."""
        self.model_ = load(self.model, self.device)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """(n, H) float32."""
        check_is_fitted(self, "model_")
        how: Any = {name: getattr(self, name) for name in ("pooling", "normalize", "long", "prompt", "dimensions")}
        return self.model_.embed(as_texts(X), **how)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """everybert0, everybert1, …"""
        return np.array([f"everybert{i}" for i in range(self.transform(["a"]).shape[1])], dtype=object)


def as_texts(X: Any) -> list[Any]:
    """Texts, or pairs of texts, of a list, a Series, an array, or a DataFrame of one or two columns."""
    if isinstance(X, str):
        raise EverybertError("give a list of texts, not one text")
    return dataset.as_texts(X)
