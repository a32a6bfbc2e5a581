"""Tiny random models with task heads, as folders, made without `transformers` (whose import takes seconds)."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_bert import VOCAB

from everybert.files import atomic_folder
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.store.huggingface import save_network
from everybert.text.tokenizer import Tokenizer


def save(
    folder: Path, heads: dict | None = None, labels=None, seed: int = 0, extras=None, problem_type=None, **changes
):
    """A folder with a tiny BERT of these heads (head → number of labels)."""
    vocabulary = list(dict.fromkeys(VOCAB))
    settings = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "layers": 2,
        "heads": 2,
        "intermediate_size": 48,
        "max_positions": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "init_range": 0.2,
        **changes,
    }
    words = folder.with_name(folder.name + ".words")
    words.mkdir(parents=True)
    (words / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = Tokenizer.load(words)
    torch.manual_seed(seed)
    network = Network(EncoderConfig(**settings), heads or {}, pooler=True)
    with atomic_folder(folder) as draft:
        save_network(network, draft, tokenizer=tokenizer, labels=labels, problem_type=problem_type, extras=extras)
    return folder
