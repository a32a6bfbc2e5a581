"""Ragged batches: what goes in comes out, in order, whatever the lengths."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.errors import EverybertError
from everybert.model.attention import grouped
from everybert.model.ragged import Ragged, Targets

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def counted(ns):
    """Sequences whose ids number the tokens of the batch."""
    ids = iter(range(sum(ns)))
    return [[next(ids) for _ in range(n)] for n in ns]


@given(lengths)
def test_split_gives_back_the_sequences(ns):
    sequences = counted(ns)
    batch = Ragged.of(sequences)
    assert [x.tolist() for x in batch.split(batch.tokens_T)] == sequences
    assert batch.first_B.tolist() == [s[0] for s in sequences]
    assert [x.tolist() for x in batch.split(batch.positions_T)] == [list(range(n)) for n in ns]
    assert [x.tolist() for x in batch.split(batch.sequence_T)] == [[b] * n for b, n in enumerate(ns)]
    assert batch.max_length == max(ns)


@given(lengths)
def test_groups_hold_every_token_once_and_can_be_undone(ns):
    batch = Ragged.of(counted(ns))
    parts = batch.by_length(batch.tokens_T)
    assert sorted(torch.cat([x.flatten() for x in parts]).tolist()) == batch.tokens_T.tolist()
    assert torch.equal(batch.from_lengths(parts), batch.tokens_T)
    assert sorted(x.shape[1] for x in parts) == sorted(set(ns))


@settings(deadline=None, max_examples=30)
@given(lengths, st.randoms(use_true_random=False))
def test_attention_is_blind_to_order_and_neighbours(ns, random):
    torch.manual_seed(0)
    sequences = [torch.randn(n, 3, 2, 4) for n in ns]
    order = list(range(len(ns)))
    random.shuffle(order)

    def run(which):
        qkv = torch.cat([sequences[i] for i in which]).unbind(1)
        batch = Ragged.of(counted([ns[i] for i in which]))
        return dict(zip(which, batch.split(grouped(qkv, batch, 0.0))))

    one, two = run(list(range(len(ns)))), run(order)
    for i in order:
        torch.testing.assert_close(one[i], two[i], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Ragged.of([]), "at least one sequence"),
        (lambda: Ragged.of([[1], []]), "sequence 1 of the batch is empty"),
        (lambda: Ragged.of([[1, 2]], [[0]]), "one entry for each token"),
        (lambda: Ragged.of([[1, 2]], None, [[2]]), "outside its sequence"),
    ],
)
def test_bad_batches_say_why(make, why):
    with pytest.raises(EverybertError, match=why):
        make()


def test_targets_move_with_their_batch():
    @dataclass(frozen=True)
    class Labels(Targets):
        label_B: torch.Tensor
        count: int

    batch = replace(Ragged.of([[1, 2], [3]]), targets=Labels(torch.tensor([4, 5]), 7))
    moved = batch.to("meta").targets
    assert moved is not None and moved.label_B.device.type == "meta" and moved.count == 7
    assert list(batch.targets.tensors()) == ["label_B"]
