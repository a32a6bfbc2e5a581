"""A recipe: everything that decides a pre-training run, read from a short TOML file.

Each table of the file is one frozen dataclass below. A key that no dataclass has, a value of the wrong type and a
contradiction are refused by name. The corpus and the output folder are not part of a recipe.
"""

import contextlib
import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from everybert.corpus.examples import ExampleConfig, ExampleKind
from everybert.corpus.masking import MaskingConfig
from everybert.errors import EverybertError
from everybert.files import as_type
from everybert.model.config import EncoderConfig, preset
from everybert.text.readers import lines
from everybert.training.optim import OptimizerConfig

T = TypeVar("T")
Pair = tuple[float, float]
AT_LEAST_0 = "must be at least 0", lambda value: value >= 0
AT_LEAST_1 = "must be at least 1", lambda value: value >= 1
ABOVE_0 = "must be above 0", lambda value: value > 0
SHARE = "must lie between 0 and 1", lambda value: 0 <= value <= 1
WARMUP = "is a share below 1, or a whole number of steps", lambda value: isinstance(value, int) or value < 1
PART = "is a share of the model's, above 0 and at most 1", lambda value: 0 < value <= 1
TOP = ("seed", "steps", "budget")
FILE_KEYS = {
    "mask_rate": "mask.rate",
    "boundary": "mask.boundary",
    "phases": "phase",
    "examples.length": "batch.length",
}
"""Fields of a recipe that the file spells differently."""
REMOVED = {"model.window": 512, "optimizer.adam_scale": 1.0, "examples.other_document": True}
"""Fields of older recipes, with the values that every recipe has today."""


class KeyProblem(EverybertError):
    """A wrong value. The key is a field's name, or table.field; `located` adds the file."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key, self.why = key, why


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
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the encoder configuration that differ from the preset, or from the folder's (dropout)."""


@dataclass(frozen=True)
class BatchSettings:
    """[batch]: the amount of text per step."""

    tokens: int | tuple[int, int] = 131_072
    """Tokens per step, special tokens included; two numbers ramp from the first to the second over each phase."""
    length: Annotated[int, ("must be at least 8", lambda value: value >= 8)] = 512
    """Longest sequence."""
    pack: int = 16_384
    """Tokens per forward pass. Memory grows with it; a step is as many packs as its tokens need."""

    def __post_init__(self) -> None:
        if self.pack < self.length:
            raise KeyProblem("pack", f"a pack must hold a sequence of {self.length} tokens, not {self.pack}")
        if (least := min(pair(self.tokens))) < self.pack:
            raise KeyProblem("tokens", f"a step cannot be smaller than a pack ({self.pack} tokens), not {least}")


@dataclass(frozen=True)
class ScheduleSettings:
    """[schedule]: the learning rate, a pure function of the step."""

    peak: Annotated[float, ABOVE_0] = 1e-4
    """The highest learning rate."""
    kind: Literal["linear", "cosine", "wsd"] = "linear"
    """After the warm-up: linear or cosine decay to the end; wsd: constant, then linear (warmup-stable-decay)."""
    warmup: Annotated[int | float, AT_LEAST_0, WARMUP] = 0.01
    """Linear increase from zero: a whole number of steps, or a share of the run below 1."""
    decay: Annotated[float, SHARE] = 0.2
    """wsd: the share of the run, at its end, in which the rate decays."""
    floor: Annotated[float, SHARE] = 0.0
    """The final rate, as a share of the peak."""


@dataclass(frozen=True)
class Phase:
    """[[phase]]: a part of the run with its own examples, tokens or mask rate; the defaults are those of the run."""

    share: Annotated[float, SHARE]
    """Its share of the run's steps."""
    length: int
    """Longest sequence."""
    tokens: tuple[int, int]
    """Tokens per step, at its start and at its end."""
    rate: Pair | None = None
    """Mask rate at its start and at its end; None follows [mask]."""
    kind: ExampleKind | None = None
    """Kind of examples; None follows [examples]."""


@dataclass(frozen=True)
class DistilSettings:
    """[distil]: what the student learns from the teacher, beside or instead of the masked tokens."""

    temperature: Annotated[float, ABOVE_0] = 2.0
    """Divides the logits of both models (Hinton et al. 2015)."""
    ce: Annotated[float, AT_LEAST_0] = 5.0
    """Weight of the divergence from the teacher's predictions at masked tokens, times temperature²."""
    mlm: Annotated[float, AT_LEAST_0] = 2.0
    """Weight of the masked-token loss."""
    pair: Annotated[float, AT_LEAST_0] = 1.0
    """Weight of the teacher's predictions and the labels of sentence pairs, where the examples are pairs."""
    cosine: Annotated[float, AT_LEAST_0] = 1.0
    """Weight of 1 − cos between the last hidden states (DistilBERT)."""
    hidden: Annotated[float, AT_LEAST_0] = 0.0
    """Weight of the squared error between hidden states, layer by layer, through a learned projection (TinyBERT)."""
    relation: Annotated[float, AT_LEAST_0] = 0.0
    """Weight of the divergence between query–query, key–key and value–value relations of the last layer (MiniLM v2)."""
    relation_heads: int = 12
    """Heads of the relations; need not be the number of attention heads of either model."""
    copy: bool = True
    """Initialise the student from every k-th teacher layer where the widths agree."""

    def __post_init__(self) -> None:
        if not any((self.ce, self.mlm, self.pair, self.cosine, self.hidden, self.relation)):
            raise KeyProblem("ce", "every weight is 0: there is nothing to learn")


@dataclass(frozen=True)
class RtdSettings:
    """[rtd]: replaced-token detection (ELECTRA, DeBERTa v3) in place of predicting masked tokens; see rtd.py."""

    width: Annotated[float, PART] = 0.25
    """Width of the generator, as a share of the model's."""
    layers: Annotated[float, PART] = 1.0
    """Number of the generator's layers, as a share of the model's."""
    sharing: Literal["tied", "disentangled"] = "tied"
    """tied: both networks have the same embeddings (ELECTRA). disentangled: the model adds its own to the generator's,
    which its loss does not change (DeBERTa v3)."""
    weight: Annotated[float, ABOVE_0] = 50.0
    """λ: weight of the detection loss, beside 1 for the masked-token loss of the generator."""
    temperature: Annotated[float, ABOVE_0] = 1.0
    """Divides the generator's logits when it samples."""


@dataclass(frozen=True)
class RunSettings:
    """[run]: how the machine is used and what is kept. None of it changes what is learnt."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision; the weights stay in fp32. auto: bfloat16 on CUDA, float32 on the CPU."""
    compile: bool | None = None
    """torch.compile; by default on CUDA only. Models with relative positions are not compiled."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    workers: Annotated[int | None, AT_LEAST_0] = None
    """Processes that prepare packs (0: the main process does); by default 4 on CUDA, 0 on the CPU."""
    tensorboard: bool = True
    """Write TensorBoard curves too, where it is installed."""
    log_every: Annotated[int, AT_LEAST_1] = 10
    """Steps between lines of log.jsonl."""
    evaluate_every: Annotated[int, AT_LEAST_0] = 1000
    """Steps between evaluations on the held-out split (0: only at the end)."""
    evaluate_packs: Annotated[int, AT_LEAST_1] = 16
    """Packs of 16,384 tokens of held-out text per evaluation."""
    save_every: Annotated[int, AT_LEAST_1] = 1000
    """Steps between checkpoints."""
    keep: Annotated[int, AT_LEAST_1] = 2
    """Number of most recent checkpoints that are kept."""
    spike: Annotated[float, AT_LEAST_0] = 3.0
    """Skip a step whose loss is this many times its running mean, or not finite (0: only the latter)."""
    patience: Annotated[int, AT_LEAST_1] = 20
    """Stop after this many skipped steps in a row."""


TABLES: dict[str, type] = {
    "batch": BatchSettings,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleSettings,
    "distil": DistilSettings,
    "rtd": RtdSettings,
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
    rtd: RtdSettings | None = None
    steps: Annotated[int | None, AT_LEAST_1] = None
    """Number of steps; None if a time budget decides."""
    budget: str | None = None
    """Time instead of steps ("20m", "24h"): the decay is planned to end on time."""
    seed: int = 0
    """Decides the initial weights, the order of the text, the masks and the dropout."""

    @classmethod
    def load(cls, name: str | Path, /, **overrides: Any) -> "Recipe":
        """Read a recipe from a file, or by the name of a shipped one; `parse` describes the overrides."""
        return cls.parse(text(name), str(name), **overrides)

    @classmethod
    def parse(cls, text: str, name: str, /, **overrides: Any) -> "Recipe":
        """Read a recipe from TOML. Overrides, written `table__key` or `key`, replace lines of the file."""
        with located(name, **overrides):
            table = _override(tomllib.loads(text), overrides)
            known = [*TOP, *TABLES, "model", "examples", "mask", "phase"]
            for key, value in table.items():
                if key not in known:
                    raise KeyProblem(key, unknown(key, known))
                if key not in (*TOP, "phase") and not isinstance(value, dict):
                    raise KeyProblem(key, f"is a table: write [{key}], and its keys below")
            if "parallel" in table.get("run", {}):
                raise KeyProblem("run.parallel", "sharded training was removed; every rank holds the model: delete it")
            parts: dict[str, Any] = {
                name: build(kind, table.get(name, {}), name)
                for name, kind in TABLES.items()
                if name in table or name not in ("distil", "rtd")
            }
            length = parts["batch"].length
            parts["examples"] = build(ExampleConfig, table.get("examples", {}), "examples", length=length)
            parts |= _mask(table.get("mask", {}))
            parts["model"] = parse_model(table.get("model", {}))
            parts["phases"] = _phases(table, parts["batch"])
            return build(cls, {k: table[k] for k in TOP if k in table}, **parts)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.budget is None):
            raise KeyProblem("budget" if self.budget else "steps", "give either steps or budget")
        if self.budget is not None:
            seconds(self.budget)
            if isinstance(self.schedule.warmup, float) and self.schedule.warmup > 0:
                raise KeyProblem("budget", "[schedule] warmup must be a number of steps where the time is fixed")
        if self.rtd is not None:
            if self.paired:
                raise KeyProblem(self.paired, '[rtd] learns no sentence pairs: set "full" or "document"')
            if self.boundary or self.distil is not None:
                raise KeyProblem("rtd", "has neither a boundary objective nor a teacher: delete one of the two")

    @property
    def config(self) -> EncoderConfig:
        """The encoder configuration before the tokenizer decides the vocabulary size."""
        base = preset(self.model.preset) if self.model.preset else EncoderConfig()
        return base.replace(**self.model.changes)

    def examples_of(self, phase: int) -> ExampleConfig:
        """The examples of a phase."""
        settings = self.phases[phase]
        return dataclasses.replace(self.examples, length=settings.length, kind=settings.kind or self.examples.kind)

    @property
    def paired(self) -> str | None:
        """The key that makes the examples of some phase pairs, if one does."""
        keys = (f"phase {n + 1}.kind" if phase.kind else "examples.kind" for n, phase in enumerate(self.phases))
        return next((key for n, key in enumerate(keys) if self.examples_of(n).paired), None)

    @property
    def heads(self) -> dict[str, int | None]:
        """The heads that the objectives need."""
        return dict.fromkeys(("rtd",) if self.rtd is not None else ("mlm", "nsp") if self.paired else ("mlm",))

    @property
    def longest(self) -> int:
        """The longest sequence of all phases."""
        return max(phase.length for phase in self.phases)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """The keys in which a saved recipe (the output of `plain`) differs; [run] is free to change."""

        def flat(table: dict[str, Any]) -> dict[str, Any]:
            tables = {k: v if isinstance(v, dict) else {"": v} for k, v in table.items() if k != "run"}
            return {f"{k}.{name}".rstrip("."): value for k, rows in tables.items() for name, value in rows.items()}

        mine = flat(self.plain())
        theirs = {key: value for key, value in flat(other).items() if REMOVED.get(key) != value}
        return sorted({FILE_KEYS.get(k, k) for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)})

    def plain(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        table = dataclasses.asdict(self)
        table["model"] |= table["model"].pop("changes")
        table["phases"] = [{k: v for k, v in phase.items() if (k, v) != ("kind", None)} for phase in table["phases"]]
        return json.loads(json.dumps(table))


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


def _shipped() -> Path:
    """The folder of recipes: package data if installed, `recipes/` beside `src/` in a checkout."""
    package = Path(__file__).parents[1]
    return inside if (inside := package / "recipes").is_dir() else package.parents[1] / "recipes"


def names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(path.stem for path in _shipped().glob("*.toml"))


def text(name: str | Path) -> str:
    """The text of a recipe, by file or by the name of a shipped one."""
    path = Path(name)
    if not path.is_file() and path.suffix != ".toml":
        if str(name) not in names():
            raise EverybertError(f"there is no recipe {str(name)!r}: give a .toml file, or one of {', '.join(names())}")
        path = _shipped() / f"{name}.toml"
    return "".join(f"{line}\n" for _, line in lines(path))


@contextlib.contextmanager
def located(name: str, /, **overrides: Any) -> Iterator[None]:
    """Add to an error about a key where it was given: in the file of this name, or as an override."""
    try:
        yield
    except tomllib.TOMLDecodeError as error:
        raise EverybertError(f"{name} is not valid TOML: {error}") from error
    except KeyProblem as problem:
        table, _, key = problem.key.rpartition(".")
        where = f"{name}: [{table}] {key}" if table else f"{name}: {key}"
        for override in overrides:
            if f"{override}__".startswith(problem.key.replace(".", "__") + "__"):
                where = f"{override.replace('__', '.')}={overrides[override]}"
        raise EverybertError(f"{where}: {problem.why}") from problem


def read_value(text: str) -> Any:
    """A value on the command line: TOML, a bare word, or none, which leaves an optional key out."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return None if text.strip() == "none" else text.strip()


# ── tables that need more than their dataclass ───────────────────────────────────────────────────────────────


def _override(tables: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The file's tables with the overrides in place, without those that are None; alternatives of these are dropped."""
    table: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in tables.items()}
    for key, value in overrides.items():
        where, _, field = key.rpartition("__")
        if not isinstance(section := table.setdefault(where, {}) if where else table, dict):
            raise KeyProblem(f"{where}.{field}", f"{where} is not a table")
        section[field] = value
    if "model__init" in overrides:  # the configuration of the folder replaces the recipe's
        table["model"] = {k: v for k, v in table["model"].items() if k == "init" or "dropout" in k}
    for key, alternative in (("budget", "steps"), ("steps", "budget")):
        if key in overrides:
            table.pop(alternative, None)
    return {key: value for key, value in table.items() if value is not None}


def parse_model(table: dict[str, Any]) -> ModelSettings:
    """[model] mixes preset and init with fields of the encoder configuration."""
    known = {"preset", "init", *(f.name for f in dataclasses.fields(EncoderConfig))}
    for key in table:
        field = f"model.{key}"
        if key in ("vocab_size", "pad_id", "mask_id", "position_offset"):
            raise KeyProblem(field, "the corpus' tokenizer decides it")
        if key in ("longformer", "window"):
            raise KeyProblem(field, "contrib/longformer.py in the source converts a model; start from its folder")
        if key not in known:
            raise KeyProblem(field, unknown(key, sorted(known)))
        if "init" in table and key != "init" and "dropout" not in key:
            raise KeyProblem(field, "contradicts init: the folder decides it")
    rest = {k: v for k, v in table.items() if k in ("preset", "init")}
    shape = {k: v for k, v in table.items() if k not in rest}
    settings = build(ModelSettings, rest, "model", changes=dict(sorted(shape.items())))
    if settings.init is None:
        try:
            base = preset(settings.preset) if settings.preset else EncoderConfig()
        except EverybertError as problem:
            raise KeyProblem("model.preset", str(problem)) from problem
        # the windows of a preset follow the number of layers (EncoderConfig.replace)
        build(EncoderConfig, shape, "model", **{k: v for k, v in vars(base).items() if k not in (*shape, "windows")})
    return settings


def _mask(table: dict[str, Any]) -> dict[str, Any]:
    """[mask]: the corpus' masking settings, a rate that may change over the run, and the boundary objective."""
    rest = {k: v for k, v in table.items() if k != "boundary"}
    masks, boundary = _masks(rest, "mask"), fit(table.get("boundary", False), bool, "mask.boundary")
    if boundary and masks[0].strategy != "span":
        raise KeyProblem("mask.boundary", 'needs strategy = "span"')
    return {"mask": masks[1], "mask_rate": (masks[0].rate, masks[1].rate), "boundary": boundary}


def _masks(table: dict[str, Any], where: str) -> list[MaskingConfig]:
    """The masking at the start and at the end of the run, or of a phase."""
    rates = pair(fit(table.get("rate", 0.15), float | Pair, f"{where}.rate"))
    return [build(MaskingConfig, table | {"rate": rate}, where) for rate in rates]


def _phases(table: dict[str, Any], batch: BatchSettings) -> tuple[Phase, ...]:
    """The phases, with their defaults filled in."""
    rows = table.get("phase", [{"share": 1.0}])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise KeyProblem("phase", "write [[phase]], with two brackets")
    out = []
    for number, row in enumerate(rows, 1):
        where, amounts = f"phase {number}", {key: row.get(key, getattr(batch, key)) for key in ("length", "tokens")}
        sizes = build(BatchSettings, amounts, where, pack=batch.pack)
        values = row | {"length": sizes.length, "tokens": pair(sizes.tokens)}
        if "rate" in row:
            values["rate"] = [mask.rate for mask in _masks({"rate": row["rate"]}, where)]
        if "share" not in row:
            raise KeyProblem(f"{where}.share", "give each phase its share of the run's steps")
        out.append(build(Phase, values, where))
    total = sum(phase.share for phase in out)
    if abs(total - 1) > 1e-6:
        raise KeyProblem("phase.share", f"the phases' shares add up to {total:g}, not 1")
    return tuple(out)


# ── values to dataclasses ────────────────────────────────────────────────────────────────────────────────────


def build(kind: type[T], values: dict[str, Any], table: str = "", **fixed: Any) -> T:
    """A dataclass from the values of a table; `fixed` are fields that the table does not have."""
    hints, prefix = get_type_hints(kind, include_extras=True), f"{table}." if table else ""
    known = [f.name for f in dataclasses.fields(kind) if f.name not in fixed]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise KeyProblem(prefix + key, unknown(key, known))
    ready = {key: fit(value, hints[key], prefix + key) for key, value in values.items()}
    try:
        return kind(**ready, **fixed)
    except KeyProblem as problem:
        raise KeyProblem(prefix + problem.key, problem.why) from problem
    except EverybertError as problem:  # a dataclass of another room, whose message names the field
        key = next((k for k in ready if k in str(problem)), next(iter(ready), ""))
        raise KeyProblem(prefix + key, str(problem)) from problem


def unknown(key: str, known: Sequence[str]) -> str:
    """The reason to refuse a key that does not exist, with the closest one that does."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"there is no such key; {f'did you mean {close[0]}?' if close else 'known: ' + ', '.join(known)}"


def fit(value: Any, hint: Any, key: str) -> Any:
    """A TOML value as the type of a field, which may say limits; others are refused."""
    kind, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    try:
        ready = as_type(value, kind)
    except TypeError as wanted:
        raise KeyProblem(key, f"must be {wanted}, not {value!r}") from None
    for words, allowed in limits:
        if ready is not None and not allowed(ready):
            raise KeyProblem(key, f"{words}, not {ready}")
    return ready
