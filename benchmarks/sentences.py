"""Sentences of mixed length for the embedding benchmarks: generated, or sampled from the lines of a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

WORDS = [
    *("the", "a", "this", "every", "old", "small", "bright", "river", "engine", "theory", "market", "garden"),
    *("winter", "signal", "paper", "teacher", "city", "carries", "finds", "leaves", "builds", "remembers"),
    *("under", "over", "between", "quickly", "never", "often", "because", "although", "while", "and", "or"),
]


def made_up(count: int, draw: random.Random) -> list[str]:
    """Sentences of mixed length: most are short, a few have hundreds of words."""
    lengths = [min(200, max(3, int(draw.lognormvariate(2.9, 0.8)))) for _ in range(count)]
    return [" ".join(draw.choices(WORDS, k=n)).capitalize() + "." for n in lengths]


def lines_of(path: Path) -> list[str]:
    """The lines of a file that are not empty."""
    found = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in found if line.strip()]


def drawn(lines: Sequence[str], count: int, draw: random.Random) -> list[str]:
    """Texts of one to five random lines."""
    from everybert.text.sentences import split_sentences

    texts = []
    for _ in range(count):
        parts = split_sentences(draw.choice(lines))
        start = draw.randrange(len(parts))
        texts.append(" ".join(parts[start : start + draw.choice((1, 1, 1, 2, 2, 3, 5))]))
    return texts


def sentences(path: Path | None, count: int) -> list[str]:
    """Sampled from a file, or generated; with a fixed seed."""
    draw = random.Random(0)
    return drawn(lines_of(path), count, draw) if path else made_up(count, draw)
