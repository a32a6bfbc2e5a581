"""Minimal pairs: read from BLiMP's own files, counted by paradigm, phenomenon and overall."""

import json

import numpy as np
import pytest
import tiny_model
from refusals import refuses

import everybert
from everybert.evaluation import blimp as module
from everybert.evaluation.blimp import blimp, likelihoods, read_pairs


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
    found = read_pairs([folder])
    assert {k: len(p) for k, p in found.items()} == {("agree", "a1"): 2, ("agree", "a2"): 1, ("island", "i1"): 1}
    assert found["agree", "a1"][0] == ("the dog eats", "the dog eat")
    assert [len(p) for p in read_pairs([folder], limit=1).values()] == [1, 1, 1]


def test_accuracy_is_how_often_the_good_one_is_likelier(folder, model, monkeypatch):
    values = {"the dog eats": -1, "the dog eat": -2, "a b": -3, "b a": -1, "he sees": -1, "he see": -1}
    values |= {"who is it": -1, "who it is": -5}
    monkeypatch.setattr(module, "likelihoods", lambda m, texts, *_: np.array([values[t] for t in texts], dtype=float))
    found = blimp(model, read_pairs([folder]))
    agree, island = found.parts
    assert [(p.name, p.accuracy) for p in agree.parts] == [("a1", 0.5), ("a2", 0.0)]  # a tie is wrong
    assert (agree.accuracy, island.accuracy, found.pairs) == (0.25, 1.0, 4)
    assert found.accuracy == pytest.approx((0.5 + 0.0 + 1.0) / 3)  # the mean of the paradigms, as BLiMP has it


def test_other_tables_of_pairs_and_mistakes(tmp_path):
    (tmp_path / "pairs.tsv").write_text("good\tbad\nhe sees\the see\n")
    assert read_pairs([tmp_path / "pairs.tsv"]) == {("pairs", "pairs"): [("he sees", "he see")]}
    (tmp_path / "no.tsv").write_text("x\ty\n1\t2\n")
    refuses("needs sentence_good", read_pairs, [tmp_path / "no.tsv"])
    (tmp_path / "notes.txt").write_text("x")
    refuses("no pairs", read_pairs, [tmp_path / "notes.txt"])


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


def test_empty_and_unknown_texts(short):
    assert likelihoods(short, [""]).tolist() == [0.0]
    assert len(likelihoods(short, [])) == 0
    assert np.isfinite(likelihoods(short, ["\N{SNOWMAN} \N{SNOWMAN}"])).all()
