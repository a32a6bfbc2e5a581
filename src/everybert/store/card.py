"""A model card: README.md with the hub's metadata, so that a folder says how it was made and how good it is.

Legend: C labels.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

PIPELINES = {
    "classify": ("text-classification", "Text classification"),
    "regress": ("text-classification", "Regression on text"),
    "tag": ("token-classification", "Tagging"),
    "answer": ("question-answering", "Question answering"),
    "choose": ("multiple-choice", "Multiple choice"),
    "embed": ("sentence-similarity", "Sentence embeddings"),
}
"""The hub's word for each task, and ours."""
METRICS = {
    **{name: name for name in ("accuracy", "f1", "precision", "recall", "mse", "mae", "mrr")},
    **{"matthews": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr", "exact": "exact_match"},
}
"""The hub's word for each score that it knows."""
USES = {
    "classify": 'model.classify(["some text", ("a premise", "a hypothesis")])',
    "regress": 'model.regress([("one text", "another")])',
    "tag": 'model.tag("John Smith lives in New York")',
    "answer": 'model.answer("Where does Matt live?", "Matt lives in Canada.")',
    "choose": 'model.choose("She opened the door and", ["walked in.", "ate the piano."])',
    "embed": 'model.embed(["some text", "another"])',
}
PICTURE = "confusion.png"
WIDEST = 12
"""Labels of the largest confusion matrix written as a table."""


def write_card(
    folder: str | Path,
    facts: Mapping[str, Any],
    confusion_CC: np.ndarray | None = None,
    labels: Sequence[str] = (),
) -> None:
    """Write README.md (and confusion.png, where matplotlib is installed) into a folder that is being made.

    `facts` is what finetune.json says: task, metric, base, data, settings, scores, seeds, command …
    """
    folder = Path(folder)
    pictured = confusion_CC is not None and draw_confusion(confusion_CC, labels, folder / PICTURE)
    parts = [
        metadata(facts),
        _opening(facts),
        _use(facts),
        _scores(facts),
        _confusion(confusion_CC, labels, pictured) if confusion_CC is not None else "",
        _making(facts),
    ]
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def base_name(base: str) -> str:
    """What a base model is called in public: a hub id, or a folder's own name, never a path."""
    cached = re.search(r"models--([^/\\]+)--([^/\\]+)[/\\]snapshots", base)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return Path(base).name


def metadata(facts: Mapping[str, Any]) -> str:
    """The hub's YAML block. Strings are quoted as JSON, which YAML reads."""
    task = facts["task"]
    kind, title = PIPELINES[task]
    base = base_name(facts["base"])
    lora = facts["settings"].get("mode") == "lora"
    library = "peft" if lora else "sentence-transformers" if task == "embed" else "transformers"
    known = [METRICS[name] for name in facts["scores"] if name in METRICS]
    lines = [
        "---",
        f"library_name: {library}",
        f"pipeline_tag: {kind}",
        *([f"base_model: {_quoted(base)}"] if "/" in base else []),
        "tags:",
        "- everybert",
        "- bert",
        *([f"- {library}"] if library != "transformers" else []),
        *(["metrics:", *(f"- {name}" for name in dict.fromkeys(known))] if known else []),
        "model-index:",
        f"- name: {_quoted(facts.get('name') or f'{base} fine-tuned')}",
        "  results:",
        "  - task:",
        f"      type: {kind}",
        f"      name: {_quoted(title)}",
        "    dataset:",
        f"      name: {_quoted(facts.get('dev') or 'held-out data')}",
        f"      type: {_quoted('private')}",
        "    metrics:",
    ]
    for name, value in facts["scores"].items():
        lines += [f"    - type: {_quoted(METRICS.get(name, name))}", f"      value: {value['mean']:.6g}"]
        lines += [f"      name: {_quoted(_spread(name, value))}"]
    return "\n".join([*lines, "---"])


def _quoted(text: str) -> str:
    return json.dumps(str(text), ensure_ascii=False)


def _spread(name: str, value: Mapping[str, Any]) -> str:
    if value.get("half") is None:
        return f"{name} (one run)"
    return f"{name} (mean of {value['runs']} runs, ± {value['half']:.2g} at 95 %)"


def _opening(facts: Mapping[str, Any]) -> str:
    title = PIPELINES[facts["task"]][1]
    base, score = base_name(facts["base"]), facts["scores"][facts["metric"]]
    lines = [f"# {title}: {base}, fine-tuned"]
    how = {"full": "in full", "frozen": "as features, under a new head", "lora": "by a LoRA adapter"}
    mode = facts["settings"].get("mode", "full")
    manner = how.get(mode, f"in its last {mode.removeprefix('top:')} layers and its head")
    lines.append(
        f"`{base}` was fine-tuned {manner} on {facts['train_examples']:,} examples"
        + (f" of {facts['train']}" if facts.get("train") else "")
        + f". On {facts['dev_examples']:,} held-out examples"
        + (f" of {facts['dev']}" if facts.get("dev") else "")
        + f" it has **{facts['metric']} {_plus_minus(score)}**."
    )
    if score.get("half") is None:
        lines.append("This is one run: with another seed the score would differ, by how much is not known.")
    return "\n\n".join(lines)


def _plus_minus(value: Mapping[str, Any]) -> str:
    half = value.get("half")
    return f"{value['mean']:.4f}" + ("" if half is None else f" ± {half:.4f}")


def _use(facts: Mapping[str, Any]) -> str:
    return "\n".join(
        ["## Use", "", "```python", "import everybert", "", 'model = everybert.load("THIS FOLDER")']
        + [f"print({USES[facts['task']]})", "```"]
    )


def _scores(facts: Mapping[str, Any]) -> str:
    runs = facts["seeds"]
    lines = ["## Scores", "", "| score | mean | 95 % interval | runs |", "|---|---|---|---|"]
    for name, value in facts["scores"].items():
        half = "one run: none" if value.get("half") is None else f"± {value['half']:.4f}"
        lines.append(f"| {name} | {value['mean']:.4f} | {half} | {value['runs']} |")
    lines += ["", f"| seed | epoch kept | {facts['metric']} | seconds |", "|---|---|---|---|"]
    for run in runs:
        lines.append(f"| {run['seed']} | {run['epoch']} | {run['scores'][facts['metric']]:.4f} | {run['seconds']} |")
    if len(runs) > 1:
        lines += ["", "The folder holds the best run, whose own score is above the mean: expect the mean."]
    return "\n".join(lines)


def _confusion(counts_CC: np.ndarray, labels: Sequence[str], pictured: bool) -> str:
    """The picture, or a table where there is none and it is not too wide; and the most frequent confusions."""
    lines = ["## Confusion matrix", ""]
    if pictured:
        lines += [f"![Rows are true labels, columns predicted ones]({PICTURE})", ""]
    elif len(labels) <= WIDEST:
        lines += ["| true \\ predicted | " + " | ".join(map(_cell, labels)) + " |", "|---" * (len(labels) + 1) + "|"]
        for label, row in zip(labels, counts_CC):
            lines.append(f"| **{_cell(label)}** | " + " | ".join(str(int(n)) for n in row) + " |")
        lines.append("")
    wrong = counts_CC * (1 - np.eye(len(counts_CC), dtype=counts_CC.dtype))
    worst = [divmod(int(i), len(counts_CC)) for i in np.argsort(-wrong, axis=None)[:5]]
    named = [f"{_cell(labels[a])} taken for {_cell(labels[b])} ({int(wrong[a, b])})" for a, b in worst if wrong[a, b]]
    lines.append("Most frequent confusions: " + ("; ".join(named) if named else "none") + ".")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def draw_confusion(counts_CC: np.ndarray, labels: Sequence[str], path: Path) -> bool:
    """Draw the confusion matrix, shaded by the share of each true label; False where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    size = len(counts_CC)
    side = min(max(3.0, 0.55 * size + 2), 16)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    share = counts_CC / np.maximum(counts_CC.sum(1, keepdims=True), 1)
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    font = 9 if size <= 20 else 5
    axes.set_xticks(range(size), [str(label)[:20] for label in labels], rotation=90, fontsize=font)
    axes.set_yticks(range(size), [str(label)[:20] for label in labels], fontsize=font)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if size <= 20:
        for row in range(size):
            for column in range(size):
                shade = "white" if share[row, column] > 0.5 else "black"
                axes.text(column, row, str(int(counts_CC[row, column])), ha="center", va="center", color=shade)
    figure.colorbar(image, ax=axes, label="share of the true label")
    figure.savefig(path, dpi=100)
    return True


def _making(facts: Mapping[str, Any]) -> str:
    settings = {k: v for k, v in facts["settings"].items() if v is not None and not isinstance(v, Mapping)}
    if facts.get("lr") is not None:
        settings["lr"] = facts["lr"]
    if facts["settings"].get("mode") == "lora":
        settings |= {f"lora {k}": v for k, v in (facts["settings"].get("lora") or {}).items()}
    lines = ["## How it was made", ""]
    if facts.get("command"):
        lines += ["```", facts["command"], "```", ""]
    lines += ["| setting | value |", "|---|---|", *(f"| {k} | {_cell(v)} |" for k, v in settings.items())]
    notes = [note for note in facts.get("notes", ()) if note]
    if notes:
        lines += ["", "Notes:", "", *(f"- {note}" for note in notes)]
    return "\n".join([*lines, "", "Made with " + ", ".join(f"{k} {v}" for k, v in versions().items()) + "."])


def versions() -> dict[str, str]:
    """Of the libraries a model's numbers depend on."""
    found = {"Python": platform.python_version()}
    for name in ("everybert", "torch", "tokenizers", "safetensors", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a copy of the source
            continue
    return found


def command_line(task: str, model: Any, train: Any, dev: Any, out: Any, settings: Mapping[str, Any]) -> str:
    """The command that makes this model, or where the data was no file, the call."""
    if isinstance(train, str | Path) and (dev is None or isinstance(dev, str | Path)):
        words = ["everybert", "finetune", task, "--model", str(model), "--train", str(train)]
        words += ["--dev", str(dev)] if dev is not None else []
        words += ["--out", str(out)]
        for name, value in settings.items():
            words += _words(f"--{name.replace('_', '-')}", value)
        return shlex.join(words)
    given = "".join(f", {name}={value!r}" for name, value in settings.items())
    held = "" if dev is None else ", dev=…"
    return f"everybert.finetune({str(model)!r}, {task!r}, train=…{held}, out={str(out)!r}{given})"


def _words(option: str, value: Any) -> list[str]:
    """One setting as the command line has it."""
    if value is True:
        return [option]
    if isinstance(value, Mapping):
        return [word for k, v in value.items() for word in (option, f"{k}={v}")]
    if option == "--lora":
        return ["--rank", str(value.rank), "--alpha", str(value.alpha), "--lora-dropout", str(value.dropout)]
    return [option, ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]
