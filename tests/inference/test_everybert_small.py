"""The bundled everybert-small gives sensible results, offline, without options, and quickly.

The examples of README: tests/docs/test_pages.py.
"""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import transformers

import everybert
from everybert import data
from everybert.evaluation.glue import TASKS, suggested
from everybert.training.tuning import FinetuneSettings

QUESTIONS = [(first, second) for task, first, second in data.rows("bundled.tsv") if task == "answer"]
BERT_LARGE = QUESTIONS[1][1]
GLUE_SETS = ("CoLA", "MRPC", "RTE", "SST-2", "STS-B")
MILK = "the man went to the [MASK] to buy a [MASK] of milk"


@pytest.fixture(scope="module")
def small():
    return everybert.load("everybert-small", device="cpu")


def words(model, text):
    return [[c.token for c in blank] for blank in model.fill(text, top=5)]


def test_fills_blanks(small):
    _, vessel = words(small, MILK)
    assert {"gallon", "bottle", "pint", "glass", "carton"} & set(vessel)


@pytest.mark.xfail(strict=True, reason="the store is its seventh guess")
def test_milk_is_bought_in_a_store(small):
    assert "store" in words(small, MILK)[0]


@pytest.mark.parametrize(
    ("question", "text", "answer"),
    [
        (*QUESTIONS[0], "Canada"),
        (*QUESTIONS[1], "340M"),
        ("Where does Sinan live?", QUESTIONS[0][1], "California"),
        ("How many layers does BERT-large have?", BERT_LARGE, "24"),
        ("Who wrote Hamlet?", "Hamlet is a tragedy written by William Shakespeare around 1600.", "William Shakespeare"),
        ("When was the tower finished?", "The Eiffel Tower in Paris was finished in 1889 by Gustave Eiffel.", "1889"),
    ],
)
def test_answers_depend_on_what_is_asked(small, question, text, answer):
    assert small.answer(question, text)[0].text == answer


def test_suggests_settings_for_glue():
    assert set(GLUE_SETS) == {name for name in TASKS if suggested("everybert-small", name)}
    for name in GLUE_SETS:
        FinetuneSettings(**suggested("everybert-small", name))


def test_judges_and_compares(small):
    pair = ("A soccer game with multiple males playing.", "Some men are playing a sport.")
    assert small.classify([pair])[0].label == "entailment"
    assert small.next_sentence("Istanbul is a great city to visit", "I was just there.") > 0.5
    a, b, c = small.embed(["A man plays the guitar.", "Someone is playing an instrument.", "The stock market fell."])
    assert a @ b > a @ c


@pytest.mark.parametrize("name", ["everybert-small", "everybert-classic"])
def test_embeddings_are_unit_vectors(name, tmp_path):
    model = everybert.load(name, device="cpu")
    assert np.linalg.norm(model.embed(["A man.", "a", ""]), axis=1) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm(model.embed(["A man."], normalize=False)) > 2
    model.save(tmp_path / "again")
    assert np.linalg.norm(everybert.load(tmp_path / "again").embed(["A man."])) == pytest.approx(1, abs=1e-5)


def test_transformers_reads_its_export(small, tmp_path):
    small.save(tmp_path / "hf")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    pair = ("Istanbul is a great [MASK] to visit", "I was just there.")
    given = tokenizer(*pair, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**given).logits
    at = int((given.input_ids[0] == tokenizer.mask_token_id).nonzero())
    for guess in small.fill(pair[0], top=5, pair=pair[1])[0]:
        assert logits[0, at].softmax(-1)[guess.id].item() == pytest.approx(guess.score, abs=1e-5)
    again = everybert.load(tmp_path / "hf", device="cpu")
    assert again.next_sentence(*pair) == pytest.approx(small.next_sentence(*pair), abs=1e-5)


def test_a_cold_start_takes_little_time():
    began = time.perf_counter()
    command = [sys.executable, "-m", "everybert", "fill", "Istanbul is a great [MASK] to visit", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(out) and time.perf_counter() - began < 30
