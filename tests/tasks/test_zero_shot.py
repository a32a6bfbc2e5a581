"""Labels without training, by an entailment model: the probabilities of transformers' zero-shot pipeline."""

import csv
import json

import pytest
import tiny_model
import transformers
from commandline import mistake, run
from refusals import refuses

import everybert

TEXTS = ["the dog eats food", "john lives in paris", "a film"]
LABELS = ["good", "bad", "song"]
NLI = ["contradiction", "neutral", "entailment"]


@pytest.fixture(scope="module", params=[NLI, NLI[::-1], ["ENTAILMENT", "not_entailment"]], ids=len)
def folder(request, tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("nli") / "m", {"classify": len(request.param)}, request.param)


@pytest.mark.parametrize(
    "labels, how",
    [(LABELS, {}), (LABELS, {"multi": True}), (LABELS[:1], {}), (LABELS, {"template": "the {} is in it"})],
)
def test_probabilities_are_those_of_transformers(folder, labels, how):
    theirs = transformers.pipeline("zero-shot-classification", model=str(folder), device="cpu")
    options = {"multi_label": how.get("multi", False)}
    options |= {"hypothesis_template": how["template"]} if "template" in how else {}
    ours = everybert.load(folder, device="cpu").classify(TEXTS, labels=labels, **how)
    for one, row in zip(ours, theirs(TEXTS, candidate_labels=labels, **options), strict=True):
        expected = dict(zip(row["labels"], row["scores"]))
        assert one.scores == pytest.approx(expected, abs=1e-5) and one.label == row["labels"][0]
        several = how.get("multi") or len(labels) == 1
        assert one.labels == (tuple(n for n in labels if expected[n] >= 0.5) if several else ())


def test_many_texts_and_long_ones(folder):
    model = everybert.load(folder, device="cpu")
    many = model.classify([*TEXTS, "the dog " * 100] * 150, labels=LABELS)
    assert len(many) == 600
    for one, again in zip(model.classify(TEXTS, labels=LABELS), many):
        assert one.scores == pytest.approx(again.scores, abs=1e-5)
    assert many[3].cut == 0 and sum(many[3].scores.values()) == pytest.approx(1)


def test_mistakes(folder, tmp_path):
    model = everybert.load(folder, device="cpu")
    for labels, template in ([[], "{}"], [["a", "a"], "{}"], [["a", " "], "{}"], [["a", "b"], "no place"]):
        refuses("different names", model.classify, TEXTS, labels=labels, template=template)
    refuses("text 1 is a tuple", model.classify, [("a", "b")], labels=LABELS)
    other = everybert.load(tiny_model.save(tmp_path / "m", {"classify": 2}, ["neg", "pos"]), device="cpu")
    refuses(r"needs an entailment model .* but neg, pos", other.classify, TEXTS, labels=LABELS)


def test_the_command(folder, tmp_path):
    how = ("--model", folder, "--device", "cpu")
    expected = everybert.load(folder, device="cpu").classify(TEXTS, labels=LABELS)
    found = json.loads(run("classify", *TEXTS, "--labels", "good, bad,song", "--json", *how).stdout)
    assert [row["label"] for row in found] == [one.label for one in expected]
    assert found[0]["scores"] == pytest.approx(expected[0].scores, abs=1e-5)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    line = ("classify", tmp_path / "texts.txt", "--labels", "good,bad,song", "--scores")
    run(*line, "--out", tmp_path / "out.csv", *how)
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["prediction"] for row in rows] == [one.label for one in expected]
    assert float(rows[0]["p(bad)"]) == pytest.approx(expected[0].scores["bad"], abs=1e-4)
    assert "single texts" in mistake("classify", TEXTS[0], "--labels", "a,b", "--pair", "b", *how)


def test_the_bundled_model_uses_its_entailment_adapter():
    result = run("classify", "The senate passed the law.", "--labels", "sport,politics", "--json")
    assert json.loads(result.stdout)[0]["label"] == "politics"
