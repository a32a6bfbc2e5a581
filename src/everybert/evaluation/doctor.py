"""The data doctor: problems of labelled data, found before training, each with examples and a remedy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from everybert.store.hub import resolve
from everybert.store.huggingface import read_config
from everybert.tasks import dataset, task_class
from everybert.tasks import words as wording
from everybert.tasks.dataset import Examples, Source
from everybert.text.tokenizer import Tokenizer

Severity = Literal["error", "warning", "note"]
SHOWN = 3
"""Examples of a finding."""
FEW = 10
"""A label with fewer examples than this is hard to learn."""
EDGES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


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
        lines = [f"{self.severity}: {self.message}"]
        lines += [f"    {example}" for example in self.examples]
        return "\n".join([*lines, f"    → {self.remedy}"] if self.remedy else lines)


def finding(severity: Severity, kind: str, message: str, remedy: str, examples: Sequence[str]) -> list[Finding]:
    """A finding about as many rows as there are examples, the first of which are shown; none without examples."""
    lines = [" ".join(str(e).split()) for e in examples[:SHOWN]]
    shown = tuple(line if len(line) <= 160 else line[:159] + "…" for line in lines)
    return [Finding(severity, kind, message, remedy, len(examples), shown)] if examples else []


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the most severe first; and the tables of a report."""

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
    """Check labelled data. With a `model`, lengths and pieces are those of its tokenizer."""
    task_class(task)
    view = VIEWS[task]
    sources = {"train": train} if dev is None else {"train": train, "dev": dev}
    sets = {name: view.read(task, source, columns) for name, source in sources.items()}
    findings: list[Finding] = []
    for name, examples in sets.items():
        message = f"{len(examples.bad)} rows of {name} cannot be used"
        findings += finding("error", "bad rows", message, "fix them, or train with skip_bad", examples.bad)
        findings += check_repeats(name, view, examples)
        findings += view.check(name, examples)
    labels = {name: dict(found.most_common()) for name, e in sets.items() if (found := view.labels(e))}
    if labels:
        findings += view.check_labels(labels["train"], sets["train"])
    if "dev" in labels and view.open:
        findings += check_unseen(labels["train"], labels["dev"])
    if "dev" in sets:
        findings += check_leaks(view, sets["train"], sets["dev"])
    lengths: dict[str, list[tuple[int | None, int]]] = {}
    if model is not None:
        folder = resolve(model)
        tokenizer, most = Tokenizer.load(folder), read_config(folder)[0].max_positions
        window = min(window or most, most)
        for name, examples in sets.items():
            sizes, more = check_tokens(name, view, examples, tokenizer, window)
            findings += more
            lengths[name] = histogram(sizes)
    order = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda f: order[f.severity])
    rows = {name: len(examples) for name, examples in sets.items()}
    return Diagnosis(task, rows, tuple(findings), labels, lengths, window)


def key_of(view: View, given: Any) -> tuple[str, ...]:
    """Equal for inputs that differ in case and white space only."""
    return tuple(" ".join(text.casefold().split()) for text in view.texts(given))


# ── checks of every task ─────────────────────────────────────────────────────────────────────────────────────


def check_repeats(name: str, view: View, examples: Examples) -> list[Finding]:
    """Inputs that occur more than once, and those of them whose targets differ."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, given in enumerate(examples.inputs):
        if not view.trivial(given):
            groups[key_of(view, given)].append(i)
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
    remedy = "decide on one label, or remove them"
    findings = finding("warning", "conflicts", message, remedy, conflicts if view.one_target else [])
    share = extra / len(examples)
    message = f"{extra} rows of {name} ({share:.1%}) repeat another row"
    severity: Severity = "warning" if share > 0.01 else "note"
    return findings + finding(severity, "duplicates", message, "remove the repetitions", same)


def check_leaks(view: View, train: Examples, dev: Examples) -> list[Finding]:
    """Dev inputs that are in the training set; for questions, contexts too."""
    seen = {key_of(view, given) for given in train.inputs}
    found = [given for given in dev.inputs if key_of(view, given) in seen and not view.trivial(given)]
    share = len(found) / len(dev)
    severity: Severity = "error" if share > 0.01 else "warning"
    message = f"{len(found)} rows of dev ({share:.1%}) are in train too: scores will be too high"
    shown = [" / ".join(view.texts(given)) for given in found]
    findings = finding(severity, "leakage", message, "remove them from one of the two", shown)
    if not view.contexts:
        return findings
    contexts = {key[1] for key in seen}
    shared = sorted({q.context for q in dev.inputs if key_of(view, q)[1] in contexts})
    message = f"{len(shared)} contexts are in train and dev"
    return findings + finding("warning", "leakage", message, "split by context, not by question", shared)


def check_tokens(
    name: str, view: View, examples: Examples, tokenizer: Tokenizer, window: int
) -> tuple[list[int], list[Finding]]:
    """(tokens of each input, findings): lengths against the window, tokens per word, unknown tokens."""
    flat = [view.texts(given) for given in examples.inputs]
    texts = [text for each in flat for text in each]
    ids = tokenizer.ids_batch(texts, specials=False)
    left = iter(ids)
    parts = [[len(next(left)) for _ in each] for each in flat]
    special = tokenizer.pair_special if view.pairs else tokenizer.single_special
    sizes = [view.tokens(each) + special for each in parts]
    over = [f"{size} tokens: {' / '.join(each)}" for size, each in zip(sizes, flat) if size > window]
    share = f"{len(over) / len(sizes):.1%}"
    message = f"{len(over)} rows of {name} ({share}) are longer than the window of {window} tokens"
    remedy = "what does not fit is cut" if view.cuts else "they are read in overlapping windows; nothing is lost"
    findings = finding("warning" if view.cuts else "note", "length", message, remedy, over)
    total, words = sum(map(len, ids)), sum(len(text.split()) for text in texts)
    if total > 3 * words and words > 20:
        message = f"{name} has {total / words:.1f} pieces per word: the tokenizer was made for other text"
        first = [text for each in flat[:500] for text in each]
        findings += finding("warning", "tokenisation", message, "choose a model of this language or domain", first)
    if (unknown := tokenizer.unk_id) is not None:
        missing = [text for text, x in zip(texts, ids) if unknown in x]
        count = sum(x.count(unknown) for x in ids)
        message = f"{count} pieces of {name} ({count / max(total, 1):.2%}) are unknown to the tokenizer"
        severity: Severity = "warning" if count > 0.01 * total else "note"
        remedy = "their letters are not in its vocabulary: choose another model if they matter"
        findings += finding(severity, "unknown pieces", message, remedy, missing)
    return sizes, findings


def histogram(sizes: Iterable[int]) -> list[tuple[int | None, int]]:
    """(up to this many tokens, how many): powers of two from 8; None is more than all of them."""
    at = np.searchsorted(EDGES, np.asarray(list(sizes)))  # a text of 8 tokens counts under 8
    counts = np.bincount(at, minlength=1).tolist()
    return list(zip((*EDGES, None), counts))


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────


def check_classes(counts: Mapping[str, int], train: Examples) -> list[Finding]:
    """Labels of texts: missing, mixed, a single one, too many, rare, unbalanced."""
    findings = []
    if "(missing)" in counts:
        message = f"{counts['(missing)']} rows of train have no label"
        findings.append(Finding("error", "labels", message, "fill them in, or remove the rows", counts["(missing)"]))
    if not isinstance(train.targets[0], tuple):
        kinds = sorted({dataset.label_kind(t) for t in train.targets if dataset.label_name(t)})
        if len(kinds) > 1:
            message = f"the labels are of different kinds: {', '.join(kinds)}"
            findings.append(Finding("error", "labels", message, "make them all one kind"))
        if len(counts) == 1:
            message = f"every row has the label {next(iter(counts))!r}"
            findings.append(Finding("error", "labels", message, "two labels or more are needed"))
        if len(counts) > max(20, len(train) // 2):
            message = f"{len(counts)} different labels in {len(train)} rows"
            return [*findings, Finding("error", "labels", message, "are the columns swapped, or is this regress?")]
    findings += check_rare(counts, train)
    most, least = max(counts.values()), min(counts.values())
    if most > 10 * least:
        message = f"the labels are unbalanced: {most} to {least} examples"
        remedy = "train with class_weights balanced, and judge by f1_macro or matthews rather than accuracy"
        findings.append(Finding("warning", "balance", message, remedy, most))
    return findings


def check_rare(counts: Mapping[str, int], train: Examples) -> list[Finding]:
    """Labels with few examples."""
    rare = [f"{label}: {count}" for label, count in counts.items() if count < FEW] if len(counts) > 1 else []
    message = f"{len(rare)} labels have fewer than {FEW} examples in train"
    return finding("warning", "rare labels", message, "collect more, or merge them", rare)


def check_positions(counts: Mapping[str, int], train: Examples) -> list[Finding]:
    """Whether one position is right too often."""
    most = max(counts.values())
    if most <= 2 * len(train) / max(len(counts), 2):
        return []
    message = f"the right ending is number {next(iter(counts))} in {most} of {len(train)} rows"
    return [Finding("warning", "balance", message, "shuffle the endings", most)]


def check_unseen(train: Mapping[str, int], dev: Mapping[str, int]) -> list[Finding]:
    """Labels that only one of the sets has."""
    unseen = [f"{label}: {n} in dev" for label, n in dev.items() if label not in train]
    absent = [f"{label}: {n} in train" for label, n in train.items() if label not in dev]
    message = f"dev has {len(unseen)} labels that train has not"
    findings = finding("error", "labels", message, "add examples to train, or rename them", unseen)
    message = f"{len(absent)} labels of train are not in dev"
    return findings + finding("note", "labels", message, "their scores will not be known", absent)


# ── checks of one task ───────────────────────────────────────────────────────────────────────────────────────


def _check_tags(name: str, examples: Examples) -> list[Finding]:
    scheme = wording.find_scheme(examples.targets)
    if scheme == "plain":
        return []
    if scheme == "IOB1":
        return [Finding("note", "scheme", f"{name} is written in IOB1", "IOB1 tags will be rewritten as BIO")]
    wrong = [
        f"sentence {i + 1}: {' '.join(f'{w}/{t}' for w, t in zip(words, tags))}"
        for i, (words, tags) in enumerate(zip(examples.inputs, examples.targets))
        if wording.convert_tags(tags, scheme) != list(tags)
    ]
    message = f"{len(wrong)} sentences of {name} are not well-formed {scheme} (an I- without its B-, and the like)"
    remedy = "correct them; training reads them as conlleval does"
    return finding("warning", "tag sequences", message, remedy, wrong)


def _check_numbers(name: str, examples: Examples) -> list[Finding]:
    values = np.asarray(examples.targets, dtype=float)
    spread = values.std()
    if spread == 0:
        return [Finding("error", "targets", f"every target of {name} is {values[0]:g}", "there is nothing to learn")]
    far = [f"row {i + 1}: {values[i]:g}" for i in np.flatnonzero(np.abs(values - values.mean()) > 5 * spread)]
    message = f"{len(far)} targets of {name} are more than five standard deviations from the mean"
    return finding("warning", "outliers", message, "check them: squared error follows them", far)


def _check_answers(name: str, examples: Examples) -> list[Finding]:
    pairs = zip(examples.inputs, examples.targets)
    long = [f"{q.question} → {golds[0].text}" for q, golds in pairs if golds and len(golds[0].text.split()) > 30]
    message = f"{len(long)} answers of {name} have more than 30 words: they are not found unless `longest` is raised"
    return finding("warning", "long answers", message, "raise longest, or shorten the answers", long)


def _check_choices(name: str, examples: Examples) -> list[Finding]:
    same = [
        f"row {i + 1}: {' | '.join(endings)}"
        for i, (_, endings) in enumerate(examples.inputs)
        if len({" ".join(e.casefold().split()) for e in endings}) < len(endings)
    ]
    message = f"{len(same)} questions of {name} have the same ending twice"
    return finding("warning", "endings", message, "give each ending once", same)


def _check_pairs(name: str, examples: Examples) -> list[Finding]:
    keys = [key_of(VIEWS["embed"], texts) for texts in examples.inputs]
    same = [texts[0] for texts, key in zip(examples.inputs, keys) if key[0] == key[1]]
    message = f"{len(same)} pairs of {name} are a text and itself"
    findings = finding("warning", "pairs", message, "they teach nothing: remove them", same)
    if examples.targets[0] is not None:
        return findings
    often = [f"{n} times: {text}" for text, n in Counter(key[1] for key in keys).most_common() if n > 1]
    message = f"{len(often)} positives of {name} belong to several anchors: in a batch they are false negatives"
    return findings + finding("note", "pairs", message, "keep one pair of each, or use small batches", often)


# ── how the doctor reads each task ───────────────────────────────────────────────────────────────────────────


def _classes(examples: Examples) -> Counter[str]:
    each = ([*t] if isinstance(t, tuple) else [dataset.label_name(t) or "(missing)"] for t in examples.targets)
    return Counter(name for names in each for name in names)


def _entities(examples: Examples) -> Counter[str]:
    plain = wording.find_scheme(examples.targets) == "plain"
    return Counter(
        x for tags in examples.targets for x in (tags if plain else [e.label for e in wording.entities(tags)])
    )


def _read(task: str, source: Source, columns: Mapping[str, str] | None) -> Examples:
    return task_class(task).read(source, columns, skip_bad=True)


def _nothing(*given: Any) -> list[Finding]:
    return []


@dataclass(frozen=True)
class View:
    """How the doctor reads the examples of a task."""

    texts: Callable[[Any], list[str]] = lambda given: [given] if isinstance(given, str) else list(given)
    """The texts of an input."""
    target: Callable[[Any], str] = str
    """Equal for targets that are the same."""
    labels: Callable[[Examples], Counter[str]] = lambda examples: Counter()
    """How often each label occurs."""
    tokens: Callable[[list[int]], int] = sum
    """The longest sequence of an input, from the tokens of its texts."""
    check: Callable[[str, Examples], list[Finding]] = _nothing
    """Checks of a set that only this task has."""
    check_labels: Callable[[Mapping[str, int], Examples], list[Finding]] = _nothing
    """Checks of the training labels and their counts."""
    trivial: Callable[[Any], bool] = lambda given: False
    """Inputs that may well occur twice."""
    read: Callable[[str, Source, Mapping[str, str] | None], Examples] = _read
    open: bool = False
    """Whether dev may have labels that train has not."""
    one_target: bool = True
    """Whether an input has one right target."""
    contexts: bool = False
    """Whether the second text is a context that several inputs share."""
    pairs: bool = False
    """Whether the texts of an input are read as a pair."""
    cuts: bool = False
    """Whether long inputs are truncated rather than read in windows."""


VIEWS = {
    "classify": View(labels=_classes, check_labels=check_classes, open=True),
    "regress": View(check=_check_numbers, pairs=True),
    "tag": View(
        texts=lambda words: [" ".join(words)],
        target=" ".join,
        labels=_entities,
        check=_check_tags,
        check_labels=check_rare,
        trivial=lambda words: len(words) <= 3,  # "Why ?"
        read=lambda task, source, columns: dataset.read_raw_tags(source, columns, skip_bad=True),
        open=True,
    ),
    "answer": View(
        texts=lambda given: [given.question, given.context],
        target=lambda golds: str(tuple(sorted({" ".join(g.text.casefold().split()) for g in golds}))),
        labels=lambda examples: Counter("answer" if golds else "no answer" for golds in examples.targets),
        check=_check_answers,
        contexts=True,
        pairs=True,
    ),
    "choose": View(
        texts=lambda given: [given[0], *given[1]],
        labels=lambda examples: Counter(str(t) for t in examples.targets),
        tokens=lambda sizes: sizes[0] + max(sizes[1:]),
        check=_check_choices,
        check_labels=check_positions,
        pairs=True,
        cuts=True,
    ),
    "embed": View(tokens=max, check=_check_pairs, one_target=False, cuts=True),
}
