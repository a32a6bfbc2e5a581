"""Pre-training end to end on a toy: what a run leaves, refuses and survives."""

import dataclasses
import errno
import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from grammar import write_corpus
from safetensors.torch import load_file
from toy import tiny_recipe

from everybert.corpus.build import build_corpus
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.model.losses import PretrainTargets, pretrain_loss
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network
from everybert.text.tokenizer import Tokenizer
from everybert.training import checkpoint, loop, pretrain
from everybert.training.data import Place, RunContext
from everybert.training.recipe import Recipe, names
from everybert.training.step import Compute


def run(corpus, out, **changes):
    return pretrain.pretrain(tiny_recipe(**changes), corpus, out, device="cpu", quiet=True)


def logged(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("done") / "run"
    return run(corpus, out, steps=12, run__evaluate_every=6), out


def test_the_model_loads_in_transformers_with_the_same_answers(done):
    from transformers import AutoModelForPreTraining, AutoTokenizer

    result, out = done
    assert result.finished and result.step == 12
    theirs = AutoModelForPreTraining.from_pretrained(result.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    ours = load_network(result.model).network.eval()
    ids = tokenizer("this farmer paints a boat .")["input_ids"]
    assert len(set(ids)) > 5
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).prediction_logits[0]
        found = ours.mlm_logits(ours.encoder(Ragged.of([ids])))
    assert torch.allclose(wanted, found, atol=1e-5)
    trained = load_file(out / "checkpoints" / "step-00000012" / "network.safetensors")
    assert torch.equal(trained["encoder.embeddings.token.weight"], ours.encoder.embeddings.token.weight)


@pytest.mark.parametrize("preset", ["eurobert-610m", "esm2-8m", "roformer-chinese-base"])
def test_newer_architectures_are_pretrained(corpus, tmp_path, preset):
    from transformers import AutoModelForMaskedLM

    changes = {"model__preset": preset, "model__key_value_heads": 1} if "euro" in preset else {"model__preset": preset}
    result = run(corpus, tmp_path / "run", steps=3, examples__kind="full", **changes)
    theirs = AutoModelForMaskedLM.from_pretrained(result.model).eval()
    loaded, tokenizer = load_network(result.model), Tokenizer.load(result.model)
    assert loaded.config.mask_id == (tokenizer.mask_id if "esm" in preset else None)
    ids = tokenizer.encode("this farmer [MASK] a boat .").ids
    with torch.no_grad():
        found = loaded.network.mlm_logits(loaded.network.encoder(Ragged.of([ids])))
        torch.testing.assert_close(found, theirs(torch.tensor([ids])).logits[0], atol=1e-5, rtol=1e-5)


def test_evaluations_and_bookkeeping(done):
    _, out = done
    lines = logged(out)
    assert [line["step"] for line in lines if "lr" in line] == [5, 10, 12]
    evaluated = [line for line in lines if "heldout_loss" in line]
    assert [line["step"] for line in evaluated] == [6, 12]
    assert {"accuracy", "perplexity", "pair_accuracy"} <= evaluated[0].keys()
    assert evaluated[1]["perplexity"] == pytest.approx(np.exp(evaluated[1]["heldout_loss"]))
    assert 1 < evaluated[1]["pseudo_perplexity"] < 1000
    progress = checkpoint.read_progress(checkpoint.latest(out / "checkpoints"))
    assert progress.figures["heldout_loss"] == evaluated[1]["heldout_loss"]
    assert progress.tokens == lines[-2]["tokens"] > 12 * 400


def test_a_finished_run_says_so_and_changes_nothing(done, corpus, capsys):
    _, out = done
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in out.rglob("*")}
    again = pretrain.pretrain(tiny_recipe(steps=12, run__evaluate_every=6), corpus, out, device="cpu")
    assert again.finished and again.figures
    assert "is finished (12 steps): nothing to do" in capsys.readouterr().err
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in out.rglob("*")} == before


def test_another_recipe_is_refused_with_its_keys(done, corpus):
    _, out = done
    with pytest.raises(EverybertError, match=r"with another mask\.rate, schedule\.peak:"):
        run(corpus, out, steps=12, schedule__peak=1e-3, mask__rate=[0.15, 0.2])


def test_another_corpus_is_refused(done, tmp_path):
    _, out = done
    with pytest.raises(EverybertError, match="another corpus"):
        run(write_corpus(tmp_path / "c", documents=50), out, steps=12)


def test_a_tokenizer_that_is_not_the_corpus_own_is_refused(corpus, tmp_path):
    copy = shutil.copytree(corpus, tmp_path / "c")
    file = copy / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"farmer"', '"former"'))
    with pytest.raises(EverybertError, match="does not belong to the corpus"):
        run(copy, tmp_path / "run")


def test_too_long_for_the_model(corpus, tmp_path):
    with pytest.raises(EverybertError, match="length 128 is more than the model's 64 positions"):
        run(corpus, tmp_path / "run", batch__length=128)


def test_a_full_disk_leaves_the_last_checkpoint(corpus, tmp_path, monkeypatch):
    out, saves = tmp_path / "run", []
    real = checkpoint.save_file

    def full(tensors, path):
        saves.append(path)
        if len(saves) == 4:  # the optimizer of the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(EverybertError, match="the disk is full"):
        run(corpus, out, steps=20)
    found = checkpoint.latest(out / "checkpoints")
    assert found.name == "step-00000007"
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000007"]
    monkeypatch.setattr(checkpoint, "save_file", real)
    assert run(corpus, out, steps=20).finished
    run(corpus, tmp_path / "straight", steps=20)
    a, b = (
        load_file(p / "checkpoints" / "step-00000020" / "network.safetensors") for p in (out, tmp_path / "straight")
    )
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_failed_start_leaves_nothing(corpus, tmp_path):
    out = tmp_path / "run"
    for wrong in ({"model__init": str(tmp_path / "nosuch")}, {"batch__length": 128}):
        with pytest.raises(EverybertError):
            run(corpus, out, **wrong)
        assert not out.exists()
    out.mkdir()
    (out / "run.json").write_text('{"recipe": {}}')  # of a run that never reached a checkpoint
    assert run(corpus, out, steps=1).finished


def test_a_damaged_checkpoint_gives_way_to_the_one_before(corpus, tmp_path, caplog):
    out = tmp_path / "run"
    run(corpus, out, steps=14)
    files = load_file(out / "checkpoints" / "step-00000014" / "network.safetensors")
    whole = {name: tensor.clone() for name, tensor in files.items()}  # not mapped from the file
    shutil.rmtree(out / "model")
    damaged = out / "checkpoints" / "step-00000014" / "network.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert run(corpus, out, steps=14).finished
    assert "step-00000014" in caplog.text and "the checkpoint before is used" in caplog.text
    again = load_file(damaged)
    assert all(torch.equal(whole[k], again[k]) for k in whole)
    for path in (out / "checkpoints").glob("*/network.safetensors"):
        path.write_bytes(b"x")
    with pytest.raises(EverybertError, match=r"network\.safetensors"):
        run(corpus, out, steps=14)


def test_one_run_at_a_time(corpus, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    for owner, refused in ((f"{socket.gethostname()} {os.getppid()}", True), ("elsewhere 7", True), ("", False)):
        (out / "lock").write_text(owner)
        if refused:
            with pytest.raises(EverybertError, match=f"in use by process {owner.split()[1]} on"):
                run(corpus, out, steps=1)
            assert sorted(p.name for p in out.iterdir()) == ["lock"]
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (out / "lock").write_text(f"{socket.gethostname()} {gone.pid}")  # left by a run that was killed
    assert run(corpus, out, steps=1).finished and not (out / "lock").exists()


def poisoned(bad_steps, factor):
    """The loss, multiplied in some steps (two packs a step)."""
    calls = []

    def loss(network, batch):
        calls.append(1)
        value, figures = pretrain_loss(network, batch)
        bad = (len(calls) - 1) // 2 in bad_steps
        return (value * factor, figures * factor) if bad else (value, figures)

    return loss


def test_steps_that_are_not_finite_are_skipped_and_reported(corpus, tmp_path, monkeypatch):
    moved = []
    real = loop.Optimizer.step

    def step(self, *args, **kwargs):
        before = [p.detach().clone() for p in self.parameters]
        out = real(self, *args, **kwargs)
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, self.parameters)))
        return out

    monkeypatch.setattr(loop.Optimizer, "step", step)
    monkeypatch.setattr(pretrain, "pretrain_loss", poisoned({3, 6}, float("nan")))
    run(corpus, tmp_path / "run", steps=10)
    assert [i for i, m in enumerate(moved) if not m] == [3, 6]
    assert [line["skipped"] for line in logged(tmp_path / "run") if "lr" in line] == [1, 2]


def test_a_spike_is_skipped(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "pretrain_loss", poisoned({25}, 50.0))
    run(corpus, tmp_path / "run", steps=30)
    assert [line.get("skipped", 0) for line in logged(tmp_path / "run") if "lr" in line] == [0, 0, 0, 0, 0, 1]


def test_gives_up_after_too_many(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "pretrain_loss", poisoned(set(range(4, 100)), float("inf")))
    with pytest.raises(EverybertError, match=r"the last 6 steps were skipped.*lower \[schedule\] peak"):
        run(corpus, tmp_path / "run", steps=40, run__patience=5)


def test_out_of_memory_says_what_to_lower(corpus, tmp_path, monkeypatch):
    def hungry(network, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pretrain, "pretrain_loss", hungry)
    with pytest.raises(EverybertError, match=r"out of memory: lower \[batch\] pack \(now 256 tokens"):
        run(corpus, tmp_path / "run")


def test_a_budget_ends_on_time(corpus, tmp_path):
    recipe = tiny_recipe(budget="6s", schedule__warmup=5, run__save_every=1000)
    result = pretrain.pretrain(recipe, corpus, tmp_path / "run", device="cpu", quiet=True)
    progress = checkpoint.read_progress(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    assert result.finished and progress.total == progress.step > 10
    assert 3 < progress.seconds < 10
    assert logged(tmp_path / "run")[-2]["lr"] < 0.1 * recipe.schedule.peak


def test_accumulation_is_the_large_batch(corpus):
    recipe = tiny_recipe(batch__tokens=1024, model__dropout=0.0, model__attention_dropout=0.0)
    opened = Corpus.open(corpus)
    tokenizer = Tokenizer.load(opened.tokenizer_path)
    setting = RunContext(
        recipe, corpus, opened, tokenizer, ExampleLayout.of(tokenizer), torch.device("cpu"), pretrain.World()
    )
    step = next(setting.steps(0, 1, Place()))
    batches = [batch for _, batch in step.batches(step.counts)]
    assert len(batches) == 4
    network = pretrain.build_network(setting)
    compute = Compute(network, pretrain_loss)
    figures = sum(compute.run(batch) for batch in batches)
    apart = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    whole = compute.run(join(batches))
    assert torch.allclose(figures, whole, atol=1e-6)
    for name, p in network.named_parameters():
        assert torch.allclose(apart[name], p.grad, atol=1e-6), name


def join(batches):
    """Several batches as one."""
    lengths = [n for b in batches for n in b.lengths]
    starts = np.cumsum([0, *(len(b.tokens_T) for b in batches)])
    targets = PretrainTargets(
        mask_index_M=torch.cat([b.targets.mask_index_M + s for b, s in zip(batches, starts.tolist())]),
        mask_label_M=torch.cat([b.targets.mask_label_M for b in batches]),
        pair_label_B=torch.cat([b.targets.pair_label_B for b in batches]),
        masked=batches[0].targets.masked,
        pairs=batches[0].targets.pairs,
    )
    flat = Ragged.flat(torch.cat([b.tokens_T for b in batches]), lengths, torch.cat([b.segments_T for b in batches]))
    return dataclasses.replace(flat, targets=targets)


SMALL = {
    "layers": 2,
    "hidden_size": 32,
    "heads": 2,
    "intermediate_size": 64,
    "max_positions": 64,
}


@pytest.mark.parametrize("name", [n for n in names() if not (Recipe.load(n).distil or Recipe.load(n).model.init)])
def test_every_recipe_trains_scaled_down(name, tmp_path_factory, tmp_path):
    corpus = tmp_path_factory.getbasetemp() / "languages"
    if not corpus.exists():
        write_corpus(corpus, documents=60, heldout=8, languages=2)
    changes = {f"model__{key}": value for key, value in SMALL.items()}
    recipe = Recipe.load(
        name,
        steps=4,
        batch__tokens=512,
        batch__pack=512,
        batch__length=64,
        schedule__warmup=1,
        schedule__peak=1e-3,
        run__tensorboard=False,
        run__workers=0,
        **changes,
    )
    short = tuple(dataclasses.replace(p, length=min(64, p.length), tokens=(512, 512)) for p in recipe.phases)
    result = pretrain.pretrain(
        dataclasses.replace(recipe, phases=short), corpus, tmp_path / "run", device="cpu", quiet=True
    )
    assert result.finished
    assert 3 < result.figures["heldout_loss"] < 6
    loaded = load_network(result.model)
    assert loaded.config.family == recipe.config.family
    assert not loaded.report.missing
    if name == "spanbert":
        assert any(line.get("boundary", 0) > 1 for line in logged(tmp_path / "run"))


def test_a_table_of_positions_longer_than_any_example_is_noted(corpus, tmp_path, capsys):
    recipe = tiny_recipe(steps=1)
    longest = max(phase.length for phase in recipe.phases)
    longer = tiny_recipe(steps=1, model__max_positions=2 * longest)
    pretrain.pretrain(longer, corpus, tmp_path / "run", device="cpu")
    assert f"set [model] max_positions = {longest}" in capsys.readouterr().err


@pytest.mark.parametrize("name", names())
def test_our_recipes_train_every_position(name):
    recipe = Recipe.load(name)
    if recipe.model.init is None and recipe.distil is None:
        assert recipe.longest >= recipe.config.max_positions or recipe.config.positions != "learned"


PHASES = [{"share": 0.5, "length": 16, "kind": "full"}, {"share": 0.5, "length": 32, "kind": "pairs"}]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_running_text_first_then_pairs(corpus, tmp_path, kind):
    """A phase has its own kind of examples, and the run its head from the start; resumed, it has the same bits.

    The head and the pooler stay as they are until there are pairs.
    """
    change = {"steps": 12, "phase": PHASES, "examples__kind": "full", "run__log_every": 1, "run__save_every": 2}
    change |= {"run__keep": 9, "optimizer__kind": kind, "optimizer__weight_decay": 0.1}
    whole = run(corpus, tmp_path / "whole", **change)
    rows = [row for row in logged(whole.folder) if "nsp" in row]
    assert whole.finished and [row["nsp"] > 0 for row in rows] == [row["step"] > 6 for row in rows]
    assert 0 <= whole.figures["pair_accuracy"] <= 1
    saved = [whole.folder / "checkpoints" / f"step-{step:08d}" for step in (2, 6, 12)]
    early, late, last = (load_file(folder / "network.safetensors") for folder in saved)
    judge = {name for name in early if name.startswith(("heads.nsp.", "pooler."))}
    assert judge == {name for name in early if torch.equal(early[name], late[name])} and len(judge) == 4
    assert not any(torch.equal(late[name], last[name]) for name in judge)
    assert not any("nsp" in name or "pooler" in name for name in load_file(saved[1] / "optimizer.safetensors"))
    again = tmp_path / "again"
    shutil.copytree(whole.folder, again)
    for part in ("model", *(f"checkpoints/step-{step:08d}" for step in (6, 8, 10, 12))):
        shutil.rmtree(again / part)
    run(corpus, again, **change)
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (whole.folder, again))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    older = tiny_recipe(steps=12, phase=[{"share": 1.0, "length": 16}]).plain()["phases"]
    assert "kind" not in older[0]  # as runs of older versions recorded it


def test_a_later_phase_that_the_corpus_cannot_give_is_refused_before_the_first_step(tmp_path, corpus):
    text = tmp_path / "lines.txt"
    text.write_text("\n\n".join(f"this farmer paints boat {i} ." for i in range(200)), encoding="utf-8")
    build_corpus([text], Corpus.open(corpus).tokenizer_path, tmp_path / "corpus", workers=1)
    with pytest.raises(EverybertError, match="two sentences"):
        run(tmp_path / "corpus", tmp_path / "run", phase=PHASES, examples__kind="full")
    assert not (tmp_path / "run" / "log.jsonl").exists()
    with pytest.raises(EverybertError, match=r"^\[phase 2\] kind: a causal model does not learn sentence pairs"):
        run(corpus, tmp_path / "run", phase=PHASES, examples__kind="full", model__causal=True)
