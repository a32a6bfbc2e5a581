"""A genuine TensorFlow checkpoint (data/make_checkpoint.py wrote it) is converted without TensorFlow."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses
from tensorflow_checkpoint import CRC, _masked_crc, convert, read_checkpoint, renamed

from everybert.errors import EverybertError
from everybert.store.huggingface import load_network

DATA = Path(__file__).parent / "data"
sys.path.insert(0, str(DATA))
from make_checkpoint import CONFIG, shapes, value  # noqa: E402

INDEX, SHARD = "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "google-bert", tmp_path / "google"))


def test_every_variable_is_found_with_its_values(folder: Path):
    tensors = read_checkpoint(folder / INDEX)
    assert len(tensors) == len(shapes())  # no optimizer slots, no step
    for name, shape in shapes().items():
        expected = value(name, shape)
        expected = expected.T if name.endswith("/kernel") else expected
        assert np.array_equal(tensors[str(renamed(name))], expected), name


def test_the_converted_folder_loads_as_a_pre_trained_bert(folder: Path, tmp_path: Path):
    refuses(r"python contrib/tensorflow_checkpoint\.py .*google --out", load_network, folder)
    convert(folder, tmp_path / "out")
    loaded = load_network(tmp_path / "out")
    assert str(loaded.report) == ""
    assert loaded.config.family == "bert" and loaded.config.layers == CONFIG["num_hidden_layers"]
    assert list(loaded.network.heads) == ["mlm", "nsp"] and loaded.network.pooler is not None
    query = value("bert/encoder/layer_10/attention/self/key/kernel", (4, 4)).T
    assert np.array_equal(loaded.network.encoder.layers[10].attention.qkv.weight[4:8].detach().numpy(), query)
    transformers = pytest.importorskip("transformers")
    model, info = transformers.BertForPreTraining.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert np.array_equal(
        model.cls.seq_relationship.weight.detach(), value("cls/seq_relationship/output_weights", (2, 4))
    )


def test_checksums_are_castagnolis():
    crc = 0xFFFFFFFF
    for byte in b"123456789":
        crc = CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    assert crc ^ 0xFFFFFFFF == 0xE3069283  # the check value of CRC-32C
    assert _masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), bits=st.integers(1, 255), keep=st.none() | st.integers(0, 10**6))
def test_damage_is_one_line(folder: Path, at: int, bits: int, keep: int | None):
    content = bytearray((DATA / "google-bert" / INDEX).read_bytes())
    content[at % len(content)] ^= bits
    content = content[: keep % len(content)] if keep is not None else content
    (folder / INDEX).write_bytes(content)
    try:
        read_checkpoint(folder / INDEX)  # the footer's padding is not covered by a checksum
    except EverybertError as error:
        assert "\n" not in str(error) and "TensorFlow checkpoint" in str(error)


def test_missing_short_and_ambiguous_files(folder: Path, tmp_path: Path):
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])
    refuses("not where it should be", convert, folder, tmp_path / "out")
    (folder / SHARD).unlink()
    refuses(f"has no {SHARD}", convert, folder, tmp_path / "out")
    shutil.copy(folder / INDEX, folder / "other.ckpt-9.index")
    refuses("2 TensorFlow checkpoints", convert, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
