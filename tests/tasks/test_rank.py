"""Reranking: as CrossEncoder ranks, from both kinds of rows, and saved so that CrossEncoder reads it."""

import json
import random
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import tiny_bert
import tiny_model
import torch
from commandline import mistake, run
from refusals import refuses
from sentence_transformers import CrossEncoder

import everybert
from everybert.errors import EverybertError
from everybert.tasks.metrics import ranking_scores
from everybert.tasks.rank import Rank
from everybert.training.finetune import hold_out

QUERY, TEXTS = "the dog", ["a cat eats", "the food was bad", "who is john", "paris", "the dog eats food"]


def same(ours, theirs):
    assert [one.index for one in ours] == [row["corpus_id"] for row in theirs]
    np.testing.assert_allclose([one.score for one in ours], [row["score"] for row in theirs], atol=1e-5)


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture
def folder(tmp_path):
    return tiny_model.save(tmp_path / "ranker", {"classify": 1})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh", "version": "4.0"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_scores_are_those_of_a_cross_encoder_and_survive_saving(folder, tmp_path, changes):
    edit(folder, **changes)
    model, theirs = everybert.load(folder), CrossEncoder(str(folder)).rank(QUERY, TEXTS)
    same(model.rank(QUERY, TEXTS), theirs)
    same(model.rank(QUERY, TEXTS, top=2), theirs[:2])
    model.save(tmp_path / "again")
    same(everybert.load(tmp_path / "again").rank(QUERY, TEXTS), theirs)
    assert [r["score"] for r in CrossEncoder(str(tmp_path / "again")).rank(QUERY, TEXTS)] == pytest.approx(
        [r["score"] for r in theirs], abs=1e-6
    )


def test_folders_that_cross_encoder_wrote(folder, tmp_path):
    prompts = {"query": "the ", "document": "a "}
    theirs = CrossEncoder(str(folder), activation_fn=torch.nn.Identity(), prompts=prompts)
    theirs.save(str(tmp_path / "theirs"))
    model = everybert.load(tmp_path / "theirs")
    same(model.rank(QUERY, TEXTS), theirs.rank(QUERY, TEXTS))
    model.save(tmp_path / "ours")
    again = CrossEncoder(str(tmp_path / "ours"))
    same(model.rank(QUERY, TEXTS), again.rank(QUERY, TEXTS))
    same(everybert.load(tmp_path / "ours").rank(QUERY, TEXTS), again.rank(QUERY, TEXTS))
    assert again.prompts == prompts and not model.pooling.published
    edit_to = tmp_path / "theirs" / "config_sentence_transformers.json"
    edit_to.write_text(json.dumps(json.loads(edit_to.read_text()) | {"default_prompt_name": "query"}))
    refuses("further modules or a prompt", everybert.load, tmp_path / "theirs")


@pytest.mark.filterwarnings("ignore")
def test_bad_input(folder, tmp_path):
    model = everybert.load(folder)
    for query, texts, why in [
        ("", TEXTS, "the query is empty"),
        ("  ", TEXTS, "the query is empty"),
        (QUERY, [], "nothing to rank"),
        (QUERY, [3], "text 1 is a int"),
    ]:
        refuses(why, model.rank, query, texts)
    refuses("nothing to rank", model.rank, QUERY, TEXTS, top=0)
    with pytest.raises(EverybertError, match="3 labels, and rank needs one output"):
        everybert.load(tiny_model.save(tmp_path / "three", {"classify": 3})).rank(QUERY, TEXTS)
    refuses("no rank head", everybert.load(tiny_model.save(tmp_path / "none", {"mlm": None})).rank, QUERY, TEXTS)
    edit(folder, sentence_transformers={"activation_fn": "my.code.Activation"})
    refuses(r"activation is my\.code\.Activation", everybert.load(folder).rank, QUERY, TEXTS)


def test_ten_thousand_texts_are_ranked_in_chunks(folder, monkeypatch):
    model, sizes = everybert.load(folder), []
    encode = Rank.encode
    monkeypatch.setattr(Rank, "encode", lambda *a: sizes.append(len(a[3])) or encode(*a))
    tracemalloc.start()
    found = model.rank(QUERY, [f"{TEXTS[i % 5]} {i % 7}" for i in range(10_000)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(one.index for one in found) == list(range(10_000)) and max(sizes) <= Rank.chunk
    assert all(a.score >= b.score for a, b in pairwise(found)) and peak < 64 << 20


def test_rows_of_both_kinds(tmp_path):
    labelled = Rank.read([("q", "a", 1), ("q", "b", 0), ("p", "c", 0.5)])
    assert labelled.inputs == [("q", "a"), ("q", "b"), ("p", "c")] and labelled.targets == [1.0, 0.0, 0.5]
    expected = [("q", "a"), ("q", "b"), ("q", "c")]
    rows = {"query": "q", "positive": "a"}
    for source in (
        [("q", "a", "b", "c")],
        [rows | {"negatives": ["b", "c"]}],
        [rows | {"negative_1": "b", "negative_2": "c"}],
    ):
        found = Rank.read(source)
        assert found.inputs == expected and found.targets == [1.0, 0.0, 0.0]
    for source, why in [
        ([("q", "a", -1.0)], "the label -1 is below 0"),
        ([("q", " ", 1)], "empty"),
        ([rows | {"negatives": [3]}], "the column 'negatives' is not a list of texts"),
        ([{"query": "q", "x": "y"}], "no column for the pair"),
    ]:
        refuses(why, Rank.read, source)
    refuses("every text is labelled 1", Rank.fit, Rank.read([("q", "a", 1), ("p", "b", 1)]))
    assert Rank.fit(Rank.read([("q", "a", 3), ("p", "b", 0)])) == {"highest": 3.0}


def test_ranking_scores():
    gold, guess = np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.9, 0.5, 0.5, 0.1])
    found = ranking_scores(gold, guess)
    assert found["mrr"] == pytest.approx(1 / 3)  # the tie counts against it
    assert 0 < found["ndcg@10"] < 1 and ranking_scores(gold, gold) == {"mrr": 1.0, "ndcg@10": pytest.approx(1.0)}


def rows(seed, size=60):
    """The relevant text has the word good in it."""
    draw = random.Random(seed)
    for i in range(size):
        words = [" ".join(draw.choices(tiny_bert.WORDS[20:40], k=3)) for _ in range(4)]
        yield (f"who {i}", f"good {words[0]}", *(f"bad {other}" for other in words[1:]))


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_fine_tuning_learns_and_cross_encoder_reads_it(tmp_path, mode):
    base = tiny_bert.save(tmp_path / "base")
    fast = {"lr": 5e-3, "epochs": 8, "batch_size": 16, "device": "cpu", "quiet": True, "mode": mode}
    tuned = everybert.finetune(base, "rank", list(rows(0)), None, tmp_path / "out", **fast)
    assert set(tuned.scores) == {"mrr", "ndcg@10"} and tuned.task.metric == "mrr"
    query, *texts = next(rows(1))
    ours = everybert.load(tmp_path / "out").rank(query, texts)
    if mode == "full":
        assert tuned.metric.mean > 0.8
        same(ours, CrossEncoder(str(tmp_path / "out")).rank(query, texts))
    else:
        assert all(0 < one.score < 1 for one in ours)
    assert everybert.evaluate("rank", str(tmp_path / "out"), list(rows(2, 10))).scores.keys() == tuned.scores.keys()


def test_the_pairs_of_a_query_are_held_out_together():
    kept, held = hold_out(Rank.read(list(rows(0))), 0, Rank.grouped)
    queries = [{query for query, _ in part.inputs} for part in (kept, held)]
    assert [len(some) for some in queries] == [54, 6] and not queries[0] & queries[1]


def test_the_command(folder, tmp_path):
    found = json.loads(run("rank", QUERY, *TEXTS, "--model", folder, "--json").stdout)
    expected = everybert.load(folder).rank(QUERY, TEXTS)
    assert [(row["index"], row["text"]) for row in found] == [(one.index, TEXTS[one.index]) for one in expected]
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    few = run("rank", QUERY, "--file", tmp_path / "texts.txt", "--top", 2, "--model", folder, "--json")
    assert json.loads(few.stdout) == found[:2]
    assert "the query is empty" in mistake("rank", "", *TEXTS, "--model", folder)
    assert "there is no text" in mistake("rank", QUERY, "--model", folder)
