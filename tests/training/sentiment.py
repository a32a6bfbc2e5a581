"""A toy problem for fine-tuning, shared by its tests."""

import random

import tiny_bert as tiny

from everybert.store.adapters import load_feature_head
from everybert.store.huggingface import load_network
from everybert.text.tokenizer import Tokenizer

FAST = {"lr": 3e-3, "epochs": 8, "batch_size": 16, "device": "cpu", "quiet": True}


def sentiment(seed, size=160):
    """good … is "yes", bad … is "no"."""
    draw = random.Random(seed)
    rows = []
    for _ in range(size):
        label = draw.choice(["yes", "no"])
        words = draw.choices(tiny.WORDS[20:40], k=4)
        words.insert(draw.randrange(4), {"yes": "good", "no": "bad"}[label])
        rows.append((" ".join(words), label))
    return rows


def parts(folder):
    loaded = load_network(folder)
    if described := loaded.extras.get("feature_head"):
        load_feature_head(loaded.network, described["name"], folder, described)
    return loaded, Tokenizer.load(folder)
