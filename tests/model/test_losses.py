"""The losses of pre-training against their formulas, one prediction at a time."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.losses import IGNORE, Boundary, PretrainTargets, boundary_loss, pretrain_loss
from everybert.model.ragged import Ragged

LENGTHS = (9, 6, 9)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "heads": 2, "intermediate_size": 64, "layers": 2, "max_positions": 32}
    made = Network(EncoderConfig(vocab_size=50, **shape), {"mlm": None, "nsp": None}).eval()
    made.heads["boundary"] = Boundary(made.config)
    return made


@pytest.fixture
def batch():
    """Spans of tokens 2–4, 11 and 17–18 are masked; the second pair has no label."""
    torch.manual_seed(1)
    targets = PretrainTargets(
        mask_index_M=torch.tensor([2, 3, 4, 11, 17, 18]),
        mask_label_M=torch.tensor([6, 7, 8, 9, IGNORE, 10]),
        pair_label_B=torch.tensor([1, IGNORE, 0]),
        span_left_M=torch.tensor([1, 1, 1, 10, 16, 16]),
        span_right_M=torch.tensor([5, 5, 5, 12, 19, 19]),
        span_place_M=torch.tensor([1, 2, 3, 1, 1, 40]),
        real=torch.tensor(sum(LENGTHS)),
    ).of_step(torch.tensor([5.0, 2.0, 24.0]))
    return replace(Ragged.flat(torch.randint(5, 50, (sum(LENGTHS),)), LENGTHS), targets=targets)


@torch.no_grad()
def test_masked_tokens_and_pairs(network, batch):
    loss, figures = pretrain_loss(network, batch)
    x, targets = network.encoder(batch), batch.targets_as(PretrainTargets)
    tokens = zip(targets.mask_index_M.tolist(), targets.mask_label_M.tolist())
    logits = network.mlm_logits(x).log_softmax(-1)
    mlm = -sum(float(logits[i, label]) for i, label in tokens if label != IGNORE) / 5
    pairs = network.sequence_logits(x, batch, "nsp").log_softmax(-1)
    nsp = -(float(pairs[0, 1]) + float(pairs[2, 0])) / 2
    assert figures.tolist() == pytest.approx([mlm, nsp], rel=1e-5)
    assert float(loss) == pytest.approx(mlm + nsp, rel=1e-5)
    alone = replace(batch, targets=replace(targets, pair_label_B=None))
    assert pretrain_loss(network, alone)[1].tolist() == pytest.approx([mlm, 0.0], rel=1e-5)


@torch.no_grad()
def test_the_boundary_objective_reads_the_tokens_around_a_span(network, batch):
    loss, figures = boundary_loss(network, batch)
    plain, parts = pretrain_loss(network, batch)
    assert torch.allclose(figures[:2], parts)
    x, targets, head = network.encoder(batch), batch.targets_as(PretrainTargets), network.heads["boundary"]
    total = 0.0
    for i, label in enumerate(targets.mask_label_M.tolist()):
        if label == IGNORE:
            continue
        place = head.place.weight[min(int(targets.span_place_M[i]), Boundary.PLACES - 1)]
        h = torch.cat((x[targets.span_left_M[i]], x[targets.span_right_M[i]], place))
        h = head.first_norm(F.gelu(head.first(h)))
        h = head.second_norm(F.gelu(head.second(h)))
        logits = network.encoder.embeddings.token.weight @ h + network.heads["mlm"].bias
        total -= float(logits.log_softmax(-1)[label])
    assert float(figures[2]) == pytest.approx(total / 5, rel=1e-4)
    assert float(loss) == pytest.approx(float(plain) + float(figures[2]), rel=1e-5)
