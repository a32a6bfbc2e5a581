import json
import shutil
from pathlib import Path

import pytest
import torch
from refusals import refuses

from everybert.errors import EverybertError
from everybert.inference.describe import compare, describe_folder, head_parameters, new_parameters, parameters
from everybert.inference.model import Model
from everybert.model.config import PRESETS
from everybert.store import config_json
from everybert.store.layouts import LAYOUTS

PUBLISHED = {
    "bert-base-uncased": 110,
    "bert-large-uncased": 340,
    "distilbert-base-uncased": 66,
    "albert-base-v2": 12,
    "roberta-base": 125,
    "xlm-roberta-large": 560,
    "modernbert-base": 149,
}
"""Millions of parameters, as the papers round them."""
CLASSES = {
    "mlm": "AutoModelForMaskedLM",
    "classify": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
    "answer": "AutoModelForQuestionAnswering",
    "choose": "AutoModelForMultipleChoice",
}


def theirs(name: str, kind: str = "AutoModel") -> int:
    import transformers

    raw, _ = config_json.write(PRESETS[name], None)
    config = transformers.AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = getattr(transformers, kind).from_config(config)
    counted = (p for name, p in model.named_parameters() if "contact_head" not in name and p.requires_grad)
    return sum(p.numel() for p in counted)


THERE = [name for name in PRESETS if PRESETS[name].family != "jina-bert"]
"""The presets of families that transformers has."""


@pytest.mark.parametrize("name", THERE)
def test_a_presets_count_is_transformers_to_the_parameter(name):
    assert sum(parameters(PRESETS[name]).values()) == theirs(name)


@pytest.mark.parametrize("name", [name for name in THERE if "base" in name and "cased" not in name])
def test_what_a_head_adds_is_transformers_to_the_parameter(name):
    config = PRESETS[name]
    counts, adds = parameters(config), head_parameters(config)
    suffixes = {kind: kind.removeprefix("AutoModel") for kind in CLASSES.values()}
    for head, kind in [(h, k) for h, k in CLASSES.items() if suffixes[k] in LAYOUTS[config.family].classes]:
        pooled = head == "classify" and config.family in ("bert", "albert", "megatron-bert", "ernie")
        pooled |= head == "choose" and config.family != "distilbert"
        body = sum(counts.values()) - (0 if pooled else counts.get("pooler", 0))
        assert body + adds[head] == theirs(name, kind), head


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_figures(name):
    total = sum(parameters(PRESETS[name]).values())
    assert total == pytest.approx(PUBLISHED[name] * 1e6, rel=0.03)


def test_the_comparison_has_base_and_large_of_every_architecture():
    rows = {row["name"]: row for row in compare()}
    for family in ("bert", "roberta", "xlm-roberta", "albert", "longformer", "modernbert"):
        assert any(name.startswith(f"{family}-base") for name in rows)
        assert any(name.startswith(f"{family}-large") for name in rows)
    assert rows["albert-base-v2"]["total"] == 11_683_584
    assert rows["longformer-large-4096"]["positions"] == 4096
    bert, modern = rows["bert-base-uncased"], rows["modernbert-base"]
    assert rows["distilbert-base-uncased"]["share"] == pytest.approx(66_362_880 / bert["total"])
    assert modern["glue"] == 88.4 and modern["source"] and bert["share"] == 1.0
    assert all(row["source"] for row in rows.values() if row["data"] or row["glue"] or row["squad"])
    base = ("bert-base-uncased", "roberta-base", "distilbert-base-uncased", "modernbert-base")
    assert all(rows[name]["glue"] and rows[name]["hardware"] for name in base)


def test_what_a_task_adds_is_what_the_network_has():
    rows = {row["task"]: row for row in new_parameters("bert-base-uncased", labels=3)}
    assert rows["classify"]["new"] == rows["tag"]["new"] == 3 * 768 + 3
    assert rows["answer"]["new"] == 2 * 768 + 2 and rows["embed"]["new"] == 0
    # per layer six matrices of LoRA, r · (inputs + outputs)
    adapter = 12 * 4 * (4 * (768 + 768) + 2 * (768 + 3072))
    assert rows["classify"]["lora_rank_4"] == rows["classify"]["new"] + adapter
    (distil,) = new_parameters("distilbert-base-uncased", "classify", 3)
    assert distil["new"] == 768 * 768 + 768 + 3 * 768 + 3  # with the pooler that its base lacks
    refuses("the tasks are", new_parameters, "bert-base-uncased", "knit")


def test_a_folder_is_described_by_its_headers(minilm: Model, minilm_folder: Path, bert: Model, bert_folder: Path):
    about = describe_folder(minilm_folder)
    assert about["total"] == sum(p.numel() for p in minilm.network.parameters())
    assert about["embedding"] == {"pooling": "mean", "normalize": True, "tokens": 256}
    about = describe_folder(bert_folder)
    assert about["total"] == sum(p.numel() for p in bert.network.parameters())
    assert set(about["heads"]) == {"mlm", "nsp"} and not {"mlm", "nsp"} & about["heads_would_add"].keys()


def test_a_pickled_module_is_read_as_the_weights_are(bert_folder: Path, tmp_path: Path):
    shutil.copytree(bert_folder, tmp_path / "model")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "model/modules.json").write_text(json.dumps(listed))
    (tmp_path / "model/1_Pooling").mkdir()
    (tmp_path / "model/2_Dense").mkdir()
    torch.save({"linear.weight": torch.ones(8, 48)}, tmp_path / "model/2_Dense/pytorch_model.bin")
    with pytest.raises(EverybertError, match="allow_pickle"):
        describe_folder(tmp_path / "model")
    assert describe_folder(tmp_path / "model", allow_pickle=True)["embedding"]["pooling"] == "mean"
