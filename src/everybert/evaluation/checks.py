"""What the data doctor looks for: labels, what only one task can have, and tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from everybert.evaluation.findings import Finding, Severity, finding, key_of, texts_of
from everybert.tasks import columns as col
from everybert.tasks import schemes
from everybert.tasks.records import Examples
from everybert.text.tokenizer import Tokenizer

FEW = 10
"""A label with fewer examples than this is hardly learnt."""
EDGES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────


def count_labels(task: str, examples: Examples) -> dict[str, int]:
    """How often each label occurs: entities for tags, positions for choices."""
    counts: Counter[str] = Counter()
    if task == "classify":
        for value in examples.targets:
            counts.update(value if isinstance(value, tuple) else [col.label_name(value) or "(missing)"])
    elif task == "tag":
        plain = schemes.find_scheme(examples.targets) == "plain"
        for tags in examples.targets:
            counts.update(tags if plain else (e.label for e in schemes.entities(tags)))
    elif task == "choose":
        counts.update(str(t) for t in examples.targets)
    elif task == "answer":
        counts.update("answer" if golds else "no answer" for golds in examples.targets)
    return dict(counts.most_common())


def check_labels(task: str, labels: dict[str, dict[str, int]], sets: dict[str, Examples]) -> list[Finding]:
    """Missing, mixed, rare, unbalanced and unseen labels."""
    findings: list[Finding] = []
    train = labels.get("train", {})
    if task == "classify" and "(missing)" in train:
        message = f"{train['(missing)']} rows of train have no label"
        findings.append(Finding("error", "labels", message, "fill them in, or leave the rows out", train["(missing)"]))
    if task == "classify" and not isinstance(sets["train"].targets[0], tuple):
        kinds = sorted({col.kind_of(t) for t in sets["train"].targets if col.label_name(t)})
        if len(kinds) > 1:
            message = f"the labels are of different kinds: {', '.join(kinds)}"
            findings.append(Finding("error", "labels", message, "make them all one kind"))
        if len(train) == 1:
            findings.append(Finding("error", "labels", f"every row has the label {next(iter(train))!r}",
                                    "two labels or more are needed"))  # fmt: skip
        if len(train) > max(20, len(sets["train"]) // 2):
            message = f"{len(train)} different labels in {len(sets['train'])} rows"
            findings.append(Finding("error", "labels", message, "are the columns swapped, or is this regress?"))
            return findings
    if task in ("classify", "tag") and len(train) > 1:
        rare = [f"{label}: {count}" for label, count in train.items() if count < FEW]
        if rare:
            message = f"{len(rare)} labels have fewer than {FEW} examples in train"
            findings.append(finding("warning", "rare labels", message, "collect more, or merge them", rare))
        most, least = max(train.values()), min(train.values())
        if task == "classify" and most > 10 * least:
            message = f"the labels are unbalanced: {most} to {least} examples"
            remedy = "train with class_weights balanced, and judge by f1_macro or matthews rather than accuracy"
            findings.append(Finding("warning", "balance", message, remedy, most))
    if task == "choose" and train and max(train.values()) > 2 * len(sets["train"]) / max(len(train), 2):
        message = (
            f"the right ending is number {next(iter(train))} in {max(train.values())} of {len(sets['train'])} rows"
        )
        findings.append(Finding("warning", "balance", message, "shuffle the endings", max(train.values())))
    if "dev" in labels and task in ("classify", "tag"):
        unseen = [f"{label}: {n} in dev" for label, n in labels["dev"].items() if label not in train]
        absent = [f"{label}: {n} in train" for label, n in train.items() if label not in labels["dev"]]
        if unseen:
            message = f"dev has {len(unseen)} labels that train has not"
            findings.append(finding("error", "labels", message, "add examples to train, or rename them", unseen))
        if absent:
            message = f"{len(absent)} labels of train are not in dev"
            findings.append(finding("note", "labels", message, "their scores will not be known", absent))
    return findings


# ── what only one task can have ──────────────────────────────────────────────────────────────────────────────


def _check_tags(name: str, examples: Examples) -> list[Finding]:
    scheme = schemes.find_scheme(examples.targets)
    if scheme in ("plain", "IOB1"):
        note = "IOB1 tags will be rewritten as BIO" if scheme == "IOB1" else ""
        return [Finding("note", "scheme", f"{name} is written in IOB1", note)] if note else []
    wrong = [
        f"sentence {i + 1}: {' '.join(f'{w}/{t}' for w, t in zip(words, tags))}"
        for i, (words, tags) in enumerate(zip(examples.inputs, examples.targets))
        if schemes.convert(tags, scheme) != list(tags)
    ]
    if not wrong:
        return []
    message = f"{len(wrong)} sentences of {name} are not well-formed {scheme} (an I- without its B-, and the like)"
    return [finding("warning", "tag sequences", message, "correct them; training reads them as conlleval does", wrong)]


def _check_numbers(name: str, examples: Examples) -> list[Finding]:
    values = np.asarray(examples.targets, dtype=float)
    spread = values.std()
    if spread == 0:
        return [Finding("error", "targets", f"every target of {name} is {values[0]:g}", "there is nothing to learn")]
    far = [f"row {i + 1}: {values[i]:g}" for i in np.flatnonzero(np.abs(values - values.mean()) > 5 * spread)]
    if not far:
        return []
    message = f"{len(far)} targets of {name} are more than five standard deviations from the mean"
    return [finding("warning", "outliers", message, "check them: squared error follows them", far)]


def _check_answers(name: str, examples: Examples) -> list[Finding]:
    long = [
        f"{given.question} → {golds[0].text}"
        for given, golds in zip(examples.inputs, examples.targets)
        if golds and len(golds[0].text.split()) > 30
    ]
    if not long:
        return []
    message = f"{len(long)} answers of {name} have more than 30 words: they are not found unless `longest` is raised"
    return [finding("warning", "long answers", message, "raise longest, or shorten the answers", long)]


def _check_choices(name: str, examples: Examples) -> list[Finding]:
    same = [
        f"row {i + 1}: {' | '.join(endings)}"
        for i, (_, endings) in enumerate(examples.inputs)
        if len({" ".join(e.casefold().split()) for e in endings}) < len(endings)
    ]
    if not same:
        return []
    message = f"{len(same)} questions of {name} have the same ending twice"
    return [finding("warning", "endings", message, "give each ending once", same)]


def _check_pairs(name: str, examples: Examples) -> list[Finding]:
    findings = []
    same = [texts[0] for texts in examples.inputs if key_of("embed", texts)[0] == key_of("embed", texts)[1]]
    if same:
        message = f"{len(same)} pairs of {name} are a text and itself"
        findings.append(finding("warning", "pairs", message, "they teach nothing: remove them", same))
    if examples.targets[0] is None:
        positives = Counter(key_of("embed", texts)[1] for texts in examples.inputs)
        often = [f"{n} times: {text}" for text, n in positives.most_common() if n > 1]
        if often:
            message = f"{len(often)} positives of {name} belong to several anchors: in a batch they are false negatives"
            findings.append(finding("note", "pairs", message, "keep one pair of each, or use small batches", often))
    return findings


TASK_CHECKS: dict[str, Callable[[str, Examples], list[Finding]]] = {
    "tag": _check_tags,
    "regress": _check_numbers,
    "answer": _check_answers,
    "choose": _check_choices,
    "embed": _check_pairs,
}


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────


def check_tokens(
    name: str, task: str, examples: Examples, tokenizer: Tokenizer, window: int
) -> tuple[np.ndarray, list[Finding]]:
    """(tokens of each input, findings): lengths against the window, pieces a word, unknown pieces."""
    flat = [texts_of(task, given) for given in examples.inputs]
    ids = tokenizer.ids_batch([text for texts in flat for text in texts], specials=False)
    owner = np.repeat(np.arange(len(flat)), [len(texts) for texts in flat])
    each = np.array([len(x) for x in ids])
    special = tokenizer.single_special if task in ("classify", "tag", "embed") else tokenizer.pair_special
    sizes = np.bincount(owner, each, len(flat)).astype(int) + special
    if task in ("choose", "embed"):  # texts are read one by one, or each with the prompt
        sizes = np.array([_longest(task, each[owner == i]) for i in range(len(flat))]) + special
    findings = _lengths(name, task, examples, sizes, window)
    words = sum(len(text.split()) for texts in flat for text in texts)
    ratio = each.sum() / max(words, 1)
    if ratio > 3 and words > 20:
        message = f"{name} falls into {ratio:.1f} pieces a word: the tokenizer was made for other text"
        split = [t for texts in flat[:500] for t in texts]
        findings.append(finding("warning", "tokenisation", message, "choose a model of this language or domain", split))
    unknown = tokenizer.unk_id
    missing = [i for i, x in enumerate(ids) if unknown is not None and unknown in x]
    if missing:
        count = sum(x.count(unknown) for x in ids if unknown is not None)
        share = count / max(each.sum(), 1)
        texts = [text for texts in flat for text in texts]
        message = f"{count} pieces of {name} ({share:.2%}) are unknown to the tokenizer"
        severity: Severity = "warning" if share > 0.01 else "note"
        remedy = "their letters are not in its vocabulary: choose another model if they matter"
        findings.append(finding(severity, "unknown pieces", message, remedy, [texts[i] for i in missing]))
    return sizes, findings


def _longest(task: str, sizes: np.ndarray) -> int:
    return int(sizes[0] + sizes[1:].max()) if task == "choose" else int(sizes.max())


def _lengths(name: str, task: str, examples: Examples, sizes: np.ndarray, window: int) -> list[Finding]:
    over = np.flatnonzero(sizes > window)
    if not len(over):
        return []
    shown = [f"{sizes[i]} tokens: {' / '.join(texts_of(task, examples.inputs[i]))}" for i in over]
    message = f"{len(over)} rows of {name} ({len(over) / len(sizes):.1%}) are longer than the window of {window} tokens"
    cut = task in ("choose", "embed")
    remedy = "what does not fit is cut" if cut else "they are read in overlapping windows; nothing is lost"
    return [finding("warning" if cut else "note", "length", message, remedy, shown)]


def histogram(sizes: Iterable[int]) -> list[tuple[int | None, int]]:
    """(up to this many tokens, how many): powers of two from 8; None is more than all of them."""
    at = np.searchsorted(EDGES, np.asarray(list(sizes)))  # a text of 8 tokens counts under 8
    counts = np.bincount(at, minlength=1).tolist()
    return list(zip((*EDGES, None), counts))
