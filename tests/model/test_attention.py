"""Attention backends agree: rectangular groups, blocks with windows and global tokens, and the textbook formula."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from everybert.model import attention as att
from everybert.model.config import EncoderConfig
from everybert.model.encoder import Encoder
from everybert.model.graphs import filled
from everybert.model.ragged import Ragged


def inputs(lengths, heads=2, size=4, seed=0):
    torch.manual_seed(seed)
    batch = Ragged.of([[1] * n for n in lengths])
    return batch, tuple(torch.randn(sum(lengths), heads, size, dtype=torch.float64) for _ in range(3))


def textbook(qkv, batch, window):
    return att.watched(qkv, batch, att.Pattern(window), None, lambda *_: None)


@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_windowed_equals_the_masked_formula(monkeypatch, block, window):
    monkeypatch.setattr(att, "QUERY_BLOCK", block)
    batch, qkv = inputs((30, 1, 7, 13))
    mine = att.windowed(qkv, batch, att.Pattern(window), None, 0.0)
    torch.testing.assert_close(mine, textbook(qkv, batch, window))


def test_the_formula_takes_scores_with_a_bias_in_half_precision():
    """ALiBi's biases are fp32, whatever the weights are."""
    batch, qkv = inputs((5, 9))
    half = tuple(x.to(torch.bfloat16) for x in qkv)

    def bias(q, k):
        return torch.ones(1, 2, q.shape[2], q.shape[2]).tril()

    found = att.watched(half, batch, att.FULL, None, lambda *_: None, bias)
    wanted = att.grouped(half, batch, 0.0, bias)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)


def test_full_equals_the_formula_and_a_wide_window():
    batch, qkv = inputs((5, 9, 5, 1))
    full = att.attend(qkv, batch, att.FULL)
    torch.testing.assert_close(full, textbook(qkv, batch, None))
    torch.testing.assert_close(att.attend(qkv, batch, att.Pattern(100)), full)


@pytest.mark.parametrize("causal", [False, True, "reverse"])
@pytest.mark.parametrize("kind", ["buckets", "alibi", "disentangled"])
def test_a_rectangle_equals_groups_by_length(monkeypatch, kind, causal):
    """With the padding of a batch for recordings: the same states, and gradients without a trace of the padding."""
    shape = {"vocab_size": 30, "hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 8, "dropout": 0.0}
    more = {"relative_buckets": 8, "relative_distance": 16} if kind != "alibi" else {}
    config = EncoderConfig(**shape, attention_dropout=0.0, relative=kind, causal=causal, **more)  # type: ignore[arg-type]
    torch.manual_seed(1)
    encoder = Encoder(config).double()
    batch = Ragged.of([list(range(1, n + 1)) for n in (9, 2, 5, 5, 1)])
    full, size = filled(batch), len(batch.tokens_T)
    assert full.max_length > 9 and len(full) > 5
    found = []
    for function, given in (("grouped", batch), ("rectangle", replace(full, lengths=()))):
        monkeypatch.setattr(att, "flashable", lambda x, function=function: function == "rectangle")
        encoder.zero_grad()
        x_TH = encoder(given)[:size]
        x_TH.square().sum().backward()
        found.append([x_TH.detach(), *(p.grad for p in encoder.parameters() if p.grad is not None)])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def test_attention_dropout_acts_and_keeps_the_mean():
    batch, qkv = inputs((6, 6, 4))
    torch.manual_seed(0)
    draws = torch.stack([att.grouped(qkv, batch, 0.3) for _ in range(3000)])
    exact = att.grouped(qkv, batch, 0.0)
    assert draws.std(0).mean() > 0.05
    torch.testing.assert_close(draws.mean(0), exact, atol=0.08, rtol=0.0)


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_dropout_settings_reach_the_encoder(name):
    shape = {"vocab_size": 30, "hidden_size": 8, "layers": 1, "heads": 2, "intermediate_size": 8}
    off = {"dropout": 0.0, "attention_dropout": 0.0}
    encoder = Encoder(EncoderConfig(**shape, **{**off, name: 0.5}))  # type: ignore[arg-type]
    batch = Ragged.of([[1, 2, 3, 4]])
    assert torch.equal(encoder.eval()(batch), encoder(batch))
    encoder.train()
    assert not torch.equal(encoder(batch), encoder(batch))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_windowed_memory_is_linear():
    """Peak memory at 4,096 tokens, in a process of its own: under a quarter of materialised scores."""
    script = r"""
import re, sys, torch
from everybert.model import attention as att
from everybert.model.ragged import Ragged
torch.set_num_threads(1)
n = 4096
batch = Ragged.of([[1] * n])
qkv = tuple(torch.randn(n, 12, 64) for _ in range(3))
def peak():  # of this process: getrusage would count the process it was forked from too
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
base = peak()
with torch.inference_mode():
    if sys.argv[1] == "sparse":
        att.windowed(qkv, batch, att.Pattern(256), None, 0.0)
    else:
        att.watched(qkv, batch, att.Pattern(), None, lambda *_: None)
print(peak() - base)
"""
    root = Path(__file__).parents[2]
    peak = {}
    for kind in ("sparse", "eager"):
        run = [sys.executable, "-c", script, kind]
        done = subprocess.run(
            run, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(root / "src")}
        )
        peak[kind] = int(done.stdout)
    assert peak["sparse"] < peak["eager"] / 4, peak


def test_windowed_runs_at_16384_tokens():
    batch = Ragged.of([[1] * 16384])
    qkv = tuple(torch.randn(16384, 1, 8) for _ in range(3))
    with torch.inference_mode():
        assert att.windowed(qkv, batch, att.Pattern(64), None, 0.0).isfinite().all()


@pytest.mark.parametrize("size", [16, 32, 48, 64, 80, 96, 128, 256])
def test_the_backend_for_each_head_size_on_cuda(size, monkeypatch):
    """Triton's tiles are powers of two; heads of other sizes go to varlen flash attention."""
    monkeypatch.setattr(att, "HAS_TRITON", True)
    heads = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(10, 3, 2, size))
    assert att.has_kernel(heads) == (size in (16, 32, 64, 128))
    assert att.flashable(heads)
