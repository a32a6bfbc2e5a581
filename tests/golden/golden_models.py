"""Groups: every method of Model, on the bundled model and on a tiny one of each family and head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from golden_tools import DATA, GROUPS, SPECS, Entries, group, sha256, tiny, written

import everybert

LONG = " ".join((DATA / "text.txt").read_text().split()[:150])
MASKS = {"wordpiece": "[MASK]", "unigram": "[MASK]", "bpe": "<mask>"}


def methods(m: Any, mask: str, tmp: Path) -> Entries:
    """Every method that needs no task head."""
    a, b = "The old farmer paints a boat by the river.", "Many wolves find it."
    ids = m.tokenizer.encode(a).ids
    segments = [[0] * (len(ids) - 2) + [1] * 2]
    return {
        "about": lambda: [repr(m), m.window, str(m.report), m.labels],
        "fill": lambda: m.fill(f"The old {mask} paints a {mask}.", top=3),
        "fill pair": lambda: m.fill(f"The {mask} paints.", top=2, pair=f"It is {mask}."),
        "fill long": lambda: m.fill(f"{LONG} {mask} {LONG}", top=2),
        "embed": lambda: m.embed([a, b, "", LONG]),
        "embed one": lambda: m.embed(a),
        "embed none": lambda: m.embed([]),
        "embed cls": lambda: m.embed([a, LONG], pooling="cls"),
        "embed max": lambda: m.embed([a, LONG], pooling="max"),
        "embed sqrt": lambda: m.embed([a, LONG], pooling="mean_sqrt_len_tokens"),
        "embed normalize": lambda: m.embed([a, b], normalize=True),
        "embed plain": lambda: m.embed([a, b], normalize=False),
        "embed cut": lambda: m.embed([a, LONG], long="cut"),
        "tokens": lambda: m.tokens(a),
        "tokens 0": lambda: m.tokens(a, layer=0),
        "tokens -2": lambda: m.tokens(a, layer=-2),
        "tokens pair": lambda: m.tokens(a, pair=b),
        "tokens long": lambda: m.tokens(LONG),
        "tokens 99": lambda: m.tokens(a, layer=99),
        "next_sentence": lambda: [m.next_sentence(a, b), m.next_sentence(b, a)],
        "attention": lambda: m.attention(a),
        "attention pair": lambda: m.attention(a, pair=b),
        "attention long": lambda: m.attention(LONG * 9),
        "trace": lambda: (lambda t: [t.tokens, t.ids, t.segments, t.values])(m.trace(a, pair=b)),
        "score": lambda: m.score(a),
        "score long": lambda: m.score(LONG),
        "hidden": lambda: m.hidden([ids, ids[:4], ids[:4]]),
        "hidden segments": lambda: m.hidden([ids], segments=segments),
        "hidden global": lambda: m.hidden([ids], global_tokens=[[0, 2]]),
        "neighbours": lambda: m.neighbours("boat", [a, "A boat and a boat."], top=3),
        "save": lambda: _saved(m, tmp / "saved"),
        "save int8": lambda: _saved(m, tmp / "saved8", int8=True),
    }


def tasks(m: Any) -> Entries:
    """Every method that needs a task head, or an adapter."""
    a, b = "The old farmer paints a boat by the river.", "Many wolves find it."
    question = "Where is the boat?"
    return {
        "classify": lambda: m.classify([a, b, "", LONG]),
        "classify pair": lambda: m.classify([(a, b), (LONG, b), (LONG, LONG)]),
        "regress": lambda: m.regress([a, (a, b), LONG]),
        "tag": lambda: m.tag([a, "Fox!", LONG]),
        "tag words": lambda: m.tag([["The", "fox", "paints", "."]]),
        "answer": lambda: m.answer(question, a, top=3),
        "answer long": lambda: m.answer([question, "Who?"], [LONG, a], top=2),
        "choose": lambda: m.choose(a, ["It floats.", "The wolves sing.", "No."]),
        "choose long": lambda: m.choose(LONG, ["It floats.", LONG]),
        "attribution": lambda: m.attribution(a),
        "attribution answer": lambda: m.attribution(question, pair=a, task="answer"),
    }


def _saved(m: Any, folder: Path, **options: Any) -> Any:
    m.save(folder, **options)
    config = json.loads((folder / "config.json").read_text())
    again = everybert.load(folder, device="cpu")
    found = {"files": written(folder), "config": config, "embed": again.embed(["The old farmer."])}
    return found if options else {**found, "sha256": sha256(folder / "model.safetensors")}


@group
def small(tmp: Path) -> Entries:
    """The bundled model with its adapters."""
    m = everybert.load("everybert-small", device="cpu")
    text = "Istanbul is a great [MASK] to visit"
    found = methods(m, "[MASK]", tmp)
    for slow in ("save", "save int8", "trace", "attention long", "score long"):
        del found[slow]
    adapters = {
        f"classify {name}": lambda name=name: m.classify([text, ("A dog sleeps.", "A dog is awake.")], adapter=name)
        for name in ("sentiment", "entailment", "paraphrase", "acceptability")
    }
    context = "Matt lives in Canada and Sinan lives in California, where John Smith of Acme works."
    return {
        **found,
        **tasks(m),
        **adapters,
        "trace names": lambda: (lambda t: [list(t.values), t["output"]])(m.trace(text)),
        "fill city": lambda: m.fill(text),
        "tag ner": lambda: m.tag(context),
        "tag pos": lambda: m.tag(context, adapter="pos"),
        "answer matt": lambda: m.answer("Where does Matt live?", context, top=3),
        "embed encoder": lambda: _bare(m),
        "int8": lambda: everybert.load("everybert-small", device="cpu", dtype="int8").embed([text, LONG]),
    }


def _bare(m: Any) -> Any:
    """Vectors under an adapter in use, and of the bare encoder."""
    m.use("sentiment")
    under = m.embed(["A dog sleeps."])
    m.use(None)
    return [under, m.embed(["A dog sleeps."])]


def _family(name: str) -> Callable[[Path], Entries]:
    def entries(tmp: Path) -> Entries:
        out: Entries = {}
        for full, spec in SPECS.items():
            family, _, head = full.rpartition("-")
            if family == name:
                m = everybert.load(tiny(tmp, full), device="cpu")
                mask = MASKS[spec["tokenizer"]]
                own = methods(m, mask, tmp / full) | tasks(m) if head == "mlm" else tasks(m)
                own |= {"save": methods(m, mask, tmp / full)["save"]}
                out |= {f"{head}: {entry}": function for entry, function in own.items()}
        return out

    return entries


GROUPS |= {name: _family(name) for name in dict.fromkeys(full.rpartition("-")[0] for full in SPECS)}


@group
def sentence_transformers(tmp: Path) -> Entries:
    """A folder with sentence-transformers' files: two poolings, a dense layer, a prompt, a normalisation."""
    folder = shutil.copytree(tiny(tmp, "bert-mlm"), tmp / "dense")
    m = everybert.load(shutil.copytree(DATA / "dense", folder, dirs_exist_ok=True), device="cpu")
    own = {k: v for k, v in methods(m, "[MASK]", tmp).items() if k.startswith(("embed", "save"))}
    return own | {"again": lambda: everybert.load(tmp / "saved", device="cpu").embed(["A boat.", LONG])}


@group
def tokenizers(tmp: Path) -> Entries:
    """Each kind of tokenizer on plain and on odd text."""
    odd = [
        "The café’s naïve Zoë!",
        "",
        "  two  spaces\t",
        "日本語 and \U0001f600",
        "[MASK] <mask> [SEP]",
        "ﬁne ＡＢ\u0301",
    ]
    found: Entries = {}
    for kind in MASKS:
        t = everybert.Tokenizer.load(DATA / "tokenizers" / kind)
        ids = (t.pad_id, t.unk_id, t.cls_id, t.sep_id, t.mask_id)
        found |= {
            f"{kind}: about": lambda t=t, ids=ids: [
                t.size,
                t.kind,
                t.lowercase,
                t.max_length,
                t.mask_token,
                t.digest,
                ids,
            ],
            f"{kind}: texts": lambda t=t: [_encoded(t.encode(text)) for text in odd],
            f"{kind}: pair": lambda t=t: _encoded(t.encode("The old boat.", "A fox?")),
            f"{kind}: bare": lambda t=t: [t.ids_batch(odd, specials=False), t.decode(t.encode("The boat.").ids)],
        }
    return found


def _encoded(e: Any) -> list[Any]:
    return [e.tokens, e.ids, e.offsets, e.segments, e.special, e.sequence, e.words]
