"""Few tokens by a trace: the encoder's own numbers for all lengths, and threads that do not wait for each other."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import server as own
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server import post

import everybert
from everybert.model.adapters import AdapterSet, LoraConfig
from everybert.model.config import EncoderConfig
from everybert.model.encoder import Encoder
from everybert.model.heads import Network
from everybert.model.int8 import to_int8
from everybert.model.ragged import Ragged
from everybert.serving import traced as room
from everybert.serving.traced import TracedEncoder

SMALL = {"vocab_size": 40, "hidden_size": 32, "layers": 3, "heads": 4, "intermediate_size": 48, "max_positions": 64}
KINDS = {
    "bert": {},
    "roberta": {"segments": 1, "position_offset": 2},
    "distilbert": {"segments": 0, "positions": "sinusoidal"},
    "albert": {"embedding_size": 16, "layer_groups": 1, "activation": "gelu_tanh"},
    "pre-norm": {"norm": "pre"},
    "rotary": {"positions": "rotary", "norm": "pre", "feed_forward": "glu", "linear_bias": False, "segments": 0},
}


def encoder_of(**changes):
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(**{**SMALL, **changes})).eval().requires_grad_(False)
    for part in encoder.modules():
        if isinstance(part, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(part.weight, std=0.1)
    return encoder


@torch.inference_mode()
def ready(encoder):
    traced = TracedEncoder(encoder)
    traced(Ragged.of([[3, 4, 5, 6, 7]]))
    return traced


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    encoder = encoder_of(**KINDS[request.param])
    traced = ready(encoder)
    assert traced.ready
    return encoder, traced


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=60), min_size=1, max_size=6))
def test_one_trace_has_the_encoders_numbers_for_all_lengths(pair, ids):
    encoder, traced = pair
    batch = Ragged.of(ids)
    with torch.inference_mode():
        torch.testing.assert_close(traced(batch), encoder(batch), rtol=0, atol=1e-5)
        alone = torch.cat([traced(Ragged.of([one])) for one in ids])
        torch.testing.assert_close(traced(batch), alone, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_other_batches_go_to_the_encoder():
    encoder = encoder_of()
    traced = ready(encoder)
    traced._run = lambda *_: pytest.fail("a trace has few tokens of one segment, and no looking inside")
    for batch in (Ragged.of([[1] * 43] * 3), Ragged.of([[1, 2]], [[0, 1]])):
        assert torch.equal(traced(batch), encoder(batch))
    states: list = []
    traced(Ragged.of([[1, 2]]), states)
    assert len(states) == 4


@torch.inference_mode()
def test_eight_bits_run_step_by_step():
    """Their products cannot be traced; nothing is lost but the gain."""
    encoder = encoder_of()
    to_int8(encoder)
    traced = ready(encoder)
    assert not traced.ready
    for n in (1, 9, 40):
        batch = Ragged.of([list(range(n))])
        assert torch.equal(traced(batch), encoder(batch))


@torch.inference_mode()
def test_an_adapter_in_use_is_in_the_trace():
    torch.manual_seed(0)
    network = Network(EncoderConfig(**SMALL)).eval()
    adapters = AdapterSet(network)
    adapters.add("one", LoraConfig(), {})
    for name, weight in network.named_parameters():
        if "lora" in name.lower() or "up" in name:
            torch.nn.init.normal_(weight)
    network.requires_grad_(False)
    batch = Ragged.of([[1, 2, 3, 4]])
    bare = ready(network.encoder)
    adapters.use("one")
    traced = ready(network.encoder)
    assert bare.ready and traced.ready
    torch.testing.assert_close(traced(batch), network.encoder(batch), rtol=0, atol=1e-5)
    assert not torch.allclose(traced(batch), bare(batch), atol=1e-3)


@pytest.mark.parametrize("why", ["windows", "an error", "a difference", "a gradient"])
def test_what_cannot_be_traced_runs_step_by_step(why, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "everybert")
    encoder = encoder_of(windows=(2, 2, 2)) if why == "windows" else encoder_of()
    calls = []
    real = torch.jit.trace

    def trace(function, example, **how):
        calls.append(1)
        if why == "an error":
            raise RuntimeError("no")
        return real((lambda *x: function(*x) + 1) if why == "a difference" else function, example, **how)

    monkeypatch.setattr(torch.jit, "trace", trace)
    if why == "a gradient":
        encoder.requires_grad_(True)
    traced = TracedEncoder(encoder)
    for n in (3, 9):
        batch = Ragged.of([list(range(1, n))])
        with torch.inference_mode():
            assert torch.equal(traced(batch), encoder(batch))
    assert not traced.ready
    assert len(calls) == (0 if why == "windows" else 1), "tried once"
    said = {"windows": "", "an error": "(no)", "a difference": "trace differs", "a gradient": "cannot be traced"}
    assert said[why] in caplog.text


def test_one_of_several_threads_traces():
    encoder, calls, both = encoder_of(), [], threading.Event()
    traced = TracedEncoder(encoder)
    batch = Ragged.of([[1, 2, 3]])

    def slow(encoder):
        calls.append(threading.current_thread())
        assert both.wait(60)
        return None

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool, torch.inference_mode():
        patch.setattr(room, "traced", slow)
        first = pool.submit(traced, batch)
        own.until(lambda: calls)
        assert torch.equal(pool.submit(traced, batch).result(60), encoder(batch))  # while the first one is at it
        both.set()
        assert torch.equal(first.result(60), encoder(batch))
    assert len(calls) == 1


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_single_texts_of_a_server_run_side_by_side(folders, two_cores):
    """Each in a thread of its own, none in the event loop, where there are two cores; and with the model's vectors."""
    meeting = threading.Barrier(2, timeout=60)
    with own.running({"words": folders["words"]}) as (url, service):
        direct = service.shelf.entries["words"].direct
        encoder = direct.model.network.encoder
        assert isinstance(encoder, TracedEncoder) and encoder.ready
        run, where = encoder._run, []

        def met(*given):
            meeting.wait()  # each waits until the other is there
            where.append(threading.current_thread())
            return run(*given)

        encoder._run = met
        texts = ["the cat eats", "mary eats"]
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(post, url, "/embed", {"inputs": texts[0]})]
            own.until(lambda: direct.trunk.running == 1)  # two that come at the same moment share a batch
            jobs.append(pool.submit(post, url, "/embed", {"inputs": texts[1]}))
            answers = [job.result(60) for job in jobs]
        assert set(where) == set(service.scheduler._threads)
    expected = everybert.load(folders["words"], device="cpu").embed(texts, normalize=True)
    for answer, vector in zip(answers, expected, strict=True):
        assert answer.json()[0] == pytest.approx(vector.tolist(), abs=1e-6)


def test_event_loop_is_not_blocked_by_a_text_that_a_thread_computes(folders, two_cores):
    """With two cores the loop hears others while a single text is computed."""
    models = {"words": folders["words"]}
    with own.running(models) as (url, service), own.held(service, "words") as opened, ThreadPoolExecutor(1) as pool:
        job = pool.submit(post, url, "/embed", {"inputs": "a"})
        own.until(lambda: service.shelf.entries["words"].direct.trunk.running == 1)
        assert httpx.get(url + "/health", timeout=60).status_code == 200
        opened.set()
        assert job.result(60).status_code == 200
