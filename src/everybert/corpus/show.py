"""Training examples as slides print them: tokens, segments, labels, and the masks that several epochs draw.

Legend: E examples, T tokens of an example, M its predicted tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from everybert.corpus.build import build_corpus
from everybert.corpus.examples import ExampleConfig, ExampleKind
from everybert.corpus.masking import MaskingConfig, Strategy
from everybert.corpus.packs import PackStream
from everybert.corpus.pmi import Phrases
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.text.tokenizer import Tokenizer

LABELS = {"pairs": ("IsNext", "NotNext"), "order": ("in order", "swapped")}


def show_examples(
    stream: PackStream, tokenizer: Tokenizer, count: int, epochs: int = 1, rate: float | None = None
) -> Iterator[dict[str, Any]]:
    """Examples of the first packs in turn, each with the masks that the first epochs draw for it, as JSON values.

    `tokens` are what the model reads, `predicted` the positions that it predicts, `was` their tokens. `how` is what it
    reads there: mask, random, kept, or next if it is causal. `units` are (first, end) of what is masked together.
    """
    packs = [(p, stream.examples_at(p)) for p in islice(stream.positions(epochs=1), count)]
    chosen = ((place, pack.take(np.array([e]))) for e in range(count) for place, pack in packs if e < len(pack))
    for number, (place, example) in enumerate(islice(chosen, count)):
        label = LABELS[stream.examples.kind][example.label_E[0]] if example.label_E[0] >= 0 else None
        for epoch in range(epochs):
            _, segments_T, _, (ids_T, at_M, was_M, first_M, end_M) = stream.mask(example, epoch, rate)
            how_M = np.select([ids_T[at_M] == tokenizer.mask_id, ids_T[at_M] == was_M], ["mask", "kept"], "random")
            tokens, was = (tokenizer.readable([tokenizer.token(int(i)) for i in ids]) for ids in (ids_T, was_M))
            yield {
                **{"example": number, "epoch": epoch, "block": place.block, "pack": place.pack, "label": label},
                "tokens": tokens,
                "segments": segments_T.tolist(),
                "predicted": at_M.tolist(),
                "was": was,
                "how": ["next"] * len(was) if stream.causal else how_M.tolist(),
                "units": sorted(set(zip(first_M.tolist(), end_M.tolist()))),
            }


def as_lines(row: dict[str, Any]) -> Iterator[str]:
    """An example as on a slide, a line per segment: a predicted token is "what the model reads→what was there"."""
    shown = list(row["tokens"])
    for i, was in zip(row["predicted"], row["was"]):
        shown[i] += f"→{was}"
    for first, end in (unit for unit in row["units"] if unit[1] - unit[0] > 1):
        shown[first], shown[end - 1] = "⟨" + shown[first], shown[end - 1] + "⟩"
    counts = ", ".join(f"{n} {how}" for how, n in Counter(row["how"]).items())
    label = f"{row['label']}, " if row["label"] else ""
    yield f"example {row['example']}: {label}pack {row['pack']}, epoch {row['epoch']} ({counts or 'none predicted'})"
    for segment in sorted(set(row["segments"])):
        yield f"   {'AB'[segment]}  " + " ".join(t for t, s in zip(shown, row["segments"]) if s == segment)


def text_examples(
    text: str,
    tokenizer: Tokenizer,
    kind: ExampleKind = "pairs",
    strategy: Strategy = "token",
    rate: float = 0.15,
    static: bool = False,
    length: int = 32,
    collocations: Sequence[str] = (),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The first eight examples of a text, in the masks of two epochs; blank lines separate its documents.

    `static` draws the masks once, as BERT did. The strategy "pmi" masks the given collocations as wholes: those of a
    corpus are mined, for which a text is too short.
    """
    if tokenizer.special_ids.issuperset(tokenizer.ids_batch([text], specials=False)[0]):
        raise EverybertError("the text has no words to make examples of; give some sentences")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_text(text.replace("\0", "\ufffd"), encoding="utf-8")
        build_corpus(file, tokenizer, Path(folder) / "corpus", workers=1, heldout=0)
        stream = PackStream(
            Corpus.open(Path(folder) / "corpus"),
            ExampleLayout.of(tokenizer),
            ExampleConfig(kind, length),
            MaskingConfig(rate, strategy, static_duplicates=1 if static else None),
            seed=seed,
            capacity=2 * length,
            phrases=Phrases(map(tuple, tokenizer.ids_batch([f" {words.strip()}" for words in collocations], False))),
        )
        return list(show_examples(stream, tokenizer, count=8, epochs=2))
