"""What a model's task heads are used for: classify, regress, tag, answer, choose; and adapters on one trunk.

A folder's task is settled by its everybert.json, or by config.json's labels where it comes from elsewhere. An adapter
brings its own head and its own settings; `using` switches to it for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everybert.errors import EverybertError
from everybert.inference.bundle import Bundle
from everybert.model.adapters import AdapterSet
from everybert.model.features import FeatureHead
from everybert.store.adapters import load_adapter, load_feature_head, read_adapter, save_feature_head
from everybert.store.hub import resolve
from everybert.tasks import load_task
from everybert.tasks.answer import Answer
from everybert.tasks.choose import Choice
from everybert.tasks.classify import Prediction, Text
from everybert.tasks.tag import Span, Words

if TYPE_CHECKING:
    from everybert.inference.model import Model


@dataclass
class Adapters:
    """The adapters on a model's trunk, and what each one's folder says."""

    on: AdapterSet
    extras: dict[str, dict[str, Any]]


# ── adapters and heads of a folder ───────────────────────────────────────────────────────────────────────────


def add_adapter(model: Model, folder: str | Path, name: str | None = None, verify: bool = True) -> str:
    """Put an adapter's folder on the model's trunk; returns the name it is used by (the folder's, unless given)."""
    path = resolve(folder)
    name = name or path.name.replace(".", "-")
    file = read_adapter(path)
    if model.adapters is None:
        model.adapters = Adapters(AdapterSet(model.network), {})
    load_adapter(model.adapters.on, name, file, verify)
    model.adapters.extras[name] = file.extras
    model.network.eval()
    return name


def base_of(folder: Path) -> Path:
    """The folder of the model that an adapter goes on."""
    base = read_adapter(folder).base
    try:
        return resolve(base)
    except EverybertError as error:
        raise EverybertError(
            f"{folder} is an adapter for {base or 'an unnamed model'}, which is not there ({error}); "
            "load that model from where it is, then model.add_adapter(folder)"
        ) from None


def merge(model: Model, adapter: str | None = None) -> None:
    """Add an adapter (the one in use, unless named) into the weights for good; the others are taken off."""
    adapters = _adapters(model)
    if adapter is not None:
        adapters.on.use(adapter)
    if adapters.on.active is None:
        raise EverybertError("no adapter is in use; name the one to merge")
    task = _extras(model).get("task") or {}
    model.extras = {**model.extras, "task": task}
    model.labels = task.get("labels")
    multi = "multi_label_classification" if task.get("multi") else "single_label_classification"
    model.problem_type = {"regress": "regression", "classify": multi}.get(task.get("task", ""))
    adapters.on.settle()
    model.adapters, model.bundle = None, Bundle()


def use(model: Model, adapter: str | None) -> None:
    """Switch to an adapter and its head, or (None) to the bare trunk."""
    folder = model.bundle.folders.get(adapter or "")
    if folder is not None and (model.adapters is None or adapter not in model.adapters.extras):
        add_adapter(model, folder, adapter, verify=False)  # they came together, hashed as one
    if adapter is not None or model.adapters is not None:
        _adapters(model).on.use(adapter)


@contextmanager
def using(model: Model, adapter: str | None) -> Iterator[None]:
    """Another adapter for a while; None leaves the one in use."""
    before = model.adapters.on.active if model.adapters is not None else None
    if adapter is None or adapter == before:
        yield
        return
    use(model, adapter)
    try:
        yield
    finally:
        use(model, before)


def chosen(model: Model, task: str, pair: bool = False) -> str | None:
    """The adapter a task takes where none is named: the one in use, or the model's own head (None), or the bundle's."""
    active = model.adapters is not None and model.adapters.on.active is not None
    own = {"regress": "classify"}.get(task, task) in model.network.heads  # no head is called embed
    return None if active or own else model.bundle.default(task, pair)


def _adapters(model: Model) -> Adapters:
    if model.adapters is None:
        raise EverybertError("this model has no adapters; put one on with add_adapter(folder)")
    return model.adapters


def open_feature_head(model: Model, folder: Path) -> None:
    """Put on the feature-based head that a folder's everybert.json describes, if it does."""
    described = model.extras.get("feature_head")
    if isinstance(described, Mapping):
        load_feature_head(model.network, described["name"], folder, dict(described))


@contextmanager
def saving(model: Model, folder: Path) -> Iterator[dict[str, Any]]:
    """While the network is written: without the heads `transformers` has not, which are written apart."""
    if model.adapters is not None and model.adapters.on.active is not None:
        raise EverybertError("an adapter is in use: merge() it first, or keep its own folder beside the trunk's")
    heads = {name: head for name, head in model.network.heads.items() if isinstance(head, FeatureHead)}
    extras = {key: value for key, value in model.extras.items() if key != "adapters"}  # they stay in their own folder
    for name, head in heads.items():
        del model.network.heads[name]
        extras["feature_head"] = {"name": name, **save_feature_head(head, folder)}
    try:
        yield extras
    finally:
        model.network.heads.update(heads)


# ── predictions ──────────────────────────────────────────────────────────────────────────────────────────────


def _extras(model: Model) -> dict[str, Any]:
    """everybert.json of the adapter in use, or of the model."""
    active = model.adapters.on.active if model.adapters is not None else None
    return model.adapters.extras[active] if model.adapters is not None and active is not None else model.extras


def settle(model: Model, name: str) -> Any:
    """The settings of one of the model's tasks, under the adapter in use."""
    extras = _extras(model)
    own = extras is model.extras
    return load_task(name, model.network, model.labels if own else None, model.problem_type if own else None, extras)


def iterate(
    model: Model, name: str, inputs: Sequence[Any], adapter: str | None = None, **options: Any
) -> Iterator[Any]:
    """One result an input, in order, as they are made: Prediction, float, list of Spans or of Answers, or Choice."""
    kinds = [isinstance(x, tuple | list) for x in inputs] if name == "classify" and adapter is None else [False]
    own = {kind: chosen(model, name, kind) for kind in set(kinds)}
    if len(set(own.values())) > 1:  # texts and pairs in one list, each with an adapter of its own
        parts = {kind: [x for x, k in zip(inputs, kinds) if k == kind] for kind in own}
        done = {kind: iter(list(iterate(model, name, parts[kind], own[kind], **options))) for kind in own}
        yield from (next(done[kind]) for kind in kinds)
        return
    adapter = adapter or chosen(model, name, any(kinds))
    if adapter in model.views:
        yield from iterate(model.views[adapter], name, inputs, **options)
        return
    with using(model, adapter):
        task = settle(model, name)
        yield from task.predict(model.network, model.tokenizer, inputs, **options)


def _texts(texts: Text | Sequence[Text]) -> list[Text]:
    """One text or pair, or a sequence of them, as a list."""
    if isinstance(texts, str) or (
        isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(t, str) for t in texts)
    ):
        return [texts]  # type: ignore[list-item]
    out = list(texts)
    for i, text in enumerate(out):
        pair = isinstance(text, tuple | list) and len(text) == 2 and all(isinstance(t, str) for t in text)
        if not isinstance(text, str) and not pair:
            raise EverybertError(f"text {i + 1} is a {type(text).__name__}: give strings, or pairs of strings")
    return out  # type: ignore[return-value]


def classify(model: Model, texts: Text | Sequence[Text], adapter: str | None = None) -> list[Prediction]:
    """See Model.classify."""
    return list(iterate(model, "classify", _texts(texts), adapter))


def regress(model: Model, texts: Text | Sequence[Text], adapter: str | None = None) -> list[float]:
    """See Model.regress."""
    return list(iterate(model, "regress", _texts(texts), adapter))


def tag(model: Model, texts: str | Sequence[Words], adapter: str | None = None) -> Any:
    """See Model.tag."""
    one = isinstance(texts, str)
    found: list[list[Span]] = list(iterate(model, "tag", [texts] if one else list(texts), adapter))
    return found[0] if one else found


def answer(
    model: Model, question: str | Sequence[str], context: str | Sequence[str], top: int = 1, adapter: str | None = None
) -> Any:
    """See Model.answer."""
    if top < 1:
        raise EverybertError(f"top is the number of answers and at least 1, not {top}")
    one = isinstance(question, str)
    questions = [question] if one else list(question)
    contexts = [context] * len(questions) if isinstance(context, str) else list(context)
    if len(contexts) != len(questions):
        raise EverybertError(
            f"{len(questions)} questions but {len(contexts)} contexts; give one for each, or one for all"
        )
    found: list[list[Answer]] = list(iterate(model, "answer", list(zip(questions, contexts)), adapter, top=top))
    return found[0] if one else found


def choose(model: Model, prompt: str, endings: Sequence[str], adapter: str | None = None) -> Choice:
    """See Model.choose."""
    (choice,) = iterate(model, "choose", [(prompt, list(endings))], adapter)
    return choice
