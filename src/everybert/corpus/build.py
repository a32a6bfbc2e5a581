"""Documents to a corpus folder: read once in order, tokenized by all cores, the same bytes for any number of them.

The parent process reads, drops copies, decides the split and cuts the text into units; workers tokenize units;
the parent joins their results in order into shards. A shard is a fixed amount of text, so a killed build
continues after its last finished shard: its documents are read again and compared, but not tokenized.
"""

import hashlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everybert.cluster import Engine, check_engine
from everybert.corpus.encode import Encoded, Piece
from everybert.corpus.pmi import DEFAULTS, PmiOptions, mine
from everybert.corpus.progress import mining_bar, reading_bar
from everybert.corpus.shards import VERSION, Corpus, dtype_for, read_meta
from everybert.corpus.summary import CorpusSummary, gather, summarise
from everybert.corpus.workers import Pool
from everybert.corpus.writing import SPLITS, ShardWriter, write_array
from everybert.errors import EverybertError
from everybert.files import disk_errors, read_json, remove_stale, replace_folder, size_and_hash, sync, write_json
from everybert.text.readers import Errors, ReadReport, expand, file_documents
from everybert.text.tokenizer import Tokenizer

UNIT = 1 << 18  # characters a worker tokenizes at a time
SHARD = 1 << 26  # characters of text in a shard
DAMAGED = "start over with --fresh"
KEPT = "finished shards are kept; check the path and its permissions, and run again"


@dataclass(frozen=True)
class BuildOptions:
    """What, besides the texts and the tokenizer, decides the bytes of a corpus."""

    heldout: float = 0.005
    min_tokens: int = 1
    wrapped: bool = False
    shard_characters: int = SHARD


def build_corpus(
    files: Sequence[str | Path] | str | Path | None,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    languages: Mapping[str, Sequence[str | Path] | str | Path] | None = None,
    workers: int | None = None,
    heldout: float = 0.005,
    min_tokens: int = 1,
    column: str | None = None,
    errors: Errors = "strict",
    per_line: bool = False,
    wrapped: bool = False,
    pmi: bool | PmiOptions = False,
    shard_characters: int = SHARD,
    fresh: bool = False,
    progress: bool = False,
    engine: Engine = "local",
    address: str | None = None,
) -> CorpusSummary:
    """Build a corpus folder from text or records; run again to continue an interrupted build.

    Give `files`, or `languages` (a language's name to its files). `heldout` is the share of documents kept
    from training, chosen by their hash. Documents under `min_tokens` are left out. A line end ends a sentence
    unless lines are `wrapped`. `pmi` also mines collocations. `fresh` starts over, replacing what is there.
    The `engine` ray tokenizes on the cluster at `address`, or in processes of its own: the bytes are the same.
    """
    options = BuildOptions(heldout, min_tokens, wrapped, shard_characters)
    _check(options, workers)
    check_engine(engine, address)
    sources, names = _sources(files, languages)
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    out = Path(out)
    if not out.name:
        raise EverybertError(f"out is {out}: name a folder to make")
    building = out.with_name(out.name + ".building")
    plan = {
        "version": VERSION,
        "tokenizer_digest": tokenizer.digest,
        "languages": names,
        "options": asdict(options),
    }
    if fresh:
        shutil.rmtree(building, ignore_errors=True)
    if _is_finished(out, plan, sources, fresh):
        with disk_errors(out, KEPT):
            _tidy(out)
            _add_collocations(out, pmi, progress)
        return summarise(out)
    started = time.monotonic()
    reading = Reading(sources, column, errors, per_line)
    with disk_errors(building, KEPT):
        _start(building, plan, tokenizer)
        with _pool(engine, address, building / "tokenizer", options, workers) as pool:
            kept = _build(building, reading, options, dtype_for(tokenizer.size), len(names), pool, progress)
        _finish(building, plan, tokenizer.size, reading)
        _add_collocations(building, pmi, progress)
        _replace(out, building)
    return summarise(out, time.monotonic() - started, kept)


def _pool(engine: Engine, address: str | None, tokenizer: Path, options: BuildOptions, workers: int | None) -> Any:
    """The processes that tokenize; they differ in nothing but where they are."""
    if engine == "local":
        return Pool(tokenizer, options.min_tokens, options.wrapped, workers)
    from everybert.corpus.cluster import RayPool

    return RayPool(tokenizer, options.min_tokens, options.wrapped, workers, address)


def _check(options: BuildOptions, workers: int | None) -> None:
    if not 0 <= options.heldout < 1:
        raise EverybertError(f"heldout is {options.heldout}: it must be a share from 0 up to, not including, 1")
    if options.min_tokens < 1 or options.shard_characters < 1:
        raise EverybertError("min_tokens and shard_characters must be at least 1")
    if workers is not None and workers < 1:
        raise EverybertError(f"workers is {workers}: it must be at least 1")


def _sources(files: Any, languages: Mapping[str, Any] | None) -> tuple[list[tuple[Path, int]], list[str]]:
    """Every file with the number of its language, and the languages' names."""
    if languages and files:
        raise EverybertError("some files have a language and some have none: name them all as LANGUAGE=FILE")
    if not languages:
        return [(path, 0) for path in expand(files or [])], []
    if len(languages) > 256:
        raise EverybertError(f"{len(languages)} languages: a corpus holds at most 256")
    names = sorted(languages)
    return [(path, number) for number, name in enumerate(names) for path in expand(languages[name])], names


def _listed(sources: list[tuple[Path, int]]) -> list[list[Any]]:
    """The sources as corpus.json remembers them: name, size, time of change, language."""
    states = [(path, language, path.stat() if path.exists() else None) for path, language in sources]
    return [[path.name, s.st_size if s else -1, s.st_mtime_ns if s else -1, n] for path, n, s in states]


def _is_finished(out: Path, plan: dict[str, Any], sources: list[tuple[Path, int]], fresh: bool) -> bool:
    """Whether the corpus asked for is there already; anything else that is there is an error."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / "corpus.json").exists():
        raise EverybertError(f"{out} exists and is not a corpus: choose another --out")
    if fresh:
        return False
    meta = read_meta(out)
    changed = [key for key, value in plan.items() if meta.get(key) != value]
    if meta["sources"] != _listed(sources) or not all(path.is_file() for path, _ in sources):
        changed.append("inputs")  # what a pipe held cannot be known
    if changed:
        raise EverybertError(
            f"{out} was built with other {', '.join(changed)}: choose another --out, or replace it with --fresh"
        )
    return True


def _start(building: Path, plan: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Make the folder of an unfinished build, or check that the one there is of the same plan."""
    file = building / "plan.json"
    if not file.exists():
        for part in ("shards", "records"):
            (building / part).mkdir(parents=True, exist_ok=True)
        tokenizer.save(building / "tokenizer")
        for saved in (building / "tokenizer").iterdir():
            sync(saved)
        write_json(file, plan)
    before = read_json(file, DAMAGED)
    changed = [key for key, value in plan.items() if before.get(key) != value]
    if changed:
        raise EverybertError(
            f"the unfinished build {building} has other {', '.join(changed)}: "
            "continue with the same, or start over with --fresh"
        )


class Reading:
    """The documents of the sources in order, each once; counts what was left out."""

    def __init__(self, sources: list[tuple[Path, int]], column: str | None, errors: Errors, per_line: bool):
        self.sources = sources
        self.report = ReadReport()
        self.duplicates = 0
        self._how = (column, errors, per_line)

    def __iter__(self) -> Iterator[tuple[Piece, bytes]]:
        """(document, its 128-bit digest); a copy of an earlier document is dropped. About 110 bytes a document."""
        seen: set[bytes] = set()
        for piece in self._all():
            digest = hashlib.blake2b(piece.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if digest in seen:
                self.duplicates += 1
            else:
                seen.add(digest)
                yield piece, digest

    def _all(self) -> Iterator[Piece]:
        column, errors, per_line = self._how
        for path, language in self.sources:
            for text in file_documents(path, column, errors, per_line, self.report):
                if text := text.strip():
                    yield Piece(text, language=language)


@dataclass(frozen=True)
class Unit:
    """Pieces for one worker, all of one split."""

    split: str
    pieces: list[Piece]


@dataclass(frozen=True)
class ShardEnd:
    """All units of a shard have come before this; the digest is of its documents."""

    number: int
    digest: str
    finished: bool


def _plan_units(reading: Reading, options: BuildOptions, finished: set[int]) -> Iterator[Unit | ShardEnd]:
    """Cut the documents into shards and these into units; finished shards have no units."""
    number, size = 0, 0
    content = hashlib.blake2b(digest_size=16)
    units: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for document, digest in reading:
        content.update(digest + bytes([document.language]))
        size += len(document.text)
        if number not in finished:
            heldout = int.from_bytes(digest[:8], "big") < options.heldout * 2**64
            split = "heldout" if heldout else "train"
            for piece in _pieces(document):
                units[split].append(piece)
                sizes[split] += len(piece.text)
                if sizes[split] >= UNIT:
                    yield Unit(split, units[split])
                    units[split], sizes[split] = [], 0
        if size >= options.shard_characters:
            yield from _shard_end(units, ShardEnd(number, content.hexdigest(), number in finished))
            number, size, content = number + 1, 0, hashlib.blake2b(digest_size=16)
            units, sizes = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    if size:
        yield from _shard_end(units, ShardEnd(number, content.hexdigest(), number in finished))


def _shard_end(units: dict[str, list[Piece]], end: ShardEnd) -> Iterator[Unit | ShardEnd]:
    yield from (Unit(split, pieces) for split, pieces in units.items() if pieces)
    yield end


def _pieces(document: Piece) -> Iterator[Piece]:
    """A document in parts of at most a unit, cut at a line end, else at a space, else anywhere."""
    text, start = document.text, 0
    if len(text) <= UNIT:
        yield document
        return
    while start < len(text):
        end = start + UNIT
        if end < len(text):
            end = (text.rfind("\n", start, end) + 1) or (text.rfind(" ", start, end) + 1) or end
        yield Piece(text[start:end], start == 0, end >= len(text), document.language)
        start = end


def _build(
    building: Path,
    reading: Reading,
    options: BuildOptions,
    dtype: np.dtype,
    languages: int,
    pool: Pool,
    progress: bool,
) -> int:
    """Write every shard that is not finished; returns how many were."""
    records = building / "records"
    finished = {int(file.stem) for file in records.glob("*.json")}
    writer = ShardWriter(building / "shards", records, dtype, languages)
    total = sum(path.stat().st_size for path, _ in reading.sources if path.is_file())
    waiting: deque[ShardEnd | tuple[str, Callable[[], Encoded]]] = deque()
    last = -1
    with reading_bar(total, progress) as show:
        for event in _plan_units(reading, options, finished):
            waiting.append((event.split, pool.submit(event.pieces)) if isinstance(event, Unit) else event)
            while len(waiting) > pool.depth:
                last = _settle(waiting.popleft(), writer, records, last)
            show(reading.report.bytes_read, writer.tokens)
        while waiting:
            last = _settle(waiting.popleft(), writer, records, last)
            show(reading.report.bytes_read, writer.tokens)
    if any(number > last for number in finished):
        raise EverybertError(_changed(records))
    return len(finished)


def _settle(event: ShardEnd | tuple[str, Callable[[], Encoded]], writer: ShardWriter, records: Path, last: int) -> int:
    """Take the next result in order; returns the number of the last shard that is complete."""
    if not isinstance(event, ShardEnd):
        split, result = event
        writer.add(split, result())
        return last
    if not event.finished:
        writer.close(event.number, event.digest)
    elif read_json(records / f"{event.number:05d}.json", DAMAGED)["digest"] != event.digest:
        raise EverybertError(_changed(records))
    return event.number


def _changed(records: Path) -> str:
    return (
        f"the inputs differ from those the unfinished build {records.parent} began with: "
        "give it the same files in the same order, or start over with --fresh"
    )


def _finish(building: Path, plan: dict[str, Any], vocab_size: int, reading: Reading) -> None:
    """Describe the finished shards in corpus.json and count the tokens of the training split."""
    records = [read_json(file, DAMAGED) for file in sorted((building / "records").glob("*.json"))]
    if not any(record["splits"]["train"]["documents"] for record in records):
        shutil.rmtree(building)
        lost = any(record["splits"]["heldout"]["documents"] for record in records)
        raise EverybertError(
            "every document fell into the held-out split: lower --heldout or add documents"
            if lost
            else f"no documents in {len(reading.sources)} files: check that they hold text"
        )
    made = gather(records)
    made["counts"] |= {
        "duplicates": reading.duplicates,
        "replaced": reading.report.replaced,
        "cut": reading.report.cut,
    }
    counts = np.zeros(vocab_size, np.int64)
    for name in made["splits"]["train"]:
        ids = np.memmap(building / "shards" / f"{name}.tokens.bin", dtype_for(vocab_size), mode="r")
        counts += np.bincount(ids, minlength=vocab_size)
    write_array(building / "unigram.npy", counts)
    rest = [building / "unigram.npy", *sorted((building / "tokenizer").iterdir())]
    made["files"] |= {str(file.relative_to(building)): size_and_hash(file) for file in rest}
    dtype = dtype_for(vocab_size).name
    head = plan | {"dtype": dtype, "vocab_size": vocab_size, "sources": _listed(reading.sources)}
    write_json(building / "corpus.json", head | made)


def _add_collocations(folder: Path, pmi: bool | PmiOptions, progress: bool) -> None:
    """Mine collocations into a corpus folder that has none of this kind yet."""
    meta = read_meta(folder)
    options = pmi if isinstance(pmi, PmiOptions) else DEFAULTS
    if not pmi or meta.get("pmi") == asdict(options):
        return
    corpus = Corpus.open(folder)
    with mining_bar(corpus.token_count * options.words, progress) as show:
        found = mine(corpus, Tokenizer.load(corpus.tokenizer_path), options, show)
    ids = np.array([i for ngram in found.ngrams for i in ngram], np.int32)
    offsets = np.cumsum([0, *(len(ngram) for ngram in found.ngrams)])
    if "pmi" in meta:  # with other options: there are none until the new ones are there
        meta = {key: value for key, value in meta.items() if key not in ("pmi", "collocations")}
        meta["files"].pop("pmi.npz")
        write_json(folder / "corpus.json", meta)
    write_array(folder / "pmi.npz", ids=ids, offsets=offsets, scores=found.scores)
    meta["files"]["pmi.npz"] = size_and_hash(folder / "pmi.npz")
    write_json(folder / "corpus.json", meta | {"pmi": asdict(options), "collocations": len(found.ngrams)})


def _replace(out: Path, building: Path) -> None:
    """Put the finished folder in its place at once; what only a continued build needs goes afterwards."""
    for folder in (building / "shards", building / "tokenizer", building):
        sync(folder)
    replace_folder(building, out)
    _tidy(out)


def _tidy(out: Path) -> None:
    """Remove what a finished corpus has no use for; a build that was killed here leaves it to the next."""
    for folder in (out, out.parent):
        remove_stale(folder)
    shutil.rmtree(out / "records", ignore_errors=True)
    (out / "plan.json").unlink(missing_ok=True)
