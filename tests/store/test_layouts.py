"""Name maps: one name per parameter in every class, and heads found by class or by names."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tiny_models import EVERY, STEMS, saved

from everybert.store import layouts
from everybert.store.huggingface import load_network

HEADS_OF = {kind: {suffix: tuple(held) for suffix, held in layouts.LAYOUTS[kind].classes.items()} for kind in STEMS}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert.encoder.layer.0.output.LayerNorm.gamma", "encoder.layer.0.output.LayerNorm.weight"),
        ("module.roberta.embeddings.LayerNorm.beta", "embeddings.LayerNorm.bias"),
        ("everybert.heads.nsp.output.weight", "everybert.heads.nsp.output.weight"),
        ("cls.predictions.bias", "cls.predictions.bias"),
    ],
)
def test_canonical_names(name: str, expected: str):
    assert layouts.canonical(name) == expected


NEXT = {"ForQuestionAnswering": "ForSequenceClassification"}
"""What a network is saved as if its family has no class for its first head: the class of the next one."""


@pytest.mark.parametrize("family", layouts.LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "suffix"),
    [
        ((), "Model"),
        (("mlm",), "ForMaskedLM"),
        (("mlm", "tag"), "ForTokenClassification"),
        (("answer", "classify"), "ForQuestionAnswering"),
    ],
)
def test_the_class_of_heads(family: str, heads: tuple[str, ...], suffix: str):
    from everybert.model.config import EncoderConfig

    known = layouts.LAYOUTS[family].classes
    assert layouts.class_for(EncoderConfig(family=family), heads) == (suffix if suffix in known else NEXT[suffix])


@pytest.mark.parametrize("kind", list(STEMS))
def test_every_parameter_has_one_name_and_every_name_one_parameter(tmp_path: Path, kind: str):
    network = load_network(saved(tmp_path, kind, "ForMaskedLM")).network
    for head, labels in (("classify", 2), ("tag", 3), ("answer", None), ("choose", None), ("nsp", None)):
        network.add_head(head, labels)
    for suffix, held in layouts.LAYOUTS[network.config.family].classes.items():
        parts = [
            part for name in network.state_dict() for part in layouts.transformers_names(network.config, name, held)
        ]
        assert len(parts) == len(set(parts)), suffix


ALIKE = {("modernbert", "ForTokenClassification"), ("modernbert", "ForQuestionAnswering")}
"""ModernBERT's heads have the same names, so that only the class tells them apart."""


@pytest.mark.parametrize(("kind", "suffix"), [e for e in EVERY if e[1] != "ForMultipleChoice" and e not in ALIKE])
def test_the_class_is_guessed_where_it_is_not_named(tmp_path: Path, kind: str, suffix: str):
    saved(tmp_path, kind, suffix)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert tuple(load_network(tmp_path).network.heads) == HEADS_OF[kind][suffix]
