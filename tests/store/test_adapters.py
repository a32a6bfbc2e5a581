"""Adapter folders: PEFT reads what everybert writes, and the other way round, for every family."""

import json

import pytest
import tiny_models
import torch

from everybert.errors import EverybertError
from everybert.model.heads import head_logits
from everybert.model.lora import TARGETS, AdapterSet, LoraConfig
from everybert.model.ragged import Ragged
from everybert.store.adapters import load_adapter, read_adapter, save_adapter
from everybert.store.huggingface import load_network


def randomise(adapters, name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in adapters.state(name).values():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)


FAMILIES = [
    ("bert", "ForSequenceClassification", "classify"),
    ("roberta", "ForSequenceClassification", "classify"),
    ("distilbert", "ForSequenceClassification", "classify"),
    ("albert", "ForTokenClassification", "tag"),
    ("albert", "ForSequenceClassification", "classify"),
    ("modernbert", "ForSequenceClassification", "classify"),
    ("bert", "ForQuestionAnswering", "answer"),
    ("megatron-bert", "ForTokenClassification", "tag"),
    ("eurobert", "ForSequenceClassification", "classify"),
    ("esm", "ForTokenClassification", "tag"),
    ("roformer", "ForSequenceClassification", "classify"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, suffix, head", FAMILIES)
@pytest.mark.parametrize("targets", [TARGETS, ("query", "feed_forward.output")])
def test_peft_reads_what_we_write(tmp_path, kind, suffix, head, targets):
    peft = pytest.importorskip("peft")
    base = tiny_models.make(kind, suffix)
    base.save_pretrained(tmp_path / "base")
    network = load_network(tmp_path / "base").network
    adapters = AdapterSet(network)
    fresh = load_network(tmp_path / "base").network.heads[head]
    with torch.no_grad():
        fresh.output.weight.mul_(-2)
    pooler = load_network(tmp_path / "base").network.pooler if network.reads_pooler(head) else None
    if pooler is not None:
        with torch.no_grad():
            pooler.dense.weight.mul_(-2)
    adapters.add("x", LoraConfig(rank=2, targets=targets), {head: fresh}, pooler)
    randomise(adapters, "x")
    adapters.use("x")
    (tmp_path / "adapter").mkdir()
    save_adapter(adapters, "x", tmp_path / "adapter", base=str(tmp_path / "base"), extras={"task": {"task": head}})
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    ids = [5, 6, 7, 8, 9]
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]))
        ours = head_logits(network, Ragged.of([ids]), head)
    wanted = torch.stack((expected.start_logits, expected.end_logits), -1) if head == "answer" else expected.logits
    torch.testing.assert_close(ours, wanted.reshape(ours.shape), atol=2e-5, rtol=1e-4)

    again = AdapterSet(load_network(tmp_path / "base").network)
    load_adapter(again, "y", read_adapter(tmp_path / "adapter"))
    again.use("y")
    with torch.no_grad():
        torch.testing.assert_close(head_logits(again.network, Ragged.of([ids]), head), ours)


MIXED = {"rank_pattern": {"query": 5, "^bert.encoder.layer.1.output.dense": 2}, "alpha_pattern": {r".*\.0\..*value": 9}}
LINEAR = {"target_modules": "all-linear"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "task", "settings"),
    [
        ("bert", "SEQ_CLS", {"target_modules": ["query", "value"]}),
        ("bert", "SEQ_CLS", {"target_modules": ["query", "key", "value", "dense"]}),  # the pooler's too
        ("bert", "SEQ_CLS", LINEAR | MIXED),
        ("bert", "SEQ_CLS", LINEAR | {"use_rslora": True}),
        ("bert", "SEQ_CLS", LINEAR | {"use_dora": True} | MIXED),
        ("bert", "SEQ_CLS", {"target_modules": ["key", "dense"], "use_dora": True, "layers_to_transform": [1]}),
        ("bert", None, LINEAR | {"use_dora": True}),  # the base's classifier too
        ("albert", "SEQ_CLS", {"target_modules": ["query", "pooler"]}),
        ("albert", "SEQ_CLS", LINEAR | {"use_dora": True}),  # the projection of the embeddings
        ("electra", "SEQ_CLS", LINEAR),
        ("roberta", "SEQ_CLS", LINEAR),
        ("roberta", None, LINEAR),
        ("mpnet", "SEQ_CLS", LINEAR),
        ("distilbert", None, LINEAR),
        ("deberta-v2", "SEQ_CLS", LINEAR | {"use_dora": True}),
        ("modernbert", "SEQ_CLS", {"target_modules": ["Wqkv"]}),  # the head's first layers are the base's
        ("modernbert", "SEQ_CLS", LINEAR | {"use_dora": True}),
        ("modernbert", None, LINEAR),
        ("eurobert", "SEQ_CLS", {"target_modules": ["k_proj", "v_proj", "up_proj"]}),
        ("eurobert", None, LINEAR | {"use_dora": True}),
        ("esm", "SEQ_CLS", LINEAR),
        ("roformer", "SEQ_CLS", LINEAR | {"use_dora": True}),
    ],
)
def test_we_read_what_peft_writes(tmp_path, kind, task, settings):
    peft = pytest.importorskip("peft")
    base = tiny_models.make(kind, "ForSequenceClassification", num_labels=3)
    base.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type=task, r=3, lora_alpha=7, **settings))
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if p.requires_grad and "lora_A" not in name:
                p.add_(torch.randn_like(p) * 0.3)
    theirs.eval().save_pretrained(tmp_path / "adapter")
    adapters = AdapterSet(load_network(tmp_path / "base").network)
    load_adapter(adapters, "x", read_adapter(tmp_path / "adapter"))
    ids = [5, 6, 7, 8, 9]
    with torch.no_grad():
        before = head_logits(adapters.network, Ragged.of([ids]), "classify")
        adapters.use("x")
        expected = theirs(input_ids=torch.tensor([ids])).logits
        found = head_logits(adapters.network, Ragged.of([ids]), "classify")
        assert not torch.allclose(before, expected, atol=1e-3)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        adapters.merge()
        merged = head_logits(adapters.network, Ragged.of([ids]), "classify")
        torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_without_a_head_names_its_architecture(tmp_path):
    """RoBERTa's matrices have BERT's names and shapes."""
    peft = pytest.importorskip("peft")
    base = tiny_models.make("roberta")
    settings = {"r": 2, "target_modules": ["query", "value"]}
    peft.get_peft_model(base, peft.LoraConfig(**settings)).save_pretrained(tmp_path / "adapter")
    for kind in ("roberta", "bert"):
        tiny_models.saved(tmp_path / kind, kind)
    load_adapter(AdapterSet(load_network(tmp_path / "roberta").network), "x", read_adapter(tmp_path / "adapter"))
    with pytest.raises(EverybertError, match="an adapter of a RobertaModel, not of bert; load its own base"):
        load_adapter(AdapterSet(load_network(tmp_path / "bert").network), "x", read_adapter(tmp_path / "adapter"))


@pytest.mark.filterwarnings("ignore")
def test_modernberts_classifier_takes_its_first_layers_from_the_base_or_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    for suffix in ("ForMaskedLM", "Model"):
        tiny_models.make("modernbert", suffix).save_pretrained(tmp_path / suffix)
    classes = pytest.importorskip("transformers").ModernBertForSequenceClassification
    base = classes.from_pretrained(tmp_path / "ForMaskedLM", num_labels=3)
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["Wqkv"])).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    adapters = AdapterSet(load_network(tmp_path / "ForMaskedLM").network)
    load_adapter(adapters, "x", read_adapter(tmp_path / "adapter"))
    adapters.use("x")
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([[5, 6, 7]])).logits
        found = head_logits(adapters.network, Ragged.of([[5, 6, 7]]), "classify")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    bare = AdapterSet(load_network(tmp_path / "Model").network)
    with pytest.raises(EverybertError, match=r"has no head\.dense"):
        load_adapter(bare, "x", read_adapter(tmp_path / "adapter"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "part", "cut", "cause"),
    [
        ("encoder.layer.0.attention.self.query", "lora_A.weight", (slice(None), slice(1)), "does not fit this model"),
        ("encoder.layer.0.attention.self.query", "lora_magnitude_vector", slice(1), "needs 16 magnitudes"),
        ("pooler.dense", "lora_A.weight", (slice(None), slice(1)), r"pooler\.dense does not fit this model"),
        ("pooler.dense", "lora_magnitude_vector", slice(1), "needs 16 magnitudes"),
    ],
)
def test_matrices_of_other_sizes_are_refused_and_never_repeated(tmp_path, module, part, cut, cause):
    from safetensors.torch import load_file, save_file

    peft = pytest.importorskip("peft")
    base = tiny_models.make("bert", "ForSequenceClassification")
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", use_dora=True)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"base_model.model.bert.{module}.{part}"
    save_file(tensors | {name: tensors[name][cut].contiguous()}, file)
    adapters = AdapterSet(load_network(tmp_path / "base").network)
    with pytest.raises(EverybertError, match=cause):
        load_adapter(adapters, "x", read_adapter(tmp_path / "adapter"))


def test_an_adapter_knows_its_base(tmp_path):
    with pytest.raises(EverybertError, match="give the folder of an adapter"):
        read_adapter(tmp_path)
    for seed in (0, 1):
        tiny_models.saved(tmp_path / f"base{seed}", "bert", "ForSequenceClassification", seed=seed)
    adapters = AdapterSet(load_network(tmp_path / "base0").network)
    adapters.add("x", LoraConfig(), dict(adapters.network.heads.items()))
    (tmp_path / "adapter").mkdir()
    save_adapter(adapters, "x", tmp_path / "adapter", base="base0")
    other = AdapterSet(load_network(tmp_path / "base1").network)
    with pytest.raises(EverybertError, match=r"trained on another base \(base0\)"):
        load_adapter(other, "x", read_adapter(tmp_path / "adapter"))
    content = json.loads((tmp_path / "adapter" / "everybert.json").read_text())
    content["base"] = "02ea6cdc40e4540ea9fc402f554a1b173bdee19fc34df1140a357b966384668c"  # everybert-small, version 1
    (tmp_path / "adapter" / "everybert.json").write_text(json.dumps(content))
    with pytest.raises(EverybertError, match=r"another base \(everybert-small of everybert 1\.0\); load that one, or"):
        load_adapter(other, "x", read_adapter(tmp_path / "adapter"))
    roberta = AdapterSet(load_network(tiny_models.saved(tmp_path / "d", "distilbert")).network)
    with pytest.raises(EverybertError, match="no tensor fits a distilbert"):
        load_adapter(roberta, "x", read_adapter(tmp_path / "adapter"), verify=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "changes", "cause"),
    [
        ({"target_modules": ["query", "word_embeddings"]}, {}, "changes embeddings.word_embeddings"),
        ({"target_modules": ["query"], "modules_to_save": ["classifier", "word_embeddings"]}, {}, "changes embeddings"),
        ({"target_modules": ["query"], "lora_bias": True}, {}, r"changes .*lora_B\.bias too"),
        ({"target_modules": ["query"], "rank_pattern": {"query": 3}}, {"rank_pattern": {"query": 4}}, "not of rank"),
        ({"target_modules": ["query"]}, {"alpha_pattern": {"(a|aa)+b": 1}}, "the pattern .* is not supported"),
        ({"target_modules": ["query"]}, {"lora_dropout": "much"}, "no proper r, lora_alpha, lora_dropout"),
        ({"target_modules": ["query"]}, {"layer_replication": [[0, 2]]}, "uses layer_replication"),
        ({"target_modules": ["query"]}, {"init_lora_weights": "pissa"}, "uses init_lora_weights"),
        ({"target_modules": ["query"]}, {"lora_alpha": float("nan")}, "an alpha below"),
        ({"target_modules": ["query"]}, {"lora_alpha": 2**70}, "an alpha below"),
        ({"target_modules": ["query"]}, {"r": 5}, "is not of rank 5"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, settings, changes, cause):
    peft = pytest.importorskip("peft")
    base = tiny_models.make("bert", "ForSequenceClassification")
    base.save_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", **settings)).save_pretrained(tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    adapters = AdapterSet(load_network(tmp_path / "base").network)
    with pytest.raises(EverybertError, match=cause):
        load_adapter(adapters, "x", read_adapter(tmp_path / "adapter"))
    assert not adapters.entries
