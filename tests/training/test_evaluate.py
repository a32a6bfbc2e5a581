"""Held-out figures against their definitions, one masked word and one token at a time."""

import json
import math

import pytest
import torch
from grammar import write_corpus
from typer.testing import CliRunner

import everybert
from everybert.cli.main import app
from everybert.corpus.examples import ExampleConfig
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.store.huggingface import save_network
from everybert.text.tokenizer import Tokenizer
from everybert.training import evaluate
from everybert.training.pretrain import pretrain


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "heads": 2, "intermediate_size": 64, "layers": 2, "max_positions": 64}
    return Network(EncoderConfig(vocab_size=128, **shape), {"mlm": None, "nsp": None})


@pytest.fixture(scope="module")
def heldout(corpus):
    opened = Corpus.open(corpus, "heldout")
    return opened, ExampleLayout.of(Tokenizer.load(opened.tokenizer_path))


def packs_of(heldout):
    return evaluate.heldout_packs(*heldout, ExampleConfig(length=32), 40_000, note=pytest.fail)


def test_the_masks_are_fixed(heldout):
    one, two = packs_of(heldout), packs_of(heldout)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.tokens_T, b.tokens_T) and torch.equal(a.targets.mask_index_M, b.targets.mask_index_M)


@torch.no_grad()
def test_figures_are_their_definitions(network, heldout, monkeypatch):
    packs = packs_of(heldout)
    monkeypatch.setattr(evaluate, "SLICE", 7)  # logits are made in slices: the sums must not notice
    network.eval()
    found = evaluate.evaluate_packs(network, packs)
    losses, right, pairs = [], [], []
    for pack in packs:
        x = network.encoder(pack)
        logits = network.mlm_logits(x, pack.targets.mask_index_M).log_softmax(-1)
        for row, label in zip(logits, pack.targets.mask_label_M.tolist()):
            losses.append(-float(row[label]))
            right.append(int(row.argmax()) == label)
        guesses = network.sequence_logits(x, pack, "nsp").argmax(-1).tolist()
        labels = pack.targets.pair_label_B.tolist()
        pairs += [guess == label for guess, label in zip(guesses, labels) if label >= 0]
    assert found["heldout_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))
    assert found["perplexity"] == pytest.approx(math.exp(found["heldout_loss"]))
    assert found["pair_accuracy"] == pytest.approx(sum(pairs) / len(pairs))


@torch.no_grad()
def test_pseudo_perplexity_masks_one_token_at_a_time(network):
    sentences = [[2, 10, 4, 12, 3], [2, 20, 21, 22, 23, 24, 3]]  # the first holds a mask token of its own
    network.eval()
    found = evaluate.pseudo_perplexity(network, sentences, mask_id=4)
    total = []
    for ids in sentences:
        for place in range(1, len(ids) - 1):
            hidden = [*ids[:place], 4, *ids[place + 1 :]]
            logits = network.mlm_logits(network.encoder(Ragged.of([hidden])))
            total.append(-float(logits[place].log_softmax(-1)[ids[place]]))
    assert found == pytest.approx(math.exp(sum(total) / len(total)), rel=1e-4)


def test_a_sample_of_sentences(heldout):
    corpus, layout = heldout
    found = evaluate.sample_sentences(corpus, layout, most=10, longest=8)
    assert len(found) == 10
    assert all(s[0] == layout.cls_id and s[-1] == layout.sep_id and 3 <= len(s) <= 8 for s in found)


def test_a_corpus_is_scored(network, corpus, heldout, tmp_path):
    opened, layout = heldout
    tokenizer = Tokenizer.load(opened.tokenizer_path)
    save_network(network, tmp_path, tokenizer=tokenizer)
    model = everybert.load(tmp_path, device="cpu")
    found = evaluate.score_corpus(model, corpus, "pairs", length=32)
    packs = evaluate.heldout_packs(opened, layout, ExampleConfig(length=32), 2_000_000, note=pytest.fail)
    assert found.items() >= evaluate.evaluate_packs(model.network, packs).items()
    assert found["masked"] == pytest.approx(0.15 * found["tokens"], rel=0.15)
    assert "pair_accuracy" not in (full := evaluate.score_corpus(model, corpus, "full", tokens=1))
    assert full["length"] == 64 and full["tokens"] <= 16_384
    with pytest.raises(EverybertError, match="more than the model's 64 positions"):
        evaluate.score_corpus(model, corpus, length=65)
    command = ["corpus", "score", str(corpus), "--model", str(tmp_path), "--tokens", "1", "--examples", "full"]
    shown = CliRunner().invoke(app, command)
    assert f"{full['accuracy']:.4f}" in shown.output and f"{full['masked']:,}" in shown.output
    as_json = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(as_json.stdout) == full


def test_text_too_small_for_pairs_is_told(network, tmp_path):
    small = write_corpus(tmp_path / "c", documents=4, heldout=1)
    opened = Corpus.open(small, "heldout")
    save_network(network, tmp_path, tokenizer=Tokenizer.load(opened.tokenizer_path))
    model = everybert.load(tmp_path, device="cpu")
    assert evaluate.score_corpus(model, small)["masked"] > 0
    with pytest.raises(EverybertError, match="one document"):  # never running text in their place
        evaluate.score_corpus(model, small, "pairs")


def test_heldout_text_without_pairs_is_noted(tmp_path):
    opened = Corpus.open(write_corpus(tmp_path / "c", documents=4, heldout=1), "heldout")
    layout, notes = ExampleLayout.of(Tokenizer.load(opened.tokenizer_path)), []
    packs = evaluate.heldout_packs(opened, layout, ExampleConfig(length=32), 512, notes.append)
    assert packs and all(pack.targets.pair_label_B is None for pack in packs)
    assert len(notes) == 2 and "without pairs" in notes[0] and "one document" in notes[0]
    assert "too small to trust" in notes[1]


def test_the_figures_of_a_run_are_those_of_corpus_score(tiny, corpus, tmp_path):
    for kind in ("pairs", "full"):
        result = pretrain(tiny(steps=2, examples__kind=kind), corpus, tmp_path / kind, device="cpu", quiet=True)
        found = evaluate.score_corpus(everybert.load(result.model, device="cpu"), corpus, length=32)
        for name in ("heldout_loss", "accuracy", "perplexity"):
            assert found[name] == pytest.approx(result.figures[name], rel=1e-5)
