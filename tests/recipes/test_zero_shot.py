"""recipes/zero_shot.py in miniature: one language teaches, another is scored, beside random weights."""

from __future__ import annotations

import json

import pytest
import tiny_model
import zero_shot


def test_two_languages_beside_random_weights(tmp_path, capsys):
    tiny_model.save(tmp_path / "model", {"mlm": None}, seed=1)
    rows = [f"the {noun} sees a red dog .\t{label}" for noun, label in (("cat", "a"), ("food", "b"))] * 12
    for name, some in (("one.tsv", rows), ("two.tsv", [row.replace("sees", "eats") for row in rows])):
        (tmp_path / name).write_text("text\tlabel\n" + "\n".join(some) + "\n")
    line = ["classify", "--model", str(tmp_path / "model"), "--train", str(tmp_path / "one.tsv")]
    line += ["--device", "cpu", "--epochs", "25", "--lr", "1e-2"]
    tests = [f"--test=one={tmp_path / 'one.tsv'}", f"--test=two={tmp_path / 'two.tsv'}"]
    zero_shot.main([*line, *tests, "--seeds", "2", "--json"])
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(table) == ["one", "two"]
    for row in table.values():
        assert list(row) == ["pre-trained", "random weights"]
        assert all(0 <= score["mean"] <= 1 and score["runs"] == 2 for score in row.values())
    assert table["one"]["pre-trained"]["mean"] > 0.9, "the noun tells the label"
    with pytest.raises(SystemExit, match="LANGUAGE=FILE"):
        zero_shot.main([*line, "--test", "wrong"])


def test_pairs_of_sentences(tmp_path, capsys):
    """XNLI's form: columns sentence1, sentence2 and gold_label, pairs that a text alone does not decide."""
    tiny_model.save(tmp_path / "model", {"mlm": None}, seed=1)
    texts = ("the cat sees a red dog .", "the food eats a red dog .")
    rows = [f"{a}\t{b}\t{'entailment' if a == b else 'contradiction'}" for a in texts for b in texts] * 8
    (tmp_path / "en.tsv").write_text("\n".join(["sentence1\tsentence2\tgold_label", *rows]) + "\n")
    line = ["classify", "--model", str(tmp_path / "model"), "--train", str(tmp_path / "en.tsv"), "--device", "cpu"]
    zero_shot.main([*line, "--test", f"en={tmp_path / 'en.tsv'}", "--epochs", "1", "--seeds", "2"])
    header, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert header.startswith("| language | pre-trained") and row.startswith("| en | ") and row.endswith(" | 100 % |")
    assert row.count("±") == 2
