"""contrib/probe_coref.py on documents made here: mentions, antecedents, baselines, and the heads' own choice."""

from __future__ import annotations

import json

import numpy as np
import probe_coref as coref
import pytest
import tiny_model

from everybert.inference.model import load

# form, head, upos, entity marks
DOCUMENT = [
    [("mary", 2, "PROPN", "(e1-person)"), ("sees", 0, "VERB", ""), ("a", 5, "DET", "(e2-animal"), ("red", 5, "ADJ", ""),
     ("dog", 2, "NOUN", "e2)"), (".", 2, "PUNCT", "")],
    [("the", 2, "DET", "(e2-animal"), ("dog", 3, "NOUN", "e2)"), ("eats", 0, "VERB", ""), ("food", 3, "NOUN", "(e3)"),
     (".", 3, "PUNCT", "")],
    [("she", 2, "PRON", "(e1-person)"), ("sees", 0, "VERB", ""), ("the", 4, "DET", "(e3[1/2]-food"),
     ("food", 2, "NOUN", "e3[1/2])"), (".", 2, "PUNCT", "(e3[2/2])")],
]  # fmt: skip


def conllu(sentences) -> str:
    rows = []
    for words in sentences:
        for i, (form, head, upos, marks) in enumerate(words, 1):
            misc = f"SpaceAfter=No|Entity={marks}" if marks else "_"
            rows.append("\t".join([str(i), form, "_", upos, "_", "_", str(head), "dep", "_", misc]))
        rows.append("")
    return "\n".join(rows) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("coref")
    tiny_model.save(place / "model", {"mlm": None}, seed=1)
    (place / "two.conllu").write_text("# newdoc id = a\n" + 2 * (conllu(DOCUMENT) + "# newdoc id = b\n"))
    return place


def test_mentions_have_head_words_and_kinds(folder):
    first, second = coref.documents(folder / "two.conllu")
    assert len(first) == len(second) == 3, "a comment begins a document"
    found = [(m.entity, m.word, m.form, m.kind) for m in coref.mentions_of(first)]
    assert found == [
        ("e1", 0, "mary", "proper"),
        ("e2", 4, "dog", "nominal"),
        ("e2", 7, "dog", "nominal"),
        ("e3", 9, "food", "nominal"),
        ("e1", 11, "she", "pronoun"),
        ("e3", 14, "food", "nominal"),
    ]


def test_every_head_against_a_plain_reading(folder, capsys):
    coref.main([str(folder / "two.conllu"), "--model", str(folder / "model"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {k: row["mentions"] for k, row in found["kinds"].items()} == {"all": 6, "pronoun": 2, "nominal": 4}
    # dog → dog is the nearest and the same word; she → mary neither; food → food the same word
    assert found["kinds"]["all"]["nearest"] == pytest.approx(1 / 3)
    assert found["kinds"]["nominal"]["head match"] == 1.0 and found["kinds"]["pronoun"]["head match"] == 0.0
    model, words = load(folder / "model"), [word[0] for sentence in DOCUMENT for word in sentence]
    attention = model.attention(" ".join(words))
    assert attention.tokens[1:-1] == words, "a token per word"
    weights = attention.weights[:, :, 1:-1, 1:-1]
    right = [
        weights[:, :, at, before].argmax(-1) == before.index(antecedent)
        for at, before, antecedent in ((7, [0, 4], 4), (11, [0, 4, 7, 9], 0), (14, [0, 4, 7, 9, 11], 9))
    ]
    assert np.allclose(found["right"], np.mean(right, axis=0))
    assert found["right"][found["layer"]][found["head"]] == np.max(found["right"])
    coref.main([str(folder / "two.conllu"), "--model", str(folder / "model")])
    assert f"head {found['layer'] + 1}-{found['head'] + 1} |" in capsys.readouterr().out, "printed from 1"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1\tthe\t_\tDET\t_\t_\t0\troot\t_\t_\n\n", "no mention has an antecedent; coreference is Entity="),
        ("1 the\n\n", "1 columns, 10 expected"),
    ],
)
def test_a_file_without_coreference_is_refused(folder, tmp_path, text, told):
    (tmp_path / "plain.conllu").write_text(text)
    with pytest.raises(SystemExit, match=told):
        coref.main([str(tmp_path / "plain.conllu"), "--model", str(folder / "model")])
