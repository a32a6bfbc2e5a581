"""Left to right, right to left, both concatenated, bidirectional: four models on the same text and steps, one table.

    python recipes/directions.py --corpus CORPUS --work W [--recipe directions] [--set steps=400] [--positions 2000]
        [--blimp FOLDER] [--task SST-2=train.tsv,dev.tsv --task CoLA=train.tsv,dev.tsv] [--tiny] [--json]

CORPUS is a folder of `everybert corpus build` with a held-out split. Three models are pre-trained (run again to
resume): the recipe as it is, with `causal = true`, and with `causal = "reverse"`. The fourth, "both", is the pair of
one-way models, as in ELMo (Peters et al. 2018): for the token at t, the left-to-right state of t − 1 and the
right-to-left state of t + 1 are concatenated, and a linear layer is trained on them while both encoders stay as they
are. Devlin et al. 2019 (section 5.1) compare the same.

fill      accuracy at the same held-out tokens; each model sees what it may: all other tokens, those before, those after
BLiMP     share of pairs in which the right sentence is more probable (one-way models: the true log-probability; the
          others: the sum over tokens given both sides)
tasks     dev accuracy of logistic regression on the mean of the frozen states, the same for all four

Legend: T tokens in the batch, H hidden, V vocabulary, M predicted tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from everybert.corpus.examples import ExampleConfig
from everybert.corpus.masking import permutation
from everybert.corpus.packs import PackStream
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.evaluation.blimp import likelihoods, read_pairs
from everybert.files import atomic_file, read_json, write_json
from everybert.inference.model import Model, load
from everybert.model.engine import Inputs, encode, masked_logits
from everybert.model.ragged import Ragged
from everybert.tasks.dataset import read_classes
from everybert.training.pretrain import pretrain
from everybert.training.recipe import read_value

WAYS: dict[str, bool | str] = {"left to right": True, "right to left": "reverse", "bidirectional": False}
LINEAR_STEPS, LINEAR_TOKENS, LINEAR_RATE = 400, 4096, 3e-3
"""Steps, tokens per step and learning rate of the linear layer of the pair."""
TINY = {
    **{"steps": 60, "model__layers": 2, "model__hidden_size": 64, "model__heads": 2, "model__intermediate_size": 128},
    **{"model__max_positions": 64, "batch__length": 64, "batch__tokens": 2048, "batch__pack": 2048},
}
"""The recipe's changes for --tiny."""
CHUNK = 64
"""Sentences whose predictions are held at once."""


class Pair(nn.Module):
    """Two one-way models side by side, and a linear layer that predicts a token from the states beside it."""

    def __init__(self, left: Model, right: Model) -> None:
        super().__init__()
        self.left, self.right, self.tokenizer = left, right, left.tokenizer
        width = left.config.hidden_size + right.config.hidden_size
        torch.manual_seed(0)
        self.output = nn.Linear(width, left.tokenizer.size, device=left.device)

    def states(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Per sequence, the concatenated states beside each inner token: (n − 2, 2H)."""
        found: list[dict[int, Tensor]] = []
        for model in (self.left, self.right):
            own: dict[int, Tensor] = {}

            def read(which: list[int], batch: Ragged, x_TH: Tensor, own: dict[int, Tensor] = own) -> None:
                own.update((k, x.float().clone()) for k, x in zip(which, batch.split(x_TH)))

            encode(model.network, Inputs(sequences), read)
            found.append(own)
        before, after = found
        return [torch.cat((before[k][:-2], after[k][2:]), dim=-1).clone() for k in range(len(sequences))]

    def train_output(self, sequences: Callable[[], list[list[int]]], steps: int) -> None:
        """Train the linear layer on sequences that the function gives, a batch per step."""
        optimizer = torch.optim.Adam(self.output.parameters(), lr=LINEAR_RATE)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LINEAR_RATE * (1 - step / steps)
            rows = sequences()
            x_MH = torch.cat(self.states(rows))
            label_M = torch.tensor([token for ids in rows for token in ids[1:-1]], device=x_MH.device)
            loss = nn.functional.cross_entropy(self.output(x_MH), label_M)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """ln P over the vocabulary at each inner token of each sequence."""
        return [self.output(x_MH).log_softmax(-1).cpu() for x_MH in self.states(sequences)]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────


def whole_sequences(corpus: Corpus, layout: ExampleLayout, length: int, capacity: int) -> Any:
    """Endless unmasked sequences of a corpus, in groups of about `capacity` tokens."""
    examples = ExampleConfig(kind="full", length=length)
    for pack in PackStream(corpus, layout, examples, seed=11, capacity=max(capacity, length), causal=True).packs():
        yield [ids.tolist() for ids in np.split(pack["tokens"], np.cumsum(pack["lengths"])[:-1])]


def heldout_positions(folder: Path, layout: ExampleLayout, length: int, count: int) -> list[tuple[list[int], int]]:
    """(sequence, place) of `count` tokens of the held-out text, none of them special; the same for all models."""
    groups = whole_sequences(Corpus.open(folder, "heldout"), layout, length, 16_384)
    sequences = [ids for group in islice(groups, 4) for ids in group]
    every = [(ids, p) for ids in sequences for p, token in enumerate(ids) if not layout.special_V[token]]
    return [every[i] for i in permutation(7, len(every))[:count]]


# ── measures ─────────────────────────────────────────────────────────────────────────────────────────────────


def fill_accuracy(model: Model | Pair, positions: Sequence[tuple[list[int], int]], mask_id: int) -> float:
    """Share of the positions whose token is the most probable one."""
    right = 0
    for start in range(0, len(positions), CHUNK):
        chosen = positions[start : start + CHUNK]
        gold = torch.tensor([ids[p] for ids, p in chosen])
        if isinstance(model, Pair):
            rows = model.log_probs([ids for ids, _ in chosen])
            right += sum(int(x[p - 1].argmax()) == ids[p] for x, (ids, p) in zip(rows, chosen))
            continue
        hidden = [ids if model.config.causal else [*ids[:p], mask_id, *ids[p + 1 :]] for ids, p in chosen]
        best = torch.empty(len(chosen), dtype=torch.int64)

        def read(which: list[int], logits_MV: Tensor, best: Tensor = best) -> None:
            best[which] = logits_MV.argmax(-1).cpu()

        masked_logits(model.network, Inputs(hidden), [[p] for _, p in chosen], read)
        right += int((best == gold).sum())
    return right / len(positions)


def blimp_accuracy(model: Model | Pair, folder: str) -> float:
    """Mean accuracy over BLiMP's paradigms; a tie counts as wrong."""
    paradigms = read_pairs([folder])
    sentences = [text for pairs in paradigms.values() for pair in pairs for text in pair]
    if isinstance(model, Pair):
        values = []
        for start in range(0, len(sentences), CHUNK):
            rows = [e.ids for e in model.tokenizer.encode_batch(sentences[start : start + CHUNK])]
            for ids, x in zip(rows, model.log_probs(rows)):
                values.append(float(x.gather(1, torch.tensor(ids[1:-1])[:, None]).sum()))
        scores = np.array(values)
    else:
        scores = likelihoods(model, sentences)
    accuracies, at = [], 0
    for pairs in paradigms.values():
        own = scores[at : at + 2 * len(pairs)]
        accuracies.append(float((own[0::2] > own[1::2]).mean()))
        at += 2 * len(pairs)
    return float(np.mean(accuracies))


def task_accuracy(model: Model | Pair, train: str, dev: str) -> float:
    """Dev accuracy of logistic regression on the mean over each text's states."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    def features(texts: list[str]) -> np.ndarray:
        parts = (model.left, model.right) if isinstance(model, Pair) else (model,)
        return np.hstack([part.embed(texts, pooling="mean", normalize=False) for part in parts])

    (texts, labels), (dev_texts, gold) = (
        (list(found.inputs), list(found.targets)) for found in (read_classes(train), read_classes(dev))
    )
    scale = StandardScaler().fit(x := features(texts))
    probe = LogisticRegression(max_iter=2000).fit(scale.transform(x), labels)
    return float(probe.score(scale.transform(features(dev_texts)), gold))


# ── the four ─────────────────────────────────────────────────────────────────────────────────────────────────


def directions(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train what is not trained yet, measure what is not measured yet, and return the table."""
    changes: dict[str, Any] = dict(TINY) if args.tiny else {}
    for given in args.set:
        key, _, value = given.partition("=")
        changes[key.replace(".", "__")] = read_value(value)
    runs: dict[str, Path] = {}
    for name, causal in WAYS.items():
        out = runs[name] = args.work / name.replace(" ", "-")
        done = pretrain(args.recipe, args.corpus, out, device=args.device, model__causal=causal, **changes)
        if not done.finished:
            raise EverybertError(f"{out} was stopped: run the same command again to resume")
    models: dict[str, Model | Pair] = {name: load(out / "model", args.device) for name, out in runs.items()}
    left, right, both_ways = (models[name] for name in WAYS)
    assert isinstance(left, Model) and isinstance(right, Model) and isinstance(both_ways, Model)
    layout, length = ExampleLayout.of(left.tokenizer), left.config.max_positions
    pair = Pair(left, right)
    file = args.work / "pair.safetensors"
    if not file.exists():
        groups = whole_sequences(Corpus.open(args.corpus), layout, length, LINEAR_TOKENS)
        pair.train_output(lambda: next(groups), args.linear_steps)
        with atomic_file(file) as draft:
            save_file(pair.output.state_dict(), draft)
    pair.output.load_state_dict(load_file(file))
    ordered = {"left to right": left, "right to left": right, "both": pair, "bidirectional": both_ways}
    positions = heldout_positions(args.corpus, layout, length, args.positions)
    measures: dict[str, Callable[[Model | Pair], float]] = {
        f"fill ({len(positions)})": lambda model: fill_accuracy(model, positions, layout.mask_id)
    }
    if args.blimp:
        measures["BLiMP"] = lambda model: blimp_accuracy(model, args.blimp)
    for task in args.task:
        name, _, files = task.partition("=")
        train, comma, dev = files.partition(",")
        if not comma:
            raise EverybertError(f"--task {task}: write NAME=TRAIN,DEV")
        measures[name] = lambda model, train=train, dev=dev: task_accuracy(model, train, dev)  # type: ignore[misc]
    record = args.work / "scores.json"
    scores: dict[str, dict[str, float]] = read_json(record) if record.exists() else {}
    for name, model in ordered.items():
        for measure, value in measures.items():
            if measure not in scores.setdefault(name, {}):
                scores[name][measure] = value(model)
                write_json(record, scores)
    return {name: {measure: scores[name][measure] for measure in measures} for name in ordered}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for runs and scores; run again to resume")
    parser.add_argument("--recipe", default=str(Path(__file__).with_name("directions.toml")))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for everybert pretrain")
    parser.add_argument("--positions", type=int, default=2000, help="held-out tokens to predict")
    parser.add_argument("--linear-steps", type=int, default=LINEAR_STEPS, help="steps of the pair's linear layer")
    parser.add_argument("--blimp", help="a folder of BLiMP's files")
    parser.add_argument("--task", action="append", default=[], metavar="NAME=TRAIN,DEV", help="labelled texts; repeat")
    parser.add_argument("--device")
    parser.add_argument("--tiny", action="store_true", help="a toy model and few steps, to test the script on a CPU")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        table = directions(args)
    except EverybertError as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(json.dumps(table))
        return
    names = list(next(iter(table.values())))
    print("| model | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(f"{100 * row[measure]:.1f} %" for measure in names) + " |")


if __name__ == "__main__":
    main()
