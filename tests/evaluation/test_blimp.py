"""Minimal pairs: read from BLiMP's own files, counted by paradigm, phenomenon and overall."""

import json

import numpy as np
import pytest
import tiny_model

import everybert
from everybert.errors import EverybertError
from everybert.evaluation import blimp as module
from everybert.evaluation.blimp import blimp, likelihoods, read_pairs
from everybert.inference import model as inference


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return everybert.load(tiny_model.save(tmp_path_factory.mktemp("m") / "m", {"mlm": None}))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    def row(uid, term, good, bad):
        return {"sentence_good": good, "sentence_bad": bad, "UID": uid, "linguistics_term": term, "field": "syntax"}

    write(tmp_path / "one.jsonl", [row("a1", "agree", "the dog eats", "the dog eat"), row("a1", "agree", "a b", "b a")])
    write(tmp_path / "two.jsonl", [row("a2", "agree", "he sees", "he see")])
    write(tmp_path / "three.jsonl", [row("i1", "island", "who is it", "who it is")])
    return tmp_path


def test_paradigms_are_read_with_their_phenomena(folder):
    found = {p.name: p for p in read_pairs([folder])}
    assert {n: (p.phenomenon, len(p.good)) for n, p in found.items()} == {
        "a1": ("agree", 2),
        "a2": ("agree", 1),
        "i1": ("island", 1),
    }
    assert found["a1"].good[0] == "the dog eats" and found["a1"].bad[0] == "the dog eat"
    assert [len(p.good) for p in read_pairs([folder], limit=1)] == [1, 1, 1]


def test_accuracy_is_how_often_the_good_one_is_likelier(folder, model, monkeypatch):
    values = {"the dog eats": -1, "the dog eat": -2, "a b": -3, "b a": -1, "he sees": -1, "he see": -1}
    values |= {"who is it": -1, "who it is": -5}
    monkeypatch.setattr(module, "likelihoods", lambda m, texts, *_: np.array([values[t] for t in texts], dtype=float))
    found = blimp(model, read_pairs([folder]))
    agree, island = found.parts
    assert [(p.name, p.accuracy) for p in agree.parts] == [("a1", 0.5), ("a2", 0.0)]  # a tie is wrong
    assert (agree.accuracy, island.accuracy, found.pairs) == (0.25, 1.0, 4)
    assert found.accuracy == pytest.approx((0.5 + 0.0 + 1.0) / 3)  # the mean of the paradigms, as BLiMP has it


def test_a_real_model_scores_real_pairs(folder, model):
    found = blimp(model, read_pairs([folder]), "word")
    assert 0 <= found.accuracy <= 1 and found.pairs == 4


def test_other_tables_of_pairs_and_mistakes(tmp_path):
    (tmp_path / "pairs.tsv").write_text("good\tbad\nhe sees\the see\n")
    (paradigm,) = read_pairs([tmp_path / "pairs.tsv"])
    assert (paradigm.name, paradigm.good, paradigm.bad) == ("pairs", ["he sees"], ["he see"])
    (tmp_path / "no.tsv").write_text("x\ty\n1\t2\n")
    with pytest.raises(EverybertError, match="needs sentence_good"):
        read_pairs([tmp_path / "no.tsv"])
    with pytest.raises(EverybertError, match="no file or folder"):
        read_pairs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(EverybertError, match="no files of pairs"):
        read_pairs([tmp_path / "empty"])


# ── pseudo-log-likelihoods ───────────────────────────────────────────────────────────────────────────────────

TEXTS = ["the cats was liked .", "john smith lives in paris", "a", "xyzzyq the dog", "the film was good and " * 9]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return everybert.load(tiny_model.save(tmp_path_factory.mktemp("m") / "m", {"mlm": None}, max_positions=24))


def test_token_variant_is_the_models_own_score(short):
    assert likelihoods(short, TEXTS) == pytest.approx([short.score(text).total for text in TEXTS], abs=1e-4)


def test_chunks_change_nothing(short, monkeypatch):
    whole = likelihoods(short, TEXTS)
    monkeypatch.setattr(module, "CHUNK", 2)
    done = []
    assert likelihoods(short, TEXTS, progress=done.append) == pytest.approx(whole, abs=1e-4)
    assert done == [2, 4, 5]


def test_word_variant_masks_the_rest_of_the_word_to_the_right(short, monkeypatch):
    encoding = short.tokenizer.encode("the xyq dog")  # x ##y ##q: three pieces of one word
    assert encoding.words == [None, 0, 1, 1, 1, 2, None]
    calls = []
    monkeypatch.setattr(inference, "token_log_probs", lambda network, *rest: calls.append(rest) or [np.zeros(5)])
    likelihoods(short, ["the xyq dog"], "word")
    (((ids,), (positions,), mask, (ends,)),) = calls
    assert list(ids) == encoding.ids and mask == short.tokenizer.mask_id
    assert list(zip(positions, ends)) == [(1, 2), (2, 5), (3, 5), (4, 5), (5, 6)]


def test_variants_agree_where_every_word_is_one_piece(short):
    text = ["john smith lives in paris", "the film was good"]
    assert likelihoods(short, text, "word") == pytest.approx(likelihoods(short, text, "token"), abs=1e-5)
    split = ["the xyzzyq dog"]
    assert abs(likelihoods(short, split, "word") - likelihoods(short, split, "token"))[0] > 1e-3


def test_empty_texts_and_unknown_variants(short):
    assert likelihoods(short, [""]).tolist() == [0.0]
    assert len(likelihoods(short, [])) == 0
    with pytest.raises(EverybertError, match="token or word"):
        likelihoods(short, ["a"], "sentence")
    assert np.isfinite(likelihoods(short, ["\N{SNOWMAN} \N{SNOWMAN}"])).all()
