"""The shipped toy recipe learns: on the bundled text it gets far below what word frequencies alone would give."""

import numpy as np
import torch

from everybert.corpus.build import build_corpus
from everybert.data import documents
from everybert.text.train_tokenizer import train_tokenizer
from everybert.training.pretrain import pretrain

STEPS = 150
BOUND = 1.3
"""Held-out loss after the first minute or less of a core's time; a model that knows frequencies alone has 4.7."""


def test_tiny_cpu_learns_the_bundled_text(tmp_path):
    torch.set_num_threads(1)
    texts = list(documents())
    (tmp_path / "text.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    tokenizer, _ = train_tokenizer(iter(texts), size=4000)
    build_corpus(tmp_path / "text.txt", tokenizer, tmp_path / "corpus", heldout=0.02)
    counts = np.load(tmp_path / "corpus" / "unigram.npy")
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * np.log(share)).sum())
    result = pretrain(
        "tiny-cpu", tmp_path / "corpus", tmp_path / "run", device="cpu", quiet=True, steps=STEPS, run__evaluate_every=0
    )
    assert entropy > 4.5
    assert result.figures["heldout_loss"] < BOUND
    assert result.figures["accuracy"] > 0.6
