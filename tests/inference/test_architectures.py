"""Every architecture from a folder to a fine-tuned model, in each mode; int8, and ONNX."""

from pathlib import Path

import numpy as np
import pytest
from grammar import write_tokenizer
from tiny_models import STEMS, saved

import everybert
from everybert.inference.export import export_onnx

NEW = list(STEMS)[list(STEMS).index("data2vec-text") :]
ROWS = [("the farmer sees the dog", "yes"), ("a cat", "no"), ("the dog sees a cat", "yes"), ("a farmer", "no")] * 4


def folder(path: Path, kind: str) -> Path:
    """A tiny model with a tokenizer."""
    saved(path, kind, "ForMaskedLM", vocab_size=max(128, write_tokenizer(path).size))
    return path


@pytest.mark.parametrize("kind", NEW)
def test_fine_tuned_in_each_mode(tmp_path: Path, kind: str):
    base = folder(tmp_path / "base", kind)
    for mode in ("full", "top:1", "lora", "frozen"):
        out = tmp_path / mode.replace(":", "")
        everybert.finetune(base, "classify", ROWS, ROWS, out, mode=mode, epochs=1, quiet=True, device="cpu")
        assert everybert.load(out).classify("the dog")[0].label in ("yes", "no"), mode


@pytest.mark.parametrize("kind", NEW)
def test_int8_and_onnx_say_what_the_model_says(tmp_path: Path, kind: str):
    base = folder(tmp_path / "base", kind)
    texts = [text for text, _ in ROWS[:4]]
    exact, coarse = everybert.load(base).embed(texts), everybert.load(base, dtype="int8").embed(texts)
    cosine = (exact * coarse).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(coarse, axis=1)
    assert cosine.min() > 0.98
    assert export_onnx(base, tmp_path / "onnx")["difference"] < 1e-4
    seen = everybert.load(base).attention("the dog sees a cat").weights
    np.testing.assert_allclose(seen.sum(-1), 1, atol=1e-5)
