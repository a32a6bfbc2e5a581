"""Predictions over files: rows in, the same rows with predictions appended out, in parts.

The rows of all files are cut into parts, which are predicted on this machine or by the workers of a Ray cluster. Each
is written to the folder OUT.building; when all are there, they become OUT: a csv, tsv or jsonl file, or a folder of
parquet files. A run that is given again after an interruption computes only the parts that are missing.
"""

import csv
import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from everybert.cluster import check_engine, ray_pool
from everybert.errors import EverybertError
from everybert.files import atomic_file, changes, disk_errors, replace_folder, sha256_folder, size_and_hash, write_json
from everybert.inference.model import Model, load
from everybert.store.hub import resolve
from everybert.tasks import TASKS
from everybert.tasks.dataset import Table, has_text
from everybert.text.readers import TEXT_KINDS, Rows, expand, kind, lines, read_rows

WRITTEN = (".csv", ".tsv", ".jsonl", ".ndjson")
LIST = "_everybert.json"
"""The plan of the run and, in a finished folder, the hash of each part. Readers of parquet folders ignore the file."""
Row = dict[str, Any]
Part = tuple[tuple[Row, Any], ...]
"""Rows with the inputs that the task reads from them."""


@dataclass(frozen=True)
class FileOptions:
    """How the rows of files are predicted, and where."""

    part_rows: int = 1024
    """Rows per part: an interruption loses at most the part in progress. A parquet folder has one file per part."""
    engine: Literal["local", "ray"] = "local"
    """Compute on this machine, or on a Ray cluster."""
    address: str | None = None
    """The Ray cluster; auto finds it. If not given, one is started here."""
    workers: int | None = None
    """Processes on the cluster. If not given: one per core, or per GPU."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The columns to read (text, pair; question, context; prompt); guessed if not given."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of Model.embed (pooling, normalize, long …); or `scores`, the probability of every label."""
    adapter: str | None = None
    device: str | None = None
    dtype: str | None = None
    allow_pickle: bool = False
    """Read .bin weights (see `load`)."""
    skip_bad: bool = False
    """Leave out rows that cannot be read, or have no text."""
    fresh: bool = False
    """Start again, and replace an output that exists."""

    def __post_init__(self) -> None:
        check_engine(self.engine, self.address)
        if self.workers is not None and self.engine == "local":
            raise EverybertError("workers are processes of a cluster: give engine ray")
        if self.part_rows < 1 or (self.workers is not None and self.workers < 1):
            raise EverybertError("the rows of a part, and the workers, must be at least 1")


@dataclass(frozen=True)
class Scored:
    """The outcome of a prediction over files."""

    rows: int
    """Rows in the output."""
    before: int
    """Rows that an earlier run had predicted."""
    bad: tuple[str, ...] = ()
    """Rows of the input that could not be read and were left out."""
    stopped: bool = False
    """Whether the run was interrupted. Run again to resume."""


def predict_files(
    task: str,
    model: str | Path,
    files: Sequence[str | Path] | str | Path,
    out: str | Path,
    *,
    progress: Callable[[int], None] = lambda rows: None,
    **options: Any,
) -> Scored:
    """Predict every row of csv, tsv, jsonl, json, parquet or text files (one text per line).

    `options` are the fields of FileOptions. `out` is a .csv, .tsv or .jsonl file, or a folder for parquet files.
    `progress` receives the number of rows that are done.
    """
    how = FileOptions(**options)
    out, sources = Path(out).absolute(), [path.absolute() for path in expand(files)]
    _check_out(out, sources, how.fresh)
    folder, adapter = resolve(model, allow_pickle=how.allow_pickle).absolute(), how.adapter
    if adapter is not None and Path(adapter).is_dir():
        how = replace(how, adapter=str(Path(adapter).absolute()))
        adapter = sha256_folder(Path(adapter))
    settings = {"columns": dict(how.columns), "skip_bad": how.skip_bad, "part_rows": how.part_rows, "dtype": how.dtype}
    plan = {
        "task": task,
        "model": [sha256_folder(folder), adapter],
        "inputs": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sources],
        "options": settings | dict(how.options),
    }
    building = out.with_name(out.name + ".building")
    bad: list[str] = []
    rows = read_inputs(task, sources, how, bad, even=out.suffix not in (".jsonl", ".ndjson"))
    rows = chain([next(rows)], rows)  # an error in the first row comes before anything is written
    _start(building, plan, how.fresh)
    predictor = Predictor(task, folder, building, out.suffix.lower(), sources[0], how)
    done = before = 0
    try:
        with closing(_run(predictor, iter(lambda: tuple(islice(rows, how.part_rows)), ()))) as results:
            for count, existed in results:
                done, before = done + count, before + count * existed
                progress(done)
    except KeyboardInterrupt:
        return Scored(done, before, tuple(bad), stopped=True)
    with disk_errors(out, "finished parts are kept; run again to resume"):
        _finish(out, building, plan | {"rows": done})
    return Scored(done, before, tuple(bad))


def _run(predictor: "Predictor", parts: Iterable[Part]) -> Generator[tuple[int, bool]]:
    """Write the parts. Yields the rows of each in order, and whether an earlier run had written it."""
    how = predictor.how
    if how.engine == "local":
        yield from map(predictor.write, enumerate(parts))
        return
    waiting: deque[Callable[[], Any]] = deque()
    with ray_pool(Predictor.write, predictor, how.workers, how.address, how.device) as pool:
        for part in enumerate(parts):
            waiting.append(pool.submit(part))
            if len(waiting) > pool.depth:
                yield waiting.popleft()()
        yield from (wait() for wait in waiting)


def read_inputs(
    task: str, sources: Sequence[Path], how: FileOptions, bad: list[str], even: bool = False
) -> Iterator[tuple[Row, Any]]:
    """Every row with the input that the task reads from it. With `even`, all must have the columns of the first."""
    names: list[str] = []
    count = 0
    for path in sources:
        per_line = kind(path) in TEXT_KINDS
        rows: Rows = ((number, {"text": line}) for number, line in lines(path)) if per_line else read_rows(path)
        for number, row in rows:
            if not names and not isinstance(row, str):
                names, pick = list(row), TASKS[task].input_reader(Table([row], str(path), how.columns))
            try:
                if isinstance(row, str):
                    raise EverybertError(row)
                if even and list(row) != names:
                    raise EverybertError(f"it has the columns {', '.join(row)}, not {', '.join(names)}")
                example = pick(row)
                if how.skip_bad and not has_text(example):
                    raise EverybertError("one of its texts is empty")
                yield row, example
                count += 1
            except EverybertError as error:
                if not how.skip_bad:
                    raise EverybertError(f"{path}:{number}: {error}; skip_bad=True leaves it out") from None
                bad.append(f"{path}:{number}: {error}")
    if not count:
        raise EverybertError(f"{sources[0]} has no row that can be read: check the file")


@dataclass
class Predictor:
    """Predicts parts and writes them. The workers of a cluster receive a copy, and load the model themselves."""

    task: str
    folder: Path
    """The model's."""
    building: Path
    kind: str
    """The suffix of the output; "" is a folder of parquet files."""
    source: Path
    """The first file."""
    how: FileOptions

    @cached_property
    def model(self) -> Model:
        """The model with the head of the task."""
        if not self.folder.is_dir():
            raise EverybertError(f"{self.folder} is not on a worker's machine; put it on a disk that all share")
        how = self.how
        model = load(self.folder, how.device, how.dtype, allow_pickle=how.allow_pickle)
        if how.adapter is not None:
            model.use(how.adapter)
        return model

    def write(self, part: tuple[int, Part]) -> tuple[int, bool]:
        """Predict and write a part, given as its number and its rows with their inputs, unless it is there."""
        number, rows = part
        path = self.building / f"part-{number:06d}{self.kind or '.parquet'}"
        if path.exists():
            return len(rows), True
        predictions = self._predict([example for _, example in rows])
        if clash := rows[0][0].keys() & predictions[0].keys():
            raise EverybertError(f"{self.source} has a column {min(clash)!r} already; rename it, or leave it out")
        with atomic_file(path) as draft:
            if self.kind:
                self._write_text(draft, [row | more for (row, _), more in zip(rows, predictions)], header=number == 0)
            else:
                self._write_parquet(draft, [row for row, _ in rows], predictions)
        return len(rows), False

    def _write_text(self, draft: Path, rows: list[Row], header: bool) -> None:
        with draft.open("w", encoding="utf-8", errors="replace", newline="") as file:
            if self.kind in (".jsonl", ".ndjson"):
                file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
                return
            tabs: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
            table = csv.writer(file, lineterminator="\n", **(tabs if self.kind == ".tsv" else {}))
            table.writerows([list(rows[0])] if header else [])
            table.writerows([self._cell(value) for value in row.values()] for row in rows)

    def _cell(self, value: Any) -> str:
        """A value as a csv or tsv file has it."""
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
        return "" if value is None else re.sub(r"[\t\r\n]+", " ", text) if self.kind == ".tsv" else text

    def _predict(self, inputs: list[Any]) -> list[Row]:
        """The new columns of some rows."""
        model, options = self.model, self.how.options
        if TASKS[self.task].head is None:
            embedded = model.embedded(inputs, **options)
            cut = [{"cut": n} for n in embedded.cut] if options.get("long") == "cut" else [{} for _ in inputs]
            return [{"vector": vector.tolist(), **more} for vector, more in zip(embedded.vectors, cut)]
        zero_shot = {name: value for name, value in options.items() if name != "scores"}  # labels and their template
        with model.using(model.adapter_for(self.task, bool(zero_shot) or isinstance(inputs[0], tuple))):
            task, done = model.task(self.task), model.predict(self.task, inputs, **zero_shot)
            return [task.as_columns(prediction, bool(options.get("scores"))) for prediction in done]

    def _write_parquet(self, draft: Path, rows: list[Row], predictions: list[Row]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        plain = {str: pa.string(), float: pa.float64(), int: pa.int64()}
        try:
            table = pa.Table.from_pylist(rows, parquet.read_schema(self.source))
            for name, value in predictions[0].items():
                many = pa.list_(pa.float32(), len(value)) if name == "vector" else pa.list_(pa.string())
                column = pa.array([row[name] for row in predictions], plain.get(type(value), many))
                table = table.append_column(name, column)
        except pa.ArrowException as error:
            raise EverybertError(f"{error}: write .jsonl instead, or give files with the same columns") from None
        parquet.write_table(table, draft)


# ── the output ───────────────────────────────────────────────────────────────────────────────────────────────


def _check_out(out: Path, sources: list[Path], fresh: bool) -> None:
    if out.suffix and out.suffix.lower() not in WRITTEN:
        raise EverybertError(f"{out}: predictions are written as {', '.join(WRITTEN)}; give out such a name")
    if not out.suffix and (other := [path for path in sources if kind(path) != ".parquet"]):
        raise EverybertError(f"{out}: a folder is for rows of parquet files; for {other[0].name} write F.jsonl")
    if out.resolve() in [path.resolve() for path in sources]:
        raise EverybertError(f"{out} is the input too; write to another file")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not fresh:
        raise EverybertError(f"{out} exists already; give another name, or replace it by fresh=True")
    if out.is_dir() and not (out / LIST).is_file():
        raise EverybertError(f"{out} exists and is no folder of predictions; give another name")


def _start(building: Path, plan: dict[str, Any], fresh: bool) -> None:
    """Make the folder of unfinished parts, or check that the existing one has the same plan."""
    if fresh:
        shutil.rmtree(building, ignore_errors=True)
    with disk_errors(building):
        building.mkdir(parents=True, exist_ok=True)
    if not any(building.glob("part-*")):
        write_json(building / LIST, plan)
    if changed := ", ".join(changes(building / LIST, plan)):
        raise EverybertError(f"the unfinished {building} has other {changed}; resume with the same, or give fresh=True")


def _finish(out: Path, building: Path, plan: dict[str, Any]) -> None:
    """Join the parts to a file, or list them and rename their folder."""
    parts = sorted(building.glob("part-*"))
    if out.suffix:
        with atomic_file(out) as draft, draft.open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        shutil.rmtree(building)
        return
    for stale in building.glob(".part-*"):  # of workers that were killed
        stale.unlink(missing_ok=True)
    write_json(building / LIST, plan | {"files": {part.name: size_and_hash(part) for part in parts}})
    replace_folder(building, out)
