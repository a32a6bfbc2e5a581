"""The engine: sequences of ids through the encoder and its heads, in batches of a token budget, on every device.

`encode` runs the encoder and hands each batch's hidden states to a function; `run_head` returns the outputs of a head,
`masked_logits` and `token_log_probs` those of the masked language model. Predictions and scores of tasks use them.

On the CPU, batches of about equal lengths run side by side, one per core. On an accelerator, batches are full and in
order (of about equal lengths where attention has a bias), the encoder's kernel launches are recorded as CUDA graphs
(graphs.py), and the host never waits for the device.

Legend: T tokens in the batch, H hidden, C labels, M masked positions, V vocabulary.
"""

import contextvars
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.model.encoder import Encoder
from everybert.model.graphs import WAVE, filled, on_device
from everybert.model.heads import SEQUENCE_HEADS, FeatureHead, Network, head_logits
from everybert.model.linear import Linear
from everybert.model.ragged import Ragged

Item = TypeVar("Item")
Result = TypeVar("Result")
Read = Callable[[list[int], Ragged, Tensor], None]
"""Takes the indices of a batch's sequences, the batch, and its hidden states (T, H)."""

BUDGET_CPU = 1024
"""Tokens per batch on the CPU: large enough for fast products, small enough that activations stay in the cache."""
BUDGET_GPU = 4 * WAVE
"""Tokens per batch on an accelerator: enough to fill it, and a whole number of waves of tiles."""


@dataclass(frozen=True)
class Inputs:
    """Sequences for the encoder."""

    ids: Sequence[Sequence[int]]
    segments: Sequence[Sequence[int]] | None = None
    global_tokens: Sequence[Sequence[int]] | None = None
    """Per sequence, the indices of the global tokens (Longformer)."""

    def batch(self, indices: Sequence[int]) -> Ragged:
        """Some of the sequences as one batch, on the host."""
        fields = (self.ids, self.segments, self.global_tokens)
        ids, segments, global_tokens = (None if x is None else [x[i] for i in indices] for x in fields)
        return Ragged.of(ids or [], segments, global_tokens)


# ── what is computed ─────────────────────────────────────────────────────────────────────────────────────────


def encode(network: Network, inputs: Inputs, read: Read, layer: int | None = None, budget: int | None = None) -> None:
    """Run the encoder on all sequences, and call `read` with the hidden states (T, H) of each batch.

    The states are those after `layer` (0: the embeddings), by default the last one. On the CPU `read` is called from
    several threads, but never twice for the same sequence.
    """
    if layer is not None:
        encode_layers(network, inputs, lambda indices, batch, states: read(indices, batch, states[layer]))
        return
    device = device_of(network.encoder)

    def work(indices: list[int], batch: Ragged) -> None:
        read(indices, batch.to(device), forward(network.encoder, batch))

    run_batches(network, inputs, work, budget)


def encode_layers(network: Network, inputs: Inputs, read: Callable[[list[int], Ragged, list[Tensor]], None]) -> None:
    """Like `encode`, but `read` is called with the L + 1 hidden states (T, H) of each batch, embeddings first."""
    device = device_of(network.encoder)

    def work(indices: list[int], batch: Ragged) -> None:
        states: list[Tensor] = []
        batch = batch.to(device)
        network.encoder(batch, states)
        read(indices, batch, states)

    run_batches(network, inputs, work)


def run_head(
    network: Network, inputs: Inputs, name: str, budget: int | None = None, features: bool = False
) -> list[np.ndarray]:
    """Run the encoder and a head on all sequences: one float32 array per sequence, in order.

    The array is (C,) for classify, choose and nsp, (n, C) for tag and answer; with `features` it is what a FeatureHead
    reads. Dropout is off, even if the network is in training. Outputs are copied while the next batches run.
    """
    device, reader = device_of(network.encoder), network.heads[name] if features else None
    assert reader is None or isinstance(reader, FeatureHead)
    out: dict[int, np.ndarray] = {}
    copies: deque[tuple[list[int], Ragged, Callable[[], np.ndarray]]] = deque()

    def collect() -> None:
        indices, batch, values = copies.popleft()
        rows = values()
        parts = rows if name in SEQUENCE_HEADS else np.split(rows, np.cumsum(batch.lengths)[:-1])
        out.update(zip(indices, parts))

    def work(indices: list[int], batch: Ragged) -> None:
        if reader is not None:
            rows = reader.read(network.encoder, batch.to(device))
        else:
            rows = head_logits(network, batch.to(device), name, lambda _: forward(network.encoder, batch))
        copies.append((indices, batch, fetched(rows.float())))
        if len(copies) > 2 and device.type != "cpu":
            collect()

    training = network.training
    network.eval()
    try:
        run_batches(network, inputs, work, budget)
    finally:
        network.train(training)
    while copies:
        collect()
    return [out[i] for i in range(len(inputs.ids))]


def masked_logits(
    network: Network, inputs: Inputs, places: Sequence[Sequence[int]], read: Callable[[list[int], Tensor], None]
) -> None:
    """Call `read` with the indices of each batch's sequences, and the logits (M, V) for their places, in fp32.

    `places` has the token indices for each sequence; the logits are in the order of the sequences. A causal network
    predicts a token at the token before it (reverse: after it).
    """
    causal = network.config.causal
    beside = 1 if causal == "reverse" else -1 if causal else 0
    if causal and any(not 0 <= p + beside < len(ids) for ids, chosen in zip(inputs.ids, places) for p in chosen):
        raise EverybertError("a causal model predicts a token from its neighbour: the first and last have none")

    def predict(indices: list[int], batch: Ragged, x_TH: Tensor) -> None:
        starts = accumulate((beside, *batch.lengths))
        index_M = torch.tensor([start + place for start, k in zip(starts, indices) for place in places[k]])
        read(indices, network.mlm_logits(x_TH, index_M.to(x_TH.device)).float())

    encode(network, inputs, predict)


def token_log_probs(
    network: Network, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], mask_id: int
) -> list[np.ndarray]:
    """ln P(token | the other tokens) at positions of each sequence: one float64 array per sequence.

    Each token is masked in turn, in a copy of its own, and predicted from all others (Salazar et al. 2020, eq. 1). A
    causal network needs no masks: it gives ln P(token | the tokens before it, or after it) for all positions at once.
    """
    rows: list[tuple[Any, Sequence[int], list[int]]] = []  # a sequence, places in it, their original tokens
    for ids, chosen in zip(sequences, positions):
        for places in [chosen] if network.config.causal else [[place] for place in chosen]:
            copy = np.array(ids, dtype=np.int64)
            rows.append((copy, places, copy[places].tolist()))
            if not network.config.causal:
                copy[places] = mask_id
    copies: list[tuple[list[int], Callable[[], np.ndarray]]] = []

    def read(indices: list[int], logits_MV: Tensor) -> None:
        label_M = torch.tensor([token for k in indices for token in rows[k][2]]).to(logits_MV.device)
        copies.append((indices, fetched(logits_MV.log_softmax(-1).gather(1, label_M[:, None])[:, 0])))

    if rows:
        masked_logits(network, Inputs([ids for ids, *_ in rows]), [places for _, places, _ in rows], read)
    values = [np.empty(0)] * len(rows)
    for indices, wait in copies:
        for k, log_probs in zip(indices, np.split(wait(), np.cumsum([len(rows[k][1]) for k in indices])[:-1])):
            values[k] = log_probs.astype(np.float64)
    ends_of = np.cumsum([len(chosen) for chosen in positions])[:-1]
    return np.split(np.concatenate([np.empty(0), *values]), ends_of) if len(positions) else []


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────


def run_batches(
    network: Network, inputs: Inputs, work: Callable[[list[int], Ragged], None], budget: int | None = None
) -> None:
    """Plan the batches, and call `work` with the indices of the sequences of each and the batch, on the host."""
    device = device_of(network.encoder)
    lengths = [len(ids) for ids in inputs.ids]
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    if device.type == "cpu":
        keep_freed_memory()
        groups = sorted_batches(lengths, budget or cpu_budget(sum(lengths), cores))
    elif network.config.relative != "none":
        groups = sorted_batches(lengths, budget or BUDGET_GPU, padded=True)
    else:
        groups = ordered_batches(lengths, budget or BUDGET_GPU)

    @torch.inference_mode()
    def run_batch(indices: list[int]) -> None:
        batch = inputs.batch(indices)
        network.encoder.check(batch)
        with on_device(device):
            work(indices, batch)

    if cores > 1 and len(groups) > 1 and cores <= 2 * len(groups):
        side_by_side(run_batch, groups, cores)
    else:
        for indices in groups:
            run_batch(indices)


def sorted_batches(lengths: Sequence[int], budget: int, padded: bool = False) -> list[list[int]]:
    """Sequences sorted by length, longest first; a batch is full once it has `budget` tokens.

    `padded` is for attention that pads to the longest sequence of a batch and holds the scores of all pairs: a
    sequence counts as n · ⌈n / 256⌉ tokens, where n is the length of the longest one.
    """
    groups: list[list[int]] = []
    total = budget
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if total >= budget:
            groups.append([])
            total, longest = 0, lengths[i]
        groups[-1].append(i)
        total += longest * -(-longest // 256) if padded else lengths[i]
    return groups


def ordered_batches(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Batches for an accelerator: sequences in their order, never more than `capacity` tokens.

    There unequal lengths cost no more than equal ones, and batches of about the same size share a recorded graph.
    """
    groups: list[list[int]] = []
    total = capacity
    for i, n in enumerate(lengths):
        if not groups or total + n > capacity:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += n
    return groups


def cpu_budget(tokens: int, cores: int) -> int:
    """Tokens per batch on the CPU: about BUDGET_CPU, chosen so that every core gets the same number of batches."""
    rounds = max(1, math.ceil(tokens / (cores * BUDGET_CPU)))
    return max(BUDGET_CPU // 4, math.ceil(tokens / (cores * rounds)))


def keep_freed_memory() -> None:
    """Let glibc keep the memory of a batch for the next one.

    It gives large blocks back to the system, which then maps each of their pages again: that took a third of the time
    in int8. Once a block of nearly 32 MB has been freed, glibc keeps those up to this size.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def side_by_side(work: Callable[[list[int]], None], groups: Sequence[list[int]], cores: int) -> None:
    """Run one batch per core: cores that share every product wait for each other.

    On two idle cores this is about a tenth faster than sharing, on two busy ones several times.
    """
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for job in [pool.submit(work, indices) for indices in groups]:
            job.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # the number is per thread, but new threads start with the last one set


def ahead(work: Callable[[Item], Result], items: Iterable[Item], most: int = 2) -> Iterator[Result]:
    """`work` of each item, in order; while one result is used, a thread computes up to `most` more.

    An error is raised in place of the result of its item. A single item needs no thread.
    """
    rest = iter(items)
    start = list(islice(rest, 2))
    if len(start) < 2:
        yield from map(work, start)
        return
    pool = ThreadPoolExecutor(1, "everybert-ahead")
    try:
        waiting: deque[Future[Result]] = deque()
        for item in chain(start, rest):
            waiting.append(pool.submit(contextvars.copy_context().run, work, item))
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────


def forward(encoder: Encoder, batch: Ragged) -> Tensor:
    """The hidden states (T, H) of a batch on the encoder's device, by a recorded CUDA graph if possible."""
    device = device_of(encoder)
    special = batch.token_TE is not None or batch.globals_T is not None or batch.attend is not None
    if special or not recordable(encoder):
        return encoder(batch.to(device))
    size = len(batch.tokens_T)
    weights = hash(tuple(p.data_ptr() for p in encoder.parameters()))  # a graph reads weights at fixed addresses

    @torch.inference_mode()
    def work(full: Ragged) -> list[Tensor]:
        return [encoder(full)]

    with torch.inference_mode():
        full = filled(batch)
        return encoder.recorder.run(work, full, device, lambda out: out[0][:size].clone(), weights)  # type: ignore[index]


def recordable(encoder: Encoder) -> bool:
    """Whether the kernel launches depend on the batch's shape only: CUDA, half precision, no adapters to switch."""
    weight = encoder.embeddings.token.weight
    half = weight.dtype in (torch.bfloat16, torch.float16)
    one_kernel = half and encoder.config.head_size % 8 == 0  # else attention groups sequences by length, on the host
    one_kernel &= not encoder.config.global_attention
    if not weight.is_cuda or not one_kernel or encoder.training:
        return False
    return all(type(m) is Linear for m in encoder.modules() if isinstance(m, nn.Linear))


def device_of(encoder: Encoder) -> torch.device:
    """Where an encoder's weights are."""
    return encoder.embeddings.token.weight.device


def fetched(x: Tensor) -> Callable[[], np.ndarray]:
    """Start to copy a tensor to the host; the function returned waits for the copy."""
    if not x.is_cuda:
        return x.numpy
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> np.ndarray:
        done.synchronize()
        return host.numpy().copy()  # pinned memory is scarce

    return wait


def pick_device(name: torch.device | str | None, gpu: bool = True) -> torch.device:
    """The device of that name; by default a GPU if there is one (and `gpu`), else the CPU."""
    if name is None:
        return torch.device("cuda" if gpu and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(f"torch sees {torch.cuda.device_count()} GPUs")
        if device.type != "cuda":  # a CUDA device is first used later: each rank takes its own
            torch.empty(1, device=device).item()  # "meta" computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's errors for a missing device
        why = str(error).strip().split("\n")[0][:80]
        raise EverybertError(
            f"device {str(name)!r} cannot be used here ({why}): give cpu, or none, to take a GPU where there is one"
        ) from None
    return device
