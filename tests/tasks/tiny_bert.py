"""A tiny random BERT with a vocabulary of whole words and a few pieces, as a folder: what the task tests run on."""

from __future__ import annotations

from pathlib import Path

import torch

_LIST = """
the a an of in on is was and to he she it they good bad fine awful great poor film food song day night cat dog
john mary smith paris london acme lives works eats likes sees where who what when does 's n't . , ! ? ( ) - :
red blue green one two three four five six seven eight nine ten
"""
WORDS = _LIST.split()
PIECES = ["##s", "##ed", "##ing", "##er", *[f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"]]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz0123456789", *PIECES]


def save(folder: Path, suffix: str = "Model", seed: int = 0, labels: list[str] | None = None, **changes) -> Path:
    """The folder of such a model, by `transformers`, without dropout."""
    import transformers

    settings = {
        "vocab_size": len(dict.fromkeys(VOCAB)),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.2,
        **changes,
    }
    if labels:
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {name: i for i, name in enumerate(labels)}
    torch.manual_seed(seed)
    model = getattr(transformers, f"Bert{suffix}")(transformers.BertConfig(**settings))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(VOCAB)) + "\n", encoding="utf-8")
    return folder
