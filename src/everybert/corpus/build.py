"""Documents to a corpus folder, tokenized by all cores. The bytes do not depend on the number of workers.

The parent process reads the documents in order, drops duplicates, assigns each to a split and collects them into
units. Workers tokenize the units, and the parent concatenates the results in order into shards. A shard is a fixed
amount of text, so an interrupted build continues after its last finished shard: documents of finished shards are
read again and compared, but not tokenized.
"""

import hashlib
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from everybert.cluster import Engine, check_engine, ray_pool
from everybert.corpus.encode import Document, DocumentEncoder, EncodedDocuments, ProcessPool, encode_documents
from everybert.corpus.pmi import WORDS, mine
from everybert.corpus.shards import VERSION, Corpus, check_file, dtype_for, offsets, read_meta, write_shard
from everybert.errors import EverybertError
from everybert.files import (
    atomic_file,
    changes,
    disk_errors,
    read_json,
    remove_stale,
    replace_folder,
    size_and_hash,
    sync,
    write_json,
)
from everybert.text.readers import ReadReport, expand, plain_size, read_documents
from everybert.text.tokenizer import Tokenizer

UNIT = 1 << 18  # characters that a worker tokenizes at a time
SPLITS = ("train", "heldout")
COUNTS = ("documents", "sentences", "tokens", "unknown", "empty")
LEAST_HELDOUT = 2000  # tokens, of which 300 are masked
log = logging.getLogger("everybert")
Sources = list[tuple[Path, int]]
"""Files with the number of their language."""
Bar = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
"""Makes a progress bar, given what it counts and the total: a context of the function that is called with progress."""


@dataclass(frozen=True)
class BuildOptions:
    """How documents are read and divided."""

    heldout: float = 0.005
    """Share of documents held out from training, chosen by their hash."""
    wrapped: bool = False
    """Lines are wrapped: a line end does not end a sentence."""
    shard_characters: int = 1 << 26
    """Characters of text per shard."""
    column: str | None = None
    """The text column of records; guessed by default."""
    errors: Literal["strict", "replace"] = "strict"
    """Bytes that are not UTF-8: "strict" stops, "replace" replaces and counts them."""
    per_line: bool = False
    """Every line of a text file is a document."""

    def __post_init__(self):
        if not 0 <= self.heldout < 1:
            raise EverybertError(f"heldout is {self.heldout}: it must be a share from 0 up to, not including, 1")

    def recorded(self) -> dict[str, Any]:
        """The options that corpus.json records. The others only affect reading, and changed text is noticed."""
        recorded = {name: getattr(self, name) for name in ("heldout", "wrapped", "shard_characters")}
        return recorded | {"min_tokens": 1}  # an option of older versions


def build_corpus(
    files: Sequence[str | Path] | str | Path | None,
    tokenizer: Tokenizer | str | Path,
    out: str | Path,
    *,
    languages: Mapping[str, Sequence[str | Path] | str | Path] | None = None,
    workers: int | None = None,
    pmi: bool = False,
    fresh: bool = False,
    bar: Bar = lambda what, total: nullcontext(lambda done: None),
    engine: Engine = "local",
    address: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Build a corpus folder from files of text or records, and return its summary. Run again to continue.

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
    started, finished = time.monotonic(), 0
    with disk_errors(out, "finished shards are kept, run again to continue"):
        if fresh:
            shutil.rmtree(building, ignore_errors=True)
        if not _is_finished(out, plan, sources, fresh):
            _start(building, plan, tokenizer)
            encoder = DocumentEncoder(building / "tokenizer", settings.wrapped)
            ray = engine == "ray"
            report = ReadReport()
            pools = ray_pool(encode_documents, encoder, workers, address) if ray else ProcessPool(encoder, workers)
            with pools as pool:
                writer = ShardWriter(building, settings, encoder.dtype, len(names), pool)
                finished = len(writer.finished)
                with bar("characters", plain_size([path for path, _ in sources])) as show:
                    writer.write(_documents(sources, settings, report), show)
            _finish(building, plan, tokenizer.size, sources, report)
            for folder in (building / "shards", building / "tokenizer", building):
                sync(folder)
            replace_folder(building, out)
        for folder in (out.parent, out):
            remove_stale(folder)
        shutil.rmtree(out / "records", ignore_errors=True)
        (out / "plan.json").unlink(missing_ok=True)
        if pmi and "collocations" not in read_meta(out):
            _add_collocations(out, bar)
    return summarise(out) | {"seconds": time.monotonic() - started, "kept_shards": finished}


def _sources(files: Any, languages: Mapping[str, Any] | None) -> tuple[Sources, list[str]]:
    """Every file with the number of its language, and the names of the languages."""
    if languages and files:
        raise EverybertError("some files have a language and some have none: name them all as LANGUAGE=FILE")
    if not languages:
        return [(path, 0) for path in expand(files or [])], []
    if len(languages) > 256:
        raise EverybertError(f"{len(languages)} languages: a corpus holds at most 256")
    names = sorted(languages)
    return [(path, number) for number, name in enumerate(names) for path in expand(languages[name])], names


def _listed(sources: Sources) -> list[list[Any]]:
    """The sources as corpus.json records them: name, size, modification time, language."""
    states = [(path, language, path.stat() if path.exists() else None) for path, language in sources]
    return [[path.name, s.st_size if s else -1, s.st_mtime_ns if s else -1, n] for path, n, s in states]


def _is_finished(out: Path, plan: dict[str, Any], sources: Sources, fresh: bool) -> bool:
    """Whether `out` is this corpus already. Anything else there is an error."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / "corpus.json").exists():
        raise EverybertError(f"{out} exists and is not a corpus: choose another folder")
    if fresh:
        return False
    meta = read_meta(out)
    changed = changes(out / "corpus.json", plan)
    if meta["sources"] != _listed(sources) or not all(path.is_file() for path, _ in sources):
        changed.append("inputs")  # the earlier content of a pipe is unknown
    if other := ", ".join(changed):
        raise EverybertError(f"{out} was built with other {other}: choose another folder, or give fresh=True")
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
    for folder in (building, building / "records", building / "tokenizer"):
        remove_stale(folder)
    if changed := ", ".join(changes(file, plan)):
        remedy = "continue with the same, or start over with fresh=True"
        raise EverybertError(f"the unfinished build {building} has other {changed}: {remedy}")


# ── documents to shards ─────────────────────────────────────────────────────────────────────────────────────


def _documents(sources: Sources, options: BuildOptions, report: ReadReport) -> Iterator[tuple[Document, bytes]]:
    """(document, its 128-bit digest) in order, without duplicates. The digests take about 110 bytes per document."""
    seen: set[bytes] = set()
    for path, language in sources:
        column, errors, per_line = options.column, options.errors, options.per_line
        for text in read_documents(path, column=column, errors=errors, per_line=per_line, report=report):
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                yield (text, language), digest
            else:
                report.duplicates += 1


class ShardWriter:
    """Takes documents in order, encodes them in units through a pool, and writes the results as shards.

    The record of a shard, written last, makes it finished.
    """

    def __init__(self, folder: Path, options: BuildOptions, dtype: np.dtype, languages: int, pool: Any):
        self.folder, self.options, self.dtype, self.languages, self.pool = folder, options, dtype, languages, pool
        self.finished = {int(file.stem) for file in (folder / "records").glob("*.json")}
        self.number = 0
        self._pending: deque[Callable[[], None]] = deque()  # results and ends of shards, in the order of the text
        self._parts: dict[str, list[EncodedDocuments]] = {split: [] for split in SPLITS}
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._size, self._content = 0, hashlib.blake2b(digest_size=16)
        self._units: dict[str, list[Document]] = {split: [] for split in SPLITS}
        self._sizes = dict.fromkeys(SPLITS, 0)  # characters of each unit

    def write(self, documents: Iterator[tuple[Document, bytes]], show: Callable[[int], None]) -> None:
        """Write every shard that is not finished."""
        read = 0
        for number, (document, digest) in enumerate(documents):
            self.add(document, digest)
            read += len(document[0])
            if number % 256 == 0:
                show(read)
        self.end_shard()
        self.settle(0)
        if any(number >= self.number for number in self.finished):
            raise self.changed()

    def add(self, document: Document, digest: bytes) -> None:
        """Add the next document."""
        text, language = document
        self._content.update(digest + bytes([language]))
        self._size += len(text)
        if self.number not in self.finished:
            heldout = int.from_bytes(digest[:8], "big") < self.options.heldout * 2**64
            split = "heldout" if heldout else "train"
            self._units[split].append(document)
            self._sizes[split] += len(text)
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
            self._pending.append(lambda: self._parts[split].append(result()))
            self._units[split], self._sizes[split] = [], 0
        self.settle(self.pool.depth)

    def settle(self, most: int) -> None:
        """Wait for results, in order, until at most `most` are pending."""
        while len(self._pending) > most:
            self._pending.popleft()()

    def close(self, number: int, digest: str) -> None:
        """Write shard `number`, or check that the finished one has the same documents."""
        file = self.folder / "records" / f"{number:05d}.json"
        if number in self.finished:
            if read_json(file, "start over with fresh=True")["digest"] != digest:
                raise self.changed()
            return
        record: dict[str, Any] = {"digest": digest, "splits": {}, "files": {}}
        for split, parts in self._parts.items():
            name = f"{number:05d}" if split == "train" else f"{number:05d}-{split}"
            record["splits"][split] = self._write(name, parts, record["files"])
        write_json(file, record)
        self._parts = {split: [] for split in SPLITS}

    def changed(self) -> EverybertError:
        """The error for inputs that changed between two runs."""
        return EverybertError(
            f"the inputs differ from those the unfinished build {self.folder} began with: "
            "give it the same files in the same order, or start over with fresh=True"
        )

    def _write(self, name: str, parts: list[EncodedDocuments], files: dict[str, Any]) -> dict[str, Any]:
        kinds: tuple[Any, ...] = (self.dtype, np.int64, np.int64, np.uint8)
        columns = ([np.empty(0, kind), *(part[i] for part in parts)] for i, kind in enumerate(kinds))
        tokens, lengths, counts, languages = map(np.concatenate, columns)
        if len(counts):
            arrays = {"sentences": offsets(lengths), "documents": offsets(counts)}
            arrays |= {"languages": languages} if self.languages > 1 else {}
            for path in write_shard(self.folder / "shards", name, tokens, arrays):
                files[f"shards/{path.name}"] = size_and_hash(path)
        return {
            "name": name,
            "documents": len(counts),
            "sentences": len(lengths),
            "tokens": len(tokens),
            "unknown": sum(part.unknown for part in parts),
            "empty": sum(part.empty for part in parts),
            "languages": np.bincount(languages, minlength=max(1, self.languages)).tolist(),
        }


# ── shards to a corpus ──────────────────────────────────────────────────────────────────────────────────────


def _finish(building: Path, plan: dict[str, Any], vocab_size: int, sources: Sources, report: ReadReport) -> None:
    """Write corpus.json from the records of the shards, and the token counts of the training split."""
    files = sorted((building / "records").glob("*.json"))
    records = [read_json(file, "start over with fresh=True") for file in files]
    shards = {split: [record["splits"][split] for record in records] for split in SPLITS}
    if not any(part["documents"] for part in shards["train"]):
        shutil.rmtree(building)
        raise EverybertError(
            "every document fell into the held-out split: lower heldout or add documents"
            if any(part["documents"] for part in shards["heldout"])
            else f"no documents in {len(sources)} files: check that they hold text"
        )
    both = shards["train"] + shards["heldout"]
    held_out = sum(part["tokens"] for part in shards["heldout"])
    if held_out < LEAST_HELDOUT and plan["options"]["heldout"]:
        log.warning("only %d tokens are held out, too few to measure a model: raise heldout or add text", held_out)
    splits = {split: [part["name"] for part in parts if part["documents"]] for split, parts in shards.items()}
    hashes = {name: state for record in records for name, state in record["files"].items()}
    left_out = {"duplicates": report.duplicates, "replaced": report.replaced, "cut": report.cut}
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
        "sources": _listed(sources),
        "splits": splits,
        "counts": _counts(both) | left_out,
        "split_counts": {split: _counts(parts) for split, parts in shards.items()},
        "language_documents": np.sum([part["languages"] for part in both], axis=0).tolist(),
        "files": hashes,
    }
    write_json(building / "corpus.json", plan | described)


def _counts(parts: list[dict[str, Any]]) -> dict[str, int]:
    return {count: sum(part.get(count, 0) for part in parts) for count in COUNTS}


def _add_collocations(folder: Path, bar: Bar) -> None:
    """Mine collocations into a finished corpus."""
    corpus = Corpus.open(folder)
    with bar("n-grams", WORDS) as show:
        ngrams, scores = mine(corpus, Tokenizer.load(corpus.tokenizer_path), show)
    ids = np.array([i for ngram in ngrams for i in ngram], np.int32)
    with atomic_file(folder / "pmi.npz") as draft, draft.open("wb") as file:
        np.savez(file, ids=ids, offsets=offsets(np.array([len(n) for n in ngrams])), scores=scores)
    meta = corpus.meta | {"collocations": len(ngrams)}
    meta["files"]["pmi.npz"] = size_and_hash(folder / "pmi.npz")
    write_json(folder / "corpus.json", meta)


def summarise(path: str | Path) -> dict[str, Any]:
    """The counts of a finished corpus: documents, sentences, tokens, unknown tokens; what was left out; languages."""
    meta = read_meta(path)
    if missing := {"counts", "split_counts", "languages", "language_documents"} - meta.keys():
        raise EverybertError(f"{path}/corpus.json has no {min(missing)!r}; build the corpus again")
    return {
        "path": str(path),
        "counts": meta["counts"],
        "splits": meta["split_counts"],
        "languages": dict(zip(meta["languages"], meta["language_documents"])),
        "collocations": meta.get("collocations"),
        "unknown_rate": meta["counts"]["unknown"] / max(1, meta["counts"]["tokens"]),
    }


def verify(path: str | Path) -> None:
    """Compare every file of a corpus with its recorded size and hash."""
    meta = read_meta(path)
    for name in meta["files"]:
        check_file(Path(path), meta, name)
