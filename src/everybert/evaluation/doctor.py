"""The data doctor: what is wrong with labelled data, told before training, each finding with examples and a remedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.evaluation.checks import TASK_CHECKS, check_labels, check_tokens, count_labels, histogram
from everybert.evaluation.findings import Finding, Severity, finding, key_of, texts_of
from everybert.store.hub import resolve
from everybert.store.huggingface import read_config
from everybert.tasks.folder import MODULES
from everybert.tasks.records import Examples, Source
from everybert.tasks.sentences import read_raw
from everybert.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found, gravest first; and the tables a report shows."""

    task: str
    rows: dict[str, int]
    """Usable rows of each set."""
    findings: tuple[Finding, ...]
    labels: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each set, how often each label occurs."""
    lengths: dict[str, list[tuple[int | None, int]]] = field(default_factory=dict)
    """For each set, (tokens up to, examples): the histogram of lengths; None is more than the last."""
    window: int | None = None

    @property
    def healthy(self) -> bool:
        """No error and no warning."""
        return all(f.severity == "note" for f in self.findings)

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "nothing is wrong"


def examine(
    task: str,
    train: Source,
    dev: Source | None = None,
    model: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    window: int | None = None,
) -> Diagnosis:
    """Look through labelled data. With a `model`, lengths and pieces are those of its tokenizer."""
    if task not in MODULES:
        raise EverybertError(f"the tasks are {', '.join(MODULES)}; there is no {task!r}")
    sets = {"train": _read(task, train, columns)}
    if dev is not None:
        sets["dev"] = _read(task, dev, columns)
    findings: list[Finding] = []
    for name, examples in sets.items():
        findings += _bad_rows(name, examples)
        findings += _repeats(name, task, examples)
        findings += TASK_CHECKS.get(task, lambda name, examples: [])(name, examples)
    labels = {name: counts for name, examples in sets.items() if (counts := count_labels(task, examples))}
    findings += check_labels(task, labels, sets)
    if "dev" in sets:
        findings += _leaks(task, sets["train"], sets["dev"])
    lengths: dict[str, list[tuple[int | None, int]]] = {}
    if model is not None:
        folder = resolve(model)
        tokenizer, config = Tokenizer.load(folder), read_config(folder)[0]
        window = min(window or config.max_positions, config.max_positions)
        for name, examples in sets.items():
            sizes, more = check_tokens(name, task, examples, tokenizer, window)
            findings += more
            lengths[name] = histogram(sizes)
    order = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda f: order[f.severity])
    rows = {name: len(examples) for name, examples in sets.items()}
    return Diagnosis(task, rows, tuple(findings), labels, lengths, window)


def _read(task: str, source: Source, columns: Mapping[str, str] | None) -> Examples:
    """Everything that can be read; the rest is in `bad`."""
    if task == "tag":
        return read_raw(source, columns, skip_bad=True)
    examples: Examples = MODULES[task].read(source, columns, skip_bad=True)
    return examples


def _bad_rows(name: str, examples: Examples) -> list[Finding]:
    if not examples.bad:
        return []
    message = f"{len(examples.bad)} rows of {name} cannot be used"
    return [finding("error", "bad rows", message, "mend them, or train with skip_bad", examples.bad)]


def _target(task: str, value: Any) -> Any:
    if task == "answer":
        return tuple(sorted({" ".join(g.text.casefold().split()) for g in value}))
    return " ".join(value) if task == "tag" else str(value)


def _trivial(task: str, given: Any) -> bool:
    """A sentence of three words or less to tag ("Why ?"): it is natural that it comes again."""
    return task == "tag" and len(given) <= 3


def _repeats(name: str, task: str, examples: Examples) -> list[Finding]:
    """Inputs that occur more than once, and those of them whose targets differ."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, given in enumerate(examples.inputs):
        if not _trivial(task, given):
            groups[key_of(task, given)].append(i)
    repeated = {key: rows for key, rows in groups.items() if len(rows) > 1}
    findings = []
    conflicts = {
        key: rows for key, rows in repeated.items() if len({_target(task, examples.targets[i]) for i in rows}) > 1
    }
    if conflicts and task != "embed":
        shown = [
            f"rows {', '.join(str(i + 1) for i in rows[:4])}: {' / '.join(key)} → "
            + " and ".join(sorted({str(_target(task, examples.targets[i])) for i in rows}))
            for key, rows in conflicts.items()
        ]
        message = f"{len(conflicts)} texts of {name} occur with different labels"
        findings.append(finding("warning", "conflicts", message, "decide on one label, or remove them", shown))
    same = {key: rows for key, rows in repeated.items() if key not in conflicts}
    if same:
        extra = sum(len(rows) - 1 for rows in same.values())
        shown = [f"{len(rows)} times: {' / '.join(key)}" for key, rows in same.items()]
        share = extra / len(examples)
        severity: Severity = "warning" if share > 0.01 else "note"
        message = f"{extra} rows of {name} ({share:.1%}) repeat another row"
        findings.append(finding(severity, "duplicates", message, "remove the repetitions", shown))
    return findings


def _leaks(task: str, train: Examples, dev: Examples) -> list[Finding]:
    """Dev inputs that training saw; for questions, contexts too."""
    seen = {key_of(task, given) for given in train.inputs}
    found = [given for given in dev.inputs if key_of(task, given) in seen and not _trivial(task, given)]
    findings = []
    if found:
        share = len(found) / len(dev)
        message = f"{len(found)} rows of dev ({share:.1%}) are in train too: scores will be too high"
        shown = [" / ".join(texts_of(task, given)) for given in found]
        severity: Severity = "error" if share > 0.01 else "warning"
        findings.append(finding(severity, "leakage", message, "remove them from one of the two", shown))
    if task == "answer":
        contexts = {key_of(task, q)[1] for q in train.inputs}
        shared = sorted({q.context for q in dev.inputs if key_of(task, q)[1] in contexts})
        if shared:
            message = f"{len(shared)} contexts are in train and dev"
            findings.append(finding("warning", "leakage", message, "split by context, not by question", shared))
    return findings
