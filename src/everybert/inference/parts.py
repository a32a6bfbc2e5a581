"""Predictions over parquet files of any size: rows in, the same rows with vectors or labels out, part by part.

The rows of all files are cut into parts; a part's output is a file that depends on its rows and the model alone, so
the parts may be made by any core, process or machine, in any order, twice or again after a crash: the bytes are the
same. Parts gather in a folder beside `out` that takes its name when all are there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from everybert.cluster import Engine, check_engine
from everybert.errors import EverybertError
from everybert.files import disk_errors, read_json, replace_folder, sha256_folder, size_and_hash, write_json
from everybert.inference.files import CHUNK, Scored
from everybert.inference.parquet import Part, open_parquet, plan_parts, read_rows, write_table
from everybert.store.hub import resolve
from everybert.tasks import Classify
from everybert.text.readers import expand

if TYPE_CHECKING:
    import pyarrow as pa

    from everybert.inference.model import Model

LIST = "_everybert.json"
"""What was asked for and, once all is there, every file's hash. Readers of parquet folders pass over a leading _."""
PART_ROWS = 4096
Record = dict[str, Any]
"""What became of a part: its number, rows, rows left out and file; or its number and an error."""
TOLD = 20
"""Bad rows of a part that are named; the rest are counted."""


@dataclass(frozen=True)
class Job:
    """What is done with every row: all that a worker anywhere must know."""

    task: str
    model: str
    adapter: str | None
    device: str | None
    texts: tuple[str, ...]
    """The text's column, or the two of a pair."""
    options: dict[str, Any]
    skip_bad: bool
    out: str
    dtype: str | None = None


def predict_parts(
    task: str,
    model: str | Path,
    files: Sequence[str | Path] | str | Path,
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    adapter: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    part_rows: int = PART_ROWS,
    engine: Engine = "local",
    address: str | None = None,
    workers: int | None = None,
    fresh: bool = False,
    progress: Callable[[int, int], None] = lambda rows, total: None,
) -> Scored:
    """Embed or classify every row of parquet files into a folder of parquet files; run again to go on.

    `options` are those of Model.embed (pooling, normalize, long), or `scores` for every label's probability. The
    `engine` ray gives the parts to the cluster at `address`, or to processes of its own; local, to this machine's
    cores. `workers` is how many work at a time. `progress` is told the rows done and their total.
    """
    check_engine(engine, address)
    if part_rows < 1 or (workers is not None and workers < 1):
        raise EverybertError("part_rows and workers must be at least 1")
    out = Path(out).absolute()
    sources = [path.absolute() for path in expand(files)]
    texts, parts = plan_parts(task, sources, dict(columns or {}), part_rows)
    folder = resolve(model).absolute()
    building = out.with_name(out.name + ".building")
    put_on = str(resolve(adapter).absolute()) if adapter is not None else None
    job = Job(task, str(folder), put_on, device, texts, dict(options or {}), skip_bad, str(building), dtype)
    plan = {
        "task": task,
        "model": sha256_folder(folder) + (sha256_folder(Path(put_on)) if put_on else ""),
        "inputs": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sources],
        "options": {"texts": list(texts), "skip_bad": skip_bad, "part_rows": part_rows, **job.options}
        | ({"dtype": dtype} if dtype is not None else {}),
    }
    total = sum(part.stop - part.start for part in parts)
    if (rows := _finished(out, plan, fresh)) is not None:
        return Scored(rows, rows)
    _start(building, plan, fresh)
    records: dict[int, Record] = {}
    done = 0
    try:
        with closing(_run(engine, job, parts, address, workers)) as results:
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


def _run(
    engine: Engine, job: Job, parts: list[Part], address: str | None, workers: int | None
) -> Generator[Record, None, None]:
    if engine == "local":
        return _on_cores(job, parts, workers)
    from everybert.inference.cluster import on_cluster

    return on_cluster(job, parts, address, workers)


def _on_cores(job: Job, parts: list[Part], workers: int | None) -> Generator[Record, None, None]:
    """Each core of this machine makes parts of its own; a GPU makes one after the other."""
    import torch

    predict = Predictor(job)
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers or (before if predict.model.device.type == "cpu" else 1))
    try:
        for made in as_completed([pool.submit(predict, part) for part in parts]):
            yield made.result()
    finally:
        predict.stopped = True
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # threads to come begin with the number last set


# ── the work ─────────────────────────────────────────────────────────────────────────────────────────────────


class Predictor:
    """Makes parts, holding the model once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.stopped = False
        self._model: Model | None = None
        self._lock = Lock()

    @property
    def model(self) -> Model:
        """The model with the head for the task, loaded when first asked for."""
        with self._lock:
            if self._model is None:
                self._model = _load(self.job)
            return self._model

    def __call__(self, part: Part) -> Record:
        """Make a part, unless it is there; what a user can mend is told as "error"."""
        file = Path(self.job.out) / f"part-{part.number:06d}.parquet"
        try:
            before = file.exists()
            if not before:
                write_table(file, self._table(part))
            return {"number": part.number, "of": part.stop - part.start, "before": before, **_record(file)}
        except EverybertError as error:
            return {"number": part.number, "error": str(error)}

    def _table(self, part: Part) -> pa.Table:
        """The part's rows with their predictions: a function of the rows and the model alone."""
        import pyarrow as pa
        import torch

        torch.set_num_threads(1)  # of this thread: products by one core are the same everywhere
        table, bad = self._good(read_rows(part), part)
        columns = [table.column(name).to_pylist() for name in self.job.texts]
        inputs = columns[0] if len(columns) == 1 else list(zip(*columns))
        chunks = []
        for start in range(0, len(inputs), CHUNK):
            if self.stopped:
                raise EverybertError("stopped: run again to go on")
            chunks.append(_predict(self.model, self.job, inputs[start : start + CHUNK]))
        made = pa.concat_tables(chunks) if chunks else _predict(self.model, self.job, [])
        for name in made.column_names:
            if name in table.column_names:
                raise EverybertError(f"{part.path} has a column {name!r} already; rename it, or leave it out")
            table = table.append_column(name, made.column(name).combine_chunks())
        return table.replace_schema_metadata({**(table.schema.metadata or {}), b"everybert": json.dumps(bad).encode()})

    def _good(self, table: pa.Table, part: Part) -> tuple[pa.Table, list[str]]:
        """The rows that have text, and what is wrong with the others, which are left out where that was asked for."""
        import pyarrow.compute as pc

        missing = pc.or_kleene(
            pc.is_null(table.column(self.job.texts[0])), pc.is_null(table.column(self.job.texts[-1]))
        )
        rows = pc.indices_nonzero(missing).to_pylist()
        if not rows:
            return table, []
        named = [f"{part.path}: row {part.start + row + 1} has no text" for row in rows[:TOLD]]
        if not self.job.skip_bad:
            raise EverybertError(f"{named[0]} in {', '.join(self.job.texts)}; fill it in, or leave it out: --skip-bad")
        if len(rows) > TOLD:
            named.append(f"{part.path}: {len(rows) - TOLD} more rows up to row {part.stop} have no text")
        return table.filter(pc.invert(missing)), named


def _load(job: Job) -> Model:
    from everybert.inference.model import load

    if not Path(job.model).is_dir():
        raise EverybertError(f"{job.model} is not there on a worker's machine; put the model on a disk that all share")
    model = load(Path(job.model), device=job.device, dtype=job.dtype)
    if job.adapter is not None:
        model.use(model.add_adapter(job.adapter))
    if (name := model.adapter_for(job.task, len(job.texts) == 2)) is not None:
        model.use(name)  # once and for all: threads share the model
    return model


def _predict(model: Model, job: Job, inputs: list[Any]) -> pa.Table:
    """The columns to add for some rows."""
    import numpy as np
    import pyarrow as pa

    if job.task == "embed":
        found = model.embedded(inputs, **job.options)
        vectors = found.vectors if inputs else np.empty((0, model.embedded([""], **job.options).vectors.shape[1]))
        flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
        columns = {"vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])}
        if job.options.get("long") == "cut":
            columns["cut"] = pa.array(found.cut, pa.int32())
        return pa.table(columns)

    task, scores = model.task("classify"), bool(job.options.get("scores"))
    assert isinstance(task, Classify)
    rows = [task.as_columns(result, scores) for result in model.predict("classify", inputs)]
    names = ["probability", *(f"p({label})" for label in task.labels if scores)]
    label = pa.list_(pa.string()) if task.multi else pa.string()
    return pa.Table.from_pylist(rows, pa.schema([("prediction", label), *((name, pa.float64()) for name in names)]))


def _record(file: Path) -> Record:
    """What the list says of a part."""
    with open_parquet(file) as found:
        rows, said = found.metadata.num_rows, found.schema_arrow.metadata[b"everybert"]
    return {"rows": rows, "bad": json.loads(said), "file": [file.name, *size_and_hash(file)]}


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────


def _finished(out: Path, plan: dict[str, Any], fresh: bool) -> int | None:
    """The rows of the output where it is there already; anything else that is there is an error."""
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
    """Make the folder of unfinished predictions, or check that the one there is of the same plan."""
    if fresh:
        shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EverybertError(f"{building} could not be made ({error.strerror}); give another --out") from None
    if not any(building.glob("part-*")):  # nothing to lose
        write_json(building / LIST, plan)
    if changed := _changed(read_json(building / LIST), plan):
        raise EverybertError(
            f"the unfinished {building} has other {changed}; go on with the same, or start over with --fresh"
        )


def _finish(out: Path, building: Path, plan: dict[str, Any], records: list[Record]) -> None:
    """List the parts and put the folder in its place."""
    for left in building.glob(".part-*"):  # by workers that were killed
        left.unlink(missing_ok=True)
    files = {name: [size, digest] for name, size, digest in (record["file"] for record in records)}
    write_json(building / LIST, plan | {"rows": sum(record["rows"] for record in records), "files": files})
    with disk_errors(out, "finished parts are kept; run again to resume"):
        replace_folder(building, out)


def _scored(records: dict[int, Record], stopped: bool = False) -> Scored:
    made = [records[number] for number in sorted(records)]
    before = sum(record["rows"] for record in made if record["before"])
    return Scored(sum(r["rows"] for r in made), before, tuple(line for r in made for line in r["bad"]), stopped)
