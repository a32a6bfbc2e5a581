"""Documents to a corpus folder, tokenized by all cores. The bytes do not depend on the number of workers.

The parent process reads the documents in order, drops duplicates, assigns each to a split and cuts the text into
units. Workers tokenize the units, and the parent concatenates the results in order into shards. A shard is a fixed
amount of text, so an interrupted build continues after its last finished shard: documents of finished shards are
read again and compared, but not tokenized.
"""

import hashlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import progress as rich
from rich.console import Console

from everybert.cluster import Engine, RayPool, check_engine
from everybert.corpus.encode import Encoded, Encoder, Piece, ProcessPool, encode_pieces
from everybert.corpus.pmi import PmiOptions, mine
from everybert.corpus.shards import VERSION, Corpus, Shard, dtype_for, offsets, read_meta, write_shard
from everybert.errors import EverybertError
from everybert.files import (
    atomic_file,
    disk_errors,
    read_json,
    remove_stale,
    replace_folder,
    size_and_hash,
    sync,
    write_json,
)
from everybert.text.readers import Errors, ReadReport, expand, file_documents
from everybert.text.tokenizer import Tokenizer

UNIT = 1 << 18  # characters that a worker tokenizes at a time
SPLITS = ("train", "heldout")
COUNTS = ("documents", "sentences", "tokens", "unknown", "short")
EDGES = (8, 16, 32, 64, 128, 256, 512, 1024)  # upper edges of the histograms' bins, in tokens
BINS = tuple(f"{a}-{b}" for a, b in zip((1, *(edge + 1 for edge in EDGES)), EDGES)) + (f"{EDGES[-1] + 1}+",)


@dataclass(frozen=True)
class BuildOptions:
    """How documents are read and divided."""

    heldout: float = 0.005
    """Share of documents held out from training, chosen by their hash."""
    min_tokens: int = 1
    """Documents with fewer tokens are left out."""
    wrapped: bool = False
    """Lines are wrapped: a line end does not end a sentence."""
    shard_characters: int = 1 << 26
    """Characters of text per shard."""
    column: str | None = None
    """The text column of records; guessed by default."""
    errors: Errors = "strict"
    """Bytes that are not UTF-8: "strict" stops, "replace" replaces and counts them."""
    per_line: bool = False
    """Every line of a text file is a document."""

    def __post_init__(self):
        if not 0 <= self.heldout < 1:
            raise EverybertError(f"heldout is {self.heldout}: it must be a share from 0 up to, not including, 1")
        if self.min_tokens < 1 or self.shard_characters < 1:
            raise EverybertError("min_tokens and shard_characters must be at least 1")

    def recorded(self) -> dict[str, Any]:
        """The options that corpus.json records. The others only affect reading, and changed text is noticed."""
        return {name: getattr(self, name) for name in ("heldout", "min_tokens", "wrapped", "shard_characters")}


def build_corpus(
    files: Sequence[str | Path] | str | Path | None,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    languages: Mapping[str, Sequence[str | Path] | str | Path] | None = None,
    workers: int | None = None,
    pmi: bool | PmiOptions = False,
    fresh: bool = False,
    progress: bool = False,
    engine: Engine = "local",
    address: str | None = None,
    **options: Any,
) -> "CorpusSummary":
    """Build a corpus folder from files of text or records. Run again to continue an interrupted build.

    Give either `files` or `languages`, which maps the name of a language to its files. `options` are those of
    `BuildOptions`. `pmi` also mines collocations. `fresh` starts over and replaces an existing corpus. `workers` is
    the number of processes (default: all cores). The engine "ray" tokenizes on the Ray cluster at `address`, or in
    one that it starts on this machine; the bytes are the same.
    """
    settings = BuildOptions(**options)
    if workers is not None and workers < 1:
        raise EverybertError(f"workers is {workers}: it must be at least 1")
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
        "options": settings.recorded(),
    }
    started, kept = time.monotonic(), 0
    with disk_errors(out, "finished shards are kept, run again to continue"):
        if fresh:
            shutil.rmtree(building, ignore_errors=True)
        if _is_finished(out, plan, sources, fresh):
            _clean(out)
            _add_collocations(out, pmi, progress)
            return summarise(out)
        reader = DocumentReader(sources, settings)
        _start(building, plan, tokenizer)
        encoder = Encoder(building / "tokenizer", settings.min_tokens, settings.wrapped)
        ray = engine == "ray"
        with RayPool(encode_pieces, encoder, workers, address) if ray else ProcessPool(encoder, workers) as pool:
            writer = ShardWriter(building, settings, encoder.dtype, len(names), pool)
            kept = len(writer.finished)
            _write_shards(writer, reader, progress)
        _finish(building, plan, tokenizer.size, reader)
        _add_collocations(building, pmi, progress)
        for folder in (building / "shards", building / "tokenizer", building):
            sync(folder)
        replace_folder(building, out)
        _clean(out)
    return summarise(out, time.monotonic() - started, kept)


def _sources(files: Any, languages: Mapping[str, Any] | None) -> tuple[list[tuple[Path, int]], list[str]]:
    """Every file with the number of its language, and the names of the languages."""
    if languages and files:
        raise EverybertError("some files have a language and some have none: name them all as LANGUAGE=FILE")
    if not languages:
        return [(path, 0) for path in expand(files or [])], []
    if len(languages) > 256:
        raise EverybertError(f"{len(languages)} languages: a corpus holds at most 256")
    names = sorted(languages)
    return [(path, number) for number, name in enumerate(names) for path in expand(languages[name])], names


def _listed(sources: list[tuple[Path, int]]) -> list[list[Any]]:
    """The sources as corpus.json records them: name, size, modification time, language."""
    states = [(path, language, path.stat() if path.exists() else None) for path, language in sources]
    return [[path.name, s.st_size if s else -1, s.st_mtime_ns if s else -1, n] for path, n, s in states]


def _changes(before: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    return [key for key, value in plan.items() if before.get(key) != value]


def _is_finished(out: Path, plan: dict[str, Any], sources: list[tuple[Path, int]], fresh: bool) -> bool:
    """Whether `out` is this corpus already. Anything else there is an error."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / "corpus.json").exists():
        raise EverybertError(f"{out} exists and is not a corpus: choose another --out")
    if fresh:
        return False
    meta = read_meta(out)
    changed = _changes(meta, plan)
    if meta["sources"] != _listed(sources) or not all(path.is_file() for path, _ in sources):
        changed.append("inputs")  # the earlier content of a pipe is unknown
    if changed:
        raise EverybertError(
            f"{out} was built with other {', '.join(changed)}: choose another --out, or replace it with --fresh"
        )
    return True


def _start(building: Path, plan: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Make the folder of an unfinished build, or check that the existing one has the same plan."""
    file = building / "plan.json"
    if not file.exists():
        for part in ("shards", "records"):
            (building / part).mkdir(parents=True, exist_ok=True)
        tokenizer.save(building / "tokenizer")
        for saved in (building / "tokenizer").iterdir():
            sync(saved)
        write_json(file, plan)
    for folder in (building, building / "records"):
        remove_stale(folder)
    changed = _changes(read_json(file, "start over with --fresh"), plan)
    if changed:
        raise EverybertError(
            f"the unfinished build {building} has other {', '.join(changed)}: "
            "continue with the same, or start over with --fresh"
        )


# ── documents to shards ─────────────────────────────────────────────────────────────────────────────────────


class DocumentReader:
    """Iterates over the documents of the sources in order, without duplicates, and counts what was left out."""

    def __init__(self, sources: list[tuple[Path, int]], options: BuildOptions):
        self.sources, self.options = sources, options
        self.report = ReadReport()
        self.duplicates = 0

    def __iter__(self) -> Iterator[tuple[Piece, bytes]]:
        """(document, its 128-bit digest). The digests take about 110 bytes per document."""
        seen: set[bytes] = set()
        how = (self.options.column, self.options.errors, self.options.per_line)
        for path, language in self.sources:
            for text in map(str.strip, file_documents(path, *how, self.report)):
                digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if text and digest not in seen:
                    seen.add(digest)
                    yield Piece(text, language=language), digest
                elif text:
                    self.duplicates += 1


class ShardWriter:
    """Takes documents in order, encodes them in units through a pool, and writes the results as shards.

    The record of a shard, written last, makes it finished.
    """

    def __init__(self, folder: Path, options: BuildOptions, dtype: np.dtype, languages: int, pool: Any):
        self.folder, self.options, self.dtype, self.languages, self.pool = folder, options, dtype, languages, pool
        self.finished = {int(file.stem) for file in (folder / "records").glob("*.json")}
        self.tokens = 0  # encoded by this process
        self.number = 0
        self._pending: deque[Callable[[], None]] = deque()  # results and ends of shards, in the order of the text
        self._parts: dict[str, list[Encoded]] = {split: [] for split in SPLITS}
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._size, self._content = 0, hashlib.blake2b(digest_size=16)
        self._units: dict[str, list[Piece]] = {split: [] for split in SPLITS}
        self._sizes = dict.fromkeys(SPLITS, 0)  # characters of each unit

    def add(self, document: Piece, digest: bytes) -> None:
        """Add the next document."""
        self._content.update(digest + bytes([document.language]))
        self._size += len(document.text)
        if self.number not in self.finished:
            heldout = int.from_bytes(digest[:8], "big") < self.options.heldout * 2**64
            split = "heldout" if heldout else "train"
            for piece in _pieces(document):
                self._units[split].append(piece)
                self._sizes[split] += len(piece.text)
                if self._sizes[split] >= UNIT:
                    self._submit(split)
        if self._size >= self.options.shard_characters:
            self.end_shard()

    def end_shard(self) -> None:
        """End the shard, if it has documents."""
        if self._size:
            for split in SPLITS:
                self._submit(split)
            self._pending.append(partial(self.close, self.number, self._content.hexdigest()))
            self.number += 1
            self._begin_shard()

    def _submit(self, split: str) -> None:
        if self._units[split]:
            result = self.pool.submit(self._units[split])
            self._pending.append(lambda: self._receive(split, result()))
            self._units[split], self._sizes[split] = [], 0
        self.settle(self.pool.depth)

    def _receive(self, split: str, part: Encoded) -> None:
        self._parts[split].append(part)
        self.tokens += len(part.tokens)

    def settle(self, most: int) -> None:
        """Wait for results, in order, until at most `most` are pending."""
        while len(self._pending) > most:
            self._pending.popleft()()

    def close(self, number: int, digest: str) -> None:
        """Write shard `number`, or check that the finished one has the same documents."""
        file = self.folder / "records" / f"{number:05d}.json"
        if number in self.finished:
            if read_json(file, "start over with --fresh")["digest"] != digest:
                raise EverybertError(self.changed())
            return
        record: dict[str, Any] = {"digest": digest, "splits": {}, "files": {}}
        for split, parts in self._parts.items():
            name = f"{number:05d}" if split == "train" else f"{number:05d}-{split}"
            record["splits"][split] = self._write(name, parts, record["files"])
        write_json(file, record)
        self._parts = {split: [] for split in SPLITS}

    def changed(self) -> str:
        """The error for inputs that changed between two runs."""
        return (
            f"the inputs differ from those the unfinished build {self.folder} began with: "
            "give it the same files in the same order, or start over with --fresh"
        )

    def _write(self, name: str, parts: list[Encoded], files: dict[str, Any]) -> dict[str, Any]:
        shard = _join(parts, self.dtype)
        documents, sentences = len(shard.documents) - 1, len(shard.sentences) - 1
        if documents:
            for path in write_shard(self.folder / "shards", name, shard, self.languages > 1):
                files[f"shards/{path.name}"] = size_and_hash(path)
        return {
            "name": name,
            "documents": documents,
            "sentences": sentences,
            "tokens": len(shard.tokens),
            "unknown": sum(part.unknown for part in parts),
            "short": sum(part.short for part in parts),
            "sentence_lengths": _histogram(np.diff(shard.sentences)),
            "document_lengths": _histogram(np.diff(shard.sentences[shard.documents])),
            "languages": np.bincount(shard.languages, minlength=max(1, self.languages)).tolist(),
        }


def _write_shards(writer: ShardWriter, reader: DocumentReader, progress: bool) -> None:
    """Write every shard that is not finished."""
    size = sum(path.stat().st_size for path, _ in reader.sources if path.is_file())
    tokens = rich.TextColumn("{task.fields[tokens]:,} tokens")
    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), tokens)
    with _progress_bar(progress, size, *columns, tokens=0) as show:
        for number, (document, digest) in enumerate(reader):
            writer.add(document, digest)
            if number % 256 == 0:
                show(completed=reader.report.bytes_read, tokens=writer.tokens)
        writer.end_shard()
        writer.settle(0)
        show(completed=reader.report.bytes_read, tokens=writer.tokens)
    if any(number >= writer.number for number in writer.finished):
        raise EverybertError(writer.changed())


@contextmanager
def _progress_bar(
    shown: bool, total: int, *columns: rich.ProgressColumn, **values: Any
) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error. Yields the function that updates it."""
    left = rich.TimeRemainingColumn()
    with rich.Progress(*columns, left, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("", total=total or None, **values)
        yield partial(bar.update, task) if shown else lambda **values: None


def _pieces(document: Piece) -> Iterator[Piece]:
    """A document in parts of at most one unit, cut at a line end, else at a space, else anywhere."""
    text, start = document.text, 0
    while start < len(text):
        end = start + UNIT
        if end < len(text):
            end = (text.rfind("\n", start, end) + 1) or (text.rfind(" ", start, end) + 1) or end
        yield Piece(text[start:end], start == 0, end >= len(text), document.language)
        start = end


def _join(parts: list[Encoded], dtype: np.dtype) -> Shard:
    """Concatenate units to one shard, and the pieces of a long document to one document."""
    tokens = np.concatenate([np.empty(0, dtype), *(part.tokens for part in parts)])
    sentences = np.concatenate([np.zeros(1, np.int64), *(part.sentence_lengths for part in parts)]).cumsum()
    counts = np.concatenate([np.empty(0, np.int64), *(part.piece_sentences for part in parts)])
    first = np.concatenate([np.empty(0, bool), *(part.piece_first for part in parts)])
    language = np.concatenate([np.empty(0, np.uint8), *(part.piece_language for part in parts)])[first]
    totals = np.add.reduceat(counts, np.flatnonzero(first)) if len(counts) else counts
    kept = totals > 0
    return Shard(tokens, sentences, offsets(totals[kept]), language[kept])


def _histogram(lengths: np.ndarray) -> list[int]:
    return np.bincount(np.searchsorted(EDGES, lengths), minlength=len(BINS)).tolist()


# ── shards to a corpus ──────────────────────────────────────────────────────────────────────────────────────


def _finish(building: Path, plan: dict[str, Any], vocab_size: int, reader: DocumentReader) -> None:
    """Write corpus.json from the records of the shards, and the token counts of the training split."""
    files = sorted((building / "records").glob("*.json"))
    records = [read_json(file, "start over with --fresh") for file in files]
    made = {split: [record["splits"][split] for record in records] for split in SPLITS}
    if not any(part["documents"] for part in made["train"]):
        shutil.rmtree(building)
        raise EverybertError(
            "every document fell into the held-out split: lower --heldout or add documents"
            if any(part["documents"] for part in made["heldout"])
            else f"no documents in {len(reader.sources)} files: check that they hold text"
        )
    both = [part for parts in made.values() for part in parts]
    splits = {split: [part["name"] for part in parts if part["documents"]] for split, parts in made.items()}
    hashes = {name: state for record in records for name, state in record["files"].items()}
    left_out = {"duplicates": reader.duplicates, "replaced": reader.report.replaced, "cut": reader.report.cut}
    dtype, unigram = dtype_for(vocab_size), np.zeros(vocab_size, np.int64)
    for name in splits["train"]:
        ids = np.memmap(building / "shards" / f"{name}.tokens.bin", dtype, mode="r")
        unigram += np.bincount(ids, minlength=vocab_size)
    with atomic_file(building / "unigram.npy") as draft, draft.open("wb") as file:
        np.save(file, unigram, allow_pickle=False)
    for path in [building / "unigram.npy", *sorted((building / "tokenizer").iterdir())]:
        hashes[str(path.relative_to(building))] = size_and_hash(path)
    described = {
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "sources": _listed(reader.sources),
        "splits": splits,
        "counts": _counts(both) | left_out,
        "split_counts": {split: _counts(parts) for split, parts in made.items()},
        "sentence_lengths": _sums(both, "sentence_lengths"),
        "document_lengths": _sums(both, "document_lengths"),
        "language_documents": _sums(both, "languages"),
        "files": hashes,
    }
    write_json(building / "corpus.json", plan | described)


def _counts(parts: list[dict[str, Any]]) -> dict[str, int]:
    return {count: sum(part[count] for part in parts) for count in COUNTS}


def _sums(parts: list[dict[str, Any]], key: str) -> list[int]:
    return np.sum([part[key] for part in parts], axis=0).astype(int).tolist()


def _add_collocations(folder: Path, pmi: bool | PmiOptions, progress: bool) -> None:
    """Mine collocations into a corpus folder that has none with these options."""
    meta = read_meta(folder)
    options = pmi if isinstance(pmi, PmiOptions) else PmiOptions()
    if not pmi or meta.get("pmi") == asdict(options):
        return
    corpus = Corpus.open(folder)
    columns = (rich.TextColumn("collocations"), rich.BarColumn(), rich.TaskProgressColumn())
    with _progress_bar(progress, corpus.token_count * options.words, *columns) as show:
        tokenizer = Tokenizer.load(corpus.tokenizer_path)
        found = mine(corpus, tokenizer, options, lambda done: show(completed=done))
    ids = np.array([i for ngram in found.ngrams for i in ngram], np.int32)
    if "pmi" in meta:  # with other options: the corpus has none until the new ones are written
        meta = {key: value for key, value in meta.items() if key not in ("pmi", "collocations")}
        meta["files"].pop("pmi.npz")
        write_json(folder / "corpus.json", meta)
    with atomic_file(folder / "pmi.npz") as draft, draft.open("wb") as file:
        np.savez(file, ids=ids, offsets=offsets(np.array([len(n) for n in found.ngrams])), scores=found.scores)
    meta["files"]["pmi.npz"] = size_and_hash(folder / "pmi.npz")
    meta |= {"pmi": asdict(options), "collocations": len(found.ngrams)}
    write_json(folder / "corpus.json", meta)


def _clean(out: Path) -> None:
    """Remove what only an unfinished build needs, and what a killed build left."""
    remove_stale(out.parent)
    remove_stale(out)
    shutil.rmtree(out / "records", ignore_errors=True)
    (out / "plan.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class CorpusSummary:
    """The contents of a corpus. `counts` and each of `splits` have documents, sentences, tokens, unknown, short."""

    path: str
    counts: dict[str, int]
    splits: dict[str, dict[str, int]]
    sentence_lengths: dict[str, int]
    document_lengths: dict[str, int]
    languages: dict[str, int]
    collocations: int | None = None
    seconds: float = 0.0
    kept_shards: int = 0
    """Shards that an earlier, interrupted build had finished."""

    @property
    def unknown_rate(self) -> float:
        """The share of tokens that are the unknown token."""
        return self.counts["unknown"] / max(1, self.counts["tokens"])

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data, for JSON."""
        return asdict(self) | {"unknown_rate": self.unknown_rate}


def summarise(path: str | Path, seconds: float = 0.0, kept_shards: int = 0) -> CorpusSummary:
    """The summary of a finished corpus folder."""
    meta = read_meta(path)
    return CorpusSummary(
        str(path),
        meta["counts"],
        meta["split_counts"],
        dict(zip(BINS, meta["sentence_lengths"])),
        dict(zip(BINS, meta["document_lengths"])),
        dict(zip(meta["languages"], meta["language_documents"])),
        meta.get("collocations"),
        seconds,
        kept_shards,
    )


def verify(path: str | Path) -> None:
    """Compare every file of a corpus with its recorded size and hash."""
    path = Path(path)
    for name, state in read_meta(path)["files"].items():
        if not (path / name).exists() or size_and_hash(path / name) != state:
            raise EverybertError(f"{path / name} is missing or was changed: build the corpus again")
