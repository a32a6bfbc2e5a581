"""What is served: loaded models, and a name for each of them and for each of their adapters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.inference.model import Model, default_adapter, load
from everybert.model.engine import BUDGET_CPU, BUDGET_GPU
from everybert.serving.limits import HttpError, Limits, RequestContext, check_limit
from everybert.text.windows import OVERLAP, longest_first

LARGE = 4096
"""Bytes of a body above which its work is not done by the event loop."""
HEAD_TASKS = {"mlm": "fill", "nsp": "next", "tag": "tag", "answer": "answer", "choose": "choose"}
"""The endpoint of each head; classify heads have several."""
VECTOR_TASKS = {"embed": "embed", "sparse": "embed_sparse", "multi": "rerank"}
"""The endpoint of what a folder makes of texts."""


@dataclass(eq=False)
class LoadedModel:
    """A model in memory. Its network computes with one adapter at a time, in any number of threads."""

    name: str
    model: Model
    budget: int
    """Tokens per batch."""
    running: int = 0
    """Batches that are computed now, all with this adapter."""

    def start(self, adapter: str | None) -> None:
        """A batch starts: switch to its adapter."""
        self.running += 1
        if self.model.adapter != adapter:
            self.model.use(adapter)


@dataclass(frozen=True)
class Served:
    """A model, or one of its adapters, under the name that requests use."""

    name: str
    loaded: LoadedModel
    adapter: str | None
    folder: Path | None
    """What `everybert.load` takes."""
    heads: frozenset[str]
    outputs: int
    """Outputs of the classify head; 0 without one, 1 for regression or a cross-encoder's relevance."""
    label: str
    """The name of that output."""
    bounded: bool
    """Whether that output is a logit, which a sigmoid maps to 0 … 1; regression gives the number itself."""
    trained: str | None
    """The task it was fine-tuned for by everybert."""

    @property
    def model(self) -> Model:
        """The model; its methods are called by the batcher's threads, which switch adapters."""
        return self.loaded.model

    @property
    def tasks(self) -> list[str]:
        """The endpoints it can answer."""
        first = VECTOR_TASKS[self.model.pooling.vectors]
        tasks = [first, "tokens", "attention", *(task for head, task in HEAD_TASKS.items() if head in self.heads)]
        if "classify" in self.heads:
            tasks += ["predict", "rerank"] if self.outputs == 1 else ["classify", "predict"]
        defaults = {task.split()[0] for task in self.model.bundle.defaults} if self.adapter is None else set()
        return list(dict.fromkeys([*tasks, *sorted(defaults - {"embed"})]))

    def adapter_for(self, task: str, pair: bool) -> str | None:
        """The adapter a task runs with: the one named, else the default."""
        return self.adapter or default_adapter(self.model.bundle, self.heads, task, pair)


class ModelRegistry:
    """The served models by name; the first is the default."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.entries: dict[str, Served] = {}

    def add(
        self, name: str, model: Model, adapters: dict[str, str | Path] | None = None, share_weights: bool = False
    ) -> None:
        """Serve a model as `name`, and each of its adapters as `name:adapter`.

        The weights are copied out of the memory-mapped file, since a file that shrinks under a map kills the process.
        With `share_weights` they stay in the map, and processes that serve the same folder share them.
        """
        if not name or ":" in name or name in self.entries:
            raise EverybertError(f"a served model needs a name of its own without a colon, not {name!r}")
        if not share_weights:
            for route in (model, *model.routes.values()):
                for tensor in (*route.network.parameters(), *route.network.buffers()):
                    tensor.data = tensor.data.clone()
        folders = adapters or {}
        for adapter, folder in folders.items():
            model.add_adapter(folder, adapter)
        budget = self.limits.budget or (BUDGET_CPU if model.device.type == "cpu" else BUDGET_GPU)
        whole = model.adapter  # in use if the folder is that of an adapter
        loaded = LoadedModel(name, model, budget)
        for used in (None, *model.bundle.folders, *folders):
            model.use(used or whole)
            heads, is_own = model.network.heads, used is None  # labels and problem_type are those of the own head
            trained = (model.active_extras.get("task") or {}).get("task")
            entry = Served(
                name=name if used is None else f"{name}:{used}",
                loaded=loaded,
                adapter=used or whole,
                folder=Path(folders[used]) if used in folders else model.folder,
                heads=frozenset(heads),
                outputs=getattr(heads["classify"].output, "out_features", 0) if "classify" in heads else 0,
                label=(model.labels or ["LABEL_0"])[0] if is_own else "LABEL_0",
                bounded=trained != "regress" and not (is_own and model.problem_type == "regression"),
                trained=trained,
            )
            self.entries[entry.name] = entry
        model.use(whole)
        model.network.requires_grad_(False)

    def get(self, name: str | None) -> Served:
        """The entry a request names; the first by default."""
        if name is None:
            return next(iter(self.entries.values()))
        if name not in self.entries:
            raise HttpError(404, f"there is no model {name[:80]!r} here; choose one of {', '.join(self.entries)}")
        return self.entries[name]


def open_models(
    registry: ModelRegistry,
    models: Sequence[str],
    adapters: Sequence[str] = (),
    share_weights: bool = False,
    **options: Any,
) -> None:
    """Load and serve "folder" or "name=folder"; adapters as "folder", "name=folder" or "model:name=folder".

    `options` are those of `everybert.load`.
    """
    named = [split_name(entry) for entry in models]
    first = named[0][0]
    by_model: dict[str, dict[str, str | Path]] = {name: {} for name, _ in named}
    for entry in adapters:
        name, folder = split_name(entry)
        model, colon, short = name.rpartition(":")
        model = model if colon else first
        if model not in by_model:
            raise EverybertError(f"the adapter {entry!r} is for {model!r}, which is not served; add {model}=FOLDER")
        by_model[model][short] = folder
    for name, folder in named:
        registry.add(name, load(folder, **options), by_model[name], share_weights)


def split_name(entry: str) -> tuple[str, str]:
    """("name", "folder") of "name=folder"; a folder alone is named by its last part."""
    name, equals, folder = entry.partition("=")
    return (name, folder) if equals else (Path(entry).name.replace(":", "-"), entry)


# ── tokens, counted before anything is computed ──────────────────────────────────────────────────────────────


def count_tokens(model: Model, inputs: Sequence[str | tuple[str, ...]], context: RequestContext) -> list[int]:
    """The tokens of each text, pair, or text with several others; 413 above the limits.

    Each distinct text is tokenized once, however often it is repeated.
    """
    tokenizer, limits = model.tokenizer, context.limits
    parts = [(x,) if isinstance(x, str) else x for x in inputs]
    texts = list(dict.fromkeys(text for part in parts for text in part))
    # Several texts at once would wait for the tokenizer's threads, which long texts of other requests keep busy.
    each = [texts] if sum(map(len, texts)) > LARGE else [[text] for text in texts]
    size = dict(zip(texts, [len(ids) for some in each for ids in tokenizer.ids_batch(some, specials=False)]))
    check_limit(max(size.values(), default=0), limits.text_tokens, "tokens in a text")
    pairs = [(size[part[0]], size[other]) for part in parts for other in part[1:]]
    windows = sum(pair_windows(a, b, model.window, tokenizer.pair_special) for a, b in pairs)
    check_limit(windows, limits.request_tokens, "tokens in the windows of long pairs")
    counts = [
        sum(size[part[0]] + size[other] + tokenizer.pair_special for other in part[1:])
        or sum(size[text] + tokenizer.single_special for text in part)
        for part in parts
    ]
    context.tokens = sum(counts)
    check_limit(context.tokens, limits.request_tokens, "tokens in a request")
    return counts


def pair_windows(a: int, b: int, window: int, special: int) -> int:
    """About how many tokens are computed for a pair of `a` and `b` tokens: both texts are read in windows."""
    rooms, overlap = longest_first(a, b, window - special), min(OVERLAP, window // 4)
    counts = [-(-n // max(room - min(overlap, room // 2), 1)) for n, room in zip((a, b), rooms) if n > room]
    return math.prod(counts) * window if counts else a + b + special
