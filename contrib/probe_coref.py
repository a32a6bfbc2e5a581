"""Coreference in heads: how often the head word of a mention attends most to an antecedent (Clark et al. 2019, §4.3).

    python contrib/probe_coref.py en_gum-ud-dev.conllu --model everybert-small [--json]

FILE is CoNLL-U with coreference, as in CorefUD and UD English GUM: `Entity=(e1-person …` in the last column opens a
mention of the entity e1, and `e1)` closes it. The head word of a mention is the word whose syntactic head lies outside.
Documents (`# newdoc`) are read in stretches of whole sentences of at most 128 tokens, as short as those of the paper. A
head chooses, among the mentions before, the one whose head word gets most attention. The baselines choose the nearest
mention, and the nearest one with the same head word. Layers and heads are printed counted from 1, in JSON from 0.

Legend: L layers, A heads, W words of a stretch, n its tokens, M mentions with an antecedent.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np

from everybert.errors import EverybertError
from everybert.inference.model import Model, load
from everybert.inside.probes import Sentence, Tree, sentence_of
from everybert.text.readers import CONLLU_FIELDS, lines

WINDOW = 128
PUBLISHED = {"all": 65, "pronoun": 64, "proper": 73, "nominal": 58}
"""Head 5-4 of BERT-base on CoNLL-2012 (Clark et al. 2019, table 2); nearest 27, head match 52."""
KINDS = {"PRON": "pronoun", "PROPN": "proper"}
BRACKET = re.compile(r"\((?P<opened>[^-()]+)[^()]*(?P<whole>\))?|(?P<closed>[^()]+)\)")


class Mention(NamedTuple):
    """A mention in a stretch of text."""

    entity: str
    word: int
    """Its head word."""
    form: str
    kind: str
    """pronoun, proper or nominal."""


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────


def documents(path: Path) -> Iterator[list[Tree]]:
    """The sentences of each document."""
    document: list[Tree] = []
    sentence: list[dict[str, str]] = []
    for number, line in [*lines(path), (0, "")]:
        if line.startswith("# newdoc") and document:
            yield document
            document = []
        if not line.strip() and sentence:
            document.append(sentence)
            sentence = []
        elif line.strip() and not line.startswith("#"):
            row = line.split("\t")
            if len(row) != len(CONLLU_FIELDS):
                raise EverybertError(f"{path}:{number}: {len(row)} columns, 10 expected: give a CoNLL-U file")
            sentence += [dict(zip(CONLLU_FIELDS, row))] if row[0].isdigit() else []
    if document:
        yield document


def mentions_of(trees: Sequence[Tree]) -> list[Mention]:
    """The mentions of some sentences, in the order of their head words."""
    found: list[Mention] = []
    base = 0
    for tree in trees:
        begun: dict[str, list[int]] = defaultdict(list)
        for at, word in enumerate(tree):
            entities = [part[7:] for part in word["misc"].split("|") if part.startswith("Entity=")]
            for mark in (mark for text in entities for mark in BRACKET.finditer(text)):
                if mark["opened"]:
                    begun[mark["opened"]].append(at)
                name = (mark["opened"] if mark["whole"] else mark["closed"]) or ""
                entity, _, part = name.partition("[")  # of a mention in parts, such as e1[1/2], the first counts
                if begun[name] and part[:2] in ("", "1/"):
                    found.append(_mention(tree, begun[name].pop(), at, entity, base))
        base += len(tree)
    return sorted(found, key=lambda mention: mention.word)


def _mention(tree: Tree, start: int, end: int, entity: str, base: int) -> Mention:
    """The mention tree[start … end]. Its head word is the first whose syntactic head lies outside."""
    span = range(start, end + 1)
    top = next((i for i in span if not tree[i]["head"].isdigit() or int(tree[i]["head"]) - 1 not in span), end)
    return Mention(entity, base + top, tree[top]["form"].lower(), KINDS.get(tree[top]["upos"], "nominal"))


def stretches(model: Model, document: Sequence[Tree], window: int) -> Iterator[list[Tree]]:
    """Whole sentences of a document together, as long as they fit. Sentences that do not fit alone are left out."""
    held: list[Tree] = []
    for tree in document:
        if held and len(joined(model, [*held, tree]).encoding) > window:
            yield held
            held = []
        if len(joined(model, [tree]).encoding) <= window:
            held.append(tree)
    if held:
        yield held


def joined(model: Model, trees: Sequence[Tree]) -> Sentence:
    """Sentences as one text."""
    return sentence_of(model.tokenizer, [word["form"] for tree in trees for word in tree])


# ── the measure ──────────────────────────────────────────────────────────────────────────────────────────────


def probe_coref(model: Model, path: Path) -> dict[str, Any]:
    """Accuracy of every head on the mentions with an antecedent in their stretch, and of the baselines, by kind."""
    kinds: list[str] = []
    baselines: list[list[bool]] = []
    right: list[np.ndarray] = []
    for document in documents(path):
        for trees in stretches(model, document, min(WINDOW, model.window)):
            text = joined(model, trees)
            mentions = [one for one in mentions_of(trees) if text.present_W[one.word]]
            between_LAWW: np.ndarray | None = None
            for i, mention in enumerate(mentions):
                before = [one for one in mentions[:i] if one.word < mention.word]
                if not any(one.entity == mention.entity for one in before):
                    continue
                if between_LAWW is None:
                    words = [word["form"] for tree in trees for word in tree]
                    between_LAWW = between(model.attention(" ".join(words)).weights, text)
                best_LA = between_LAWW[:, :, mention.word, [one.word for one in before]].argmax(-1)
                right.append(np.array([one.entity == mention.entity for one in before])[best_LA])
                same = [one.entity for one in before if one.form == mention.form]
                kinds.append(mention.kind)
                baselines.append([before[-1].entity == mention.entity, same[-1:] == [mention.entity]])
    if not kinds:
        raise EverybertError(f"{path}: no mention has an antecedent; coreference is Entity=(e1-… in the last column")
    right_MLA, baselines_M2 = np.stack(right), np.array(baselines)
    accuracy_LA = right_MLA.mean(0)
    layer, head = (int(i) for i in np.unravel_index(int(accuracy_LA.argmax()), accuracy_LA.shape))
    rows = {}
    for name in (name for name in PUBLISHED if name == "all" or name in kinds):
        chosen = np.array([name in ("all", kind) for kind in kinds])
        nearest, match = baselines_M2[chosen].mean(0).tolist()
        score = float(right_MLA[chosen, layer, head].mean())
        rows[name] = {"mentions": int(chosen.sum()), "best head": score, "nearest": nearest, "head match": match}
    return {"layer": layer, "head": head, "kinds": rows, "right": accuracy_LA.tolist()}


def between(weights_LAnn: np.ndarray, text: Sentence) -> np.ndarray:
    """(L, A, W, W): attention between words: summed over the tokens of the target, mean over those of the source."""
    member_nW = (text.owner_n[:, None] == np.arange(len(text.present_W))).astype(np.float32)
    return (member_nW / np.maximum(member_nW.sum(0), 1)).T @ weights_LAnn @ member_nW


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="everybert-small")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        found = probe_coref(load(args.model), args.file)
    except EverybertError as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(json.dumps(found))
        return
    print(f"| mentions | | head {found['layer'] + 1}-{found['head'] + 1} | nearest | head match | BERT-base |")
    print("|---|---|---|---|---|---|")
    for name, row in found["kinds"].items():
        scores = " | ".join(f"{100 * row[key]:.1f}" for key in ("best head", "nearest", "head match"))
        print(f"| {name} | {row['mentions']:,} | {scores} | {PUBLISHED[name]} |")


if __name__ == "__main__":
    main()
