"""LoRA: an adapter starts as nothing, merges exactly, switches cheaply, and is PEFT's."""

import pytest
import tiny_models
import torch

from everybert.errors import EverybertError
from everybert.model.adapters import TARGETS, AdapterSet, LoraConfig
from everybert.model.config import EncoderConfig
from everybert.model.features import head_logits
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.store.adapters import load_adapter, read_adapter, save_adapter
from everybert.store.huggingface import load_network

BATCH = Ragged.of([[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]])


@pytest.fixture
def network():
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=60, layers=2, hidden_size=16, heads=2, intermediate_size=24, max_positions=40)
    return Network(config.replace(init_range=0.3), {"classify": 3}).eval()


def randomise(adapters, name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in adapters.state(name).values():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)


def logits(network):
    with torch.no_grad():
        return head_logits(network, BATCH, "classify")


@pytest.mark.parametrize("targets", [TARGETS, ("query", "value"), ("key",), ("feed_forward.output",)])
def test_a_fresh_adapter_changes_nothing_and_merging_changes_nothing_more(network, targets):
    before = logits(network)
    adapters = AdapterSet(network)
    adapters.add("a", LoraConfig(rank=3, targets=targets))
    adapters.use("a")
    assert torch.equal(logits(network), before)
    randomise(adapters, "a")
    adapted = logits(network)
    assert not torch.allclose(adapted, before, atol=1e-3)
    adapters.merge()
    torch.testing.assert_close(logits(network), adapted, atol=1e-5, rtol=1e-5)
    adapters.unmerge()
    assert torch.equal(logits(network), adapted)
    adapters.use(None)
    assert torch.equal(logits(network), before)


def test_many_adapters_with_heads_of_their_own(network):
    before = logits(network)
    adapters = AdapterSet(network)
    for seed, name in enumerate(("one", "two")):
        other = Network(network.config, {"classify": 4 + seed})
        adapters.add(name, LoraConfig(), {"classify": other.heads["classify"].eval()})
        randomise(adapters, name, seed)
    seen = {}
    for name in ("one", "two", "one", None, "two"):
        adapters.use(name)
        out = logits(network)
        assert torch.equal(seen.setdefault(name, out), out)
    assert seen["one"].shape[1] == 4 and seen["two"].shape[1] == 5 and torch.equal(seen[None], before)
    adapters.remove("one")
    adapters.use("two")
    assert torch.equal(logits(network), seen["two"])
    with pytest.raises(EverybertError, match="no adapter 'one'; this model has two"):
        adapters.use("one")
    with pytest.raises(EverybertError, match="already"):
        adapters.add("two", LoraConfig())


def test_only_the_adapter_learns(network):
    network.requires_grad_(False)
    adapters = AdapterSet(network)
    adapters.add("a", LoraConfig(dropout=0.1))
    adapters.use("a")
    head_logits(network.train(), BATCH, "classify").sum().backward()
    moved = [name for name, p in network.named_parameters() if p.grad is not None]
    assert moved and all(".lora.a." in name for name in moved)
    assert len(adapters.parameters("a")) == len(moved)


def test_settled_networks_are_plain(network):
    names = set(network.state_dict())
    adapters = AdapterSet(network)
    adapters.add("a", LoraConfig())
    adapters.use("a")
    randomise(adapters, "a")
    adapted = logits(network)
    adapters.settle()
    assert set(network.state_dict()) == names
    assert {type(m) for m in network.modules() if "Linear" in type(m).__name__} == {torch.nn.Linear}
    torch.testing.assert_close(logits(network), adapted, atol=1e-5, rtol=1e-5)


def test_bad_settings(network):
    with pytest.raises(EverybertError, match="rank"):
        LoraConfig(rank=0)
    with pytest.raises(EverybertError, match="adapter targets are"):
        LoraConfig(targets=("querry",))
    adapters = AdapterSet(network)
    adapters.add("a", LoraConfig(rank=2))
    with pytest.raises(EverybertError, match="does not fit"):
        adapters.load("a", {})
    with pytest.raises(EverybertError, match="merge needs"):
        adapters.merge()


# ── files: PEFT's, both ways ─────────────────────────────────────────────────────────────────────────────────

FAMILIES = [
    ("bert", "ForSequenceClassification", "classify"),
    ("roberta", "ForSequenceClassification", "classify"),
    ("distilbert", "ForSequenceClassification", "classify"),
    ("albert", "ForTokenClassification", "tag"),
    ("modernbert", "ForSequenceClassification", "classify"),
    ("bert", "ForQuestionAnswering", "answer"),
    ("megatron-bert", "ForTokenClassification", "tag"),
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
    adapters.add("x", LoraConfig(rank=2, targets=targets), {head: fresh})
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", [["query", "value"], ["query", "key", "value", "dense"]])
def test_we_read_what_peft_writes(tmp_path, targets):
    peft = pytest.importorskip("peft")
    base = tiny_models.make("bert", "ForSequenceClassification", num_labels=3)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=3, lora_alpha=7, target_modules=targets)
    if "dense" in targets:  # also the pooler's dense, which we do not adapt: name the layers' own
        config = peft.LoraConfig(
            task_type="SEQ_CLS", r=3, lora_alpha=7, target_modules=r".*encoder.*(query|key|value|dense)"
        )
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name or "classifier" in name:
                p.add_(torch.randn_like(p) * 0.3)
    theirs.eval().save_pretrained(tmp_path / "adapter")
    adapters = AdapterSet(load_network(tmp_path / "base").network)
    load_adapter(adapters, "x", read_adapter(tmp_path / "adapter"))
    adapters.use("x")
    ids = [5, 6, 7, 8, 9]
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids])).logits
        torch.testing.assert_close(
            head_logits(adapters.network, Ragged.of([ids]), "classify"), expected, atol=2e-5, rtol=1e-4
        )


def test_an_adapter_knows_its_base(tmp_path):
    for seed in (0, 1):
        tiny_models.saved(tmp_path / f"base{seed}", "bert", "ForSequenceClassification", seed=seed)
    adapters = AdapterSet(load_network(tmp_path / "base0").network)
    adapters.add("x", LoraConfig(), dict(adapters.network.heads.items()))
    (tmp_path / "adapter").mkdir()
    save_adapter(adapters, "x", tmp_path / "adapter", base="base0")
    other = AdapterSet(load_network(tmp_path / "base1").network)
    with pytest.raises(EverybertError, match=r"trained on another base \(base0\)"):
        load_adapter(other, "x", read_adapter(tmp_path / "adapter"))
    roberta = AdapterSet(load_network(tiny_models.saved(tmp_path / "d", "distilbert")).network)
    with pytest.raises(EverybertError, match="no tensor fits a distilbert"):
        load_adapter(roberta, "x", read_adapter(tmp_path / "adapter"), verify=False)
