"""A recipe: everything that decides a pre-training run, read from a short TOML file.

Each table of the file is one frozen dataclass below. A key that no dataclass has, a value of the wrong type and a
contradiction are refused with the file and the line. The corpus and the output folder are not part of a recipe.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from everybert.corpus.examples import ExampleConfig
from everybert.corpus.masking import MaskingConfig
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig, preset
from everybert.training.optim import OptimizerConfig

T = TypeVar("T")
Pair = tuple[float, float]


class KeyProblem(EverybertError):
    """A wrong value, raised by a dataclass about its own field; `Source.build` adds the file and the line."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key, self.why = key, why


def at_least(key: str, value: float, least: float, why: str = "") -> None:
    """Refuse a value below `least`."""
    if value < least:
        raise KeyProblem(key, f"{why or f'must be at least {least}'}, not {value}")


def within(key: str, value: float, low: float, high: float, open_ends: bool = False) -> None:
    """Refuse a value outside [low, high], or outside (low, high) with `open_ends`."""
    if not low <= value <= high or (open_ends and value in (low, high)):
        raise KeyProblem(key, f"must lie between {low} and {high}, not {value}")


def pair(value: Any) -> Any:
    """(start, end) of a setting that may be one number."""
    return value if isinstance(value, tuple) else (value, value)


def seconds(text: str) -> float:
    """A duration: "90s", "20m", "1.5h", "2d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)
    if not match or float(match[1]) == 0:
        raise KeyProblem("budget", f'is a time such as "20m" or "24h", not {text!r}')
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


# ── the tables ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ModelSettings:
    """[model]: a preset and what differs from it, or a trained model to start from."""

    preset: str | None = None
    """A published configuration, by name."""
    init: str | None = None
    """A model folder to start from, instead of random weights."""
    longformer: int | None = None
    """With init: convert to a Longformer with this many positions, copied from those of the model."""
    window: int = 512
    """With longformer: tokens that a token attends to, half on each side."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Fields of the encoder configuration that differ from the preset, or from the folder's (dropout)."""


@dataclass(frozen=True)
class BatchSettings:
    """[batch]: the amount of text per step."""

    tokens: int | tuple[int, int] = 131_072
    """Tokens per step, special tokens included; two numbers ramp from the first to the second over each phase."""
    length: int = 512
    """Longest sequence."""
    pack: int = 16_384
    """Tokens per forward pass. Memory grows with it; a step is as many packs as its tokens need."""

    def __post_init__(self) -> None:
        at_least("length", self.length, 8)
        at_least("pack", self.pack, self.length, f"a pack must hold a sequence of {self.length} tokens")
        for tokens in pair(self.tokens):
            at_least("tokens", tokens, self.pack, f"a step cannot be smaller than a pack ({self.pack} tokens)")


@dataclass(frozen=True)
class ScheduleSettings:
    """[schedule]: the learning rate, a pure function of the step."""

    peak: float = 1e-4
    """The highest learning rate."""
    kind: Literal["linear", "cosine", "wsd"] = "linear"
    """After the warm-up: linear or cosine decay to the end; wsd: constant, then linear (warmup-stable-decay)."""
    warmup: int | float = 0.01
    """Linear increase from zero: a whole number of steps, or a share of the run below 1."""
    decay: float = 0.2
    """wsd: the share of the run, at its end, in which the rate decays."""
    floor: float = 0.0
    """The final rate, as a share of the peak."""

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise KeyProblem("peak", f"must be above 0, not {self.peak}")
        at_least("warmup", self.warmup, 0)
        if isinstance(self.warmup, float) and self.warmup >= 1:
            raise KeyProblem("warmup", f"is a share below 1, or a whole number of steps, not {self.warmup}")
        within("decay", self.decay, 0, 1)
        within("floor", self.floor, 0, 1)


@dataclass(frozen=True)
class Phase:
    """[[phase]]: a part of the run with its own length, tokens or mask rate; the defaults are those of the run."""

    share: float
    """Its share of the run's steps; in the file also `steps`, a number of steps."""
    length: int
    """Longest sequence."""
    tokens: tuple[int, int]
    """Tokens per step, at its start and at its end."""
    rate: Pair | None = None
    """Mask rate at its start and at its end; None follows [mask]."""

    def __post_init__(self) -> None:
        within("share", self.share, 0, 1)
        for rate in self.rate or ():
            within("rate", rate, 0, 1, open_ends=True)


@dataclass(frozen=True)
class DistilSettings:
    """[distil]: what the student learns from the teacher, beside or instead of the masked tokens."""

    temperature: float = 2.0
    """Divides the logits of both models (Hinton et al. 2015)."""
    ce: float = 5.0
    """Weight of the divergence from the teacher's predictions at masked tokens, times temperature²."""
    mlm: float = 2.0
    """Weight of the masked-token loss."""
    pair: float = 1.0
    """Weight of the teacher's predictions and the labels of sentence pairs, where the examples are pairs."""
    cosine: float = 1.0
    """Weight of 1 − cos between the last hidden states (DistilBERT)."""
    hidden: float = 0.0
    """Weight of the squared error between hidden states, layer by layer, through a learned projection (TinyBERT)."""
    relation: float = 0.0
    """Weight of the divergence between query–query, key–key and value–value relations of the last layer (MiniLM v2)."""
    relation_heads: int = 12
    """Heads of the relations; need not be the number of attention heads of either model."""
    copy: bool = True
    """Initialise the student from every k-th teacher layer where the widths agree."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise KeyProblem("temperature", f"must be above 0, not {self.temperature}")
        weights = {name: getattr(self, name) for name in ("ce", "mlm", "pair", "cosine", "hidden", "relation")}
        for name, weight in weights.items():
            at_least(name, weight, 0)
        if not any(weights.values()):
            raise KeyProblem("ce", "every weight is 0: there is nothing to learn")


@dataclass(frozen=True)
class RunSettings:
    """[run]: how the machine is used and what is kept. None of it changes what is learnt."""

    parallel: Literal["data", "sharded"] = "data"
    """Several ranks: data, each holds the whole model; sharded, a share of weights, gradients and moments (FSDP)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision; the weights stay in fp32. auto: bfloat16 on CUDA, float32 on the CPU."""
    compile: bool | None = None
    """torch.compile; by default on CUDA only."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    workers: int | None = None
    """Processes that prepare packs (0: the main process does); by default 4 on CUDA, 0 on the CPU."""
    tensorboard: bool = True
    """Write TensorBoard curves too, where it is installed."""
    log_every: int = 10
    """Steps between lines of log.jsonl."""
    evaluate_every: int = 1000
    """Steps between evaluations on the held-out split (0: only at the end)."""
    evaluate_packs: int = 16
    """Packs of held-out text per evaluation."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Number of most recent checkpoints that are kept, besides the best."""
    spike: float = 3.0
    """Skip a step whose loss is this many times its running mean, or not finite (0: only the latter)."""
    patience: int = 20
    """Stop after this many skipped steps in a row."""

    def __post_init__(self) -> None:
        for name in ("log_every", "evaluate_packs", "save_every", "keep", "patience"):
            at_least(name, getattr(self, name), 1)
        for name in ("workers", "evaluate_every", "spike"):
            at_least(name, getattr(self, name) or 0, 0)


TOP = ("seed", "steps", "budget")
TABLES: dict[str, type] = {
    "batch": BatchSettings,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleSettings,
    "distil": DistilSettings,
    "run": RunSettings,
}


@dataclass(frozen=True)
class Recipe:
    """A whole recipe; `Recipe.load` reads one."""

    model: ModelSettings
    examples: ExampleConfig
    mask: MaskingConfig
    mask_rate: Pair
    """Masked share of the text at the start and at the end of the run ([mask] rate)."""
    boundary: bool
    """SpanBERT's boundary objective ([mask] boundary)."""
    batch: BatchSettings
    phases: tuple[Phase, ...]
    """The parts of the run, at least one."""
    optimizer: OptimizerConfig
    schedule: ScheduleSettings
    run: RunSettings
    distil: DistilSettings | None = None
    steps: int | None = None
    """Number of steps; None if a time budget decides."""
    budget: str | None = None
    """Time instead of steps ("20m", "24h"): the decay is planned to end on time."""
    seed: int = 0
    """Decides the initial weights, the order of the text, the masks and the dropout."""

    @classmethod
    def load(cls, name: str | Path, **overrides: Any) -> Recipe:
        """Read a recipe from a file, or by the name of a shipped one; `parse` describes the overrides."""
        return cls.parse(Source.read(name), **overrides)

    @classmethod
    def parse(cls, source: Source, **overrides: Any) -> Recipe:
        """Read a recipe from TOML. Overrides, written `table__key` or `key`, replace lines of the file."""
        table = _override(source.table, overrides)
        known = [*TOP, *TABLES, "model", "examples", "mask", "phase"]
        for key in table:
            if key not in known:
                raise source.refuse(key, unknown(key, known))
        parts: dict[str, Any] = {
            name: source.build(kind, table.get(name, {}), name)
            for name, kind in TABLES.items()
            if name in table or name != "distil"
        }
        length = parts["batch"].length
        parts["examples"] = source.build(ExampleConfig, table.get("examples", {}), "examples", length=length)
        parts |= _mask(source, table.get("mask", {}))
        parts["model"] = parse_model(source, table.get("model", {}))
        parts["phases"], steps = _phases(source, table, parts["batch"])
        named: dict[str, Any] = {k: table[k] for k in TOP if k in table} | ({"steps": steps} if steps else {})
        return source.build(cls, named, **parts)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.budget is None):
            raise KeyProblem("budget" if self.budget else "steps", "give either steps or budget")
        if self.steps is not None:
            at_least("steps", self.steps, 1)
        if self.budget is not None:
            seconds(self.budget)
            if isinstance(self.schedule.warmup, float) and self.schedule.warmup > 0:
                raise KeyProblem("budget", "[schedule] warmup must be a number of steps where the time is fixed")
        if self.run.parallel == "sharded":
            reason = None
            if self.optimizer.kind == "muon":
                reason = 'muon needs whole matrices: set [optimizer] kind = "adamw"'
            elif self.distil is not None and self.distil.relation:
                reason = "the relation loss needs whole matrices: set [distil] relation = 0"
            if reason:
                raise KeyProblem("run.parallel", f'sharded ranks hold rows, and {reason}, or [run] parallel = "data"')

    @property
    def config(self) -> EncoderConfig:
        """The encoder configuration before the tokenizer decides the vocabulary size."""
        base = preset(self.model.preset) if self.model.preset else EncoderConfig()
        return base.replace(**dict(self.model.changes))

    @property
    def heads(self) -> dict[str, int | None]:
        """The heads that the objectives need."""
        return {"mlm": None, "nsp": None} if self.examples.paired else {"mlm": None}

    @property
    def longest(self) -> int:
        """The longest sequence of all phases."""
        return max(phase.length for phase in self.phases)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """The keys in which a saved recipe (the output of `plain`) differs; [run] is free to change."""
        mine, theirs = _flat(self.plain()), _flat(other)
        keys = {_written(k) for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)}
        return sorted(key for key in keys if key is not None)

    def plain(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        table = dataclasses.asdict(self)
        table["model"] |= dict(table["model"].pop("changes"))
        return json.loads(json.dumps(table))


def _written(key: str) -> str | None:
    """A key as the file spells it; None if it does not affect the result."""
    own = {"mask_rate": "mask.rate", "boundary": "mask.boundary", "phases": "phase", "examples.length": "batch.length"}
    return None if key.startswith("run.") else own.get(key, key)


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix.removesuffix("."): table}
    return {k: v for key, value in table.items() for k, v in _flat(value, f"{prefix}{key}.").items()}


# ── shipped recipes ──────────────────────────────────────────────────────────────────────────────────────────


def _shipped() -> Any:
    """The folder of recipes: package data if installed, `recipes/` beside `src/` in a checkout."""
    inside = resources.files("everybert").joinpath("recipes")
    return inside if inside.is_dir() else Path(__file__).parents[3] / "recipes"


def names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(item.name.removesuffix(".toml") for item in _shipped().iterdir() if item.name.endswith(".toml"))


def text(name: str | Path) -> str:
    """The text of a recipe, by name or file."""
    return Source.read(name).text


def summary(name: str) -> str:
    """The first line of a recipe's comment."""
    return text(name).splitlines()[0].lstrip("# ")


# ── tables that need more than their dataclass ───────────────────────────────────────────────────────────────


def _override(given: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The file's tables with the overrides in place; the alternatives of what they set are dropped."""
    table: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in given.items()}
    for key, value in overrides.items():
        where, _, field = key.rpartition("__")
        (table.setdefault(where, {}) if where else table)[field] = value
    if "model__init" in overrides:  # the configuration of the folder replaces the recipe's
        own = {f.name for f in dataclasses.fields(ModelSettings)} - {"preset"}
        table["model"] = {k: v for k, v in table["model"].items() if k in own or "dropout" in k}
    for key, alternative in (("budget", "steps"), ("steps", "budget")):
        if key in overrides:
            table.pop(alternative, None)
    if "phase" in table and {"budget", "steps"} & overrides.keys():
        # Phases by steps become shares, which scale with the new length of the run.
        total = sum(row.get("steps", 0) for row in table["phase"])
        table["phase"] = [{**row, "share": row["steps"] / total} if "steps" in row else row for row in table["phase"]]
        table["phase"] = [{k: v for k, v in row.items() if k != "steps"} for row in table["phase"]]
    return table


def parse_model(source: Source, table: dict[str, Any]) -> ModelSettings:
    """[model] mixes its own keys with fields of the encoder configuration."""
    fixed = dict.fromkeys(("vocab_size", "pad_id"), "the corpus' tokenizer decides it")
    fixed["position_offset"] = "the family and the tokenizer decide it"
    own = {f.name for f in dataclasses.fields(ModelSettings)} - {"changes"}
    fields = {f.name for f in dataclasses.fields(EncoderConfig)} - own - set(fixed)
    init = "init" in table
    for key in table:
        why = fixed.get(key)
        if why is None and key not in own | fields:
            why = unknown(key, sorted(own | fields))
        elif key in ("longformer", "window") and not init:
            why = "needs init, the folder to start from"
        elif init and key == "preset":
            why = "contradicts init: the folder has its own configuration"
        elif init and key in fields and "dropout" not in key:
            why = "contradicts init: the folder's weights decide it"
        if why:
            raise source.refuse(key, why, "model")
    shape = {k: v for k, v in table.items() if k in fields}
    rest = {k: v for k, v in table.items() if k in own}
    settings = source.build(ModelSettings, rest, "model", changes=tuple(sorted(shape.items())))
    if not init:
        try:
            base = preset(settings.preset) if settings.preset else EncoderConfig()
        except EverybertError as problem:
            raise source.refuse("preset", str(problem), "model") from problem
        source.build(EncoderConfig, shape | {k: v for k, v in vars(base).items() if k not in shape}, "model")
    return settings


def _mask(source: Source, table: dict[str, Any]) -> dict[str, Any]:
    """[mask]: the corpus' masking settings, a rate that may change over the run, and the boundary objective."""
    rate = pair(source.fit(table, "rate", float | Pair, "mask", 0.15))
    boundary = source.fit(table, "boundary", bool, "mask", False)
    rest = {k: v for k, v in table.items() if k not in ("rate", "boundary")}
    masks = [source.build(MaskingConfig, rest | {"rate": r}, "mask") for r in rate]
    if boundary and masks[0].strategy != "span":
        raise source.refuse("boundary", 'needs strategy = "span"', "mask")
    return {"mask": masks[1], "mask_rate": rate, "boundary": boundary}


def _phases(source: Source, table: dict[str, Any], batch: BatchSettings) -> tuple[tuple[Phase, ...], int | None]:
    """The phases with their defaults filled in, and the number of steps if the phases define it."""
    rows = table.get("phase", [{"share": 1.0}])
    if not isinstance(rows, list):
        raise source.refuse("phase", "write [[phase]], with two brackets")
    for i, row in enumerate(rows):
        if ("share" in row) == ("steps" in row):
            raise source.refuse("share", "a phase needs either its share of the run or its steps", "phase", i)
        if source.fit(row, "steps", int, "phase", 1, i) < 1:
            raise source.refuse("steps", "must be at least 1", "phase", i)
    steps = None
    if any("steps" in row for row in rows):
        if not all("steps" in row for row in rows):
            raise source.refuse("share", "some phases have steps and others a share; use one of the two", "phase")
        if "budget" in table:
            raise source.refuse("steps", "contradicts budget: give the phases shares", "phase")
        steps = sum(row["steps"] for row in rows)
        if table.get("steps", steps) != steps:
            raise source.refuse("steps", f"is {table['steps']}, but the phases have {steps} together")
    out = []
    for i, row in enumerate(rows):
        amounts = {key: row.get(key, getattr(batch, key)) for key in ("length", "tokens")}
        own = source.build(BatchSettings, amounts, "phase", i, pack=batch.pack)
        values = row | {"length": own.length, "tokens": pair(own.tokens)}
        if "rate" in row:
            values["rate"] = pair(source.fit(row, "rate", float | Pair, "phase", index=i))
        if steps:
            values["share"] = values.pop("steps") / steps
        out.append(source.build(Phase, values, "phase", i))
    total = sum(phase.share for phase in out)
    if abs(total - 1) > 1e-6:
        raise source.refuse("share", f"the phases' shares add up to {total:g}, not 1", "phase", len(out) - 1)
    return tuple(out), steps


# ── TOML to dataclasses ──────────────────────────────────────────────────────────────────────────────────────


class Source:
    """A TOML file and its text, so that an error can name the line of a key."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        try:
            self.table: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise EverybertError(f"{name} is not valid TOML: {error}") from error

    @classmethod
    def read(cls, name: str | Path) -> Source:
        """Read a file, or a shipped recipe by its name."""
        path = Path(name)
        if not path.is_file() and path.suffix != ".toml":
            if str(name) not in names():
                known = ", ".join(names())
                raise EverybertError(f"there is no recipe {str(name)!r}: give a .toml file, or one of {known}")
            return cls(_shipped().joinpath(f"{name}.toml").read_text("utf-8"), f"{name}.toml")
        try:
            return cls(path.read_text("utf-8"), str(path))
        except OSError as error:
            raise EverybertError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise EverybertError(f"{path} is not UTF-8 text (byte {error.start})") from error

    def refuse(self, key: str, why: str, table: str = "", index: int = 0) -> EverybertError:
        """The error about a key, with its line."""
        line = self.line(key, table, index)
        where = f"{self.name}, line {line}" if line else self.name
        shown = f"[{table}] {key}" if table else key
        return EverybertError(f"{where}: {shown}: {why}")

    def line(self, key: str, table: str = "", index: int = 0) -> int | None:
        """The line of a key in a table (in the index-th table of that name), or None."""
        here, seen = table == "", -1
        fallback = None
        key = key.split(".")[0]
        for number, line in enumerate(self.text.splitlines(), 1):
            header = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$", line)
            if header:
                seen += header[1] == table
                here = header[1] == table and seen == index
                fallback = number if here or (not table and header[1] == key) else fallback
            elif here and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*[=.]""", line):
                return number
            elif not here and table and re.match(rf"\s*{re.escape(table)}\s*\.\s*{re.escape(key)}\s*=", line):
                return number
        return fallback

    def fit(self, values: dict[str, Any], key: str, hint: Any, table: str, default: Any = None, index: int = 0) -> Any:
        """The value of a key as a type, or the default."""
        try:
            return fit(values[key], hint) if key in values else default
        except TypeError as error:
            raise self.refuse(key, str(error), table, index) from error

    def build(self, kind: type[T], values: dict[str, Any], table: str = "", index: int = 0, **fixed: Any) -> T:
        """A dataclass from the values of a table; `fixed` are fields that the table does not have."""
        hints = get_type_hints(kind)
        known = [f.name for f in dataclasses.fields(kind) if f.name not in fixed]  # type: ignore[arg-type]
        for key in values:
            if key not in known:
                raise self.refuse(key, unknown(key, known), table, index)
        ready = {key: self.fit(values, key, hints[key], table, index=index) for key in values}
        try:
            return kind(**ready, **fixed)
        except KeyProblem as problem:
            raise self.refuse(problem.key, problem.why, table, index) from problem
        except EverybertError as problem:  # a dataclass of another room, whose message names the field
            key = next((k for k in ready if k in str(problem)), next(iter(ready), table))
            raise self.refuse(key, str(problem), table, index) from problem


def unknown(key: str, known: Sequence[str]) -> str:
    """The reason to refuse a key that does not exist, with the closest one that does."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"there is no such key; {f'did you mean {close[0]}?' if close else 'known: ' + ', '.join(known)}"


def fit(value: Any, hint: Any) -> Any:
    """A TOML value as the type of a field (lists become tuples, integers floats); TypeError if it does not fit."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if value in parts:
            return value
        raise TypeError(f"must be one of {', '.join(map(str, parts))}, not {value!r}")
    if origin in (Union, types.UnionType):
        problems = []
        for part in parts:
            try:
                return fit(value, part)
            except TypeError as error:
                problems.append(str(error))
        raise TypeError(" or ".join(dict.fromkeys(p for p in problems if "nothing" not in p)))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"must be a list, not {value!r}")
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(value) != len(parts):
            raise TypeError(f"must be a list of {len(parts)}, not {value!r}")
        return tuple(fit(v, p) for v, p in zip(value, parts))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "nothing"}
    raise TypeError(f"must be {names.get(hint, hint)}, not {value!r}")
