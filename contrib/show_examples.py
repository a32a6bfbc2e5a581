"""Training examples of a recipe as slides print them: segments, label, masks; the masks of several epochs.

    python contrib/show_examples.py CORPUS --recipe bert-base --count 3
    python contrib/show_examples.py CORPUS --recipe spanbert --length 64 --epochs 2 --set mask.static_duplicates=1

CORPUS is a folder of `everybert corpus build`. The examples are those of a run of the recipe, one per pack in turn.
A predicted token is printed as "what the model reads→what was there"; ⟨ ⟩ join what is masked together: the tokens of a
word, a span, a collocation. With --epochs, each example is shown with the masks that each epoch draws for it (dynamic);
with mask.static_duplicates=1 they are always the same (static).

Legend: T tokens of an example, M its predicted tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np

from everybert.corpus.examples import ExampleRanges
from everybert.corpus.masking import Masked, Text, make_key, neighbours
from everybert.corpus.packs import PackStream, Position
from everybert.errors import EverybertError
from everybert.store.hub import resolve
from everybert.store.huggingface import read_config
from everybert.text.tokenizer import Tokenizer
from everybert.training import schedule
from everybert.training.pretrain import check_config, prepare
from everybert.training.recipe import Recipe, read_value

LABELS = {"pairs": ("IsNext", "NotNext"), "order": ("in order", "swapped")}


def show_examples(
    stream: PackStream, tokenizer: Tokenizer, count: int, epochs: int = 1, rate: float | None = None
) -> Iterator[dict[str, Any]]:
    """Examples of the first packs in turn, each with the masks that the first epochs draw for it, as JSON values.

    `tokens` are what the model reads, `predicted` the positions that it predicts, `was` their tokens. `how` is what it
    reads there: mask, random, kept, or next if it is causal. `units` are (first, end) of what is masked together.
    """
    packs = list(islice(stream.positions(epochs=1), count))
    places = ((pack, e) for e in range(count) for pack in packs if e < len(examples_at(stream, pack)))
    for number, (pack, e) in enumerate(islice(places, count), 1):
        example = examples_at(stream, pack).take(np.array([e]))
        text, segments_T = stream.assemble(example)
        label = LABELS[stream.examples.kind][example.label_E[0]] if example.label_E[0] >= 0 else None
        for epoch in range(epochs):
            ids_T, at_M, was_M, first_M, end_M = masks(stream, text, example, epoch, rate)
            how_M = np.select([ids_T[at_M] == tokenizer.mask_id, ids_T[at_M] == was_M], ["mask", "kept"], "random")
            tokens, was = (tokenizer.readable([tokenizer.token(int(i)) for i in ids]) for ids in (ids_T, was_M))
            yield {
                "example": number,
                "epoch": epoch + 1,
                "pack": pack.pack + 1,
                "label": label,
                "tokens": tokens,
                "segments": segments_T.tolist(),
                "predicted": at_M.tolist(),
                "was": was,
                "how": ["next"] * len(was) if stream.causal else how_M.tolist(),
                "units": sorted(set(zip(first_M.tolist(), end_M.tolist()))),
            }


def as_lines(one: dict[str, Any]) -> Iterator[str]:
    """An example as on a slide, a line per segment: a predicted token is "what is read→what was there"."""
    shown = list(one["tokens"])
    for i, was in zip(one["predicted"], one["was"]):
        shown[i] += f"→{was}"
    for first, end in (unit for unit in one["units"] if unit[1] - unit[0] > 1):
        shown[first], shown[end - 1] = "⟨" + shown[first], shown[end - 1] + "⟩"
    counts = ", ".join(f"{n} {how}" for how, n in Counter(one["how"]).items())
    yield f"{one['example']}. {one['label'] or 'no label'} (pack {one['pack']}, epoch {one['epoch']}: {counts})"
    for segment in sorted(set(one["segments"])):
        yield f"   {'AB'[segment]}  " + " ".join(t for t, s in zip(shown, one["segments"]) if s == segment)


def examples_at(stream: PackStream, position: Position) -> ExampleRanges:
    """The examples of the pack at a position."""
    plan = stream.plan(position.epoch, position.block)
    return plan.examples.take(np.arange(*plan.offsets_N1[position.pack : position.pack + 2]))


def masks(stream: PackStream, text: Text, example: ExampleRanges, epoch: int, rate: float | None) -> Masked:
    """The masks that an epoch draws for an example, as `PackStream.make` does; or the targets of a causal model."""
    if stream.causal:
        return neighbours(text, stream.causal == "reverse")
    return stream.masker(text, make_key(stream.seed, 6, stream.content_epoch(epoch), example.id_E), rate)


def example_stream(recipe: Recipe, corpus: str, length: int | None) -> tuple[PackStream, Tokenizer, float]:
    """The examples of the first phase of a run, the corpus' tokenizer, and the mask rate of the first step."""
    if length is not None:
        recipe = replace(recipe, phases=(replace(recipe.phases[0], length=length),))
    setting = prepare(recipe, corpus, corpus, "cpu")
    init = recipe.model.init
    config = recipe.config if init is None else read_config(resolve(init))[0].replace(**recipe.model.changes)
    check_config(recipe, config)
    stream = replace(setting, causal=config.causal).stream(0)
    return stream, setting.tokenizer, schedule.moment(recipe, 0, recipe.steps).mask_rate


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--recipe", default="bert-base", help="the name of a recipe, or a .toml file")
    parser.add_argument("--count", type=int, default=5, help="number of examples")
    parser.add_argument("--length", type=int, help="most tokens of an example, in place of the recipe's")
    parser.add_argument("--epochs", type=int, default=1, help="show the masks of this many epochs for each example")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for everybert pretrain")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    changes = {key.replace(".", "__"): read_value(value) for key, _, value in (one.partition("=") for one in args.set)}
    try:
        stream, tokenizer, rate = example_stream(Recipe.load(args.recipe, **changes), args.corpus, args.length)
        found = list(show_examples(stream, tokenizer, args.count, args.epochs, rate))
    except EverybertError as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for one in found:
        print(*as_lines(one), sep="\n")


if __name__ == "__main__":
    main()
