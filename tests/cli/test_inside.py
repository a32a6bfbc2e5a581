"""The commands that look inside: what they print, what they write, how they fail."""

import json

import numpy as np
import pytest
import tiny_model
from typer.testing import CliRunner

from everybert.cli.main import app
from everybert.inference.model import load

TREES = """\
1\tthe\tthe\tDET\t_\t_\t2\tdet\t_\t_
2\tcat\tcat\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tsees\tsee\tVERB\t_\t_\t0\troot\t_\t_
4\ta\ta\tDET\t_\t_\t5\tdet\t_\t_
5\tdog\tdog\tNOUN\t_\t_\t3\tobj\t_\t_

1\tmary\tmary\tPROPN\t_\t_\t2\tnsubj\t_\t_
2\teats\teat\tVERB\t_\t_\t0\troot\t_\t_
3\tthe\tthe\tDET\t_\t_\t4\tdet\t_\t_
4\tfood\tfood\tNOUN\t_\t_\t2\tobj\t_\t_
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("inside")
    tiny_model.save(place / "model", {"mlm": None}, seed=1)
    (place / "trees.conllu").write_text(TREES)
    return place


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "140"})


def test_explain_tells_every_step(folder):
    told = run("explain", "the cat [MASK] a dog", "--layer", 1, "--head", 1, "--model", folder / "model")
    assert told.exit_code == 0, told.output
    steps = ("Text to tokens", "S = Q·Kᵀ / √16", "Layer 2, head 2", "softmax", "(7 × 7)", "(7 × 16)", "The vocabulary")
    for words in steps:
        assert words in told.output
    assert "[MASK]" in told.output, "square brackets are text, not markup"
    found = json.loads(run("explain", "the cat [MASK]", "--json", "--model", folder / "model").stdout)
    model = load(folder / "model")
    assert found["tokens"] == ["[CLS]", "the", "cat", "[MASK]", "[SEP]"] and found["gap"] < 1e-5
    assert found["vocabulary"][3][0][0] == model.fill("the cat [MASK]")[0][0].token
    names = [part["name"] for step in found["steps"] for part in step["parts"]]
    assert "layers.0.attention.scores" in names and "mlm.probabilities" in names


def test_attention_writes_one_page(folder, tmp_path):
    done = run("attention", "the cat", "--pair", "a dog", "--out", tmp_path / "a.html", "--model", folder / "model")
    assert done.exit_code == 0 and "7 tokens, 2 layers of 2 heads" in done.output
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>") and "attentionView(" in page
    bad = run("attention", "the cat", "--out", tmp_path / "no" / "a.html", "--model", folder / "model")
    assert bad.exit_code == 2 and "could not be written" in bad.output


def test_neighbours_give_what_the_model_gives(folder):
    texts = ["the red cat", "a red song"]
    found = json.loads(run("neighbours", "red", *texts, "--top", 2, "--json", "--model", folder / "model").stdout)
    expected = load(folder / "model").neighbours("red", texts, 2)
    assert np.allclose(found["similarity"], expected.similarity, atol=1e-6)
    assert found["nearest"][2][0][0]["word"] == expected.nearest[2][0][0].word
    told = run("neighbours", "red", *texts, "--model", folder / "model")
    assert "layer 2" in told.output and expected.nearest[3][1][0].word in told.output
    bad = run("neighbours", "blue", *texts, "--model", folder / "model")
    assert bad.exit_code == 2 and "'blue' does not occur in text 1" in bad.output


def test_probe_heads_prints_the_table(folder):
    file = folder / "trees.conllu"
    done = run("probe", "heads", file, "--least", 1, "--relation", "obj", "--model", folder / "model")
    assert done.exit_code == 0, done.output
    for words in ("sentences  2", "words      9", "det", "0.9430", "0.8680", "chosen", "baseline"):
        assert words in done.output
    found = json.loads(run("probe", "heads", file, "--least", 1, "--json", "--model", folder / "model").stdout)
    rows = {row["relation"]: row for row in found["relations"]}
    line = next(line for line in done.output.splitlines() if line.startswith("det ")).split()
    assert line[2:4] == [str(rows["det"]["layer"] + 1), str(rows["det"]["head"] + 1)], "printed from 1, JSON from 0"
    assert rows["det"]["count"] == 3 and rows["det"]["baseline"] == 1.0 and rows["det"]["offset"] == 1
    rare = run("probe", "heads", file, "--least", 999, "--model", folder / "model")
    assert rare.exit_code == 2 and "lower --least" in rare.output
    bad = run("probe", "heads", file, "--relation", "expl", "--model", folder / "model")
    assert bad.exit_code == 2 and "has no relation 'expl'" in bad.output


def test_probe_coref_prints_the_best_head_and_the_baselines(folder):
    file = folder / "coref.conllu"
    marks = {"mary": "(e1)", "cat": "(e2)", "dog": "(e1)", "food": "(e2)"}
    rows = [row[:-1] + f"Entity={marks[row.split()[1]]}" if row.split()[1:2] and row.split()[1] in marks else row
            for row in TREES.splitlines()]  # fmt: skip
    file.write_text("\n".join(rows) + "\n")
    found = json.loads(run("probe", "coref", file, "--json", "--model", folder / "model").stdout)
    assert found["mentions"] == 2 and np.shape(found["right"]) == (2, 2)
    assert found["published"] == {"accuracy": 0.65, "nearest": 0.27, "head_match": 0.52}
    told = run("probe", "coref", file, "--model", folder / "model").output
    lines = told.splitlines()
    assert f"layer       {found['layer'] + 1}" in lines and f"head        {found['head'] + 1}" in lines, "from 1"
    plain = run("probe", "coref", folder / "trees.conllu", "--model", folder / "model")
    assert plain.exit_code == 2 and "no mention has an antecedent" in plain.stderr and plain.stderr.count("\n") == 1
    none = run("probe", "coref", folder / "none.conllu", "--model", folder / "model")
    assert none.exit_code == 2 and none.stderr.count("\n") == 1
