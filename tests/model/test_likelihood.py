"""Pseudo-log-likelihoods against masking one token at a time by hand."""

import pytest
import torch

from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.likelihood import token_log_probs
from everybert.model.ragged import Ragged

MASK = 4
SEQUENCES = [[2, 10, 4, 12, 3], [2, 20, 21, 22, 23, 24, 3], [2, 3]]  # the first holds a mask token of its own


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "heads": 2, "intermediate_size": 64, "layers": 2, "max_positions": 64}
    return Network(EncoderConfig(vocab_size=128, **shape), {"mlm": None}).eval()


@torch.no_grad()
def by_hand(network: Network, ids: list[int], place: int, end: int) -> float:
    hidden = [*ids[:place], *[MASK] * (end - place), *ids[end:]]
    logits = network.mlm_logits(network.encoder(Ragged.of([hidden])))
    return float(logits[place].log_softmax(-1)[ids[place]])


def test_each_position_is_masked_in_a_copy_of_its_own(network):
    positions = [range(1, len(ids) - 1) for ids in SEQUENCES]
    found = token_log_probs(network, SEQUENCES, positions, MASK)
    assert [len(values) for values in found] == [3, 5, 0]
    for ids, places, values in zip(SEQUENCES, positions, found):
        assert values == pytest.approx([by_hand(network, ids, p, p + 1) for p in places], abs=1e-5)


def test_tokens_up_to_an_end_are_masked_together(network):
    (values,) = token_log_probs(network, SEQUENCES[1:2], [[1, 2, 4]], MASK, ends=[[2, 4, 5]])
    wanted = [by_hand(network, SEQUENCES[1], p, end) for p, end in ((1, 2), (2, 4), (4, 5))]
    assert values == pytest.approx(wanted, abs=1e-5)


def test_nothing_to_score(network):
    assert token_log_probs(network, [], [], MASK) == []
