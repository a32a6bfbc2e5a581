"""Folders go both ways: transformers → ours → transformers, byte for byte, every family and every head."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from tiny_models import EVERY, STEMS, make, saved  # noqa: E402

from everybert.errors import EverybertError  # noqa: E402
from everybert.files import atomic_folder  # noqa: E402
from everybert.inference.describe import TABLES  # noqa: E402
from everybert.model.heads import Network  # noqa: E402
from everybert.model.ragged import Ragged  # noqa: E402
from everybert.store import layouts  # noqa: E402
from everybert.store.huggingface import Loaded, load_network, read_config, save_network  # noqa: E402
from everybert.text.tokenizer import Tokenizer  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
KINDS = list(STEMS)
HEADS_OF = {kind: {suffix: tuple(held) for suffix, held in layouts.LAYOUTS[kind].classes.items()} for kind in STEMS}


CONTACTS = "contact_head"
"""A part of ESM that is not read."""


def resave(loaded: Loaded, folder: Path, **changes) -> Path:
    keep = {
        "labels": loaded.labels,
        "problem_type": loaded.problem_type,
        "extras": loaded.extras,
        "raw_config": loaded.raw_config,
    }
    with atomic_folder(folder) as tmp:
        save_network(loaded.network, tmp, **{**keep, **changes})
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder; of ESM, transformers itself writes odd names."""
    found = load_file(folder / "model.safetensors")

    def usual(name: str) -> str:
        name = re.sub(r"layer\.\d+(?=\.attention\.self\.rotary_embeddings)", "layer.*", name)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")

    return {usual(name): value for name, value in found.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    a, b = ({name: value for name, value in x.items() if CONTACTS not in name} for x in (a, b))
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def opened(model: type, folder: Path):
    """The folder as transformers opens it; any tensor missing, unexpected or of another shape is a failure."""
    loaded, info = model.from_pretrained(folder, output_loading_info=True)
    info["missing_keys"] = {key for key in info["missing_keys"] if CONTACTS not in key}
    assert not any(info.values()), info
    return loaded.eval()


@pytest.mark.parametrize(("kind", "suffix"), EVERY)
def test_every_class_goes_both_ways(tmp_path: Path, kind: str, suffix: str):
    changes = {"num_labels": 3, "problem_type": "multi_label_classification"} if "Classification" in suffix else {}
    model = make(kind, suffix, custom_field=[1, {"a": None}], **changes)
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_network(tmp_path / "theirs")
    assert loaded.report.missing == loaded.report.notes == ()
    assert not [name for name in loaded.report.unused if CONTACTS not in name]
    assert tuple(loaded.network.heads) == HEADS_OF[kind][suffix]
    assert loaded.labels == (["LABEL_0", "LABEL_1", "LABEL_2"] if changes else None)
    assert loaded.problem_type == changes.get("problem_type")

    resave(loaded, tmp_path / "ours")
    assert same(tensors(tmp_path / "theirs"), tensors(tmp_path / "ours"))
    again = opened(type(model), tmp_path / "ours")
    assert same(model.state_dict(), again.state_dict())
    before, after = model.config.to_dict(), again.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        before.pop(key, None), after.pop(key, None)
    assert before == after

    ours, theirs = outputs(loaded.network, model, suffix)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def outputs(network: Network, model, suffix: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What both compute for one sequence of ids."""
    ids = torch.tensor([4, 17, 33, 8, 52, 5, 9, 11, 20, 2])
    batch = Ragged.of([ids.tolist()])
    inputs = {"input_ids": ids[None]}
    if network.config.family == "longformer":
        batch = Ragged.of([ids.tolist()], global_tokens=[[0]])
        inputs["global_attention_mask"] = torch.eye(10, dtype=torch.long)[:1]
    if suffix == "ForMultipleChoice":
        inputs = {k: v[None] for k, v in inputs.items()}
    with torch.no_grad():
        theirs = model(**inputs)
        x = network.encoder(batch)
        if suffix == "Model":
            return x, theirs.last_hidden_state[0]
        if suffix == "ForMaskedLM":
            return network.mlm_logits(x), theirs.logits[0]
        if suffix == "ForPreTraining" and network.config.family == "electra":
            return network.token_logits(x, "rtd").flatten(), theirs.logits[0]
        if suffix == "ForPreTraining":
            other = theirs.seq_relationship_logits if "seq_relationship_logits" in theirs else theirs.sop_logits
            pair = network.sequence_logits(x, batch, "nsp")
            return torch.cat((network.mlm_logits(x).ravel(), pair.ravel())), torch.cat(
                (theirs.prediction_logits.ravel(), other.ravel())
            )
        if suffix == "ForTokenClassification":
            return network.token_logits(x, "tag"), theirs.logits[0]
        if suffix == "ForQuestionAnswering":
            return network.token_logits(x, "answer"), torch.stack((theirs.start_logits[0], theirs.end_logits[0]), -1)
        return network.sequence_logits(x, batch, HEADS_OF[network.config.family][suffix][0]), theirs.logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "heads", [{}, {"mlm": None, "nsp": None}, {"classify": 3, "mlm": None}, {"tag": 5, "answer": None}]
)
def test_a_network_of_ours_opens_there_and_comes_back(tmp_path: Path, kind: str, heads: dict):
    config = load_network(saved(tmp_path / "shape", kind)).config
    torch.manual_seed(1)
    network = Network(config, heads, pooler=kind not in TABLES["no_pooler"])
    labels = {"classify": ["no", "yes", "maybe"], "tag": ["O", "B-X", "I-X", "B-Y", "I-Y"]}.get(next(iter(heads), ""))
    with atomic_folder(tmp_path / "ours") as tmp:
        save_network(network, tmp, labels=labels, extras={"pooling": "mean"})

    back = load_network(tmp_path / "ours")
    assert back.config == config
    assert set(back.network.heads) == set(heads)
    assert same(dict(network.state_dict()), dict(back.network.state_dict()))
    assert back.labels == labels
    assert back.extras == {"pooling": "mean"}
    assert str(back.report) == ""

    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    model = getattr(transformers, raw["architectures"][0])
    loaded, info = model.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert all(CONTACTS in key for key in info["missing_keys"]) and not info["mismatched_keys"]
    ours = json.loads((tmp_path / "ours" / "everybert.json").read_text()).get("own_tensors", [])
    assert {k for k in info["unexpected_keys"] if k.startswith("everybert.") or ".pooler." not in k} == set(ours)
    if "nsp" in heads and kind == "modernbert":  # as everybert-small is stored
        assert model is transformers.ModernBertForMaskedLM and "everybert.heads.nsp.output.weight" in ours
    if labels:
        assert loaded.config.id2label == dict(enumerate(labels))


# ── old names ───────────────────────────────────────────────────────────────────────────────────────────────


def rewrite(folder: Path, change) -> None:
    """Apply a change of (name, tensor) pairs to a folder's weights."""
    found = dict(change(name, value) for name, value in tensors(folder).items())
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


OLD = {
    "gamma": lambda n, v: (
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        v,
    ),
    "module": lambda n, v: ("module." + n, v),
    "bare": lambda n, v: (n.removeprefix("bert."), v),
    "prefixed": lambda n, v: (n if n.startswith(("cls.", "bert.")) else "bert." + n, v),
    "decoder": lambda n, v: (n.replace("cls.predictions.bias", "cls.predictions.decoder.bias"), v),
}


@pytest.mark.parametrize("age", OLD)
@pytest.mark.parametrize("suffix", ["Model", "ForPreTraining"])
def test_old_names_are_read(tmp_path: Path, age: str, suffix: str):
    new = load_network(saved(tmp_path, "bert", suffix)).network.state_dict()
    rewrite(tmp_path, OLD[age])
    old = load_network(tmp_path)
    assert same(dict(new), dict(old.network.state_dict()))
    assert str(old.report) == ""


def test_buffers_and_tied_copies_are_passed_over(tmp_path: Path):
    saved(tmp_path, "bert", "ForMaskedLM")
    found = tensors(tmp_path)
    found["bert.embeddings.position_ids"] = torch.arange(40)[None]
    found["cls.predictions.decoder.weight"] = found["bert.embeddings.word_embeddings.weight"].clone()
    found["cls.predictions.decoder.bias"] = found["cls.predictions.bias"].clone()
    save_file(found, tmp_path / "model.safetensors")
    loaded = load_network(tmp_path)
    assert str(loaded.report) == ""
    assert loaded.config.tied


def test_a_decoder_that_differs_stays_apart(tmp_path: Path):
    model = make("bert", "ForMaskedLM")
    model.save_pretrained(tmp_path / "theirs")
    found = tensors(tmp_path / "theirs")
    found["cls.predictions.decoder.weight"] = torch.randn(60, 16)
    save_file(found, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_network(tmp_path / "theirs")
    assert not loaded.config.tied and "is kept" in str(loaded.report)
    theirs = type(model).from_pretrained(tmp_path / "theirs").eval()
    torch.testing.assert_close(*outputs(loaded.network, theirs, "ForMaskedLM"), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untied_decoder_goes_both_ways(tmp_path: Path, kind: str):
    model = make(kind, "ForMaskedLM", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_network(tmp_path / "theirs")
    torch.testing.assert_close(*outputs(loaded.network, model, "ForMaskedLM"), atol=1e-5, rtol=1e-4)
    again = opened(type(model), resave(loaded, tmp_path / "ours"))
    torch.testing.assert_close(*outputs(loaded.network, again, "ForMaskedLM"), atol=1e-5, rtol=1e-4)


def test_a_missing_pooler_is_left_out_or_made_new(tmp_path: Path):
    saved(tmp_path, "bert", "ForSequenceClassification")
    found = {k: v for k, v in tensors(tmp_path).items() if "pooler" not in k}
    save_file(found, tmp_path / "model.safetensors")
    loaded = load_network(tmp_path)
    assert loaded.report.missing == ("pooler",)
    assert not any(p.is_meta for p in loaded.network.parameters())
    bare = load_network(tmp_path, heads={})
    assert bare.network.pooler is None
    assert bare.report.unused == ("classifier.bias", "classifier.weight") and bare.report.missing == ()


def test_heads_asked_for_are_taken_or_made_new(tmp_path: Path):
    saved(tmp_path, "bert", "ForPreTraining")
    loaded = load_network(tmp_path, heads={"mlm": None, "classify": 3})
    assert list(loaded.network.heads) == ["mlm", "classify"]
    assert str(loaded.report) == (
        "new, not in the folder: classify head (3 labels); "
        "not used: cls.seq_relationship.bias, cls.seq_relationship.weight"
    )
    saved(tmp_path, "bert", "ForSequenceClassification", num_labels=3)
    assert load_network(tmp_path, heads={"classify": 3}).report.missing == ()
    other = load_network(tmp_path, heads={"classify": 4})
    assert other.report.missing == ("classify head (4 labels)",) and other.labels is None


def test_a_head_that_config_names_but_weights_lack(tmp_path: Path):
    saved(tmp_path, "bert", "ForMaskedLM")
    save_file({k: v for k, v in tensors(tmp_path).items() if "cls" not in k}, tmp_path / "model.safetensors")
    loaded = load_network(tmp_path)
    assert list(loaded.network.heads) == []
    assert str(loaded.report) == "config.json names a mlm head, the weights have none"


def test_shards_are_read(tmp_path: Path):
    model = make("bert", "ForMaskedLM")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    one, many = (load_network(tmp_path / name).network.state_dict() for name in ("whole", "shards"))
    assert same(dict(one), dict(many))


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##x", "Héllo", "hello"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_travels_with_the_model(tmp_path: Path, kind: str):
    loaded = load_network(saved(tmp_path / "theirs", kind))
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    resave(loaded, tmp_path / "ours", tokenizer=tokenizer)
    text = "Héllo hello ax [MASK]"
    ids = tokenizer.encode(text).ids
    assert Tokenizer.load(tmp_path / "ours").encode(text).ids == ids and 1 not in ids
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs.encode(text) == ids
    transformers.AutoModel.from_pretrained(tmp_path / "ours")(**theirs("hello", "hello ax", return_tensors="pt"))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    if kind in ("modernbert", "longformer"):
        assert config.sep_token_id == tokenizer.sep_id


# ── dtypes, extras, configurations ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_on_the_cpu_and_kept_when_asked(tmp_path: Path, half: torch.dtype):
    make("bert").to(half).save_pretrained(tmp_path / "half")
    wide = load_network(tmp_path / "half")
    assert {p.dtype for p in wide.network.parameters()} == {torch.float32}
    assert "widened to float32" in str(wide.report)
    kept = load_network(tmp_path / "half", dtype=half)
    assert str(kept.report) == ""
    resave(kept, tmp_path / "again")
    assert same(tensors(tmp_path / "half"), tensors(tmp_path / "again"))
    assert transformers.BertModel.from_pretrained(tmp_path / "again").dtype == half


def test_what_only_this_library_has_is_kept_in_everybert_json(tmp_path: Path):
    loaded = load_network(saved(tmp_path / "theirs", "bert"))
    config = loaded.config.replace(classifier_form="cls", feed_forward_dropout=0.25)
    network = Network(config, {"classify": 2}, pooler=True)
    with atomic_folder(tmp_path / "ours") as tmp:
        save_network(network, tmp)
    back = load_network(tmp_path / "ours")
    assert back.config == config and back.extras == {}
    assert same(dict(network.state_dict()), dict(back.network.state_dict()))
    assert "classifier.weight" not in tensors(tmp_path / "ours")  # transformers would put it on its pooler
    newer = json.loads((tmp_path / "ours" / "everybert.json").read_text()) | {"version": 99}
    (tmp_path / "ours" / "everybert.json").write_text(json.dumps(newer))
    with pytest.raises(EverybertError, match="upgrade everybert"):
        load_network(tmp_path / "ours")


def test_a_changed_configuration_is_written_over_the_old_one(tmp_path: Path):
    loaded = load_network(saved(tmp_path / "theirs", "bert", custom="kept"))
    config = loaded.config.replace(dropout=0.3, activation="gelu_tanh")
    with atomic_folder(tmp_path / "ours") as tmp:
        save_network(Network(config, {}, pooler=True), tmp, raw_config=loaded.raw_config)
    found, raw = read_config(tmp_path / "ours")
    assert found == config
    assert raw["custom"] == "kept" and raw["hidden_act"] == "gelu_new" and raw["hidden_dropout_prob"] == 0.3


def test_label_names_must_fit_the_head(tmp_path: Path):
    loaded = load_network(saved(tmp_path / "theirs", "bert", "ForSequenceClassification", num_labels=3))
    with pytest.raises(EverybertError, match="2 label names were given for a head of 3"):
        resave(loaded, tmp_path / "ours", labels=["a", "b"])
    assert not (tmp_path / "ours").exists()
