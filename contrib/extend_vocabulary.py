"""Add words to the vocabulary of a model: each new embedding starts as the mean of the pieces of its word.

python contrib/extend_vocabulary.py bert-base --words terms.txt --out bert-medical
everybert corpus build texts/ --tokenizer bert-medical --out corpus
everybert pretrain tiny-cpu --init bert-medical --corpus corpus --out run
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken

from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.store.convert import extend
from everybert.store.huggingface import load_network, save_network
from everybert.text.readers import lines
from everybert.text.tokenizer import Tokenizer


def add_words(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """The tokenizer with whole words added after its own tokens."""
    new = [word for word in dict.fromkeys(w.strip() for w in words) if word and tokenizer.id(word) is None]
    if not new:
        raise EverybertError("every word given is in the vocabulary already: there is nothing to add")
    backend, settings = tokenizer.__reduce__()[1]
    wider = tokenizer._backend.from_str(backend)
    # Vocabularies that spell the space before a word as part of the word include it here.
    spaced = tokenizer.kind != "wordpiece"
    wider.add_tokens([AddedToken(word, single_word=True, lstrip=spaced, normalized=not spaced) for word in new])
    return Tokenizer(wider, settings)


def extend_folder(folder: str | Path, words: Sequence[str], out: str | Path) -> int:
    """Write a copy of a model with words added to its vocabulary; returns how many were new."""
    loaded = load_network(folder)
    known = Tokenizer.load(folder)
    wider = add_words(known, words)
    with atomic_folder(out) as draft:
        save_network(
            extend(loaded.network, known, wider),
            draft,
            tokenizer=wider,
            labels=loaded.labels,
            problem_type=loaded.problem_type,
            extras=loaded.extras,
        )
    return wider.size - known.size


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the model folder")
    parser.add_argument("--words", type=Path, required=True, help="a file with one word per line")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    given = parser.parse_args()
    try:
        count = extend_folder(given.model, [line for _, line in lines(given.words)], given.out)
    except EverybertError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{count} words added: build a corpus with --tokenizer {given.out}, then pretrain with --init {given.out}")


if __name__ == "__main__":
    main()
