"""Batches filled up to a few shapes, and recordings of them: on the CPU a recording runs the encoder anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from everybert.model import graphs
from everybert.model.engine import BUDGET_GPU, Inputs, run_head
from everybert.model.graphs import WAVE, Recording, Replays, filled, rounded
from everybert.model.heads import Network
from everybert.model.ragged import Ragged

CPU = torch.device("cpu")


def ragged(lengths, seed=0, segments=False):
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, 40, (n,), generator=draw).tolist() for n in lengths]
    return Ragged.of(ids, [[i % 2 for i in range(n)] for n in lengths] if segments else None)


def pretend(encoder, batch, pool):
    """A recording as a graph is: it reads the tensors it was made from, and writes to one place."""
    out = torch.empty(len(batch.tokens_T), encoder.config.hidden_size)

    def run(given):
        out.copy_(encoder(replace(batch, lengths=given.lengths)))
        return out

    return Recording(graphs._inputs(batch), run)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=300))
def test_a_filled_batch_holds_the_batch_and_has_the_shape(lengths):
    batch = Ragged.of([list(range(1, n + 1)) for n in lengths])
    shape = rounded(batch)
    full = filled(batch, shape)
    size = sum(lengths)
    assert len(full.tokens_T) == len(full.positions_T) == shape.tokens == sum(full.lengths)
    assert len(full) == shape.sequences and len(full.offsets_B1) == shape.sequences + 1
    assert torch.equal(full.tokens_T[:size], batch.tokens_T)
    assert torch.equal(full.positions_T[:size], batch.positions_T)
    assert torch.equal(full.offsets_B1[: len(batch) + 1], batch.offsets_B1)
    assert full.offsets_B1[-1] == shape.tokens and bool((full.offsets_B1.diff() >= 0).all())
    assert full.positions_T.max() == batch.positions_T.max()  # filler has positions that the model has
    assert full.offsets_B1.diff().max() == max(lengths) <= shape.longest
    assert shape.tokens < size + 64 if size <= 512 else shape.tokens <= max(1.25 * size, size + WAVE)


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
        filled(batch, rounded(batch))
    views = {"aten.lift_fresh.default", "aten.detach.default"}
    assert not [name for name, size in sizes.seen if size > 32_768 and name not in views]


def test_there_are_few_shapes():
    sizes = [[40] * n for n in range(1, 820)]
    shapes = {rounded(ragged(s)) for s in sizes[::7]}
    assert len({shape.tokens for shape in shapes}) <= 8 + 4 * 4 + 4
    full = {rounded(ragged([80] * n)) for n in range(415, 423)}
    assert {shape.tokens for shape in full} == {BUDGET_GPU} and len(full) == 1  # a full batch needs hardly any filler


@pytest.mark.parametrize("segments", [False, True])
def test_recorded_passes_give_what_the_encoder_gives(tiny: Network, segments):
    """Three batches of one shape (run, recorded, replayed), and others between them; results stay as they were."""
    encoder, replays = tiny.encoder, Replays(CPU, pretend)
    batches = [ragged(n, i, segments) for i, n in enumerate(([3, 30, 7], [20, 20], [32] * 7, [9, 31], [5, 1, 4, 28]))]
    with torch.inference_mode():
        wanted = [encoder(batch) for batch in batches]
    for _ in range(3):
        found = [replays(encoder, batch) for batch in batches]
        for mine, want in zip(found, wanted):
            torch.testing.assert_close(mine, want, atol=1e-5, rtol=0)
    assert 2 <= len(replays.made) < len(batches)


def test_a_recording_is_not_used_after_the_weights_moved(tiny: Network):
    encoder, replays, batch = tiny.encoder, Replays(CPU, pretend), ragged([4, 9])
    for _ in range(3):
        replays(encoder, batch)
    assert len(replays.made) == 1
    for parameter in encoder.parameters():
        parameter.data = parameter.data.clone()
    replays(encoder, batch)
    assert len(replays.made) == 1 and len(replays.seen) == 2


def test_what_cannot_be_recorded_runs_as_it_is(tiny: Network):
    def fail(encoder, batch, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    encoder, replays, batch = tiny.encoder, Replays(CPU, fail), ragged([4, 9])
    for _ in range(4):
        found = replays(encoder, batch)
    assert not replays.works
    with torch.inference_mode():
        torch.testing.assert_close(found, encoder(batch), atol=1e-5, rtol=0)


def test_the_engine_uses_recordings_where_they_serve(tiny: Network, monkeypatch):
    """The accelerator's path, rehearsed: batches filled and recorded give the same hidden states."""
    given = [[5 + (i * j) % 50 for j in range(1 + i % 20)] for i in range(200)]
    wanted = run_head(tiny, Inputs(given), "tag")
    replays = Replays(CPU, pretend)
    monkeypatch.setattr(graphs, "recordable", lambda encoder: True)
    monkeypatch.setitem(graphs.REPLAYS, tiny.encoder, replays)
    found = run_head(tiny, Inputs(given), "tag")
    for mine, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, want, atol=1e-5, rtol=0)
    assert replays.seen


def test_the_cpu_and_adapters_have_no_recordings(tiny: Network):
    assert not graphs.recordable(tiny.encoder)


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
        found = [graphs.forward(encoder, batch) for batch in batches]
        for mine, want in zip(found, wanted):
            torch.testing.assert_close(mine, want, atol=3e-2, rtol=0)
    assert graphs.REPLAYS[encoder].works and len(graphs.REPLAYS[encoder].made) >= 2
