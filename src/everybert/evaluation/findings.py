"""What the data doctor says: findings, with examples and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SHOWN = 3
"""Examples of a finding."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    severity: Severity
    """error: training would fail or mislead; warning: scores will suffer; note: good to know."""
    kind: str
    message: str
    remedy: str = ""
    count: int = 0
    """How many rows it concerns."""
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.message}"]
        lines += [f"    {example}" for example in self.examples]
        return "\n".join([*lines, f"    → {self.remedy}"] if self.remedy else lines)


def finding(severity: Severity, kind: str, message: str, remedy: str, examples: Sequence[str]) -> Finding:
    """A finding about as many rows as there are examples, of which the first few are shown."""
    shown = tuple(shorten(e) for e in examples[:SHOWN])
    return Finding(severity, kind, message, remedy, len(examples), shown)


def shorten(text: str, size: int = 160) -> str:
    """One line of at most so many characters."""
    text = " ".join(str(text).split())
    return text if len(text) <= size else text[: size - 1] + "…"


def texts_of(task: str, given: Any) -> list[str]:
    """The texts of one input."""
    if task == "tag":
        return [" ".join(given)]
    if task == "answer":
        return [given.question, given.context]
    if task == "choose":
        return [given[0], *given[1]]
    return [given] if isinstance(given, str) else list(given)


def key_of(task: str, given: Any) -> tuple[str, ...]:
    """Equal for inputs that differ in case and white space only."""
    return tuple(" ".join(text.casefold().split()) for text in texts_of(task, given))
