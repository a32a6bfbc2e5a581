"""Add words to the vocabulary of a model: each new embedding starts as the mean of the pieces of its word.

python contrib/extend_vocabulary.py bert-base --words terms.txt --out bert-medical
everybert corpus build texts/ --tokenizer bert-medical --out corpus
everybert pretrain tiny-cpu --init bert-medical --corpus corpus --out run
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from tokenizers import AddedToken
from torch import Tensor

from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.model.config import EncoderConfig, padded_vocabulary
from everybert.model.heads import Network
from everybert.store.huggingface import load_network, save_network
from everybert.text.readers import lines
from everybert.text.tokenizer import Tokenizer


def add_words(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """The tokenizer with whole words added after its own tokens."""
    new = [word for word in dict.fromkeys(w.strip() for w in words) if word and tokenizer.id(word) is None]
    if not new:
        raise EverybertError("every word given is in the vocabulary already: there is nothing to add")
    wider, settings = deepcopy(tokenizer.__reduce__()[1])
    # Vocabularies that spell the space before a word as part of the word include it here.
    spaced = tokenizer.kind != "wordpiece"
    wider.add_tokens([AddedToken(word, single_word=True, lstrip=spaced, normalized=not spaced) for word in new])
    return Tokenizer(wider, settings)


def rebuild(network: Network, config: EncoderConfig, replaced: Mapping[str, Tensor]) -> Network:
    """The same heads and weights with another configuration, and some tensors replaced."""
    state = network.state_dict()
    sized = ("classify", "tag")
    heads = {name: len(state[f"heads.{name}.output.weight"]) if name in sized else None for name in network.heads}
    fresh = Network(config, heads, pooler=network.pooler is not None)
    like = network.encoder.embeddings.token.weight
    fresh.to(like.device, like.dtype).load_state_dict({**state, **replaced})
    return fresh.train(network.training)


def extend(network: Network, known: Tokenizer, wider: Tokenizer) -> Network:
    """A network for a tokenizer with all tokens of `known` and more; a new token starts as the mean of its pieces."""
    table_VE = network.encoder.embeddings.token.weight.detach()
    rows = max(table_VE.shape[0], padded_vocabulary(wider.size))
    pieces = {i: known.encode(token, specials=False).ids for token, i in wider.vocab().items() if i >= known.size}
    replaced = {"encoder.embeddings.token.weight": _grown(table_VE, rows, pieces)}
    if "mlm" in network.heads:
        head = network.heads["mlm"].state_dict()
        for name in {"bias", "decoder.weight"} & head.keys():
            replaced[f"heads.mlm.{name}"] = _grown(head[name], rows, pieces)
    return rebuild(network, network.config.replace(vocab_size=rows), replaced)


def _grown(table: Tensor, rows: int, pieces: Mapping[int, Sequence[int]]) -> Tensor:
    """A table with more rows: row i is the mean of the rows pieces[i], or of all rows."""
    out = torch.cat((table, table.mean(0, keepdim=True).expand(rows - table.shape[0], *table.shape[1:])))
    for i, ids in pieces.items():
        if ids:
            out[i] = table[list(ids)].mean(0)
    return out


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
