"""Folders at a byte a parameter: every family there and back, and what is damaged or hostile is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from tiny_models import STEMS, saved

from everybert.errors import EverybertError
from everybert.files import MANIFEST, atomic_folder
from everybert.inference.model import load
from everybert.model.config import PRESETS
from everybert.model.int8 import Int8Linear, supported
from everybert.store.huggingface import load_network, save_network
from everybert.store.weights import INT8, QUANTISATION, SAFE, SCALE, quantise_tensors

IDS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


def hidden(model) -> torch.Tensor:
    return torch.cat(model.hidden(IDS))


@pytest.mark.parametrize("kind", STEMS)
def test_every_family_there_and_back(tmp_path: Path, kind: str):
    source = saved(tmp_path / "source", kind, "ForMaskedLM")
    plain = load(source, device="cpu")
    plain.save(tmp_path / "small", int8=True)
    assert (tmp_path / "small" / INT8).exists() and not (tmp_path / "small" / SAFE).exists()
    small = load(tmp_path / "small", device="cpu")
    assert Int8Linear not in map(type, small.network.encoder.modules()) and "quantisation" not in small.extras
    assert list(small.network.state_dict()) == list(plain.network.state_dict()) and not str(small.report)
    for name, value in small.network.state_dict().items():
        row = plain.network.state_dict()[name]
        step = row.abs().amax(-1, keepdim=True) / 127 if row.ndim == 2 and len(row) >= 8 else torch.zeros(1)
        assert bool(((value - row).abs() <= step * 0.51).all()), name
    assert torch.cosine_similarity(hidden(plain), hidden(small)).min() > 0.99
    if supported():
        fast = load(tmp_path / "small", device="cpu", dtype="int8")
        assert Int8Linear in map(type, fast.network.encoder.modules())
        assert torch.cosine_similarity(hidden(plain), hidden(fast)).min() > 0.98
        fast.save(tmp_path / "again", int8=True)
        first, second = (load_file(tmp_path / name / INT8) for name in ("small", "again"))
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        fast.save(tmp_path / "wide")  # for transformers: the same numbers in fp32
        wide = load(tmp_path / "wide", device="cpu").network.state_dict()
        assert all(torch.equal(value, wide[name]) for name, value in small.network.state_dict().items())


def test_transformers_finds_no_weights_rather_than_wrong_ones(tmp_path: Path, folder: Path):
    from transformers import BertModel

    with pytest.raises(OSError, match=r"model\.safetensors"):
        BertModel.from_pretrained(folder)


def test_half_precision_reads_the_same_folder(folder: Path):
    wide, half = (load_network(folder, dtype=dtype).network.state_dict() for dtype in (None, torch.bfloat16))
    assert all(torch.equal(value.bfloat16(), half[name]) for name, value in wide.items())


def test_size_of_an_encoder_of_36_million(tmp_path: Path):
    """12 × 384 with a vocabulary of 30,528: a byte a parameter and less than a megabyte more."""
    from everybert.model.heads import Network

    shape = {"vocab_size": 30_528, "layers": 12, "hidden_size": 384, "heads": 6, "intermediate_size": 1536}
    network = Network(PRESETS["prenorm-bert-base"].replace(**shape), {"mlm": None, "nsp": None}, pooler=True)
    parameters = sum(value.numel() for value in network.state_dict().values())
    with atomic_folder(tmp_path / "encoder") as tmp:
        save_network(network, tmp, int8=True)
    size = (tmp_path / "encoder" / INT8).stat().st_size
    assert parameters < 36_000_000 and size < parameters + 1_000_000 and size <= 36_000_000


# ── damaged and hostile ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load(saved(tmp_path / "source", "bert"), device="cpu").save(tmp_path / "small", int8=True)
    (tmp_path / "small" / MANIFEST).unlink()  # a folder from elsewhere
    return tmp_path / "small"


def refused(folder: Path) -> str:
    with pytest.raises(EverybertError) as caught:
        load_network(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def edit(folder: Path, name: str, value: torch.Tensor | None) -> None:
    found = load_file(folder / INT8)
    assert name in found or value is not None
    save_file({k: v for k, v in (found | {name: value}).items() if v is not None}, folder / INT8)


WEIGHT = "encoder.layer.0.attention.output.dense.weight"


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        *((SCALE, torch.tensor([1.0] * 15 + [x]), "one positive fp32 scale") for x in (np.nan, np.inf, -1.0, 0.0)),
        (SCALE, None, "one positive fp32 scale"),
        (SCALE, torch.ones(15), "one positive fp32 scale"),
        (SCALE, torch.tensor(1.0), "one positive fp32 scale"),
        (SCALE, torch.ones(16, dtype=torch.float16), "one positive fp32 scale"),
        (SCALE, torch.ones(16, dtype=torch.int8), "one positive fp32 scale"),
        ("", torch.zeros(16, 16, 1, dtype=torch.int8), "one positive fp32 scale"),
        ("", torch.zeros(16, 16, dtype=torch.uint8), "is torch.uint8"),
        ("", torch.zeros(16, 8, dtype=torch.int8), "config.json asks"),
    ],
)
def test_matrices_and_scales_that_do_not_fit(folder: Path, name: str, value: torch.Tensor | None, cause: str):
    edit(folder, WEIGHT + name, value)
    assert cause in refused(folder)


def test_files_that_do_not_fit(folder: Path):
    before = (folder / INT8).read_bytes()
    (folder / INT8).write_bytes(before[: len(before) // 2])
    assert "truncated or damaged" in refused(folder)
    (folder / INT8).unlink()
    (folder / INT8).symlink_to(folder.parent / "source" / SAFE)
    assert "link out" in refused(folder)


@pytest.mark.parametrize("said", [None, {"kind": "int4"}, "int8", QUANTISATION["quantisation"] | {"scales": "tensor"}])
def test_everybert_json_must_say_how(folder: Path, said: object):
    (folder / "everybert.json").write_text(
        json.dumps({"version": 1, **({} if said is None else {"quantisation": said})})
    )
    assert "everybert.json" in refused(folder)
    (folder / "everybert.json").unlink()
    assert "everybert.json" in refused(folder)


def test_a_byte_changed_on_disk_is_seen(tmp_path: Path):
    load(saved(tmp_path / "source", "bert"), device="cpu").save(tmp_path / "small", int8=True)
    file = tmp_path / "small" / INT8
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert "hash differs" in refused(tmp_path / "small")


def test_lost_numbers_are_not_quantised():
    with pytest.raises(EverybertError, match="not finite"):
        quantise_tensors({"w": torch.full((9, 4), np.nan)})
