"""recipes/everybert_small.py: what the model is, and that it does not learn from the examples that are shown."""

from __future__ import annotations

import argparse
import json
import re
from itertools import pairwise
from pathlib import Path

import everybert_small
import pytest
import small_adapters
import torch
from small_sets import is_published

import everybert
from everybert.model.heads import Network
from everybert.text.readers import read_records
from everybert.training.pretrain import padded_vocabulary
from everybert.training.recipe import Recipe

ROOT = Path(__file__).parents[2]
SHOWN = [
    "Istanbul is a great place to visit.",
    "the man went to the store to buy a gallon of milk",
    "rich veins of funny stuff in this movie",
    "rich veins of funny stuff in this movie ; a joy",
    "John Smith lives in New York , you know",
    "MARIE CURIE WAS BORN IN WARSAW and later moved to Paris.",
    ("A soccer game with multiple males playing.", "Nobody plays.", "contradiction"),
    (["John", "Smith", "lives", "in", "New", "York", "."], ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O"]),
    {"question": "Where?", "context": "Matt lives in Canada and Sinan lives in California."},
]
OTHERS = [
    "Istanbul is a city.",
    ("A soccer game.", "Some men play."),
    (["John", "Smith"], ["B-PER", "I-PER"]),
    {"id": 3},
]


def test_the_model_is_small_enough():
    first, second = (Recipe.load(file) for file in everybert_small.RECIPES.values())
    with torch.device("meta"):
        network = Network(first.config.replace(vocab_size=padded_vocabulary(30_000)), second.heads)
    sizes = [p.shape for p in network.parameters()]
    assert sum(shape.numel() for shape in sizes) <= 36e6
    assert sum(shape.numel() + 4 * shape[0] for shape in sizes if len(shape) == 2) <= 35e6, "int8, with its scales"
    assert network.config.family == "modernbert" and network.config.positions == "rotary"


def test_running_text_comes_first_and_pairs_last():
    first, second = (Recipe.load(file) for file in everybert_small.RECIPES.values())
    for run in (first, second):
        *text, last = [run.examples_of(phase).paired for phase in range(len(run.phases))]
        assert last and not any(text)
        assert all(a.rate[1] == b.rate[0] for a, b in pairwise(run.phases)) and run.phases[-1].rate[1] == 0.15
    student = Recipe.load(ROOT / "recipes" / "everybert-small-student.toml")
    assert student.config.replace(layers=first.config.layers) == first.config


def test_the_second_run_has_weights_to_start_from():
    recipe, folder = Recipe.load(everybert_small.RECIPES["first"]), ROOT / "weights" / "everybert-small-2" / "first"
    model = everybert.load(folder, device="cpu")
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "classifier_dropout": 0.1}
    assert model.config == recipe.config.replace(vocab_size=model.config.vocab_size, pad_id=0, **rates)
    assert set(model.network.heads) == set(recipe.heads)
    assert [c.token for c in model.fill("Istanbul is a great [MASK] to visit", top=1)[0]] == ["place"]


@pytest.mark.parametrize("row", SHOWN, ids=str)
def test_what_is_shown_is_found_in_every_form(row):
    assert is_published(row)


@pytest.mark.parametrize("row", OTHERS, ids=str)
def test_other_rows_are_kept(row):
    assert not is_published(row)


def test_every_example_of_readme_is_known():
    text = (ROOT / "README.md").read_text("utf-8")
    quoted = [
        q for block in re.findall(r"```(?:sh|python)\n(.*?)```", text, re.DOTALL) for q in re.findall(r'"(.+?)"', block)
    ]
    sentences = [q for q in quoted if len(re.findall(r"\w+", q)) > 3]
    assert len(sentences) >= 6 and all(map(is_published, sentences))


def test_adapters_learn_from_none_of_them(tmp_path, monkeypatch):
    rows = ["sentence\tlabel", "rich veins of funny stuff in this movie\t1", "a bore\t0", "a joy\t1"]
    for name in ("train", "dev"):
        (tmp_path / "glue" / "SST-2").mkdir(parents=True, exist_ok=True)
        (tmp_path / "glue" / "SST-2" / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    train, dev = small_adapters.read_data("sentiment", tmp_path)
    assert train == [("a bore", "negative"), ("a joy", "positive")] and len(dev) == 3
    (tmp_path / "glue" / "STS-B").mkdir()
    pairs = "sentence1\tsentence2\tscore\nA man plays a guitar.\tA man plays.\t3.5\nA dog runs.\tA dog is running.\t5\n"
    for name in ("train", "dev"):
        (tmp_path / "glue" / "STS-B" / f"{name}.tsv").write_text(pairs)
    train, dev = small_adapters.read_data("similarity", tmp_path)
    assert train == [("A dog runs.", "A dog is running.", 5.0)] and len(dev) == 2
    (tmp_path / "squad").mkdir()
    for part in ("train", "dev"):
        (tmp_path / "squad" / f"v1.1-{part}.json").write_text(json.dumps({"context": SHOWN[-1]["context"]}))
    with pytest.raises(SystemExit, match=r"contains an example of README\.md"):
        small_adapters.read_data("qa", tmp_path)


def test_questions_are_made_from_other_documents(tmp_path, monkeypatch):
    told = (
        "Rosa Parks lived in Detroit for years. Rosa Parks wrote to Anna Sims in {}. Anna Sims lived in Boston then. "
    )
    told += (
        "The letters of Rosa Parks and Anna Sims were long, and in Detroit they are still read by many people today."
    )
    shown = told.format(1960) + " Matt lives in Canada and Sinan lives in California."
    documents = [shown, *(told.format(year) for year in range(1961, 1990))]
    (tmp_path / "text.txt").write_text("\n\n".join(documents) + "\n")
    monkeypatch.setattr(small_adapters, "GENERATED", {"cloze": 50, "short": 50})
    small_adapters.labels(argparse.Namespace(work=tmp_path, text=[tmp_path / "text.txt"], tiny=True, teacher=None))
    for name in ("cloze", "short"):
        text = (tmp_path / f"{name}.jsonl").read_text()
        assert "Detroit" in text and "Sinan" not in text and "1960" not in text


def test_everyday_sentences_can_be_scored():
    rows = list(read_records(ROOT / "recipes" / "everyday.tsv"))
    assert len(rows) >= 30 and all("[MASK]" in row["text"] and row["sensible"].split() for row in rows)
    tokenizer = everybert.load("everybert-small", device="cpu").tokenizer
    known = [[word for word in row["sensible"].split() if len(tokenizer.encode(word).ids) == 3] for row in rows]
    assert all(known), "a mask stands for one token"
