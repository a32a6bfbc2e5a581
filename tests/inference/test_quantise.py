"""A published model in int8: how near it stays, that neighbours do not matter, and what users may ask of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import mistake, run
from refusals import refuses

from everybert.data import documents
from everybert.inference.export import compare_models as compare
from everybert.inference.export import quantise
from everybert.inference.model import Model, load
from everybert.model.int8 import Int8Linear, supported
from everybert.store.weights import INT8
from everybert.text.sentences import split_sentences

pytestmark = pytest.mark.skipif(not supported(), reason="no int8 products on this machine")
TEXTS = [sentence for text in documents(60) for sentence in split_sentences(text)[:3]]
TEXTS += [" ".join(TEXTS[i : i + n]) for i, n in ((0, 5), (9, 12), (30, 25))]


@pytest.fixture(scope="module")
def fast(minilm_folder: Path) -> Model:
    return load(minilm_folder, dtype="int8")


def test_vectors_stay_near(minilm: Model, fast: Model):
    one_NH, two_NH = minilm.embed(TEXTS), fast.embed(TEXTS)
    cosine_N = (one_NH * two_NH).sum(1)
    assert cosine_N.mean() >= 0.99 and cosine_N.min() >= 0.97


def test_a_text_does_not_depend_on_its_neighbours(fast: Model):
    together = fast.embed(TEXTS)
    for i in (0, 7, 31, len(TEXTS) - 1):
        assert np.array_equal(fast.embed([TEXTS[i]])[0], together[i])
    assert np.array_equal(fast.embed(TEXTS[::-1])[::-1], together)
    ids = [fast.tokenizer.encode(text).ids for text in TEXTS[:5]]
    alone = [fast.hidden([sequence])[0] for sequence in ids]
    assert all(torch.equal(a, b) for a, b in zip(alone, fast.hidden(ids)))


def test_a_quantised_folder_keeps_its_pooling(minilm: Model, minilm_folder: Path, tmp_path: Path):
    found = quantise(minilm_folder, tmp_path / "small", TEXTS[:8])
    assert found["bytes_after"] == (tmp_path / "small" / INT8).stat().st_size < 0.26 * found["bytes_before"]
    assert found["stored"] > 0.999
    assert found["computed"] is not None and found["computed"] > 0.98
    small = load(tmp_path / "small", dtype="int8")
    assert small.pooling.normalize and small.pooling.size == minilm.pooling.size
    assert (minilm.embed(TEXTS) * small.embed(TEXTS)).sum(1).min() > 0.97


def test_blanks_next_sentences_and_the_inside(bert_folder: Path, tmp_path: Path):
    plain = load(bert_folder, device="cpu")
    plain.save(tmp_path / "small", int8=True)
    fast = load(tmp_path / "small", dtype="int8")
    agreement = compare(plain, fast, [*TEXTS[:4]])
    assert agreement > 0.98
    text = "the dog sleeps in the garden"
    assert fast.attention(text).weights.sum(-1) == pytest.approx(1, abs=1e-4)
    traced = fast.trace(text)
    assert np.allclose(traced["output"], fast.tokens(text).vectors, atol=1e-4)
    assert abs(fast.next_sentence(text, text) - plain.next_sentence(text, text)) < 0.1
    fast.network.add_head("classify", 2)
    fast.labels = ["no", "yes"]
    assert fast.classify(text)[0].label in fast.labels
    refuses("no gradients", fast.attribution, text)


def test_where_int8_cannot_be(minilm_folder: Path):
    refuses("on the CPU", load, minilm_folder, device="cuda", dtype="int8")


def test_an_adapter_of_the_fp32_encoder_goes_on_its_int8(bert_folder: Path, tmp_path: Path):
    from everybert.files import atomic_folder
    from everybert.model.lora import AdapterSet, LoraConfig
    from everybert.store.adapters import save_adapter

    plain = load(bert_folder, device="cpu")
    adapters = AdapterSet(plain.network)
    adapters.add("a", LoraConfig(rank=2))
    with atomic_folder(tmp_path / "a") as tmp:
        save_adapter(adapters, "a", tmp, base=str(bert_folder))
    fast = load(bert_folder, dtype="int8")
    before = fast.embed(TEXTS[:3])
    fast.use(fast.add_adapter(tmp_path / "a"))
    assert np.array_equal(fast.embed(TEXTS[:3]), before)  # an adapter that was never trained adds nothing
    refuses("without dtype", fast.merge)


def test_the_command(bert_folder: Path, tmp_path: Path):
    """Its JSON is in tests/golden."""
    done = run("quantize", bert_folder, tmp_path / "small")
    assert "computed" in done.stdout
    assert "quantised already" in mistake("quantize", tmp_path / "small", tmp_path / "third")
    assert not (tmp_path / "third").exists()
    assert "int8" in run("info", tmp_path / "small").stdout
    filled = run("fill", "the dog [MASK]", "--model", tmp_path / "small", "--dtype", "int8", "--json")
    assert len(json.loads(filled.stdout)[0]["masks"][0]) == 5


def test_the_encoder_is_int8_only_where_asked(bert_folder: Path):
    assert Int8Linear not in map(type, load(bert_folder, device="cpu").network.encoder.modules())
    assert Int8Linear in map(type, load(bert_folder, dtype=torch.int8).network.encoder.modules())
