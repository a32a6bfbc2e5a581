"""The data doctor: problems of labelled data, found before training, each with examples and a remedy."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from everybert.errors import EverybertError
from everybert.store.hub import resolve
from everybert.store.huggingface import read_config
from everybert.tasks import dataset, task_class
from everybert.tasks.dataset import Examples, Source, View, plain
from everybert.text.tokenizer import Tokenizer

Severity = Literal["error", "warning", "note"]
SHOWN = 3
"""Examples of a finding."""
FEW = 10
"""A label with fewer examples than this is hard to learn."""


@dataclass(frozen=True)
class Finding:
    """One problem."""

    severity: Severity
    """error: training would fail or mislead; warning: scores will suffer; note: good to know."""
    kind: str
    message: str
    remedy: str = ""
    count: int = 0
    """How many rows it concerns."""
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.severity}: {self.message}", *(f"    {example}" for example in self.examples)]
        return "\n".join([*lines, f"    → {self.remedy}"] if self.remedy else lines)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the most severe first; and the tables of a report."""

    task: str
    rows: dict[str, int]
    """Usable rows of each set."""
    findings: tuple[Finding, ...]
    labels: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each set, how often each label occurs."""
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each set, the tokens of its inputs: median, 95th percentile, longest."""
    window: int | None = None

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def doctor(
    task: str,
    data: Source,
    dev: Source | None = None,
    model: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Check labelled data. With a `model`, lengths and pieces are those of its tokenizer."""
    kind = task_class(task)
    view = kind.view
    sources = {"train": data} if dev is None else {"train": data, "dev": dev}
    sets = {name: kind.read(source, columns, skip_bad=True) for name, source in sources.items()}
    counts = {name: Counter(x for t in e.targets for x in view.labels(t)) for name, e in sets.items()}
    findings: list[Finding] = check_labels(counts["train"])
    for name, examples in sets.items():
        message = f"{len(examples.bad)} rows of {name} cannot be used"
        findings += finding("error", "bad rows", message, "fix them, or leave them out (skip_bad)", examples.bad)
        findings += [Finding("note", "reading", note) for note in examples.notes]
        findings += check_repeats(name, view, examples)
    try:  # what training itself refuses
        kind.fit(sets["train"])
        if "dev" in sets:
            dataset.label_ids(sorted(counts["dev"]), sorted(counts["train"]), sets["dev"].where)
    except EverybertError as error:
        findings.append(Finding("error", "labels", str(error)))
    if "dev" in sets:
        findings += check_leaks(view, sets["train"], sets["dev"])
    lengths, window = {}, None
    if model is not None:
        folder = resolve(model)
        tokenizer, window = Tokenizer.load(folder), read_config(folder)[0].max_positions
        for name, examples in sets.items():
            lengths[name], more = check_tokens(name, view, examples, tokenizer, window)
            findings += more
    findings.sort(key=lambda f: ("error", "warning", "note").index(f.severity))
    labels = {name: dict(counter.most_common()) for name, counter in counts.items() if counter}
    return Diagnosis(task, {n: len(e) for n, e in sets.items()}, tuple(findings), labels, lengths, window)


def finding(severity: Severity, kind: str, message: str, remedy: str, examples: Sequence[str]) -> list[Finding]:
    """A finding about the rows `examples`, of which the first few are shown; an empty list if there are none."""
    lines = [" ".join(str(e).split()) for e in examples[:SHOWN]]
    shown = tuple(line if len(line) <= 160 else line[:159] + "…" for line in lines)
    return [Finding(severity, kind, message, remedy, len(examples), shown)] if examples else []


# ── checks of every task ─────────────────────────────────────────────────────────────────────────────────────


def check_repeats(name: str, view: View, examples: Examples) -> list[Finding]:
    """Inputs that occur more than once, and those of them whose targets differ."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, example in enumerate(examples.inputs):
        if key := view.key(example):
            groups[key].append(i)
    extra, same, conflicts = 0, [], []
    for key, rows in groups.items():
        targets = sorted({view.target(examples.targets[i]) for i in rows})
        if len(targets) > 1:
            where = ", ".join(str(i + 1) for i in rows[:4])
            conflicts.append(f"rows {where}: {' / '.join(key)} → {' and '.join(targets)}")
        elif len(rows) > 1:
            extra += len(rows) - 1
            same.append(f"{len(rows)} times: {' / '.join(key)}")
    message = f"{len(conflicts)} texts of {name} occur with different labels"
    findings = finding("warning", "conflicts", message, "decide on one label, or remove them", conflicts)
    share = extra / len(examples)
    message = f"{extra} rows of {name} ({share:.1%}) repeat another row"
    severity: Severity = "warning" if share > 0.01 else "note"
    return findings + finding(severity, "duplicates", message, "remove the repetitions", same)


def check_leaks(view: View, train: Examples, dev: Examples) -> list[Finding]:
    """Dev inputs that are in the training set; for questions, contexts too."""
    seen = set(map(view.key, train.inputs)) - {()}
    leaked = [" / ".join(view.texts(example)) for example in dev.inputs if view.key(example) in seen]
    share = len(leaked) / len(dev)
    severity: Severity = "error" if share > 0.01 else "warning"
    message = f"{len(leaked)} rows of dev ({share:.1%}) are in train too: scores will be too high"
    findings = finding(severity, "leakage", message, "remove them from one of the two", leaked)
    if view.contexts:
        contexts = {key[-1] for key in seen}
        shared = sorted({context for _, context in dev.inputs if plain(context) in contexts})
        message = f"{len(shared)} contexts are in train and dev"
        findings += finding("warning", "leakage", message, "split by context, not by question", shared)
    return findings


def check_labels(counts: Mapping[str, int]) -> list[Finding]:
    """Labels that are rare, or unbalanced."""
    if len(counts) < 2:
        return []
    rare = [f"{label}: {count}" for label, count in counts.items() if count < FEW]
    message = f"{len(rare)} labels have fewer than {FEW} examples in train"
    findings = finding("warning", "rare labels", message, "collect more, or merge them", rare)
    most, least = max(counts.values()), min(counts.values())
    if most > 10 * least:
        message = f"the labels are unbalanced: {most} to {least} examples"
        remedy = "judge by f1_macro rather than accuracy; classify can balance them (class_weights balanced)"
        findings.append(Finding("warning", "balance", message, remedy, most))
    return findings


def check_tokens(
    name: str, view: View, examples: Examples, tokenizer: Tokenizer, window: int
) -> tuple[dict[str, int], list[Finding]]:
    """The tokens of the inputs, and findings: lengths against the window, tokens per word, unknown tokens."""
    each = [view.sequences(example) for example in examples.inputs]
    ids = tokenizer.ids_batch([sequence for some in each for sequence in some])
    left = iter(ids)
    rows = [[next(left) for _ in some] for some in each]
    sizes = [max(map(len, row)) for row in rows]
    texts = [" / ".join(view.texts(example)) for example in examples.inputs]
    over = [f"{size} tokens: {text}" for size, text in zip(sizes, texts) if size > window]
    message = f"{len(over)} rows of {name} ({len(over) / len(sizes):.1%}) are longer than the window of {window} tokens"
    remedy = "what does not fit is cut" if view.cuts else "they are read in overlapping windows; nothing is lost"
    findings = finding("warning" if view.cuts else "note", "length", message, remedy, over)
    total, words = sum(map(len, ids)), sum(len(text.split()) for text in texts)
    if total > 4 * words > 80:
        message = f"{name} has {total / words:.1f} tokens per word: the tokenizer was made for other text"
        findings += finding("warning", "tokenisation", message, "choose a model of this language or domain", texts)
    if unknown := sum(token == tokenizer.unk_id for x in ids for token in x):
        message = f"{unknown} tokens of {name} ({unknown / total:.2%}) are unknown to the tokenizer"
        severity: Severity = "warning" if unknown > 0.01 * total else "note"
        remedy = "their letters are not in its vocabulary: choose another model if they matter"
        missing = [text for text, row in zip(texts, rows) if any(tokenizer.unk_id in x for x in row)]
        findings += finding(severity, "unknown pieces", message, remedy, missing)
    median, most = np.percentile(sizes, (50, 95), method="higher").tolist()
    return {"median": median, "95 %": most, "longest": max(sizes)}, findings
