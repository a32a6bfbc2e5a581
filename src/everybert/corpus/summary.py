"""What a corpus holds, in numbers."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everybert.corpus.shards import read_meta
from everybert.corpus.writing import BINS, SPLITS
from everybert.errors import EverybertError
from everybert.files import size_and_hash

COUNTS = ("documents", "sentences", "tokens", "unknown", "short")


@dataclass(frozen=True)
class CorpusSummary:
    """What a build made; `counts` and each of `splits` hold documents, sentences, tokens, unknown, short."""

    path: str
    counts: dict[str, int]
    splits: dict[str, dict[str, int]]
    sentence_lengths: dict[str, int]
    document_lengths: dict[str, int]
    languages: dict[str, int]
    collocations: int | None = None
    seconds: float = 0.0
    kept_shards: int = 0  # finished by an earlier, interrupted build

    @property
    def unknown_rate(self) -> float:
        """The share of tokens that are the unknown token."""
        return self.counts["unknown"] / max(1, self.counts["tokens"])

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self) | {"unknown_rate": self.unknown_rate}


def gather(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The shards' records as the parts of corpus.json: splits, counts, histograms, files."""
    made = {split: [record["splits"][split] for record in records] for split in SPLITS}
    every = [part for parts in made.values() for part in parts]
    return {
        "splits": {split: [p["name"] for p in parts if p["documents"]] for split, parts in made.items()},
        "counts": _counts(every),
        "split_counts": {split: _counts(parts) for split, parts in made.items()},
        "sentence_lengths": _sums(every, "sentence_lengths"),
        "document_lengths": _sums(every, "document_lengths"),
        "language_documents": _sums(every, "languages"),
        "files": {name: state for record in records for name, state in record["files"].items()},
    }


def _counts(parts: list[dict[str, Any]]) -> dict[str, int]:
    return {count: sum(part[count] for part in parts) for count in COUNTS}


def _sums(parts: list[dict[str, Any]], key: str) -> list[int]:
    return np.sum([part[key] for part in parts], axis=0).astype(int).tolist()


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
    """Compare every file of a corpus with the size and hash it was finished with."""
    path = Path(path)
    for name, state in read_meta(path)["files"].items():
        if not (path / name).exists() or size_and_hash(path / name) != state:
            raise EverybertError(f"{path / name} is missing or was changed: build the corpus again")
