"""Shards written one after another, each with a record that makes it finished."""

from pathlib import Path
from typing import Any

import numpy as np

from everybert.corpus.encode import Encoded
from everybert.corpus.shards import Shard, write_shard
from everybert.files import atomic_file, size_and_hash, write_json

SPLITS = ("train", "heldout")
EDGES = (8, 16, 32, 64, 128, 256, 512, 1024)  # upper ends of the histograms' bins, in tokens
BINS = tuple(f"{a}-{b}" for a, b in zip((1, *(edge + 1 for edge in EDGES)), EDGES)) + (f"{EDGES[-1] + 1}+",)


class ShardWriter:
    """Gathers encoded units and writes them as shards, with a record of each in `records`."""

    def __init__(self, shards: Path, records: Path, dtype: np.dtype, languages: int):
        self.shards, self.records, self.dtype, self.languages = shards, records, dtype, languages
        self.tokens = 0  # written or gathered by this process
        self._parts: dict[str, list[Encoded]] = {split: [] for split in SPLITS}

    def add(self, split: str, part: Encoded) -> None:
        """Append the next unit of a split."""
        self._parts[split].append(part)
        self.tokens += len(part.tokens)

    def close(self, number: int, digest: str) -> None:
        """Write what has been gathered as shard `number`; its record, written last, makes it finished."""
        record: dict[str, Any] = {"digest": digest, "splits": {}, "files": {}}
        for split, parts in self._parts.items():
            name = f"{number:05d}" if split == "train" else f"{number:05d}-{split}"
            record["splits"][split] = self._write(name, parts, record["files"])
        write_json(self.records / f"{number:05d}.json", record)
        self._parts = {split: [] for split in SPLITS}

    def _write(self, name: str, parts: list[Encoded], files: dict[str, Any]) -> dict[str, Any]:
        shard = _join(parts, self.dtype)
        documents, sentences = len(shard.documents) - 1, len(shard.sentences) - 1
        if documents:
            for path in write_shard(self.shards, name, shard, self.languages > 1):
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


def _join(parts: list[Encoded], dtype: np.dtype) -> Shard:
    """Units in order to one shard; the pieces of a document that was cut become one again."""
    tokens = np.concatenate([np.empty(0, dtype), *(part.tokens for part in parts)])
    sentences = np.concatenate([np.zeros(1, np.int64), *(part.sentence_lengths for part in parts)]).cumsum()
    counts = np.concatenate([np.empty(0, np.int64), *(part.piece_sentences for part in parts)])
    first = np.concatenate([np.empty(0, bool), *(part.piece_first for part in parts)])
    language = np.concatenate([np.empty(0, np.uint8), *(part.piece_language for part in parts)])[first]
    totals = np.add.reduceat(counts, np.flatnonzero(first)) if len(counts) else counts
    kept = totals > 0
    documents = np.concatenate([[0], totals[kept].cumsum()])
    return Shard(tokens, sentences, documents, language[kept])


def _histogram(lengths: np.ndarray) -> list[int]:
    return np.bincount(np.searchsorted(EDGES, lengths), minlength=len(BINS)).tolist()


def write_array(path: Path, array: np.ndarray | None = None, **named: np.ndarray) -> None:
    """Write an .npy or, from named arrays, an .npz, atomically."""
    with atomic_file(path) as draft, draft.open("wb") as file:
        if array is not None:
            np.save(file, array, allow_pickle=False)
        else:
            np.savez(file, **named)  # type: ignore[arg-type]
