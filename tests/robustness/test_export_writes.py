"""Faults while a model is quantised or exported: what is found afterwards is whole, or nothing is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from faults import KINDS
from places import Place, beginning, network, sweep, weights

from everybert.files import is_complete, read_json, verify_folder
from everybert.inference import export as exporting
from everybert.inference.export import quantise
from everybert.inference.model import Model, load
from everybert.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "no_waiting_for_the_disk")


@pytest.mark.parametrize("kinds", [("cut",), pytest.param(KINDS, marks=pytest.mark.slow)])
def test_quantize(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]):
    """`everybert quantize`: a folder that loads in int8, or none."""
    Model(network(0), tokenizer).save(tmp_path / "base")
    path = tmp_path / "here" / "small"
    place = Place(path, weights, None)
    begin = beginning(Model, "save", monkeypatch)
    sweep(place, lambda: quantise(tmp_path / "base", path, ["the dog runs ."]), begin, *kinds)
    assert load(path, dtype="int8").fill("the [MASK] runs .")


def graph(folder: Path) -> str:
    """An ONNX folder's fingerprint: complete, its graph valid, its other files readable."""
    import onnx

    verify_folder(folder)
    assert is_complete(folder) and "onnx" in read_json(folder / "everybert.json")
    onnx.checker.check_model(str(folder / "onnx/model.onnx"))
    assert [p.name for p in folder.rglob("*.onnx*")] == ["model.onnx"] and not list(folder.glob("*.safetensors"))
    Tokenizer.load(folder)
    return hashlib.sha256((folder / "onnx/model.onnx").read_bytes()).hexdigest()


@pytest.mark.parametrize("kinds", [("cut-kill",), pytest.param(KINDS, marks=pytest.mark.slow)])
def test_export_onnx(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]):
    """The graph is traced once, before; every child writes it, runs it, and writes the rest."""
    pytest.importorskip("onnxruntime")
    Model(network(0), tokenizer).save(tmp_path / "base")
    program = None
    trace = torch.onnx.export

    def traced(*args, **kwargs):
        nonlocal program
        program = program or trace(*args, **kwargs)
        return program

    monkeypatch.setattr(torch.onnx, "export", traced)
    exporting.export_onnx(tmp_path / "base", tmp_path / "once", task="fill")
    path = tmp_path / "here" / "graph"
    place = Place(path, graph, None)
    begin = beginning(exporting, "atomic_folder", monkeypatch)
    sweep(place, lambda: exporting.export_onnx(tmp_path / "base", path, task="fill"), begin, *kinds)


@pytest.mark.parametrize("kinds", [("ENOSPC",), pytest.param(KINDS, marks=pytest.mark.slow)])
def test_export_hf(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]):
    Model(network(0), tokenizer).save(tmp_path / "base", int8=True)
    path = tmp_path / "here" / "plain"
    place = Place(path, weights, None)
    begin = beginning(exporting, "atomic_folder", monkeypatch)
    sweep(place, lambda: exporting.export_hf(tmp_path / "base", path), begin, *kinds)
