"""A model card: README.md with metadata for the hub, which describes how a model was trained and its scores.

Legend: C labels.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""Task → the hub's pipeline tag, and a title."""
METRICS = {
    **{name: name for name in ("accuracy", "f1", "precision", "recall", "mse", "mae", "mrr")},
    **{"matthews": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr", "exact": "exact_match"},
}
"""Score → the hub's name of it."""
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
"""Number of labels of the largest confusion matrix that is written as a table."""


def write_card(
    folder: str | Path,
    facts: Mapping[str, Any],
    confusion_CC: np.ndarray | None = None,
    labels: Sequence[str] = (),
) -> None:
    """Write README.md (and confusion.png, if matplotlib is installed) into a folder.

    `facts` is the content of finetune.json: task, metric, base, data, settings, scores, seeds, command …
    """
    folder = Path(folder)
    drawn = confusion_CC is not None and draw_confusion(confusion_CC, labels, folder / PICTURE)
    parts = [
        "\n".join(["---", *_yaml(metadata(facts)), "---"]),
        _summary(facts),
        f'## Use\n\n```python\nimport everybert\n\nmodel = everybert.load("THIS FOLDER")\n'
        f"print({USES[facts['task']]})\n```",
        _scores(facts),
        _confusion(confusion_CC, labels, drawn) if confusion_CC is not None else "",
        _training(facts),
    ]
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def base_name(base: str) -> str:
    """The public name of a base model: its hub id, or the name of its folder without the path."""
    cached = re.search(r"models--([^/\\]+)--([^/\\]+)[/\\]snapshots", base)
    return f"{cached[1]}/{cached[2]}" if cached else Path(base).name


def metadata(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that the hub reads."""
    task, scores = facts["task"], facts["scores"]
    kind, title = PIPELINES[task]
    base = base_name(facts["base"])
    lora = facts["settings"].get("mode") == "lora"
    library = "peft" if lora else "sentence-transformers" if task == "embed" else "transformers"
    found: dict[str, Any] = {"library_name": library, "pipeline_tag": kind}
    if "/" in base:
        found["base_model"] = base
    found["tags"] = ["everybert", "bert", *([library] if library != "transformers" else [])]
    if known := list(dict.fromkeys(METRICS[name] for name in scores if name in METRICS)):
        found["metrics"] = known
    result = {
        "task": {"type": kind, "name": title},
        "dataset": {"name": facts.get("dev") or "held-out data", "type": "private"},
        "metrics": [
            {"type": METRICS.get(name, name), "value": float(f"{value['mean']:.6g}"), "name": _spread(name, value)}
            for name, value in scores.items()
        ],
    }
    found["model-index"] = [{"name": facts.get("name") or f"{base} fine-tuned", "results": [result]}]
    return found


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Lines of YAML. Strings are written as JSON, which is valid YAML."""
    pairs: Iterable[tuple[str, Any]]
    pairs = ((f"{key}:", v) for key, v in value.items()) if isinstance(value, dict) else (("-", v) for v in value)
    for lead, inner in pairs:
        if isinstance(inner, dict | list):
            yield indent + lead
            yield from _yaml(inner, indent + "  ")
        else:
            yield f"{indent}{lead} {json.dumps(inner, ensure_ascii=False)}"


def _spread(name: str, value: Mapping[str, Any]) -> str:
    if value.get("half") is None:
        return f"{name} (one run)"
    return f"{name} (mean of {value['runs']} runs, ± {value['half']:.2g} at 95 %)"


def _summary(facts: Mapping[str, Any]) -> str:
    base, score = base_name(facts["base"]), facts["scores"][facts["metric"]]
    mode = facts["settings"].get("mode", "full")
    how = {"full": "in full", "frozen": "as features, under a new head", "lora": "by a LoRA adapter"}.get(
        mode, f"in its last {mode.removeprefix('top:')} layers and its head"
    )
    half = score.get("half")
    lines = [
        f"# {PIPELINES[facts['task']][1]}: {base}, fine-tuned",
        f"`{base}` was fine-tuned {how} on {facts['train_examples']:,} examples"
        + (f" of {facts['train']}" if facts.get("train") else "")
        + f". On {facts['dev_examples']:,} held-out examples"
        + (f" of {facts['dev']}" if facts.get("dev") else "")
        + f" it has **{facts['metric']} {score['mean']:.4f}{'' if half is None else f' ± {half:.4f}'}**.",
    ]
    if half is None:
        lines.append("This is one run. The variation between seeds is not known.")
    return "\n\n".join(lines)


def _scores(facts: Mapping[str, Any]) -> str:
    lines = ["## Scores", "", "| score | mean | 95 % interval | runs |", "|---|---|---|---|"]
    for name, value in facts["scores"].items():
        half = "none (one run)" if value.get("half") is None else f"± {value['half']:.4f}"
        lines.append(f"| {name} | {value['mean']:.4f} | {half} | {value['runs']} |")
    lines += ["", f"| seed | epoch kept | {facts['metric']} | seconds |", "|---|---|---|---|"]
    for run in facts["seeds"]:
        lines.append(f"| {run['seed']} | {run['epoch']} | {run['scores'][facts['metric']]:.4f} | {run['seconds']} |")
    if len(facts["seeds"]) > 1:
        lines += ["", "The folder holds the best run, whose score is above the mean: expect the mean."]
    return "\n".join(lines)


def _confusion(counts_CC: np.ndarray, labels: Sequence[str], drawn: bool) -> str:
    """The picture, or a table if there is none and it is not too wide; and the most frequent confusions."""
    lines = ["## Confusion matrix", ""]
    if drawn:
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


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def draw_confusion(counts_CC: np.ndarray, labels: Sequence[str], path: Path) -> bool:
    """Draw the confusion matrix; False if matplotlib or scikit-learn is not installed."""
    try:
        from matplotlib.figure import Figure
        from sklearn.metrics import ConfusionMatrixDisplay
    except ImportError:
        return False
    side = min(max(3.0, 0.55 * len(labels) + 2), 16)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    names = [str(label)[:20] for label in labels]
    ConfusionMatrixDisplay(counts_CC, display_labels=names).plot(
        include_values=len(labels) <= 20,
        cmap="Blues",
        xticks_rotation="vertical",
        ax=figure.subplots(),
        values_format="d",
    )
    figure.savefig(path, dpi=100)
    return True


def _training(facts: Mapping[str, Any]) -> str:
    settings = {k: v for k, v in facts["settings"].items() if v is not None and not isinstance(v, Mapping)}
    if facts.get("lr") is not None:
        settings["lr"] = facts["lr"]
    if facts["settings"].get("mode") == "lora":
        settings |= {f"lora {k}": v for k, v in (facts["settings"].get("lora") or {}).items()}
    lines = ["## Training", ""]
    if facts.get("command"):
        lines += ["```", facts["command"], "```", ""]
    lines += ["| setting | value |", "|---|---|", *(f"| {k} | {_cell(v)} |" for k, v in settings.items())]
    if notes := [note for note in facts.get("notes", ()) if note]:
        lines += ["", "Notes:", "", *(f"- {note}" for note in notes)]
    return "\n".join([*lines, "", "Trained with " + ", ".join(f"{k} {v}" for k, v in versions().items()) + "."])


def versions() -> dict[str, str]:
    """The versions of the libraries that the numbers of a model depend on."""
    found = {"Python": platform.python_version()}
    for name in ("everybert", "torch", "tokenizers", "safetensors", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a copy of the source
            continue
    return found


def command_line(task: str, model: Any, train: Any, dev: Any, out: Any, settings: Mapping[str, Any]) -> str:
    """The command that trains this model; the Python call if the data was not read from files."""
    if isinstance(train, str | Path) and (dev is None or isinstance(dev, str | Path)):
        words = ["everybert", "finetune", task, "--model", str(model), "--train", str(train)]
        words += ["--dev", str(dev)] if dev is not None else []
        words += ["--out", str(out)]
        for name, value in settings.items():
            words += _option(f"--{name.replace('_', '-')}", value)
        return shlex.join(words)
    given = "".join(f", {name}={value!r}" for name, value in settings.items())
    held = "" if dev is None else ", dev=…"
    return f"everybert.finetune({str(model)!r}, {task!r}, train=…{held}, out={str(out)!r}{given})"


def _option(option: str, value: Any) -> list[str]:
    """One setting as words of a command line."""
    if value is True:
        return [option]
    if isinstance(value, Mapping):
        return [word for k, v in value.items() for word in (option, f"{k}={v}")]
    if option == "--lora":
        return ["--rank", str(value.rank), "--alpha", str(value.alpha), "--lora-dropout", str(value.dropout)]
    return [option, ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]
