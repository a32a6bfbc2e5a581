"""Multiple choice (SWAG): each ending is read with the prompt as a pair; softmax over one score an ending.

A prompt and ending longer than the window are cut longest-first, and the choice says by how much.

Legend: B sequences (one an ending), Q questions (one an example).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.features import head_logits
from everybert.model.heads import Network, choice_loss
from everybert.model.ragged import Ragged
from everybert.tasks import columns as col
from everybert.tasks import metrics
from everybert.tasks.features import BUDGET, Encoded, Features, Reading, cover, lay, run
from everybert.tasks.records import Bad, Examples, Source, read_rows
from everybert.text.tokenizer import Tokenizer

CHUNK = 256
PROMPTS = ("startphrase", "prompt", "context", "question", "text", "sent1")


@dataclass(frozen=True)
class Choice:
    """The ending that fits best."""

    index: int
    text: str
    score: float
    """Its probability among the endings."""
    scores: tuple[float, ...]
    """The probability of each ending."""
    cut: int = 0
    """Tokens of prompt and endings that did not fit the window."""


@dataclass(frozen=True)
class Choose:
    """How endings are chosen."""

    reading: Reading
    metric: str = "accuracy"

    name = "choose"
    head = "choose"
    outputs = None

    def features(self, tokenizer: Tokenizer, config: EncoderConfig, examples: Examples) -> Features:
        """One sequence an ending; answer_E is the number of the right one."""
        features = choice_features(tokenizer, config, examples.inputs, self.reading)
        return features.labelled(answer_E=np.asarray(examples.targets, dtype=np.int64))

    def share(self, features: Features, which: np.ndarray) -> float:
        """The questions' number."""
        return float(len(which))

    def loss(self, network: Network, batch: Ragged) -> Tensor:
        """Cross-entropy among each question's endings."""
        counts = batch.extra["counts"]
        logits_B = head_logits(network, batch, self.head)[: sum(counts), 0]
        return choice_loss(logits_B, counts, batch.extra["answer_E"])

    def evaluate(self, network: Network, features: Features, examples: Examples) -> dict[str, float]:
        """accuracy."""
        guess = np.array([p.argmax() for p in self.scores(network, features)])
        return {"accuracy": float((guess == np.asarray(examples.targets)).mean())}

    def scores(self, network: Network, features: Features, budget: int = BUDGET) -> list[np.ndarray]:
        """For each question, the probabilities of its endings."""
        out = run(network, features, lambda batch: head_logits(network, batch, self.head), budget)
        logits = np.concatenate(out)
        return [metrics.softmax(part) for part in np.split(logits, features.first_E1[1:-1])]

    def tuned(self, network: Network, features: Features, examples: Examples) -> Choose:
        """As it is."""
        return self

    def state(self) -> dict[str, Any]:
        """What the model folder keeps."""
        return {"task": self.name, "window": self.reading.state()}


def choice_features(
    tokenizer: Tokenizer, config: EncoderConfig, inputs: Sequence[tuple[str, Sequence[str]]], reading: Reading
) -> Features:
    """(prompt, endings) → one sequence an ending. Longformer's global tokens are those of the ending."""
    cutting = replace(reading, long="cut")
    prompts = tokenizer.ids_batch([prompt for prompt, _ in inputs], specials=False)
    endings = iter(tokenizer.ids_batch([e for _, es in inputs for e in es], specials=False))
    examples, cut = [], np.zeros(len(inputs), dtype=np.int64)
    for i, ((_, options), a) in enumerate(zip(inputs, prompts)):
        sequences = []
        for b in (next(endings) for _ in options):
            [(part_a, part_b, _)], lost = cover(a, b, tokenizer.pair_special, cutting)
            cut[i] += lost
            ids, segments = tokenizer.build(part_a, part_b)
            sequences.append(Encoded(ids, segments, range(len(part_a) + tokenizer.pair_special - 1, len(ids))))
        examples.append(sequences)
    features = lay(examples, config, cutting)
    return replace(features, cut_E=cut if cut.any() else None)


def read(source: Source, columns: Mapping[str, str] | None = None, skip_bad: bool = False) -> Examples:
    """SWAG's own columns (startphrase, ending0 …, label), or a prompt, a list of endings, and the right number."""
    chosen = columns or {}
    table = read_rows(source, ("prompt", "endings", "label"), skip_bad)
    first, where = table.rows[0], table.where
    prompt = col.find(first, "text", PROMPTS, chosen, where)
    label = col.find(first, "label", ("label", "answer", "gold", "target"), chosen, where)
    listed = col.find(first, "endings", ("endings", "choices", "options"), chosen, where)
    numbered = sorted((c for c in first if re.fullmatch(r"(ending|choice|option)_?\d+", str(c))), key=_number)
    if prompt is None or label is None or not (listed or numbered):
        raise EverybertError(
            f"{where}: multiple choice needs a prompt, endings (a list, or ending0, ending1 …) and a label; "
            f"it has {', '.join(map(str, first))}"
        )
    bad = Bad(where, skip_bad, table.bad)
    inputs: list[Any] = []
    targets: list[int] = []
    for i, row in enumerate(table.rows):
        options = row.get(listed) if listed else [row.get(c) for c in numbered]
        if not isinstance(row.get(prompt), str) or not row[prompt].strip():
            bad(i, f"the prompt in column {prompt!r} is empty or not text")
        elif not isinstance(options, list | tuple) or len(options) < 2:
            bad(i, "fewer than two endings")
        elif any(not isinstance(o, str) or not o.strip() for o in options):
            bad(i, "an ending is empty or not text")
        elif not (name := col.label_name(row.get(label)) or "").isdigit() or int(name) >= len(options):
            bad(i, f"the label {row.get(label)!r} is not the number of an ending (0 … {len(options) - 1})")
        else:
            inputs.append((row[prompt], list(options)))
            targets.append(int(name))
    if not inputs:
        raise EverybertError(f"{where} has no usable row; {bad.found[0]}")
    shown = repr(listed) if listed else f"{numbered[0]} … {numbered[-1]}"
    note = f"{where}: prompt read from {prompt!r}, endings from {shown}, label from {label!r}"
    return Examples(inputs, targets, where, (*table.notes, *bad.notes(), note), tuple(bad.found))


def _number(name: str) -> int:
    return int(re.sub(r"\D", "", name))


def begin(
    examples: Examples, config: EncoderConfig, *, reading: Reading | None = None, metric: str | None = None
) -> Choose:
    """Nothing is learnt from the examples beforehand."""
    if metric not in (None, "accuracy"):
        raise EverybertError(f"choose is judged by accuracy, not {metric!r}")
    return Choose(reading or Reading.of(config))


def of(state: Mapping[str, Any], config: EncoderConfig) -> Choose:
    """From what `state` gave."""
    return Choose(Reading.from_state(state.get("window"), config))


def predict(
    network: Network,
    tokenizer: Tokenizer,
    task: Choose,
    questions: Sequence[tuple[str, Sequence[str]]],
    budget: int = BUDGET,
) -> Iterator[Choice]:
    """The best ending of each (prompt, endings)."""
    for start in range(0, len(questions), CHUNK):
        part = questions[start : start + CHUNK]
        if any(isinstance(options, str) or len(options) < 1 for _, options in part):
            raise EverybertError("choose needs a list of one ending or more for each prompt")
        features = choice_features(tokenizer, network.config, part, task.reading)
        cuts = features.cut_E if features.cut_E is not None else np.zeros(len(part), dtype=int)
        for (_, options), p, cut in zip(part, task.scores(network, features, budget), cuts):
            best = int(p.argmax())
            yield Choice(best, options[best], float(p[best]), tuple(p.tolist()), int(cut))
