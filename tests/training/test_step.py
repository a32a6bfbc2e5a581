"""The training step: packs add up to the large batch, filler counts for nothing, and one graph serves every pack."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from everybert.errors import EverybertError
from everybert.model import attention
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.losses import PretrainTargets, pretrain_loss
from everybert.training.data import collate
from everybert.training.step import Compute, steady

SHAPE = {"vocab_size": 64, "hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 32, "max_positions": 32}
OFF = {"dropout": 0.0, "attention_dropout": 0.0}


def network(seed=0):
    torch.manual_seed(seed)
    return Network(EncoderConfig(**SHAPE, **OFF), {"mlm": None, "nsp": None})


def pack(lengths, masked, seed=0):
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    index = np.sort(rng.choice(total, masked, replace=False))
    tokens = rng.integers(5, 64, total)
    return {
        "tokens": tokens,
        "lengths": lengths,
        "segments": rng.integers(0, 2, total),
        "mask_index": index,
        "mask_label": tokens[index],
        "pair_label": rng.integers(0, 2, len(lengths)),
    }


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def run(packs, **options):
    """Gradients of one step made of these packs."""
    net = network()
    compute = Compute(net, pretrain_loss)
    counts = [sum(len(p[name]) for p in packs) for name in ("mask_index", "lengths", "tokens")]
    batches = [collate(p, max_length=32, **options) for p in packs]
    totals = torch.tensor(counts, dtype=torch.float32)
    step = [replace(b, targets=b.targets_as(PretrainTargets).of_step(totals)) for b in batches]
    figures = [compute.run(batch) for batch in step]
    return gradients(net), torch.stack(figures).sum(0)


def joined(one, two):
    shift = sum(one["lengths"])
    both = {k: np.concatenate((one[k], two[k])) for k in one}
    both["mask_index"] = np.concatenate((one["mask_index"], two["mask_index"] + shift))
    return both


def test_packs_add_up_to_the_large_batch():
    one, two = pack([7, 12, 3], 6, seed=1), pack([30, 2], 3, seed=2)  # unequal shares: a mean of means would differ
    apart, together = run([one, two]), run([joined(one, two)])
    torch.testing.assert_close(apart[1], together[1])
    for name, gradient in together[0].items():
        torch.testing.assert_close(apart[0][name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("capacity", [40, 41, 71, 128])
def test_filler_changes_nothing(capacity):
    plain, filled = run([pack([20, 20], 5)]), run([pack([20, 20], 5)], capacity=capacity, pad_id=3)
    torch.testing.assert_close(plain[1], filled[1])
    for name, gradient in plain[0].items():
        torch.testing.assert_close(filled[0][name], gradient, atol=1e-6, rtol=1e-4)


def test_one_graph_serves_every_mask_rate_and_number_of_sequences(monkeypatch):
    """What torch.compile captures on a GPU, captured here: other rates and lengths must not compile again."""

    def one_kernel(qkv, batch, *_):
        q, k, v = qkv
        return q + k * batch.offsets_B1.float().mean() + v * batch.max_length

    monkeypatch.setattr(attention, "attend", one_kernel)
    torch._dynamo.reset()
    graphs = []
    net = network()
    loss = torch.compile(pretrain_loss, dynamic=False, fullgraph=True, backend=lambda g, _: graphs.append(g) or g)
    for lengths, masked in (([30, 30, 30], 20), ([20] * 5, 60), ([25, 25], 15), ([9], 1)):
        batch = collate(pack(lengths, masked), max_length=32, capacity=128)
        assert len(batch.tokens_T) == 128 and len(batch.targets_as(PretrainTargets).mask_index_M) % 64 == 0
        loss(net, steady(batch))
    assert len(graphs) == 1


def test_compile_is_refused_where_it_cannot_work():
    with pytest.raises(EverybertError, match="CUDA"):
        Compute(network(), pretrain_loss, compile=True)
