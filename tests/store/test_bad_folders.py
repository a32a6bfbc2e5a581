"""Damaged and foreign folders: a one-line error with the cause and the remedy. Hostile ones: tests/robustness."""

from __future__ import annotations

import json
import pickle
import resource
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from tiny_models import make, saved

from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.store import weights
from everybert.store.huggingface import load_network, save_network


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", "bert", "ForSequenceClassification", num_labels=3)


def refused(folder: Path, **options) -> str:
    with pytest.raises(EverybertError) as caught:
        load_network(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 450
    return message


def configure(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    found = load_file(folder / "model.safetensors") | tensors
    save_file({k: v for k, v in found.items() if v is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"model_type": "gpt2"}, "everybert reads bert, roberta"),
        ({"model_type": None, "architectures": ["GPT2Model"]}, "everybert reads bert"),
        ({"model_type": ["bert"]}, "everybert reads bert"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"architectures": ["RobertaForCausalLM"]}, "text generator"),
        ({"architectures": ["BertLMHeadModel"]}, "text generator"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"hidden_act": []}, "hidden_act"),
        ({"hidden_size": "16"}, "hidden_size must be a whole number"),
        ({"hidden_size": -16}, "hidden_size"),
        ({"hidden_size": 15}, "multiple of heads"),
        ({"hidden_dropout_prob": 2.0}, "dropout"),
        ({"hidden_dropout_prob": float("nan")}, "hidden_dropout_prob"),
        ({"pad_token_id": 60}, "pad_token_id 60 is outside"),
        ({"vocab_size": 2**60}, "vocab_size must be a whole number up to"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers"),
        ({"num_hidden_layers": 4096}, "a bert encoder of 4096 layers, but the weights have no encoder.layer.4095."),
        ({"num_hidden_layers": 3}, "a bert encoder of 3 layers"),
        ({"vocab_size": 2**27}, r"word_embeddings.weight has the shape (60, 16)"),
        ({"hidden_size": 2**20, "num_attention_heads": 1}, "has the shape"),
        ({"intermediate_size": 25}, "intermediate.dense.weight has the shape (24, 16), config.json asks for (25, 16)"),
        ({"id2label": {"0": "a", "1": "b"}}, "names 2 labels, the weights have 3"),
        ({"model_type": "distilbert"}, "a distilbert encoder"),
        ({"model_type": "megatron-bert"}, "lack"),
    ],
)
def test_configs_that_do_not_fit(folder: Path, changes: dict, cause: str):
    configure(folder, **changes)
    assert cause in refused(folder)


def test_fewer_layers_than_the_weights_is_a_cut_encoder(folder: Path):
    configure(folder, num_hidden_layers=1)
    assert len(load_network(folder).report.unused) == 16


def test_no_such_folder_no_config_no_weights(folder: Path, tmp_path: Path):
    assert "is not a folder" in refused(tmp_path / "nowhere")
    assert "is not a folder" in refused(folder / "config.json")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty")
    save_file({"embedding.weight": torch.zeros(3)}, tmp_path / "empty" / "model.safetensors")
    assert "has no config.json" in refused(tmp_path / "empty"), "not a table of tokens either"
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refused(folder)
    (folder / "tf_model.h5").write_bytes(b"")
    assert "only tf_model.h5; convert" in refused(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 200_000, '{"a":' * 200_000])
def test_config_that_is_no_config(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.3, 0.9, -1])
def test_truncated_weights(folder: Path, keep: float):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    assert "truncated or damaged" in refused(folder)


def test_damage_inside_a_folder_of_ours_is_found(folder: Path, tmp_path: Path):
    loaded = load_network(folder)
    with atomic_folder(tmp_path / "ours") as tmp:
        save_network(loaded.network, tmp, raw_config=loaded.raw_config)
    file = tmp_path / "ours" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert "damaged or was edited" in refused(tmp_path / "ours")
    load_network(tmp_path / "ours", verify=False)


def test_tensors_missing_from_the_encoder(folder: Path):
    edit(folder, **{"bert.encoder.layer.1.attention.self.key.weight": None})
    assert "lack 1 tensors of the encoder (encoder.layer.1.attention.self.key.weight" in refused(folder)


def test_tensors_of_the_wrong_kind(folder: Path):
    edit(folder, **{"bert.embeddings.LayerNorm.weight": torch.ones(16, dtype=torch.int8)})
    assert "is torch.int8" in refused(folder)


def test_unused_tensors_are_reported_in_one_line(folder: Path):
    edit(folder, **{f"stray.{i}": torch.zeros(1) for i in range(9)})
    assert str(load_network(folder).report) == "not used: stray.0, stray.1, stray.2 and 6 more tensors"


# ── shards and links ────────────────────────────────────────────────────────────────────────────────────────


def shard(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(folder / "part.safetensors"), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_that_are_missing_or_indexless(folder: Path):
    shard(folder, "other.safetensors")
    assert "lacks other.safetensors" in refused(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "no weight_map" in refused(folder)


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(folder)
    load_network(tmp_path / "link")


# ── pickles ─────────────────────────────────────────────────────────────────────────────────────────────────


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (self.mark.touch, ())


def pickled(folder: Path, value: object, **options) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(value, folder / "pytorch_model.bin", **options)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_only_on_request(folder: Path, zipped: bool):
    before = load_network(folder).network.state_dict()
    pickled(
        folder,
        make("bert", "ForSequenceClassification", num_labels=3).state_dict(),
        _use_new_zipfile_serialization=zipped,
    )
    assert "allow_pickle=True" in refused(folder)
    after = load_network(folder, allow_pickle=True).network.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_code_in_pickles_is_not_run(folder: Path, tmp_path: Path):
    mark = tmp_path / "went-off"
    pickled(folder, {"bert.embeddings.word_embeddings.weight": Bomb(mark)})
    assert "has more than tensors" in refused(folder, allow_pickle=True)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    assert "has more than tensors" in refused(folder, allow_pickle=True)
    assert not mark.exists()


def test_pickled_shapes_without_data(folder: Path):
    state = make("bert").state_dict()
    state["embeddings.word_embeddings.weight"] = torch.zeros(1).expand(2**30, 2**20)
    pickled(folder, state)
    assert "lacks data for its shape" in refused(folder, allow_pickle=True)
    pickled(folder, [torch.zeros(1)])
    assert "no dictionary of tensors" in refused(folder, allow_pickle=True)


def test_a_disk_that_fails_while_saving(folder: Path, tmp_path: Path, monkeypatch):
    loaded = load_network(folder)
    out = tmp_path / "out"
    with atomic_folder(out) as tmp:
        save_network(loaded.network, tmp)
    before = (out / "model.safetensors").read_bytes()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(EverybertError, match="File too large"), atomic_folder(out) as tmp:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            save_network(loaded.network, tmp)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def full(*args, **kwargs):  # what safetensors raises on a disk without space
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(EverybertError, match="disk is full"), atomic_folder(out) as tmp:
        save_network(loaded.network, tmp)
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
