"""Batches filled up to a few shapes, and recordings of them: on the CPU a recording runs the encoder anew."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from everybert.model import engine
from everybert.model.engine import BUDGET_GPU, Inputs, run_head
from everybert.model.graphs import WAVE, Recorder, Recording, filled
from everybert.model.heads import Network
from everybert.model.ragged import Ragged, Targets

CPU = torch.device("cpu")


def ragged(lengths, seed=0, segments=False):
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, 40, (n,), generator=draw).tolist() for n in lengths]
    return Ragged.of(ids, [[i % 2 for i in range(n)] for n in lengths] if segments else None)


class Pretend(Recorder):
    """Records as CUDA graphs do: a recording reads the tensors it was made from, and always writes the same ones."""

    def capture(self, work, batch):
        def run():
            lengths = tuple(n for n in batch.offsets_B1.diff().tolist() if n)
            for mine, value in zip(outputs, work(replace(batch, lengths=lengths))):
                mine.copy_(value)

        outputs = [torch.empty(len(batch.tokens_T), 48)]
        return Recording(list(batch.tensors().values()), outputs, run)


@pytest.fixture
def recorded(tiny: Network, monkeypatch) -> Network:
    """A network whose encoder records its forward passes, although it is on the CPU."""
    monkeypatch.setattr(engine, "recordable", lambda encoder: True)
    tiny.encoder.recorder = Pretend()
    return tiny


@torch.inference_mode()
def run(network, batch):
    return engine.forward(network.encoder, batch)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=300))
def test_a_filled_batch_holds_the_batch_and_has_the_shape(lengths):
    batch = Ragged.of([list(range(1, n + 1)) for n in lengths])
    full = filled(batch)
    size, tokens = sum(lengths), len(full.tokens_T)
    assert len(full.positions_T) == tokens == sum(full.lengths)
    assert len(full) == len(full.offsets_B1) - 1
    assert torch.equal(full.tokens_T[:size], batch.tokens_T)
    assert torch.equal(full.positions_T[:size], batch.positions_T)
    assert torch.equal(full.offsets_B1[: len(batch) + 1], batch.offsets_B1)
    assert full.offsets_B1[-1] == tokens and bool((full.offsets_B1.diff() >= 0).all())
    assert full.positions_T.max() == batch.positions_T.max()  # filler has positions that the model has
    assert full.offsets_B1.diff().max() == max(lengths) <= full.max_length
    assert tokens < size + 64 if size <= 512 else tokens <= max(1.25 * size, size + WAVE)


class Sizes(TorchDispatchMode):
    """How many numbers each operation of torch is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        parts = [y for x in args for y in (x if isinstance(x, list | tuple) else [x])]
        self.seen.append((str(func), max([x.numel() for x in parts if isinstance(x, torch.Tensor)], default=0)))
        return func(*args, **kwargs or {})


def test_the_host_makes_a_large_batch_without_the_threads_of_torch(tiny: Network):
    """They are woken for more than 32,768 numbers, milliseconds each time while texts are tokenized: once a batch grew
    from 32,768 tokens to 33,792, texts on an H200 took three times as long."""
    batch = ragged([30] * 1_120, segments=True)
    with Sizes() as sizes:
        tiny.encoder.check(batch)
        filled(batch)
    views = {"aten.lift_fresh.default", "aten.detach.default"}
    assert not [name for name, size in sizes.seen if size > 32_768 and name not in views]


def test_there_are_few_shapes():
    sizes = [[40] * n for n in range(1, 820)]
    assert len({len(filled(ragged(s)).tokens_T) for s in sizes[::7]}) <= 8 + 4 * 4 + 4
    full = [filled(ragged([80] * n)) for n in range(415, 423)]
    assert {(len(x.tokens_T), len(x)) for x in full} == {(BUDGET_GPU, 512)}  # a full batch needs hardly any filler


@pytest.mark.parametrize("segments", [False, True])
def test_recorded_passes_give_what_the_encoder_gives(recorded: Network, segments):
    """Three batches of one shape (run, recorded, replayed), and others between them; results stay as they were."""
    batches = [ragged(n, i, segments) for i, n in enumerate(([3, 30, 7], [20, 20], [32] * 7, [9, 31], [5, 1, 4, 28]))]
    with torch.inference_mode():
        wanted = [recorded.encoder(batch) for batch in batches]
    for _ in range(3):
        found = [run(recorded, batch) for batch in batches]
        for mine, want in zip(found, wanted):
            torch.testing.assert_close(mine, want, atol=1e-5, rtol=0)
    assert 2 <= len(recorded.encoder.recorder.recordings) < len(batches)


def test_a_recording_is_not_used_after_the_weights_moved(recorded: Network):
    recorder, batch = recorded.encoder.recorder, ragged([4, 9])
    for _ in range(3):
        run(recorded, batch)
    assert len(recorder.recordings) == 1
    for parameter in recorded.encoder.parameters():
        parameter.data = parameter.data.clone()
    run(recorded, batch)
    assert len(recorder.recordings) == 1 and len(recorder.seen) == 2


def test_what_cannot_be_recorded_runs_as_it_is(recorded: Network):
    class Fails(Recorder):
        def capture(self, work, batch):
            raise RuntimeError("operation not permitted when stream is capturing")

    recorder, batch = Fails(), ragged([4, 9])
    recorded.encoder.recorder = recorder
    for _ in range(4):
        found = run(recorded, batch)
    assert not recorder.works
    with torch.inference_mode():
        torch.testing.assert_close(found, recorded.encoder(batch), atol=1e-5, rtol=0)


def test_batches_differ_by_what_the_host_knows_of_their_targets():
    """A recording has the targets' constants built in, so that batches with others need recordings of their own."""

    @dataclass(frozen=True)
    class Labels(Targets):
        label_B: torch.Tensor
        counts: tuple[int, ...]

    recorder = Pretend()
    for counts in ((1, 1), (2,), (1, 1)):
        batch = replace(ragged([4, 9]), targets=Labels(torch.tensor([0, 1]), counts))
        recorder.run(lambda b: [b.tokens_T[:, None].expand(-1, 48)], batch, CPU, lambda out: None)
    assert len(recorder.seen) == 2 and len(recorder.recordings) == 1


def test_copies_have_no_recordings(recorded: Network):
    for _ in range(3):
        run(recorded, ragged([4, 9]))
    assert recorded.encoder.recorder.recordings
    for copied in (copy.deepcopy(recorded), pickle.loads(pickle.dumps(recorded.encoder.recorder))):
        recorder = copied.encoder.recorder if isinstance(copied, Network) else copied
        assert type(recorder) is Recorder and not recorder.recordings


def test_work_runs_with_its_device_as_the_current_one(monkeypatch):
    """Graphs and Triton kernels start on the current device, which need not be the model's (`device="cuda:1"`)."""
    current = ["cuda:0"]

    @contextmanager
    def guard(device):
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", guard)
    batch, seen = ragged([4, 9]), []
    monkeypatch.setattr(Ragged, "to", lambda self, device: self)
    Recorder().run(lambda b: seen.append(current[-1]) or [b.tokens_T], batch, torch.device("cuda:1"), lambda out: None)
    assert seen == ["cuda:1"] and current == ["cuda:0"]


def test_the_engine_uses_recordings_where_they_serve(recorded: Network, monkeypatch):
    """The accelerator's path on the CPU: batches filled and recorded give the same results."""
    given = [[5 + (i * j) % 50 for j in range(1 + i % 20)] for i in range(200)]
    found = run_head(recorded, Inputs(given), "tag")
    assert recorded.encoder.recorder.seen
    monkeypatch.undo()
    for mine, want in zip(found, run_head(recorded, Inputs(given), "tag"), strict=True):
        np.testing.assert_allclose(mine, want, atol=1e-5, rtol=0)


def test_the_cpu_has_no_recordings(tiny: Network):
    assert not engine.recordable(tiny.encoder)


@pytest.mark.gpu
def test_graphs_on_the_device_give_what_the_encoder_gives(tiny: Network):
    from everybert.model.encoder import Encoder, initialise

    config = tiny.config.replace(hidden_size=64, heads=4, intermediate_size=128)  # heads that kernels take
    encoder = Encoder(config)
    initialise(encoder, config)
    encoder = encoder.to("cuda", torch.bfloat16).eval()
    batches = [ragged(n, i) for i, n in enumerate(([3, 30, 7], [20, 20], [32] * 7, [9, 31], [5, 1, 4, 28]))]
    with torch.inference_mode():
        wanted = [encoder(batch.to("cuda")) for batch in batches]
    for _ in range(3):
        found = [engine.forward(encoder, batch) for batch in batches]
        for mine, want in zip(found, wanted):
            torch.testing.assert_close(mine, want, atol=3e-2, rtol=0)
    assert encoder.recorder.works and len(encoder.recorder.recordings) >= 2
