"""scikit-learn estimators: a fine-tuned classifier and an embedder, for pipelines, cross-validation and grid search.

They follow scikit-learn's conventions. A pickle contains the model folder's files (safetensors, JSON) as bytes: it
loads without the folder, and no torch object is pickled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from everybert.errors import EverybertError

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d
except ImportError as error:  # pragma: no cover
    raise EverybertError("everybert.sklearn needs scikit-learn: pip install scikit-learn") from error

from everybert.files import MANIFEST
from everybert.inference.model import Model, load

FEWEST = 20
"""The fewest rows of which some are held out to choose the best epoch; fewer are trained and scored on as a whole."""
SETTINGS = ("mode", "epochs", "lr", "batch_size", "warmup", "weight_decay", "layer_decay", "patience", "device")
"""Parameters that are settings of `finetune`."""
_cached = lru_cache(maxsize=2)(load)


class _Packed(BaseEstimator):
    """Base of both estimators: texts as input, and a model that is pickled as its folder's bytes."""

    def __sklearn_tags__(self) -> Any:
        """One string per row; no 2-D arrays of numbers."""
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        tags.no_validation = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        model = state.pop("model_", None)
        if model is not None:
            state["files_"] = pack(model)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("files_", None)
        super().__setstate__(state)
        if files is not None:
            self.model_ = unpack(files, self.device)  # type: ignore[attr-defined]


class TextClassifier(ClassifierMixin, _Packed):
    """Fine-tunes a model on texts (or pairs of texts) with one label each.

    model: a folder, a bundled model or a hub id. mode: full, top:K, frozen or lora. epochs, lr, batch_size, warmup,
    weight_decay, layer_decay, patience: as `everybert.finetune` has them. class_weight: None, balanced or a dictionary.
    validation_fraction: held out of `fit`'s rows to choose the best epoch (0: train and choose on all rows).
    """

    def __init__(
        self,
        model: str = "everybert-small",
        *,
        mode: str = "full",
        epochs: int = 3,
        lr: float | None = None,
        batch_size: int = 32,
        warmup: float = 0.1,
        weight_decay: float = 0.01,
        layer_decay: float = 1.0,
        patience: int | None = None,
        window: int | None = None,
        class_weight: str | dict[Any, float] | None = None,
        validation_fraction: float = 0.1,
        random_state: int = 0,
        device: str | None = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.mode = mode
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.warmup = warmup
        self.weight_decay = weight_decay
        self.layer_decay = layer_decay
        self.patience = patience
        self.window = window
        self.class_weight = class_weight
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> TextClassifier:
        """Fine-tune on texts X with labels y."""
        from everybert.training.finetune import finetune

        texts = as_texts(X)
        y = column_or_1d(y, warn=True)
        check_consistent_length(texts, y)
        check_classification_targets(y)
        self.classes_ = unique_labels(y)
        if len(self.classes_) < 2:
            raise EverybertError(f"every row has the label {self.classes_[0]!r}; two classes or more are needed")
        names = [str(i) for i in range(len(self.classes_))]  # labels of any kind, by their number
        number = np.searchsorted(self.classes_, y)
        rows = [(*((text,) if isinstance(text, str) else text), names[i]) for text, i in zip(texts, number)]
        train, dev = self._split(rows, number)
        with tempfile.TemporaryDirectory(prefix="everybert-") as folder:
            tuned = finetune(
                self.model,
                "classify",
                train,
                dev,
                Path(folder) / "model",
                seed=self.random_state,
                window=self.window,
                options={"labels": names, "class_weights": self._weights()},
                quiet=not self.verbose,
                **{name: getattr(self, name) for name in SETTINGS},
            )
            self.model_ = load(Path(folder) / "model", device=self.device)
            if self.model_.adapters is not None:
                self.model_.merge()
        self.n_iter_ = tuned.runs[0].epoch
        self.scores_ = dict(tuned.runs[0].scores)
        return self

    def _split(self, rows: list[Any], number: np.ndarray) -> tuple[list[Any], list[Any]]:
        """Hold out a share of every class; all rows twice if they are few."""
        if not 0 <= self.validation_fraction < 1:
            raise EverybertError(f"validation_fraction lies in [0, 1), not {self.validation_fraction}")
        if len(rows) < FEWEST or self.validation_fraction == 0:
            return rows, rows
        order = np.random.default_rng(self.random_state).permutation(len(rows))
        held: set[int] = set()
        for label in range(len(self.classes_)):
            own = order[number[order] == label]
            held |= set(own[: int(len(own) * self.validation_fraction)].tolist())
        if not held:
            return rows, rows
        return [r for i, r in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]

    def _weights(self) -> Any:
        if not isinstance(self.class_weight, dict):
            return self.class_weight
        return [float(self.class_weight.get(label, 1.0)) for label in self.classes_.tolist()]

    def predict_proba(self, X: Any) -> np.ndarray:
        """(n, classes) probabilities, in the order of `classes_`."""
        check_is_fitted(self, "classes_")
        found = self.model_.classify(as_texts(X))
        return np.array([list(p.scores.values()) for p in found]).reshape(len(found), len(self.classes_))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each text."""
        probability = self.predict_proba(X)
        return self.classes_[probability.argmax(1)]


class TextEmbedder(TransformerMixin, _Packed):
    """Texts to vectors by a pre-trained model: the first step of a pipeline. `fit` only loads the model."""

    def __init__(
        self,
        model: str = "everybert-small",
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        long: str = "window",
        device: str | None = None,
    ) -> None:
        self.model = model
        self.pooling = pooling
        self.normalize = normalize
        self.long = long
        self.device = device

    def fit(self, X: Any = None, y: Any = None) -> TextEmbedder:
        """Load the model."""
        self.model_ = _cached(self.model, self.device)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """(n, H) float32."""
        check_is_fitted(self, "model_")
        texts = as_texts(X)
        if any(not isinstance(text, str) for text in texts):
            raise EverybertError("TextEmbedder takes texts, not pairs of texts")
        return self.model_.embed(texts, pooling=self.pooling, normalize=self.normalize, long=self.long)  # type: ignore[arg-type]

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """everybert0, everybert1, …"""
        check_is_fitted(self, "model_")
        width = self.model_.embed(["a"], pooling=self.pooling).shape[1]
        return np.array([f"everybert{i}" for i in range(width)], dtype=object)


# ── texts and pickles ────────────────────────────────────────────────────────────────────────────────────────


def as_texts(X: Any) -> list[Any]:
    """Texts, or pairs of texts, of a list, a Series, an array, or a DataFrame of one or two columns."""
    if isinstance(X, str):
        raise EverybertError("give a list of texts, not one text")
    if hasattr(X, "to_numpy"):
        X = X.to_numpy()
    if isinstance(X, np.ndarray):
        if X.ndim == 2 and X.shape[1] == 1:
            X = X[:, 0]
        X = X.tolist()
    rows: Iterable[Any] = X
    out: list[Any] = []
    for i, row in enumerate(rows):
        pair = isinstance(row, Sequence) and not isinstance(row, str) and len(row) == 2
        if isinstance(row, str):
            out.append(row)
        elif pair and all(isinstance(part, str) for part in row):
            out.append(tuple(row))
        else:
            raise EverybertError(f"row {i} is {str(row)[:40]!r}, not a text or a pair of texts")
    return out


def pack(model: Model) -> dict[str, bytes]:
    """The files of a model's folder."""
    with tempfile.TemporaryDirectory(prefix="everybert-") as parent:
        folder = Path(parent) / "model"
        model.save(folder)
        return {
            p.relative_to(folder).as_posix(): p.read_bytes()
            for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != MANIFEST
        }


def unpack(files: dict[str, bytes], device: str | None = None) -> Model:
    """The model of such files."""
    with tempfile.TemporaryDirectory(prefix="everybert-") as folder:
        for name, content in files.items():
            path = Path(folder, name)
            if ".." in path.parts or Path(name).is_absolute():
                raise EverybertError(f"the pickle names a file outside its folder ({name!r}); do not use it")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        model = load(folder, device=device)
        _ = model.pooling  # read now: the folder is about to go
        return model
