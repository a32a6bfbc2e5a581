"""Every architecture from a folder to a fine-tuned model, in each mode; and in int8. (test_export.py: ONNX.)"""

from pathlib import Path

import numpy as np
import pytest
from grammar import write_tokenizer
from tiny_models import STEMS, saved

import everybert

NEW = list(STEMS)[list(STEMS).index("data2vec-text") :]
ROWS = [("the farmer sees the dog", "yes"), ("a cat", "no"), ("the dog sees a cat", "yes"), ("a farmer", "no")]


@pytest.fixture(scope="module", params=NEW)
def base(request, tmp_path_factory) -> Path:
    """A tiny model of each kind, with a tokenizer."""
    folder = tmp_path_factory.mktemp("base") / request.param
    return saved(folder, request.param, "ForMaskedLM", vocab_size=max(128, write_tokenizer(folder).size))


@pytest.mark.parametrize("mode", ["full", "top:1", "lora", "frozen"])
def test_fine_tuned_in_each_mode(base: Path, tmp_path: Path, mode: str):
    everybert.finetune(base, "classify", ROWS, ROWS, tmp_path / "out", mode=mode, epochs=1, quiet=True, device="cpu")
    assert everybert.load(tmp_path / "out").classify("the dog")[0].label in ("yes", "no")


def test_int8_says_what_the_model_says(base: Path):
    texts, model = [text for text, _ in ROWS], everybert.load(base)
    exact, coarse = model.embed(texts), everybert.load(base, dtype="int8").embed(texts)
    cosine = (exact * coarse).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(coarse, axis=1)
    assert cosine.min() > 0.98
    np.testing.assert_allclose(model.attention("the dog sees a cat").weights.sum(-1), 1, atol=1e-5)
