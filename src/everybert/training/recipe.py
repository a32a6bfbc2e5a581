"""A recipe: everything that decides a pre-training run, read from a short TOML file.

Beside `seed` and either `steps` or `budget` it has the tables below, one dataclass each; a key that no dataclass
has, or that contradicts another, is refused with its line. The corpus and the folder to write are not part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from everybert.corpus.examples import ExampleConfig
from everybert.corpus.masking import MaskingConfig
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.presets import preset
from everybert.training.optim import OptimizerConfig
from everybert.training.settings import (
    BatchSettings,
    DistilSettings,
    ModelSettings,
    Pair,
    Phase,
    PhaseSettings,
    RunSettings,
    ScheduleSettings,
    at_least,
    pair,
    seconds,
)
from everybert.training.tables import KeyProblem, Source, fit, unknown

TOP = ("seed", "steps", "budget")
DECIDED_ELSEWHERE = {
    "vocab_size": "the corpus' tokenizer decides it (rounded up to a multiple of 64)",
    "pad_id": "the corpus' tokenizer decides it",
    "position_offset": "the family and the tokenizer decide it",
}


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
    """How many steps; None when a budget of time decides."""
    budget: str | None = None
    """Time instead of steps ("20m", "24h"): the decay is planned to end on time."""
    seed: int = 0
    """Decides the initial weights, the order of the text, the masks and the dropout."""

    @classmethod
    def load(cls, name: str | Path, **overrides: Any) -> Recipe:
        """A recipe by file, or by the name of one that comes with everybert; see `parse` for the overrides."""
        path = Path(name)
        source = Source.read(path) if path.is_file() else Source(text(name), f"{name}.toml")
        return cls.parse(source, **overrides)

    @classmethod
    def parse(cls, source: Source, **overrides: Any) -> Recipe:
        """A recipe from TOML. Overrides are written `table__key` or `key`, and stand for lines of the file."""
        table: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in source.table.items()}
        for key, value in overrides.items():
            where, _, field = key.rpartition("__")
            (table.setdefault(where, {}) if where else table)[field] = value
        if "model__init" in overrides:  # the folder's shape replaces the recipe's
            own = {f.name for f in dataclasses.fields(ModelSettings)} - {"preset"}
            table["model"] = {k: v for k, v in table["model"].items() if k in own or "dropout" in k}
        for given, dropped in (("budget", "steps"), ("steps", "budget")):
            if given in overrides:
                table.pop(dropped, None)
                table["phase"] = _as_shares(table.get("phase", []))
        if not table.get("phase"):
            table.pop("phase", None)
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
        if self.run.parallel == "sharded" and self.optimizer.kind == "muon":
            raise KeyProblem(
                "run.parallel",
                'sharded ranks hold rows of the matrices, and muon needs whole ones: set [optimizer] kind = "adamw", '
                'or [run] parallel = "data"',
            )
        if self.run.parallel == "sharded" and self.distil is not None and self.distil.relation:
            raise KeyProblem(
                "run.parallel",
                "the relation loss reads weights that sharded ranks have let go: set [distil] relation = 0, "
                'or [run] parallel = "data"',
            )

    @property
    def config(self) -> EncoderConfig:
        """The encoder's shape before the tokenizer has its say."""
        base = preset(self.model.preset) if self.model.preset else EncoderConfig()
        return base.replace(**dict(self.model.changes))

    def differences(self, other: dict[str, Any]) -> list[str]:
        """The keys in which a saved recipe (as `plain` gives it) differs; [run] is free to change."""
        mine, theirs = _flat(self.plain()), _flat(other)
        keys = {_written(k) for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)}
        return sorted(key for key in keys if key is not None)

    def plain(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        table = dataclasses.asdict(self)
        table["model"] |= dict(table["model"].pop("changes"))
        return json.loads(json.dumps(table))

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the result."""
        kept = {k: v for k, v in _flat(self.plain()).items() if _written(k)}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def names() -> list[str]:
    """The recipes that come with everybert."""
    return sorted(item.name.removesuffix(".toml") for item in _shipped().iterdir() if item.name.endswith(".toml"))


def text(name: str | Path) -> str:
    """A recipe's file as it is."""
    if Path(name).is_file():
        return Source.read(Path(name)).text
    if str(name) not in names():
        raise EverybertError(f"there is no recipe {str(name)!r}: give a .toml file, or one of {', '.join(names())}")
    return _shipped().joinpath(f"{name}.toml").read_text("utf-8")


def summary(name: str) -> str:
    """The first line of a recipe's comment."""
    return text(name).splitlines()[0].lstrip("# ")


# ── tables that are more than their dataclass ────────────────────────────────────────────────────────────────


def parse_model(source: Source, table: dict[str, Any]) -> ModelSettings:
    """[model] mixes its own keys with fields of the encoder configuration."""
    own = {f.name for f in dataclasses.fields(ModelSettings)} - {"changes"}
    fields = {f.name for f in dataclasses.fields(EncoderConfig)} - own - set(DECIDED_ELSEWHERE)
    for key in table:
        if key in DECIDED_ELSEWHERE:
            raise source.refuse(key, DECIDED_ELSEWHERE[key], "model")
        if key not in own | fields:
            raise source.refuse(key, unknown(key, sorted(own | fields)), "model")
    init = "init" in table
    for key in ("longformer", "window"):
        if key in table and not init:
            raise source.refuse(key, "needs init, the folder to go on from", "model")
    if init and "preset" in table:
        raise source.refuse("preset", "contradicts init: the folder has its own configuration", "model")
    shape = {k: v for k, v in table.items() if k not in own}
    for key in shape:
        if init and "dropout" not in key:
            raise source.refuse(key, "contradicts init: the folder's weights decide it", "model")
    settings = source.build(
        ModelSettings, {k: v for k, v in table.items() if k in own}, "model", changes=tuple(sorted(shape.items()))
    )
    if not init:
        try:
            base = preset(settings.preset) if settings.preset else EncoderConfig()
        except EverybertError as problem:
            raise source.refuse("preset", str(problem), "model") from problem
        source.build(EncoderConfig, shape | {k: v for k, v in vars(base).items() if k not in shape}, "model")
    return settings


def _mask(source: Source, table: dict[str, Any]) -> dict[str, Any]:
    """[mask]: the corpus' masking settings, a rate that may change over the run, and the boundary objective."""
    table = dict(table)
    try:
        rate = pair(fit(table.pop("rate", 0.15), float | Pair))
        boundary = fit(table.pop("boundary", False), bool)
    except TypeError as error:
        raise source.refuse("rate" if "boundary" in table else "boundary", str(error), "mask") from error
    masks = [source.build(MaskingConfig, table | {"rate": r}, "mask") for r in rate]
    if boundary and masks[0].strategy != "span":
        raise source.refuse("boundary", 'needs strategy = "span"', "mask")
    return {"mask": masks[1], "mask_rate": rate, "boundary": boundary}


def _phases(source: Source, table: dict[str, Any], batch: BatchSettings) -> tuple[tuple[Phase, ...], int | None]:
    """The run's parts, with what they omit filled in, and the number of steps where the parts say it."""
    rows = table.get("phase", [{"share": 1.0}])
    if not isinstance(rows, list):
        raise source.refuse("phase", "write [[phase]], with two brackets")
    written = [source.build(PhaseSettings, row, "phase", i) for i, row in enumerate(rows)]
    steps = None
    if any(phase.steps for phase in written):
        if not all(phase.steps for phase in written):
            raise source.refuse("share", "some phases have steps and others a share; use one of the two", "phase")
        if "budget" in table:
            raise source.refuse("steps", "contradicts budget: give the phases shares", "phase")
        steps = sum(phase.steps or 0 for phase in written)
        if table.get("steps", steps) != steps:
            raise source.refuse("steps", f"is {table['steps']}, but the phases have {steps} together")
    total = sum(phase.share if phase.share is not None else (phase.steps or 0) / (steps or 1) for phase in written)
    if abs(total - 1) > 1e-6:
        raise source.refuse("share", f"the phases' shares add up to {total:g}, not 1", "phase", len(written) - 1)
    return tuple(_phase(source, p, i, batch, steps) for i, p in enumerate(written)), steps


def _as_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Phases by steps as shares of the run, so that another length of the run scales them."""
    total = sum(row.get("steps", 0) for row in rows)
    return [
        {("share" if k == "steps" else k): v / total if k == "steps" else v for k, v in row.items()} for row in rows
    ]


def _phase(source: Source, phase: PhaseSettings, index: int, batch: BatchSettings, steps: int | None) -> Phase:
    length = phase.length or batch.length
    tokens = pair(phase.tokens if phase.tokens is not None else batch.tokens)
    if not 8 <= length <= batch.pack:
        raise source.refuse("length", f"must lie between 8 and the pack of {batch.pack}", "phase", index)
    if min(tokens) < batch.pack:
        raise source.refuse("tokens", f"a step cannot be smaller than a pack ({batch.pack})", "phase", index)
    share = phase.share if phase.share is not None else (phase.steps or 0) / (steps or 1)
    return Phase(share, length, tokens, pair(phase.rate) if phase.rate is not None else None)


def _shipped() -> Any:
    """The folder of recipes: package data where installed, `recipes/` beside `src/` in a checkout."""
    inside = resources.files("everybert").joinpath("recipes")
    return inside if inside.is_dir() else Path(__file__).parents[3] / "recipes"


def _written(key: str) -> str | None:
    """A key as the recipe's author writes it; None where it does not decide the result."""
    own = {"mask_rate": "mask.rate", "boundary": "mask.boundary", "phases": "phase", "examples.length": "batch.length"}
    return None if key.startswith("run.") else own.get(key, key)


def _flat(table: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix.removesuffix("."): table}
    return {k: v for key, value in table.items() for k, v in _flat(value, f"{prefix}{key}.").items()}
