"""everybert-classic as it is shipped: BERT's own layout, small, and what a lecture shows."""

from pathlib import Path

import pytest
import torch
import transformers

import everybert


@pytest.fixture(scope="module")
def classic():
    return everybert.load("everybert-classic", device="cpu")


def test_is_the_paper_s_layout(classic):
    config = classic.config
    assert (config.family, config.norm, config.positions, config.segments) == ("bert", "post", "learned", 2)
    assert (config.layers, config.hidden_size, config.heads, config.max_positions) == (4, 256, 4, 512)
    assert {"mlm", "nsp"} <= set(classic.network.heads)
    folder = Path(everybert.__file__).parent / "models" / "everybert-classic"
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= 12_000_000


def test_fills_masks_and_judges_pairs(classic):
    (place,) = classic.fill("Istanbul is a great [MASK] to visit", top=3)
    assert "place" in [candidate.token for candidate in place]
    follows = classic.next_sentence("The man went to the store.", "He bought a gallon of milk.")
    assert follows > 0.5 > classic.next_sentence("The man went to the store.", "Penguins are flightless birds.")


def test_transformers_reads_it(classic, tmp_path):
    """Loaded in fp32, the folder is BertForPreTraining there, with the same hidden states."""
    everybert.load("everybert-classic", device="cpu", dtype="float32").save(tmp_path / "plain")
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path / "plain").eval()
    encoded = classic.tokenizer.encode("The man went to the [MASK].")
    with torch.no_grad():
        expected = theirs.bert(torch.tensor([encoded.ids])).last_hidden_state[0]
    found = everybert.load(tmp_path / "plain", device="cpu").hidden([encoded.ids])[0]
    assert torch.allclose(found, expected, atol=1e-5)
