"""A model card: README.md with metadata for the hub, which describes how a model was trained and its scores.

Legend: C labels.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everybert import __version__

TASK_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""Task → tag, title and call."""
MODE_TEXTS = {"full": "in full", "frozen": "as features, under a new head", "lora": "by a LoRA adapter"}
MODE_TEXTS["fewshot"] = "on pairs of texts, then as features under a new head"
LIBRARIES = {"lora": "peft", "frozen": "everybert", "fewshot": "everybert"}
"""Mode → the library that loads the whole model, if it is not that of the task."""
TEMPLATE = Path(__file__).with_suffix(".md")
WIDEST = 12
"""Number of labels of the largest confusion matrix that is written."""


def write_card(
    folder: str | Path, facts: Mapping[str, Any], confusion_CC: np.ndarray | None = None, labels: Sequence[str] = ()
) -> None:
    """Write README.md into a folder. `facts` is the content of finetune.json: task, base, settings, scores …"""
    mode = facts["settings"].get("mode", "full")
    settings = {**facts["settings"], "lr": facts.get("lr")}
    if mode != "lora":
        settings.pop("lora", None)
    confusion = ""
    if confusion_CC is not None and len(labels) <= WIDEST:
        counts = [[f"**{label}**", *map(int, row)] for label, row in zip(labels, confusion_CC)]
        confusion = f"## Confusion matrix\n\n{_table(['true ↓ predicted →', *labels], counts)}\n\n"
    score = facts["scores"][facts["metric"]]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        metadata="\n".join(f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in metadata(facts).items()),  # YAML too
        **{key: TASK_TEXTS[facts["task"]][key] for key in ("title", "call")},
        base=base_name(facts["base"]),
        how=MODE_TEXTS.get(mode, f"in its last {mode.removeprefix('top:')} layers and its head"),
        score=f"{score['mean']:.4f}",
        spread=_spread(score),
        scores=_table(
            ["score", "mean", "runs"], [(k, f"{x['mean']:.4f}", _spread(x)) for k, x in facts["scores"].items()]
        ),
        confusion=confusion,
        training=_table(["setting", "value"], [(k, v) for k, v in settings.items() if v is not None]),
        notes="".join(f"- {note}\n" for note in facts.get("notes", ()) if note),
        everybert=__version__,
        torch=torch.__version__,
        **{key: facts.get(key) or "no file" for key in ("train", "dev")},
        **{key: facts[key] for key in ("train_examples", "dev_examples", "metric")},
    )
    (Path(folder) / "README.md").write_text(text, encoding="utf-8")


def base_name(base: str) -> str:
    """The public name of a base model: its hub id, or the name of its folder without the path."""
    cached = re.search(r"models--([^/\\]+)--([^/\\]+)[/\\]snapshots", base)
    return f"{cached[1]}/{cached[2]}" if cached else Path(base).name


def metadata(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that the hub reads. `transformers` cannot use the head of a frozen model, so it is not named."""
    task = TASK_TEXTS[facts["task"]]
    base = base_name(facts["base"])
    library = task.get("library", "transformers")
    result = {
        "task": {"type": task["tag"], "name": task["title"]},
        "dataset": {"name": facts.get("dev") or "held-out data", "type": "private"},
        "metrics": [
            {"type": name, "value": float(f"{x['mean']:.6g}"), "name": f"{name}, {_spread(x)}"}
            for name, x in facts["scores"].items()
        ],
    }
    return {
        "library_name": LIBRARIES.get(facts["settings"].get("mode"), library),
        "pipeline_tag": task["tag"],
        **({"base_model": base} if "/" in base else {}),
        "tags": ["everybert", "bert"],
        "model-index": [{"name": facts.get("name") or f"{base} fine-tuned", "results": [result]}],
    }


def _spread(value: Mapping[str, Any]) -> str:
    if value.get("half") is None:
        return "one run"
    return f"mean of {value['runs']} runs, ± {value['half']:.4f} at 95 %"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    cells = [[str(x).replace("|", "\\|").replace("\n", " ") for x in row] for row in (header, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
