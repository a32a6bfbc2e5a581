"""Predictions over parquet files of any size: rows in, the same rows with vectors or labels out, in parts.

The rows of all files are cut into parts. The output of a part depends on its rows and the model alone, so parts can be
computed by any core, process or machine, in any order, and again after a crash: the bytes are the same. Parts are
written to a folder beside `out`, which is renamed when all are there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from everybert.cluster import check_engine, map_on_actors
from everybert.errors import EverybertError
from everybert.files import (
    atomic_file,
    disk_errors,
    read_json,
    replace_folder,
    sha256_folder,
    size_and_hash,
    write_json,
)
from everybert.inference.files import CHUNK, Scored
from everybert.store.hub import resolve
from everybert.tasks.dataset import find_texts
from everybert.text.readers import expand

if TYPE_CHECKING:
    import pyarrow as pa

    from everybert.inference.model import Model

LIST = "_everybert.json"
"""What was asked for and, once all parts are there, the hash of each. Readers of parquet folders ignore a leading _."""
Record = dict[str, Any]
"""The outcome of a part: its number, rows, rows left out and file; or its number and an error."""
NAMED = 20
"""Bad rows of a part that are listed. The others are counted."""


@dataclass(frozen=True)
class PartOptions:
    """How the rows of parquet files are predicted, and where."""

    part_rows: int = 4096
    """Rows per file of the output."""
    engine: Literal["local", "ray"] = "local"
    """Compute on the cores of this machine, or on a Ray cluster."""
    address: str | None = None
    """The Ray cluster; auto finds it. If not given, one is started here."""
    workers: int | None = None
    """Parts computed at a time. If not given: one per core, or per GPU."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The columns to read (text, pair); guessed if not given."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of Model.embed (pooling, normalize, long); or `scores`, the probability of every label."""
    adapter: str | None = None
    device: str | None = None
    dtype: str | None = None
    skip_bad: bool = False
    """Leave out rows without text."""
    fresh: bool = False
    """Start the output again."""

    def __post_init__(self) -> None:
        check_engine(self.engine, self.address)
        if self.part_rows < 1 or (self.workers is not None and self.workers < 1):
            raise EverybertError("part_rows and workers must be at least 1")


@dataclass(frozen=True)
class Part:
    """Rows `start` up to `stop` of a file."""

    number: int
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Job:
    """What a worker on any machine must know."""

    task: str
    model: str
    texts: tuple[str, ...]
    """The text column, or the two of a pair."""
    building: str
    how: PartOptions


def predict_parts(
    task: str,
    model: str | Path,
    files: Sequence[str | Path] | str | Path,
    out: str | Path,
    *,
    progress: Callable[[int, int], None] = lambda rows, total: None,
    **options: Any,
) -> Scored:
    """Embed or classify every row of parquet files into a folder of parquet files. Run again to resume.

    `options` are the fields of PartOptions. `progress` receives the rows done and their total.
    """
    how = PartOptions(**options)
    out = Path(out).absolute()
    sources = [path.absolute() for path in expand(files)]
    texts, parts = plan_parts(task, sources, dict(how.columns), how.part_rows)
    folder = resolve(model).absolute()
    if how.adapter is not None:
        how = replace(how, adapter=str(resolve(how.adapter).absolute()))
    building = out.with_name(out.name + ".building")
    plan = {
        "task": task,
        "model": sha256_folder(folder) + (sha256_folder(Path(how.adapter)) if how.adapter else ""),
        "inputs": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sources],
        "options": {"texts": list(texts), "skip_bad": how.skip_bad, "part_rows": how.part_rows, **how.options}
        | ({"dtype": how.dtype} if how.dtype is not None else {}),
    }
    if (rows := _finished(out, plan, how.fresh)) is not None:
        return Scored(rows, rows)
    _start(building, plan, how.fresh)
    records: dict[int, Record] = {}
    done, total = 0, sum(part.stop - part.start for part in parts)
    run = _on_cores if how.engine == "local" else _on_cluster
    try:
        with closing(run(Job(task, str(folder), texts, str(building), how), parts)) as results:
            for record in results:
                if "error" in record:
                    raise EverybertError(record["error"])
                records[record["number"]] = record
                done += record["of"]
                progress(done, total)
    except KeyboardInterrupt:
        return _scored(records, stopped=True)
    _finish(out, building, plan, [records[part.number] for part in parts])
    return _scored(records)


def _on_cores(job: Job, parts: list[Part]) -> Generator[Record, None, None]:
    """Each core of this machine computes parts; a GPU computes one after the other."""
    import torch

    predict = Predictor(job)
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(job.how.workers or (before if predict.model.device.type == "cpu" else 1))
    try:
        for made in as_completed([pool.submit(predict, part) for part in parts]):
            yield made.result()
    finally:
        predict.stopped = True
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # new threads start with the number that was set last


def _on_cluster(job: Job, parts: list[Part]) -> Generator[Record, None, None]:
    """Actors of a Ray cluster compute parts. Each holds the model, and reads and writes parquet by itself."""

    def arguments(device: str) -> tuple[Job]:
        return (replace(job, how=replace(job.how, device=device)),)

    how, rows = job.how, [asdict(part) for part in parts]
    for row in map_on_actors(Actor, arguments, rows, how.device, how.address, how.workers):
        yield json.loads(row["record"])


class Actor:
    """A `Predictor` as Ray Data calls it: from a row that names a part to a row with its record."""

    def __init__(self, job: Job) -> None:
        self.predict = Predictor(job)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Compute the part of a row."""
        return {"record": json.dumps(self.predict(Part(**row)))}


# ── one part ─────────────────────────────────────────────────────────────────────────────────────────────────


class Predictor:
    """Computes parts with one model."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.stopped = False
        self._model: Model | None = None
        self._lock = Lock()

    @property
    def model(self) -> Model:
        """The model with the head of the task, loaded when first needed."""
        with self._lock:
            if self._model is None:
                self._model = _load(self.job)
            return self._model

    def __call__(self, part: Part) -> Record:
        """Compute a part, unless it is there. Errors that users can fix are returned as "error"."""
        from pyarrow import parquet

        file = Path(self.job.building) / f"part-{part.number:06d}.parquet"
        try:
            before = file.exists()
            if not before:
                table = self._table(part)
                with atomic_file(file) as draft:
                    parquet.write_table(table, draft)
            with open_parquet(file) as found:
                rows, bad = found.metadata.num_rows, json.loads(found.schema_arrow.metadata[b"everybert"])
            about = {"rows": rows, "bad": bad, "file": [file.name, *size_and_hash(file)]}
            return {"number": part.number, "of": part.stop - part.start, "before": before, **about}
        except EverybertError as error:
            return {"number": part.number, "error": str(error)}

    def _table(self, part: Part) -> pa.Table:
        """The rows of a part with their predictions: a function of the rows and the model alone."""
        import pyarrow as pa
        import torch

        torch.set_num_threads(1)  # of this thread: the products of one core are the same everywhere
        table, bad = self._good(read_part(part), part)
        columns = [table.column(name).to_pylist() for name in self.job.texts]
        inputs = columns[0] if len(columns) == 1 else list(zip(*columns))
        chunks = []
        for start in range(0, max(len(inputs), 1), CHUNK):
            if self.stopped:
                raise EverybertError("stopped: run again to resume")
            chunks.append(_predict(self.model, self.job, inputs[start : start + CHUNK]))
        made = pa.concat_tables(chunks)
        for name in made.column_names:
            if name in table.column_names:
                raise EverybertError(f"{part.path} has a column {name!r} already; rename it, or leave it out")
            table = table.append_column(name, made.column(name).combine_chunks())
        return table.replace_schema_metadata({**(table.schema.metadata or {}), b"everybert": json.dumps(bad).encode()})

    def _good(self, table: pa.Table, part: Part) -> tuple[pa.Table, list[str]]:
        """The rows that have text; and what is wrong with the others, if they may be left out."""
        import pyarrow.compute as pc

        texts = self.job.texts
        missing = pc.or_kleene(pc.is_null(table.column(texts[0])), pc.is_null(table.column(texts[-1])))
        rows = pc.indices_nonzero(missing).to_pylist()
        if not rows:
            return table, []
        named = [f"{part.path}: row {part.start + row + 1} has no text" for row in rows[:NAMED]]
        if not self.job.how.skip_bad:
            raise EverybertError(f"{named[0]} in {', '.join(texts)}; fill it in, or leave it out: --skip-bad")
        if len(rows) > NAMED:
            named.append(f"{part.path}: {len(rows) - NAMED} more rows up to row {part.stop} have no text")
        return table.filter(pc.invert(missing)), named


def _load(job: Job) -> Model:
    from everybert.inference.model import load

    if not Path(job.model).is_dir():
        raise EverybertError(f"{job.model} is not there on a worker's machine; put the model on a disk that all share")
    model = load(Path(job.model), device=job.how.device, dtype=job.how.dtype)
    if job.how.adapter is not None:
        model.use(model.add_adapter(job.how.adapter))
    if (name := model.adapter_for(job.task, len(job.texts) == 2)) is not None:
        model.use(name)  # for good: threads share the model
    return model


def _predict(model: Model, job: Job, inputs: list[Any]) -> pa.Table:
    """The new columns of some rows."""
    import numpy as np
    import pyarrow as pa

    options = job.how.options
    if job.task == "embed":
        found = model.embedded(inputs or [""], **options)
        vectors = np.ascontiguousarray(found.vectors[: len(inputs)], np.float32)
        columns = {"vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), found.vectors.shape[1])}
        if options.get("long") == "cut":
            columns["cut"] = pa.array(found.cut[: len(inputs)], pa.int32())
        return pa.table(columns)
    task, scores = model.task("classify"), bool(options.get("scores"))
    rows = [task.as_columns(result, scores) for result in model.predict("classify", inputs)]
    names = ["probability", *(f"p({label})" for label in task.labels if scores)]
    label = pa.list_(pa.string()) if getattr(task, "multi", False) else pa.string()
    return pa.Table.from_pylist(rows, pa.schema([("prediction", label), *((name, pa.float64()) for name in names)]))


# ── parquet ──────────────────────────────────────────────────────────────────────────────────────────────────


def plan_parts(
    task: str, sources: list[Path], chosen: dict[str, str], part_rows: int
) -> tuple[tuple[str, ...], list[Part]]:
    """The columns to read, and the parts of all files."""
    texts: tuple[str, ...] = ()
    parts: list[Part] = []
    for path in sources:
        with open_parquet(path) as file:
            kinds = {field.name: _is_text(field.type) for field in file.schema_arrow}
            rows = file.metadata.num_rows
        if not texts:
            first = {name: "" if text else None for name, text in kinds.items()}
            texts = tuple(find_texts(first, chosen, str(path), []))
            if task == "embed" and len(texts) == 2:
                raise EverybertError(f"{path}: is it {' or '.join(texts)} that is to be embedded? Give --text-column")
        for name in texts:
            if not kinds.get(name):
                what = "has no column" if name not in kinds else "has no text in column"
                raise EverybertError(f"{path} {what} {name!r}; name one that has with --text-column")
        starts = range(0, rows, part_rows)
        parts += [Part(len(parts) + i, str(path), at, min(at + part_rows, rows)) for i, at in enumerate(starts)]
    if not parts:
        raise EverybertError(f"no rows in {len(sources)} files: check the paths")
    return texts, parts


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner)


def open_parquet(path: Path) -> Any:
    """A file opened for reading."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise EverybertError("parquet files need pyarrow: pip install pyarrow") from None
    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise EverybertError(f"{path} cannot be read as parquet ({_line(error)}): check the file") from None


def read_part(part: Part) -> pa.Table:
    """The rows of a part. Only their row groups are read, in batches."""
    import pyarrow as pa

    with open_parquet(Path(part.path)) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        edges = list(accumulate(sizes, initial=0))
        groups = [i for i, (a, b) in enumerate(pairwise(edges)) if b > part.start and a < part.stop]
        batches, at = [], edges[groups[0]]
        try:
            for batch in file.iter_batches(1024, row_groups=groups):
                here = batch.slice(max(part.start - at, 0), max(0, part.stop - max(at, part.start)))
                batches += [here] if here.num_rows else []
                at += batch.num_rows
                if at >= part.stop:
                    break
        except (pa.ArrowException, OSError) as error:
            where = f"rows {part.start + 1} to {part.stop}"
            raise EverybertError(f"{part.path} cannot be read at {where} ({_line(error)}): it is damaged") from None
        return pa.Table.from_batches(batches, file.schema_arrow)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────


def _finished(out: Path, plan: dict[str, Any], fresh: bool) -> int | None:
    """The rows of the output if it is complete. A folder of something else is an error."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / LIST).is_file():
        raise EverybertError(f"{out} exists and is no folder of predictions; give another --out")
    if fresh:
        return None
    there = read_json(out / LIST)
    if changed := _changed(there, plan):
        raise EverybertError(f"{out} was made with other {changed}; give another --out, or replace it with --fresh")
    return int(there["rows"])


def _changed(there: dict[str, Any], plan: dict[str, Any]) -> str:
    return ", ".join(key for key, value in plan.items() if there.get(key) != value)


def _start(building: Path, plan: dict[str, Any], fresh: bool) -> None:
    """Make the folder of unfinished predictions, or check that the one there has the same plan."""
    if fresh:
        shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EverybertError(f"{building} could not be made ({error.strerror}); give another --out") from None
    if not any(building.glob("part-*")):
        write_json(building / LIST, plan)
    if changed := _changed(read_json(building / LIST), plan):
        raise EverybertError(
            f"the unfinished {building} has other {changed}; resume with the same, or start over with --fresh"
        )


def _finish(out: Path, building: Path, plan: dict[str, Any], records: list[Record]) -> None:
    """List the parts and rename the folder."""
    for left in building.glob(".part-*"):  # of workers that were killed
        left.unlink(missing_ok=True)
    files = {name: [size, digest] for name, size, digest in (record["file"] for record in records)}
    write_json(building / LIST, plan | {"rows": sum(record["rows"] for record in records), "files": files})
    with disk_errors(out, "finished parts are kept; run again to resume"):
        replace_folder(building, out)


def _scored(records: dict[int, Record], stopped: bool = False) -> Scored:
    made = [records[number] for number in sorted(records)]
    before = sum(record["rows"] for record in made if record["before"])
    return Scored(sum(r["rows"] for r in made), before, tuple(line for r in made for line in r["bad"]), stopped)
