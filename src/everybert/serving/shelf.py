"""The models that are served: trunks, and a view of each for every adapter, which many threads may use at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everybert.errors import EverybertError
from everybert.inference.bundle import Bundle
from everybert.inference.model import Model, load
from everybert.model.encoder import Encoder
from everybert.model.engine import BUDGET_CPU, BUDGET_GPU
from everybert.model.heads import Network
from everybert.serving.limits import CountingTokenizer, Limits, Refusal
from everybert.serving.scheduler import Scheduler, Trunk
from everybert.serving.sequences import SharedEncoder
from everybert.serving.texts import Direct


@dataclass(frozen=True)
class Served:
    """A model under the name that requests call it by."""

    name: str
    model: Model
    """A view: its encoder is shared, its heads are its own."""
    direct: Direct | None = None
    """Embeds in the threads that run the trunk; None on an accelerator, which must not wait for the tokenizer."""

    @property
    def tasks(self) -> list[str]:
        """The endpoints that it answers."""
        network, found = self.model.network, ["embed", "tokens", "attention"]
        heads = {"mlm": "fill", "nsp": "next", "tag": "tag", "answer": "answer", "choose": "choose"}
        found += [task for head, task in heads.items() if head in network.heads]
        if "classify" in network.heads:
            found += ["predict", "rerank"] if is_regression(self.model) else ["classify", "predict"]
        theirs = {task.split()[0] for task in self.model.bundle.defaults} - {"embed"}
        return list(dict.fromkeys([*found, *sorted(theirs)]))


class Shelf:
    """All that is served, by name; the first is the default."""

    def __init__(self, scheduler: Scheduler, limits: Limits) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self.entries: dict[str, Served] = {}

    def add(self, name: str, model: Model, adapters: dict[str, str | Path] | None = None) -> None:
        """Serve a model as `name`, and each adapter put on it as `name:adapter`."""
        if not name or ":" in name or name in self.entries:
            raise EverybertError(f"a served model needs a name of its own without a colon, not {name!r}")
        for tensor in (*model.network.parameters(), *model.network.buffers()):
            tensor.data = tensor.data.clone()  # out of the file's memory map: the file may shrink, which is a bus error
        if model.device.type == "cpu":
            _turn(model.network.encoder)
        for adapter in model.bundle.folders:
            model.use(adapter)  # puts it on
        model.use(None)
        for adapter, folder in (adapters or {}).items():
            model.add_adapter(folder, adapter)
        model.network.requires_grad_(False)  # nothing is trained here
        budget = self.limits.budget or (BUDGET_CPU if model.device.type == "cpu" else BUDGET_GPU)
        trunk = Trunk(name, model.network.encoder, model.use, budget)
        base = self._view(model, trunk, None)
        self.entries[name] = Served(name, base)
        views: dict[str | None, Model] = {None: base}
        for adapter in model.adapters.extras if model.adapters is not None else ():
            view = self._view(model, trunk, adapter)
            view.folder = Path({**model.bundle.folders, **(adapters or {})}.get(adapter, view.folder or "."))
            view.bundle = Bundle()
            self.entries[f"{name}:{adapter}"] = Served(f"{name}:{adapter}", view, _direct(view, trunk, adapter))
            views[adapter] = base.views[adapter] = view
        embeds = model.bundle.default("embed")
        self.entries[name] = Served(name, base, _direct(views[embeds], trunk, embeds))

    def get(self, name: str | None) -> Served:
        """The model a request asks for; the first where it names none."""
        if name is None:
            return next(iter(self.entries.values()))
        if name not in self.entries:
            raise Refusal(404, f"there is no model {name[:80]!r} here; choose one of {', '.join(self.entries)}")
        return self.entries[name]

    def _view(self, model: Model, trunk: Trunk, adapter: str | None) -> Model:
        """The model with a shared encoder, and under an adapter with its heads and settings."""
        entry = model.adapters.on.entries[adapter] if model.adapters is not None and adapter is not None else None
        network: Network = copy.copy(model.network)
        network._modules = dict(model.network._modules)
        network.encoder = SharedEncoder(trunk, adapter, self.scheduler)  # type: ignore[assignment]
        network.heads = nn.ModuleDict({**dict(model.network.heads), **(entry.heads if entry else {})})
        if entry is not None and entry.pooler is not None:
            network.pooler = entry.pooler  # type: ignore[assignment]
        own: dict[str, Any] = {"extras": model.extras, "labels": model.labels, "problem_type": model.problem_type}
        if adapter is not None and model.adapters is not None:
            own = {"extras": model.adapters.extras[adapter]}
        tokenizer = CountingTokenizer(model.tokenizer)
        view = Model(network, tokenizer, raw_config=model.raw_config, folder=model.folder, **own)
        view.pooling = model.pooling  # read now: the folder may be gone when it is first needed
        return view


def _turn(encoder: Encoder) -> None:
    """Lay weights out by column, which changes no number: products with a few tokens read them a third faster."""
    for part in encoder.modules():
        if type(part) is nn.Linear and part.weight.dtype == torch.float32:
            part.weight.data = part.weight.data.t().contiguous().t()


def _direct(view: Model, trunk: Trunk, adapter: str | None) -> Direct | None:
    """The view with the trunk's own encoder in it."""
    if view.device.type != "cpu":
        return None
    model, network = copy.copy(view), copy.copy(view.network)
    network._modules = {**view.network._modules, "encoder": trunk.encoder}
    model.network, model.bundle, model.views = network, Bundle(), {}
    return Direct(trunk, adapter, model)


def open_models(
    shelf: Shelf,
    models: Sequence[str],
    adapters: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Load and serve "folder" or "name=folder"; adapters as "folder", "name=folder" or "model:name=folder"."""
    named = [_named(entry) for entry in models]
    first = named[0][0]
    theirs: dict[str, dict[str, str | Path]] = {name: {} for name, _ in named}
    for entry in adapters:
        name, folder = _named(entry)
        on, colon, short = name.rpartition(":")
        on, short = (on, short) if colon else (first, name)
        if on not in theirs:
            raise EverybertError(f"the adapter {entry!r} is for {on!r}, which is not served; add --model {on}=FOLDER")
        theirs[on][short] = folder
    for name, folder in named:
        shelf.add(name, load(folder, device=device, dtype=dtype), theirs[name])


def _named(entry: str) -> tuple[str, str]:
    """("name", "folder") of "name=folder"; a folder alone is called by its last part."""
    name, equals, folder = entry.partition("=")
    return (name, folder) if equals else (Path(entry).name.replace(":", "-"), entry)


def is_regression(model: Model) -> bool:
    """Whether the classify head gives one number: a cross-encoder's score, or regression."""
    head = model.network.heads["classify"] if "classify" in model.network.heads else None
    return head is not None and getattr(head.output, "out_features", 0) == 1
