"""Make a Longformer of a BERT or RoBERTa model: longer texts, after some further pre-training on long text.

python contrib/longformer.py roberta-base --positions 4096 --window 512 --out roberta-4096
everybert pretrain longformer --init roberta-4096 --corpus corpus --out run
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from extend_vocabulary import rebuild

from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.model.heads import Network
from everybert.store.hub import resolve
from everybert.store.huggingface import load_network, save_network
from everybert.text.tokenizer import Tokenizer


def to_longformer(network: Network, positions: int, window: int) -> Network:
    """BERT or RoBERTa as a Longformer: position embeddings are repeated, global projections copied from the local.

    Copying keeps the local structure that the model has learnt, except at the boundaries (Beltagy et al. 2020, §5).
    """
    config = network.config
    if config.family not in ("bert", "roberta", "xlm-roberta", "longformer") or config.positions != "learned":
        raise EverybertError(f"a Longformer can be made of BERT or RoBERTa, not of {config.family}")
    offset = config.pad_id + 1
    table = network.encoder.embeddings.position.weight.detach()  # type: ignore[union-attr]
    own_PE = table[config.position_offset :]
    copies = own_PE.repeat(-(-positions // len(own_PE)), 1)[:positions]
    unused = table[:offset] if config.position_offset == offset else torch.zeros(offset, table.shape[1])
    long = config.replace(
        family="longformer",
        max_positions=positions,
        position_offset=offset,
        windows=(window // 2,) * config.layers,
        global_attention=True,
    )
    state = network.state_dict()
    replaced = {"encoder.embeddings.position.weight": torch.cat((unused, copies))}
    for name, value in state.items():
        if ".attention.qkv." in name:
            twin = name.replace(".qkv.", ".qkv_global.")
            replaced[twin] = state.get(twin, value)
    if "nsp" in network.heads:
        del network.heads["nsp"]  # `transformers`' Longformer has no such head
    return rebuild(network, long, replaced)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model: a folder or a hub id")
    parser.add_argument("--positions", type=int, default=4096, help="tokens of the longest text")
    parser.add_argument("--window", type=int, default=512, help="tokens that a token attends to, half on each side")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    given = parser.parse_args()
    try:
        folder = resolve(given.model)
        long = to_longformer(load_network(folder).network, given.positions, given.window)
        with atomic_folder(given.out) as draft:
            save_network(long, draft, tokenizer=Tokenizer.load(folder))
    except EverybertError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"written: pre-train it with --init {given.out}")


if __name__ == "__main__":
    main()
