"""Hostile folders are refused in one line, at once, and before memory is taken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hostile import CASES, DEEP, HUGE, header
from places import network
from refusals import refuses

from everybert.inference.model import Model, load
from everybert.store.adapters import read_adapter
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import finetune

HARMLESS = {
    "a label of number 2^60",
    "labels without end",
    "tokenizer settings that are a pipe",
    "an added word of number 2^32",
}
"""Odd, but nothing is made of it: they may load."""


@pytest.fixture(scope="module")
def good(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("good")
    Model(network(0), tokenizer).save(place / "model")
    return place / "model"


@pytest.fixture(scope="module")
def outcomes(good: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    command = [sys.executable, Path(__file__).with_name("hostile.py"), good, tmp_path_factory.mktemp("scratch")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_folder(outcomes: dict[str, dict], case: str):
    found = outcomes[case]
    assert found["kind"] == "refused" or (case in HARMLESS and found["kind"] == "loaded"), found
    assert "\n" not in found["said"] and len(found["said"]) < 400
    assert found["rose"] < 50_000, "memory was taken first"  # kB
    assert found["took"] < 20


# ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def adapter(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [("the dog plays", "a"), ("the cat sleeps", "b")] * 8
    out = tmp_path_factory.mktemp("adapter") / "lora"
    finetune(good, "classify", rows, rows, out, mode="lora", epochs=1, batch_size=8, device="cpu", quiet=True)
    (out / "manifest.json").unlink()
    return out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", DEEP),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 1152921504606846976, "target_modules": ["query"]}'),
        ("adapter_config.json", '{"peft_type": "LORA", "r": "x", "target_modules": 7}'),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 1152921504606846976, "lora_alpha": 8}'),
        ("adapter_config.json", '{"peft_type": "LORA", "r": 1e999, "lora_alpha": 8}'),
        ("adapter_config.json", "[]"),
        ("everybert.json", DEEP),
        ("adapter_model.safetensors", header(a=HUGE) + b"\0" * 64),
        ("adapter_model.safetensors", b"\xff" * 8),
        ("adapter_model.safetensors", None),
    ],
)
def test_a_hostile_adapter(good: Path, adapter: Path, tmp_path: Path, name: str, content: str | bytes | None):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    if content is None:
        (folder / name).unlink()
        (folder / name).symlink_to("/etc/passwd")
    else:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    model = load(good, device="cpu")
    before = {k: v.clone() for k, v in model.network.state_dict().items()}
    refuses(".", model.add_adapter, folder)
    after = model.network.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before), "a refused adapter changes nothing"


def test_the_good_adapter_is_good(good: Path, adapter: Path):
    model = load(good, device="cpu")
    model.use(model.add_adapter(adapter))
    assert model.classify(["the dog"])[0].label in "ab"
    assert read_adapter(adapter).raw["peft_type"] == "LORA"
