"""How fast a model is on this machine: throughput and latency by length, load time, memory.

Every way of running (a dtype, or transformers for comparison) takes its turn at every length, round after round, so
that a busy moment of the machine falls on all of them. Sequences are ids of exactly the length: tokenizing is not in.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.inference.model import load
from everybert.model.engine import BUDGET_CPU, BUDGET_GPU, Inputs, encode, pick_device
from everybert.model.ragged import Ragged
from everybert.store.hub import resolve

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
ROUNDS = 3
"""Turns that each cell gets within the time, if the machine is quick enough."""
THEIR_BATCH = 32
"""Texts of a batch of transformers, as its pipelines and sentence-transformers have it."""
Ids = list[list[int]]


@dataclass(frozen=True)
class Way:
    """A way of running the model."""

    name: str
    run: Callable[[Ids], None] = field(repr=False)
    load_seconds: float
    weights_mb: float
    """Parameters and buffers."""


@dataclass
class Cell:
    """One way at one length: what has been measured so far."""

    way: str
    length: int
    rates: list[float] = field(default_factory=list)
    """Tokens a second, of each batch."""
    waits: list[float] = field(default_factory=list)
    """Seconds of each single text."""
    batch: int = 0
    """Texts of a batch."""
    cuda_mb: float | None = None
    """The most CUDA memory allocated while batches ran, weights included."""

    def summary(self) -> dict[str, Any]:
        """As plain data; what was not measured is None."""
        rate = float(np.median(self.rates)) if self.rates else None
        marks = np.percentile(self.waits, (50, 90, 99)) * 1e3 if self.waits else (None, None, None)
        return {
            "way": self.way,
            "length": self.length,
            "tokens_per_s": rate,
            "texts_per_s": None if rate is None else rate / self.length,
            **{f"p{p}_ms": None if mark is None else float(mark) for p, mark in zip((50, 90, 99), marks)},
            "batch": self.batch,
            "batches": len(self.rates),
            "singles": len(self.waits),
            "cuda_mb": self.cuda_mb,
        }


@dataclass(frozen=True)
class Bench:
    """What was measured, and where."""

    model: str
    device: str
    threads: int
    torch: str
    seconds: float
    """Spent measuring."""
    ways: list[dict[str, Any]]
    """name, load_seconds, weights_mb of each."""
    cells: list[dict[str, Any]]
    peak_rss_mb: float | None
    """Of this process, all ways together; None where the system does not say."""
    stopped: bool
    """Whether it was interrupted."""
    notes: tuple[str, ...] = ()


def bench(
    name: str | Path,
    *,
    dtypes: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    device: str | None = None,
    threads: int | None = None,
    against: str | None = None,
    seconds: float = 20.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Bench:
    """Measure a model for about so many seconds, loading aside. Ctrl-C ends it early with what there is.

    `dtypes` None is fp32 on the CPU, bf16 on a GPU. `against` may be "transformers". `progress` is told the share done.
    """
    if against not in (None, "transformers"):
        raise EverybertError(f"a model can be measured against transformers, not {against!r}")
    where = pick_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    ways, notes, window, vocabulary = _ways(name, dtypes, where, against)
    chosen = [n for n in lengths or LENGTHS if n <= window]
    if lengths and (long := [n for n in lengths if n > window or n < 1]):
        raise EverybertError(f"the model reads 1 to {window} tokens at once; a length of {long[0]} cannot be measured")
    cells = {(way.name, n): Cell(way.name, n) for n in chosen or [window] for way in ways}
    start = time.perf_counter()
    stopped = _measure({way.name: way for way in ways}, cells, vocabulary, where, seconds, progress)
    return Bench(
        model=str(name),
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        seconds=time.perf_counter() - start,
        ways=[{"name": w.name, "load_seconds": w.load_seconds, "weights_mb": w.weights_mb} for w in ways],
        cells=[cell.summary() for cell in cells.values()],
        peak_rss_mb=peak_rss_mb(),
        stopped=stopped,
        notes=tuple(notes),
    )


# ── the ways ─────────────────────────────────────────────────────────────────────────────────────────────────


def _ways(
    name: str | Path, dtypes: Sequence[str] | None, device: torch.device, against: str | None
) -> tuple[list[Way], list[str], int, int]:
    """Each dtype that this machine has, loaded; and what was left out."""
    known = {long: short for short, long in DTYPES.items()}
    asked = [known.get(d, d) for d in dtypes or ["bf16" if device.type == "cuda" else "fp32"]]
    for short in asked:
        if short not in DTYPES:
            raise EverybertError(f"there is no dtype {short!r}; choose among {', '.join(DTYPES)}, with commas between")
    ways: list[Way] = []
    notes: list[str] = []
    window = vocabulary = 0
    for short in asked:
        begin = time.perf_counter()
        try:
            model = load(name, device=device, dtype=DTYPES[short])
        except EverybertError as error:
            if short != "int8" or len(asked) == 1:
                raise
            notes.append(f"int8 left out: {error}")
            continue
        took = time.perf_counter() - begin
        window, vocabulary = model.window, model.config.vocab_size
        ways.append(Way(short, _ours(model), took, _megabytes(model.network)))
    if against is not None:
        ways.append(_theirs(name, asked[0], device))
    return ways, notes, window, vocabulary


def _ours(model: Any) -> Callable[[Ids], None]:
    def read(which: list[int], batch: Ragged, x_TH: Tensor) -> None:
        x_TH[batch.first_B]

    return lambda ids: encode(model.network, Inputs(ids), read)


def _theirs(name: str | Path, short: str, device: torch.device) -> Way:
    """The same folder in transformers, batches of equal length: no padding is held against it."""
    if find_spec("transformers") is None:
        raise EverybertError("--against transformers needs it installed: pip install transformers")
    from transformers import AutoModel

    dtype = getattr(torch, DTYPES[short]) if short != "int8" else torch.float32
    begin = time.perf_counter()
    try:
        theirs = AutoModel.from_pretrained(resolve(name), dtype=dtype).eval().to(device)
    except (OSError, ValueError) as error:
        raise EverybertError(
            f"transformers cannot read {name} ({str(error).splitlines()[0]}); everybert export hf makes a folder it can"
        ) from None
    took = time.perf_counter() - begin

    @torch.inference_mode()
    def run(ids: Ids) -> None:
        for start in range(0, len(ids), THEIR_BATCH):
            theirs(torch.tensor(ids[start : start + THEIR_BATCH], device=device))

    label = "fp32" if short == "int8" else short
    return Way(f"transformers {label}", run, took, _megabytes(theirs))


def _megabytes(network: nn.Module) -> float:
    parts = {id(x): x for x in (*network.parameters(), *network.buffers())}
    return sum(x.numel() * x.element_size() for x in parts.values()) / 1e6


# ── the measuring ────────────────────────────────────────────────────────────────────────────────────────────


def _measure(
    ways: dict[str, Way],
    cells: dict[tuple[str, int], Cell],
    vocabulary: int,
    device: torch.device,
    seconds: float,
    progress: Callable[[float], None],
) -> bool:
    """Round after round over all cells until the time is over; True when interrupted."""
    draw = random.Random(0)
    share = seconds / (len(cells) * ROUNDS)
    begin = time.perf_counter()
    try:
        for way in ways.values():
            _timed(way.run, [[0] * 8], device)  # what is made at the first call
        while True:
            for (name, length), cell in cells.items():
                spent = time.perf_counter() - begin
                if spent >= seconds:
                    return False
                progress(spent / seconds)
                tokens = (2 * BUDGET_GPU) if device.type == "cuda" else BUDGET_CPU * torch.get_num_threads()
                texts = [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(max(1, tokens // length))]
                _singles(cell, ways[name].run, texts, share / 2, device)
                _batches(cell, ways[name].run, texts, share / 2, device)
    except KeyboardInterrupt:
        return True


def _singles(cell: Cell, run: Callable[[Ids], None], texts: Ids, share: float, device: torch.device) -> None:
    """Single texts for a share of the time; at least one."""
    end = time.perf_counter() + share
    for i in range(1000):
        cell.waits.append(_timed(run, [texts[i % len(texts)]], device))
        if time.perf_counter() >= end:
            break


def _batches(cell: Cell, run: Callable[[Ids], None], texts: Ids, share: float, device: torch.device) -> None:
    """Batches for a share of the time, at least one; of as many texts as fit it, at least 256 tokens."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    end = time.perf_counter() + share
    if not cell.batch:
        cell.batch = min(len(texts), max(256 // cell.length, int(share / min(cell.waits)), 1))
    while True:
        took = _timed(run, texts[: cell.batch], device)
        cell.rates.append(cell.batch * cell.length / took)
        if took < share / 8 and cell.batch < len(texts):  # larger ones are quicker: count those alone
            cell.batch = min(len(texts), 4 * cell.batch)
            _timed(run, texts[: cell.batch], device)  # kernels and graphs of the new shape are made here
            cell.rates.clear()
        elif time.perf_counter() >= end:
            break
    if device.type == "cuda":
        cell.cuda_mb = max(cell.cuda_mb or 0.0, torch.cuda.max_memory_allocated(device) / 1e6)


def _timed(run: Callable[[Ids], None], ids: Ids, device: torch.device) -> float:
    begin = time.perf_counter()
    run(ids)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def peak_rss_mb() -> float | None:
    """The most memory this process has held."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def place(found: Bench) -> str:
    """Where it was measured, in words."""
    return found.device if found.device != "cpu" else f"CPU, {found.threads} thread{'s' * (found.threads > 1)}"


# ── the picture ──────────────────────────────────────────────────────────────────────────────────────────────

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Distinct to colour-blind eyes too (Okabe & Ito)."""
MARKERS = "osD^v"


def draw(found: Bench, path: Path) -> None:
    """Throughput and latency by length, side by side, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for way, colour, marker in zip((w["name"] for w in found.ways), COLOURS, MARKERS):
        cells = [c for c in found.cells if c["way"] == way and c["tokens_per_s"]]
        x = [c["length"] for c in cells]
        left.plot(x, [c["tokens_per_s"] for c in cells], color=colour, marker=marker, label=way)
        cells = [c for c in found.cells if c["way"] == way and c["p50_ms"]]
        x = [c["length"] for c in cells]
        right.plot(x, [c["p50_ms"] for c in cells], color=colour, marker=marker, label=f"{way}, p50")
        right.fill_between(
            x, [c["p50_ms"] for c in cells], [c["p99_ms"] for c in cells], color=colour, alpha=0.18, lw=0
        )
    lengths = sorted({c["length"] for c in found.cells})
    for axes, title, unit in ((left, "Throughput", "tokens a second"), (right, "Latency of one text", "milliseconds")):
        axes.set_title(title, loc="left")
        axes.set_ylabel(unit)
        axes.set_xlabel("tokens of a text")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(bottom=0)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    right.set_yscale("log")
    for formatted in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
        formatted(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in "125" else "")
    left.legend(frameon=False)
    right.legend(frameon=False, title="shaded up to p99", title_fontsize="small")
    figure.suptitle(f"{Path(found.model).name} on {place(found)}", x=0.01, ha="left", fontsize="large")
    figure.savefig(path, dpi=130)
