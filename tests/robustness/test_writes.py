"""Whatever ends a write, and wherever: readers find the old version or the new one, whole, and the next write works."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny_bert as tiny
import torch
from faults import DONE, KINDS, RAISED, SAID, SURVIVED, Faults
from places import Place, beginning, leftovers, network, sweep, weights
from refusals import refuses

from everybert.errors import EverybertError
from everybert.files import atomic_file, atomic_folder, is_complete, read_json, recover, verify_folder, write_json
from everybert.inference.model import Model, load
from everybert.model.lora import AdapterSet
from everybert.store.adapters import load_adapter, read_adapter
from everybert.store.huggingface import load_network
from everybert.text.tokenizer import Tokenizer
from everybert.training import finetune, pretrain
from everybert.training.checkpoint import Progress, latest, load_checkpoint, save_checkpoint
from everybert.training.optim import Optimizer, OptimizerConfig

pytestmark = pytest.mark.usefixtures("one_thread", "no_waiting_for_the_disk")


# ── models, checkpoints ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("before", [pytest.param(False, marks=pytest.mark.slow), True])
def test_saving_a_model(tmp_path: Path, tokenizer: Tokenizer, before: bool):
    old, new = Model(network(0), tokenizer), Model(network(1), tokenizer)
    path = tmp_path / "here" / "model"
    place = Place(path, weights, (lambda: old.save(path)) if before else None)
    faults = Faults(path.parent, place.examine)
    faults.run(lambda: (faults.begin(), new.save(path)))
    place.judge(faults)


@pytest.mark.parametrize("kinds", [("cut-kill",), pytest.param(KINDS, marks=pytest.mark.slow)])
def test_quantising_over_a_model(tmp_path: Path, tokenizer: Tokenizer, kinds: tuple[str, ...]):
    """Another file name each time: what is found must never be a mixture."""
    model = Model(network(0), tokenizer)
    path = tmp_path / "here" / "model"

    def read(folder: Path) -> str:
        kinds = sorted(p.name for p in folder.glob("*.safetensors"))
        assert len(kinds) == 1, kinds
        return kinds[0] + weights(folder)

    place = Place(path, read, lambda: model.save(path))
    faults = Faults(path.parent, place.examine, kinds)
    faults.run(lambda: (faults.begin(), model.save(path, int8=True)))
    place.judge(faults)


def test_saving_a_checkpoint_and_pruning_older_ones(tmp_path: Path):
    folder = tmp_path / "run" / "checkpoints"
    net = network(0)
    mover = Optimizer(net, OptimizerConfig())
    net.mlm_logits(torch.randn(3, 8), torch.arange(3)).sum().backward()
    mover.step(1e-2)
    for step in (1, 2):
        save_checkpoint(folder, net, mover, Progress(step=step, total=9), keep=2)
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)

    def resumed() -> int:
        found = latest(folder)
        assert found is not None, "a run that had checkpoints has none"
        other = network(5)
        progress = load_checkpoint(found, other, Optimizer(other, OptimizerConfig()))
        assert torch.equal(other.encoder.embeddings.token.weight, net.encoder.embeddings.token.weight)
        return progress.step

    seen = set()

    def examine(kind: str, step: int, code: int) -> None:
        assert code != RAISED, (kind, step)
        at = resumed()
        assert at in (2, 3) and (at == 3 or code not in (DONE, SURVIVED)), (kind, step, code)
        seen.add(at)
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)

    faults = Faults(folder, examine, kinds=("kill", "cut"))
    faults.run(lambda: (faults.begin(), save_checkpoint(folder, net, mover, Progress(step=3, total=9), keep=2)))
    assert seen == {2, 3} and resumed() == 3
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000002", "step-00000003"]
    assert len(faults.codes["kill"]) > 15


def test_the_model_at_the_end_of_pretraining(tmp_path: Path, corpus: Path, tiny_run, monkeypatch: pytest.MonkeyPatch):
    """The run's last act; run again, it finishes with the model of a run that nothing disturbed."""
    recipe = tiny_run(steps=2, run__save_every=1)
    straight = pretrain.pretrain(recipe, corpus, tmp_path / "straight", device="cpu", quiet=True).model
    out = tmp_path / "run"
    expected = weights(straight)
    codes: list[int] = []

    def examine(kind: str, step: int, code: int) -> None:
        assert code != RAISED, (kind, step)
        model = recover(out / "model")
        assert not model.exists() or weights(model) == expected
        codes.append(code)
        shutil.rmtree(model, ignore_errors=True)

    faults = Faults(out / "model", examine, kinds=("kill", "ENOSPC", "cut-kill"))
    faults.root = str(out)
    with contextmanager(beginning(pretrain, "write_model", monkeypatch))(faults):
        faults.run(lambda: pretrain.pretrain(recipe, corpus, out, device="cpu", quiet=True))
    assert weights(out / "model") == expected
    assert codes.count(-signal.SIGKILL) > 8 and codes.count(SAID) > 8
    assert latest(out / "checkpoints").name == "step-00000002"


# ── fine-tuning, adapters ────────────────────────────────────────────────────────────────────────────────────


def reviews(seed: int, size: int = 24) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    return [
        (f"{'good' if label == 'yes' else 'bad'} {draw.choice(tiny.WORDS[20:40])}", label)
        for label in (draw.choice(["yes", "no"]) for _ in range(size))
    ]


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("full", ("cut-kill",)),
        ("lora", ("cut",)),
        pytest.param("full", KINDS, marks=pytest.mark.slow),
        pytest.param("lora", KINDS, marks=pytest.mark.slow),
        pytest.param("frozen", KINDS, marks=pytest.mark.slow),
    ],
)
def test_what_finetuning_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, kinds: tuple[str, ...]):
    base = tiny.save(tmp_path / "base")
    path = tmp_path / "here" / "tuned"
    settings = {"mode": mode, "epochs": 1, "batch_size": 8, "device": "cpu", "quiet": True, "lr": 1e-3}
    first = tmp_path / "first"
    finetune.finetune(base, "classify", reviews(0), reviews(1), first, seed=5, **settings)

    def read(folder: Path) -> object:
        verify_folder(folder)
        read_json(folder / "finetune.json")
        if mode == "frozen":  # the encoder stays: the head tells the versions apart
            return weights(folder) + hashlib.sha256((folder / "head.safetensors").read_bytes()).hexdigest()
        if mode == "full":
            return weights(folder)
        encoder = load_network(base).network
        adapters = AdapterSet(encoder)
        load_adapter(adapters, "reviews", read_adapter(folder))
        return f"{sum(float(v.double().abs().sum()) for v in encoder.state_dict().values()):.9f}"

    place = Place(path, read, lambda: shutil.copytree(first, path))

    def tune() -> None:
        finetune.finetune(base, "classify", reviews(0), reviews(1), path, seed=6, overwrite=True, **settings)

    sweep(place, tune, beginning(finetune, "atomic_folder", monkeypatch), *kinds)


def write_array(path: Path, value: int) -> None:
    with atomic_file(path) as draft, draft.open("wb") as file:
        np.save(file, np.full(1000, value))


def write_folder(path: Path, value: int) -> None:
    with atomic_folder(path) as draft:
        write_json(draft / "facts.json", {"v": value})
        (draft / "part").mkdir()
        (draft / "part" / "weights.bin").write_bytes(bytes([value]) * 1000)


def read_folder(path: Path) -> int:
    verify_folder(path)
    value = read_json(path / "facts.json")["v"]
    assert (path / "part" / "weights.bin").read_bytes() == bytes([value]) * 1000
    return value


@pytest.mark.parametrize("before", [None, 1])
@pytest.mark.parametrize(
    ("name", "write", "read"),
    [
        ("facts.json", lambda p, v: write_json(p, {"v": v}), lambda p: read_json(p)["v"]),
        ("vectors.npy", write_array, lambda p: int(np.load(p)[-1])),
        ("folder", write_folder, read_folder),
    ],
)
def test_files_and_folders_are_the_old_or_the_new(tmp_path: Path, name: str, write, read, before: int | None):
    path = tmp_path / "here" / name
    again = (lambda: write(path, 3)) if name == "folder" else None  # which clears up what was left beside it
    place = Place(path, read, before and (lambda: write(path, before)), again)
    faults = Faults(path.parent, place.examine)
    faults.run(lambda: (faults.begin(), write(path, 2)))
    assert place.seen == {before, 2} and read(path) == 2
    assert leftovers(path.parent) == []


def test_a_device_is_written_to_as_it_is(tmp_path: Path):
    with atomic_file(Path("/dev/null")) as draft:
        draft.write_text("x", encoding="utf-8")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with atomic_file(tmp_path / "link") as draft:
        draft.write_text("x", encoding="utf-8")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text(encoding="utf-8") == "x"


def test_a_folder_that_was_cut_is_never_complete(tmp_path: Path, tokenizer: Tokenizer):
    """Every prefix of every file, as a crash without our renames would leave it, is refused or loads as it was."""
    whole = tmp_path / "whole"
    Model(network(0), tokenizer).save(whole)
    for file in sorted(whole.iterdir()):
        content = file.read_bytes()
        for share in (0.0, 0.5, 0.99):
            cut = tmp_path / "cut"
            shutil.copytree(whole, cut)
            (cut / file.name).write_bytes(content[: int(share * len(content))])
            if file.name == "manifest.json":
                with pytest.raises(Exception, match="JSON"):
                    verify_folder(cut)
            assert not is_complete(cut), (file.name, share)
            if file.name == "vocab.txt":  # for slow tokenizers of other libraries; tokenizer.json has the vocabulary
                with pytest.warns(UserWarning, match="vocab.txt changed"):
                    assert load(cut).tokenizer.digest == tokenizer.digest
            else:
                with pytest.raises(Exception, match=r"could not be read|can be read|bytes where"):
                    load(cut)
            shutil.rmtree(cut)


@pytest.mark.parametrize(
    ("number", "why"), [(errno.EIO, r"could not be written \(Input/output error\)"), (errno.ENOSPC, "disk is full")]
)
def test_errors_of_the_disk_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, why: str):
    def broken(_: int) -> None:
        raise OSError(number, os.strerror(number))

    write_json(tmp_path / "facts.json", {"v": 1})
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(EverybertError, match=why), atomic_folder(tmp_path / "x"):
        pass
    refuses(why, write_json, tmp_path / "facts.json", {"v": 2})
    assert read_json(tmp_path / "facts.json") == {"v": 1} and [p.name for p in tmp_path.iterdir()] == ["facts.json"]
