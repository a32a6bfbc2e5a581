"""Ragged: the batch of this library. Its sequences are concatenated, with offsets; there is no padding.

    sequences     [CLS] a b [SEP]    [CLS] c [SEP]
    tokens_T      [CLS] a b [SEP] [CLS] c [SEP]
    positions_T     0   1 2   3     0   1   2
    offsets_B1    [0, 4, 7]

Legend: T tokens in the batch, B sequences, N the longest length, H hidden, E embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError


@dataclass(frozen=True)
class Targets:
    """What a loss compares predictions with. Subclasses add fields; those that are tensors move with the batch."""

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def constants(self) -> tuple[Any, ...]:
        """The fields that are not tensors, in order."""
        return tuple(x for x in vars(self).values() if not isinstance(x, Tensor))

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The same targets with `fn` applied to each tensor."""
        return replace(self, **{name: fn(x) for name, x in self.tensors().items()})

    def of_step(self, counts: Tensor) -> Self:
        """The same targets with the totals of a training step over all ranks, for losses that divide by them."""
        return self


Kind = TypeVar("Kind", bound=Targets)


@dataclass(frozen=True)
class Ragged:
    """B sequences of any lengths, one after the other in flat tensors."""

    tokens_T: Tensor
    """int64 token ids."""
    offsets_B1: Tensor
    """int32, B + 1 entries: sequence b is tokens offsets[b] … offsets[b + 1]; on the tokens' device."""
    lengths: tuple[int, ...]
    """The B lengths on the host, so that grouping by length does not wait for the device."""
    positions_T: Tensor
    """int64, 0 … n − 1 within each sequence."""
    segments_T: Tensor | None = None
    """int64 segment ids, or None for all zeros."""
    globals_T: Tensor | None = None
    """bool, Longformer's global tokens, or None for none."""
    max_length: int = 0
    """An upper bound of the lengths; constant over a run, so that kernels are compiled only once."""
    token_TE: Tensor | None = None
    """Embeddings to read in place of the token table's rows, for gradients with respect to them; usually None."""
    targets: Targets | None = None
    """What the loss needs besides the tokens."""

    attend: ClassVar[Callable[..., Tensor] | None] = None
    """How attention is computed; None: attention.py chooses a backend. A padded batch (padded.py) has its own."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]] | None = None,
        global_tokens: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
    ) -> "Ragged":
        """A batch from lists of ids. `global_tokens` lists, per sequence, the indices that are global."""
        if not sequences:
            raise EverybertError("a batch needs at least one sequence")
        lengths = tuple(len(s) for s in sequences)
        if min(lengths) == 0:
            raise EverybertError(f"sequence {lengths.index(0)} of the batch is empty; give it at least one token")
        tokens = _joined(sequences)
        segments_T = None
        if segments is not None:
            if tuple(len(s) for s in segments) != lengths:
                raise EverybertError("segments must have one entry for each token of each sequence")
            segments_T = torch.from_numpy(_joined(segments))
        globals_T = None
        if global_tokens is not None:
            mark = np.zeros(len(tokens), dtype=bool)
            for start, n, chosen in zip(accumulate((0, *lengths)), lengths, global_tokens):
                for i in chosen:
                    if not 0 <= i < n:
                        raise EverybertError(f"global token {i} lies outside its sequence of {n} tokens")
                    mark[start + i] = True
            globals_T = torch.from_numpy(mark)
        return cls.flat(torch.from_numpy(tokens), lengths, segments_T, globals_T).to(device)

    @classmethod
    def flat(
        cls,
        tokens_T: Tensor,
        lengths: Sequence[int],
        segments_T: Tensor | None = None,
        globals_T: Tensor | None = None,
        max_length: int | None = None,
    ) -> "Ragged":
        """A batch from tokens that are already concatenated."""
        lengths = tuple(lengths)
        offsets = np.fromiter(accumulate(lengths, initial=0), dtype=np.int32, count=len(lengths) + 1)
        starts = np.repeat(offsets[:-1], lengths)
        positions = np.arange(len(starts), dtype=np.int64) - starts
        device = tokens_T.device
        return cls(
            tokens_T=tokens_T,
            offsets_B1=torch.from_numpy(offsets).to(device),
            lengths=lengths,
            positions_T=torch.from_numpy(positions).to(device),
            segments_T=segments_T,
            globals_T=globals_T,
            max_length=max_length or max(lengths),
        )

    def __len__(self) -> int:
        return self.offsets_B1.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.tokens_T.device

    @property
    def first_B(self) -> Tensor:
        """int32 index of each sequence's first token, which is [CLS]."""
        return self.offsets_B1[:-1]

    @property
    def last_B(self) -> Tensor:
        """int32 index of each sequence's last token; a padded batch has its own (padded.py)."""
        return self.offsets_B1[1:] - 1

    @property
    def counts_B(self) -> Tensor:
        """fp32: the number of tokens of each sequence; a padded batch has its own."""
        return self.offsets_B1.diff().float()

    @cached_property
    def sequence_T(self) -> Tensor:
        """int64: the index of the sequence that each token belongs to."""
        return (self.positions_T == 0).cumsum(0) - 1

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Each distinct length, with the indices of the first tokens of the sequences that have it."""
        starts: dict[int, list[int]] = {}
        for start, n in zip(accumulate((0, *self.lengths)), self.lengths):
            starts.setdefault(n, []).append(start)
        return starts

    @cached_property
    def order(self) -> tuple[Tensor, Tensor] | None:
        """int64: the tokens in the order of the groups, and the inverse; None if they are in that order already."""
        rows = [(np.array(starts)[:, None] + np.arange(n)).ravel() for n, starts in self.groups.items()]
        order = np.concatenate(rows)
        if (order == np.arange(len(order))).all():
            return None
        return torch.from_numpy(order).to(self.device), torch.from_numpy(np.argsort(order)).to(self.device)

    def by_length(self, x: Tensor) -> list[Tensor]:
        """A per-token tensor (T, …) as one rectangle (sequences, n, …) for each distinct length."""
        x = x if self.order is None else x.index_select(0, self.order[0])
        parts = x.split([n * len(starts) for n, starts in self.groups.items()])
        return [part.unflatten(0, (-1, n)) for n, part in zip(self.groups, parts)]

    def from_lengths(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `by_length`."""
        x = torch.cat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0].flatten(0, 1)
        return x if self.order is None else x.index_select(0, self.order[1])

    @cached_property
    def rectangle(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slots (B, N) up to `max_length`: the token in each, whether there is one; and the slot of each token (T)."""
        at_N = torch.arange(self.max_length, device=self.device)
        real_BN = at_N < self.offsets_B1.diff()[:, None]
        from_BN = (self.first_B[:, None] + at_N).clamp(max=len(self.tokens_T) - 1)
        return from_BN, real_BN, self.sequence_T * self.max_length + self.positions_T

    def split(self, x: Tensor) -> list[Tensor]:
        """Split a per-token tensor (T, …) into one (n, …) view per sequence."""
        return list(torch.split(x, list(self.lengths)))

    def reduce(self, x_TH: Tensor, how: Literal["mean", "max"]) -> Tensor:
        """(T, H) → (B, H): the mean or maximum over each sequence's tokens."""
        # unsafe: the lengths are right, and checking them would make the host wait for the device
        return torch.segment_reduce(x_TH.float(), how, lengths=self.offsets_B1.diff(), unsafe=True).to(x_TH.dtype)

    def padded(self, count: int, longest: int, pad_id: int = 0) -> "Ragged":
        """The batch and `count` tokens of padding after it, in sequences of at most `longest`; targets are dropped."""
        whole, remainder = divmod(count, longest)
        lengths = [*self.lengths, *[longest] * whole, *[remainder] * (remainder > 0)]

        def extended(x_T: Tensor | None, value: int = 0) -> Any:
            # by numpy: torch wakes all its threads for more than 32,768 numbers, for milliseconds while others tokenize
            return None if x_T is None else torch.from_numpy(np.pad(x_T.cpu(), (0, count), constant_values=value))

        tensors = extended(self.tokens_T, pad_id), lengths, extended(self.segments_T), extended(self.globals_T)
        return Ragged.flat(*tensors, max_length=self.max_length).to(self.device)

    def targets_as(self, kind: type[Kind]) -> Kind:
        """The targets, which must be of this kind."""
        assert isinstance(self.targets, kind)
        return self.targets

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the batch by name, targets included."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        targets = {} if self.targets is None else self.targets.tensors()
        return {name: x for name, x in {**tensors, **targets}.items() if isinstance(x, Tensor)}

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Ragged":
        """The same batch with `fn` applied to each tensor, targets included."""
        mapped: dict[str, Any] = {name: fn(x) for name in TENSORS if (x := getattr(self, name)) is not None}
        return replace(self, **mapped, targets=self.targets and self.targets.map(fn))

    def to(self, device: torch.device | str | None) -> "Ragged":
        """The same batch on another device. Copies to a CUDA device do not make the host wait."""
        if device is None:
            return self
        target = torch.device(device)
        if target.type == self.device.type and target.index in (None, self.device.index):
            return self
        return self.map(lambda x: pinned(x, target).to(target, non_blocking=True))


TENSORS = ("tokens_T", "offsets_B1", "positions_T", "segments_T", "globals_T", "token_TE")
"""The fields of a batch that are tensors."""


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the host in memory that a CUDA device can copy by itself; any other tensor as it is.

    numpy copies it, since torch wakes all its threads for more than 32,768 numbers.
    """
    if device.type != "cuda" or x.device.type != "cpu" or x.is_pinned():
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    np.copyto(copy.view(-1).view(torch.uint8).numpy(), x.reshape(-1).view(torch.uint8).numpy())
    return copy


def _joined(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """The numbers of all rows in one int64 array."""
    joined = np.concatenate([np.asarray(row) for row in rows])
    if joined.ndim != 1 or joined.dtype.kind not in "iu":
        raise EverybertError("tokens and segments are whole numbers; give lists of token ids, as [[2, 57, 3]]")
    return joined.astype(np.int64, copy=False)
