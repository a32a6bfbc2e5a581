"""Left to right, right to left, both concatenated, bidirectional: four models on the same text and steps, one table.

    python recipes/directions.py --corpus CORPUS --work W [--recipe directions] [--set steps=400] [--positions 2000]
        [--blimp FOLDER] [--task SST-2=train.tsv,dev.tsv --task MRPC=train.tsv,dev.tsv] [--seeds 3] [--tiny] [--json]

CORPUS is a folder of `everybert corpus build` with a held-out split. Three models are pre-trained (run again to
resume): the recipe as it is, with `causal = true`, and with `causal = "reverse"`. The fourth, "both", is the pair of
one-way models, as in ELMo (Peters et al. 2018): for the token at t, the left-to-right state of t − 1 and the
right-to-left state of t + 1 are concatenated, and a linear layer is trained on them while both encoders stay as they
are. Devlin et al. 2019 (section 5.1) compare the same.

fill      accuracy at the same held-out tokens; each model sees what it may: all other tokens, those before, those after
BLiMP     share of pairs in which the right sentence is more probable (one-way models: the true log-probability; the
          others: the sum over tokens given both sides)
tasks     dev accuracy after fine-tuning all weights, the same way for all four: a linear layer on the mean over the
          tokens' states (of the pair, on both means, and both encoders are trained); mean and 95 % interval over seeds

Legend: T tokens in the batch, H hidden, V vocabulary, M predicted tokens, B sequences, E examples, C classes.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
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
from everybert.model.engine import Inputs, device_of, encode, masked_logits
from everybert.model.losses import label_loss
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged
from everybert.tasks import Classify
from everybert.tasks.features import TaskTargets, make_batch
from everybert.tasks.metrics import Interval, interval
from everybert.training.optim import Optimizer, OptimizerConfig
from everybert.training.pretrain import pretrain
from everybert.training.recipe import read_value
from everybert.training.step import Compute
from everybert.training.tuning import Data, FinetuneSettings, linear, steps

WAYS: dict[str, bool | str] = {"left to right": True, "right to left": "reverse", "bidirectional": False}
LINEAR_TOKENS, LINEAR_RATE = 4096, 3e-3
"""Tokens per step and learning rate of the linear layer of the pair."""
TINY = {
    **{"steps": 40, "model__layers": 2, "model__hidden_size": 64, "model__heads": 2, "model__intermediate_size": 128},
    **{"model__max_positions": 64, "batch__length": 64, "batch__tokens": 1024, "batch__pack": 1024},
}
"""The recipe's changes for --tiny."""
LINEAR_STEPS, TINY_LINEAR_STEPS = 400, 20
"""Steps of the pair's linear layer, by default and for --tiny."""
TINY_ROWS, TINY_PAIRS = 200, 10
"""For --tiny: labelled rows of the training set and of the dev set, and pairs of each of BLiMP's paradigms."""
CHUNK = 64
"""Sentences whose predictions are held at once."""


class Pair(nn.Module):
    """Two one-way models side by side, and a linear layer that predicts a token from the states beside it."""

    def __init__(self, left: Model, right: Model) -> None:
        super().__init__()
        self.left, self.right, self.tokenizer, self.config = left, right, left.tokenizer, left.config
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


def blimp_accuracy(model: Model | Pair, folder: str, most: int | None = None) -> float:
    """Mean accuracy over BLiMP's paradigms, or the first `most` pairs of each; a tie counts as wrong."""
    paradigms = {name: pairs[:most] for name, pairs in read_pairs([folder]).items()}
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


# ── fine-tuning ──────────────────────────────────────────────────────────────────────────────────────────────


class Classifier(nn.Module):
    """The encoder of a model, or both of a pair, and a linear layer on the mean over each text's tokens."""

    def __init__(self, model: Model | Pair, labels: int) -> None:
        super().__init__()
        parts = (model.left, model.right) if isinstance(model, Pair) else (model,)
        self.encoders = nn.ModuleList(copy.deepcopy(part.network.encoder) for part in parts)
        self.output = nn.Linear(sum(part.config.hidden_size for part in parts), labels)
        self.requires_grad_(True)

    def forward(self, given: Ragged) -> Tensor:
        """(T) ids → (E, C) logits."""
        mean_BH = torch.cat([pool(encoder(given), given, "mean") for encoder in self.encoders], dim=-1)
        return given.targets_as(TaskTargets).combine(self.output(mean_BH))


def labelled(model: Model, train: Path, dev: Path, most: int | None = None) -> Data:
    """A task's two sets for models with this one's tokenizer and sizes; at most the first `most` rows of each."""
    sets = [Classify.read(file, skip_bad=True) for file in (train, dev)]
    task = Classify.from_examples(sets[0], model.config)
    sets = [examples.take(range(len(examples))[:most]) for examples in sets]
    features = [task.features(model.tokenizer, model.config, examples) for examples in sets]
    return Data(Path(), model.tokenizer, task, *features, *sets)


def task_accuracy(model: Model | Pair, data: Data, settings: FinetuneSettings, seed: int) -> float:
    """Fine-tune all weights on a task, which `everybert finetune` would refuse for a pair; the last dev accuracy."""

    def loss(network: Any, given: Ragged) -> tuple[Tensor, Tensor]:
        value = label_loss(network(given), given.targets_as(TaskTargets).label_E)  # type: ignore[arg-type]
        return value, value.detach()[None]

    torch.manual_seed(seed)
    network: Any = Classifier(model, len(data.task.labels))
    device = device_of(network.encoders[0])
    dtype = settings.torch_dtype(device)
    compute = Compute(network, loss, device, dtype, graphs=dtype != torch.float32)
    optimizer = Optimizer(compute.master, OptimizerConfig(eps=1e-8))
    total = settings.rounds * math.ceil(len(data.train) / settings.batch_size)
    compute.network.train()
    for number, step in enumerate(steps(data, settings, seed, device, model.config)):
        for item in step.items:
            compute.run(item.batch)
        optimizer.step(settings.lr * linear(number, settings.warmup, total))
        compute.master.zero_grad()
        compute.refresh()
    return dev_accuracy(compute.network.eval(), data, device)


@torch.inference_mode()
def dev_accuracy(network: nn.Module, data: Data, device: torch.device) -> float:
    """Share of the dev set's texts whose label is the most probable one."""
    right = 0
    for which in np.array_split(np.arange(len(data.dev)), math.ceil(len(data.dev) / CHUNK)):
        given = make_batch(data.dev, which).to(device)
        right += int((network(given).argmax(-1) == given.targets_as(TaskTargets).label_E).sum())
    return right / len(data.dev)


# ── the four ─────────────────────────────────────────────────────────────────────────────────────────────────


def pretrained(args: argparse.Namespace) -> dict[str, Model | Pair]:
    """The four models; what is not trained yet is trained."""
    changes: dict[str, Any] = dict(TINY) if args.tiny else {}
    for given in args.set:
        key, _, value = given.partition("=")
        changes[key.replace(".", "__")] = read_value(value)
    models: dict[str, Model] = {}
    for name, causal in WAYS.items():
        out = args.work / name.replace(" ", "-")
        done = pretrain(args.recipe, args.corpus, out, device=args.device, model__causal=causal, **changes)
        if not done.finished:
            raise EverybertError(f"{out} was stopped: run the same command again to resume")
        models[name] = load(out / "model", args.device)
    left, right, both_ways = (models[name] for name in WAYS)
    pair = Pair(left, right)
    file = args.work / "pair.safetensors"
    if not file.exists():
        layout, length = ExampleLayout.of(left.tokenizer), left.config.max_positions
        groups = whole_sequences(Corpus.open(args.corpus), layout, length, LINEAR_TOKENS)
        usual = TINY_LINEAR_STEPS if args.tiny else LINEAR_STEPS
        pair.train_output(lambda: next(groups), args.linear_steps or usual)
        with atomic_file(file) as draft:
            save_file(pair.output.state_dict(), draft)
    pair.output.load_state_dict(load_file(file))
    return {"left to right": left, "right to left": right, "both": pair, "bidirectional": both_ways}


def measures(args: argparse.Namespace, model: Model) -> dict[str, list[Callable[[Model | Pair], float]]]:
    """Column of the table → what is measured of each model: once, or for each seed."""
    layout = ExampleLayout.of(model.tokenizer)
    positions = heldout_positions(args.corpus, layout, model.config.max_positions, args.positions)
    found: dict[str, list[Callable[[Model | Pair], float]]] = {
        f"fill ({len(positions)})": [lambda model: fill_accuracy(model, positions, layout.mask_id)]
    }
    if args.blimp:
        found["BLiMP"] = [lambda model: blimp_accuracy(model, args.blimp, TINY_PAIRS if args.tiny else None)]
    settings = FinetuneSettings(epochs=args.epochs, lr=args.lr)
    for task in args.task:
        name, _, files = task.partition("=")
        train, comma, dev = files.partition(",")
        if not comma:
            raise EverybertError(f"--task {task}: write NAME=TRAIN,DEV")
        data = labelled(model, Path(train), Path(dev), TINY_ROWS if args.tiny else None)
        found[f"{name} ({args.epochs} epochs, {args.lr:g})"] = [
            partial(task_accuracy, data=data, settings=settings, seed=seed) for seed in range(args.seeds)
        ]
    return found


def directions(args: argparse.Namespace) -> dict[str, dict[str, Interval]]:
    """Train what is not trained yet, measure what is not measured yet, and return the table."""
    models = pretrained(args)
    columns = measures(args, models["bidirectional"])
    record = args.work / "measured.json"
    scores: dict[str, dict[str, list[float]]] = read_json(record) if record.exists() else {}
    for name, model in models.items():
        for column, runs in columns.items():
            known = scores.setdefault(name, {}).setdefault(column, [])
            for run in runs[len(known) :]:
                known.append(run(model))
                write_json(record, scores)
    return {
        name: {column: interval(scores[name][column][: len(runs)]) for column, runs in columns.items()}
        for name in models
    }


def cell(score: Interval) -> str:
    """A score in per cent, with its interval if there were several runs."""
    return f"{100 * score.mean:.1f}" + (f" ± {100 * score.half:.1f}" if score.half is not None else "") + " %"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for runs and scores; run again to resume")
    parser.add_argument("--recipe", default=str(Path(__file__).with_name("directions.toml")))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for everybert pretrain")
    parser.add_argument("--positions", type=int, default=2000, help="held-out tokens to predict")
    parser.add_argument("--linear-steps", type=int, help=f"of the pair's linear layer: {LINEAR_STEPS}")
    parser.add_argument("--blimp", help="a folder of BLiMP's files")
    parser.add_argument("--task", action="append", default=[], metavar="NAME=TRAIN,DEV", help="labelled texts; repeat")
    parser.add_argument("--seeds", type=int, default=3, help="fine-tuning runs per task")
    parser.add_argument("--epochs", type=int, default=3, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=2e-4, help="highest learning rate of fine-tuning")
    parser.add_argument("--device")
    parser.add_argument("--tiny", action="store_true", help="a toy model and few steps, to test the script on a CPU")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        table = directions(args)
    except EverybertError as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(json.dumps({name: {k: asdict(v) for k, v in row.items()} for name, row in table.items()}))
        return
    names = list(next(iter(table.values())))
    print("| model | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(cell(row[column]) for column in names) + " |")


if __name__ == "__main__":
    main()
