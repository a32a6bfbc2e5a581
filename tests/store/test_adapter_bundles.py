"""An encoder with adapters in its own folder: each task takes its own, one encoder serves all."""

import json
import shutil

import numpy as np
import pytest
import tiny_bundle

import everybert
from everybert.errors import EverybertError
from everybert.evaluation.evaluate import evaluate
from everybert.inference.describe import describe_folder

TASKS = tiny_bundle.TASKS


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return tiny_bundle.parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def folder(parts, tmp_path_factory):
    return tiny_bundle.box(parts, tmp_path_factory.mktemp("bundle") / "small")


def test_each_task_takes_its_adapter(folder, parts):
    model = everybert.load(folder)
    apart = everybert.load(parts / "encoder")
    for name in TASKS:
        apart.add_adapter(parts / name)
    text, pair = "the film was good", ("john lives in paris", "mary works")
    assert model.classify(text)[0].scores == pytest.approx(apart.classify(text, adapter="sentiment")[0].scores)
    assert model.classify([pair])[0].scores == pytest.approx(apart.classify([pair], adapter="entailment")[0].scores)
    assert model.tag("john lives in paris") == apart.tag("john lives in paris", adapter="ner")
    bare = apart.embed([text])
    apart.use("similarity")
    assert np.allclose(model.embed([text]), apart.embed([text]), atol=1e-6)
    assert not np.allclose(model.embed([text]), bare, atol=1e-4)
    assert set(model.adapters.entries) == {"sentiment", "entailment", "ner", "similarity"}  # only those asked for
    assert model.adapter is None


def test_texts_and_pairs_in_one_call(folder):
    model = everybert.load(folder)
    mixed = ["a great song", ("john lives", "mary works"), "an awful day", ("the dog", "the film")]
    found = model.classify(mixed)
    assert [set(p.scores) for p in found] == [{"neg", "pos"}, {"no", "yes"}, {"neg", "pos"}, {"no", "yes"}]
    for text, p in zip(mixed, found):
        assert model.classify([text])[0].scores == pytest.approx(p.scores, abs=1e-6)


def test_scores_are_of_the_adapter_that_a_task_takes(folder):
    model = everybert.load(folder)
    texts = [("a great song", "pos"), ("an awful day", "neg")]
    pairs = [("john lives", "mary works", "yes"), ("the dog", "the film", "no")]
    for rows, adapter in ((texts, "sentiment"), (pairs, "entailment")):
        assert evaluate("classify", model, rows).scores == evaluate("classify", model, rows, adapter=adapter).scores
    assert model.adapter is None


def test_what_is_named_or_in_use_comes_first(folder):
    model = everybert.load(folder)
    pair = ("john lives", "mary works")
    assert set(model.classify([pair], adapter="sentiment")[0].scores) == {"neg", "pos"}
    model.use("odd")
    assert set(model.classify([pair])[0].scores) == {"neg", "pos"}
    with pytest.raises(EverybertError, match=r"no tag head|no head for tag"):
        model.tag("john")


def test_masked_tokens_and_vectors_are_those_of_the_bare_encoder(folder, parts):
    model, bare = everybert.load(folder), everybert.load(parts / "encoder")
    before = model.fill("the [MASK] was good")
    model.classify("a great song"), model.embed(["a song"])
    assert model.fill("the [MASK] was good") == before == bare.fill("the [MASK] was good")
    assert np.array_equal(model.tokens("a song").vectors, bare.tokens("a song").vectors)


def test_saved_and_merged_models_stand_alone(folder, tmp_path):
    model = everybert.load(folder)
    model.save(tmp_path / "encoder")
    assert not everybert.load(tmp_path / "encoder").bundle.folders
    said = model.classify("a great song")[0].scores
    model.merge("sentiment")
    model.save(tmp_path / "merged")
    assert everybert.load(tmp_path / "merged").classify("a great song")[0].scores == pytest.approx(said, abs=1e-5)


def test_info_lists_them(folder):
    about = describe_folder(folder)["adapters"]
    assert about == {"sentiment": "classify", "entailment": "classify pair", "ner": "tag", "similarity": "embed",
                     "odd": "by name"}  # fmt: skip


@pytest.mark.parametrize("said", [[], {"../up": ["tag"]}, {"ner": ["cook"]}, {"ner": "tag"}])
def test_odd_lists_are_refused(folder, tmp_path, said):
    copy = tmp_path / "odd"
    shutil.copytree(folder, copy)
    (copy / "manifest.json").unlink()
    (copy / "everybert.json").write_text(json.dumps({"version": 1, "adapters": said}))
    with pytest.raises(EverybertError, match="adapter"):
        everybert.load(copy)
