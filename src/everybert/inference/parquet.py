"""Parquet files as parts: which rows belong together, reading just those, and writing a part whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everybert.errors import EverybertError
from everybert.files import atomic_file
from everybert.tasks.dataset import find_texts

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Part:
    """Rows `start` up to `stop` of a file."""

    number: int
    path: str
    start: int
    stop: int


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


def read_rows(part: Part) -> pa.Table:
    """A part's rows; of the file no more than the row groups they lie in is read, a little at a time."""
    import pyarrow as pa

    with open_parquet(Path(part.path)) as file:
        groups: list[int] = []
        first, at = 0, 0
        for number in range(file.metadata.num_row_groups):
            stop = at + file.metadata.row_group(number).num_rows
            if stop > part.start and at < part.stop:
                first = at if not groups else first
                groups.append(number)
            at = stop
        batches, at = [], first
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


def write_table(path: Path, table: pa.Table) -> None:
    """Write a part so that it is there whole or not at all, even where two workers make it at once."""
    from pyarrow import parquet

    with atomic_file(path) as draft:
        parquet.write_table(table, draft)
