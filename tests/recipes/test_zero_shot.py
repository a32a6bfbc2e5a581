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
    zero_shot.main([*line, *tests, "--json"])
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(table) == ["one", "two"]
    for row in table.values():
        assert list(row) == ["pre-trained", "random weights"] and all(0 <= score <= 1 for score in row.values())
    assert table["one"]["pre-trained"] > 0.9, "the noun tells the label"
    with pytest.raises(SystemExit, match="LANGUAGE=FILE"):
        zero_shot.main([*line, "--test", "wrong"])
