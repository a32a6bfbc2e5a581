"""Time and memory of attention by length: full with a materialised score matrix, full by SDPA, sliding window.

    python benchmarks/scaling.py --out scaling.png

One layer's attention in the shape of BERT-base and Longformer-base (12 heads of 64, window 256 to each side), forward
only. Each measurement runs in its own process: median seconds of several runs, and the increase of the peak memory in
MiB. Textbook attention costs O(n²·d) time and O(n²) memory, the window O(n·w·d) and O(n·w).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HEADS, SIZE, WINDOW = 12, 64, 256
KINDS = {"eager": "eager, full", "sdpa": "SDPA, full", "window": "sliding window", "global": "window + 2 global"}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MOST = 4 << 30
"""Limit of the score matrix in bytes; beyond it the textbook form is skipped."""


def measure(kind: str, n: int, rounds: int) -> dict[str, float]:
    """Measure one case in this process."""
    import torch

    from everybert.model.attention import Pattern, attend
    from everybert.model.ragged import Ragged

    torch.manual_seed(0)
    qkv = torch.randn(n, 3, HEADS, SIZE)
    whole, pattern = qkv.unbind(1), Pattern(None if kind in ("eager", "sdpa") else WINDOW)
    batch = Ragged.of([[1] * n], global_tokens=[[0, n // 2]] if kind == "global" else None)

    def run() -> torch.Tensor:
        if kind == "eager":
            q_AnD, k_AnD, v_AnD = (x.transpose(0, 1) for x in whole)
            weights = torch.softmax(q_AnD @ k_AnD.transpose(1, 2) * SIZE**-0.5, dim=-1)
            return (weights @ v_AnD).transpose(0, 1)
        return attend(whole, batch, pattern, whole if kind == "global" else None)

    with torch.inference_mode():
        if n > 512:  # leave out the one-time allocations of the libraries
            warm = Ragged.of([[1] * 512])
            attend(qkv[:512].unbind(1), warm, pattern)
        before = peak(reset=True)
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            out = run()
            times.append(time.perf_counter() - start)
        assert out.shape == (n, HEADS, SIZE)
    return {"seconds": statistics.median(times), "mib": max(0.0, peak() - before) / 2**20}


def peak(reset: bool = False) -> float:
    """Peak memory of the process in bytes (on Linux since the last reset)."""
    if reset:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    try:
        status = Path("/proc/self/status").read_text()
        return float(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    except OSError:
        import resource

        scale = 1 if sys.platform == "darwin" else 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)


def case(kind: str, n: int, rounds: int) -> dict[str, float] | None:
    """Measure one case in its own process; None if the score matrix would be too large."""
    if kind == "eager" and HEADS * n * n * 4 > MOST:
        return None
    command = [sys.executable, __file__, "--case", kind, str(n), str(rounds)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def draw(found: dict[str, dict[int, dict[str, float] | None]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, key, title in ((left, "seconds", "seconds"), (right, "mib", "peak memory, MiB")):
        for kind, cases in found.items():
            points = [(n, x[key]) for n, x in cases.items() if x is not None and x[key] > 0]
            if points:
                axis.loglog(*zip(*points), marker="o", label=KINDS[kind])
        axis.set(xlabel="tokens", title=title)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    left.legend()
    figure.suptitle(f"one layer's attention, {HEADS} heads of {SIZE}, window {WINDOW} to each side")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="plot the curves to this PNG file (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--case", nargs=3, metavar=("KIND", "N", "ROUNDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        kind, n, rounds = options.case
        print(json.dumps(measure(kind, int(n), int(rounds))))
        return
    found: dict[str, dict[int, dict[str, float] | None]] = {kind: {} for kind in KINDS}
    if not options.json:
        print(f"{'tokens':>7}" + "".join(f"{title:>26}" for title in KINDS.values()))
    for n in options.lengths:
        row = f"{n:>7}"
        for kind in KINDS:
            result = found[kind][n] = case(kind, n, options.rounds)
            row += f"{'–':>26}" if result is None else f"{result['seconds']:>14.3f} s {result['mib']:>6.0f} MiB"
        if not options.json:
            print(row, flush=True)
    if options.json:
        print(json.dumps(found))
    else:
        faster = [n for n in options.lengths if _seconds(found, "window", n) < _seconds(found, "sdpa", n)]
        if faster:
            print(f"the window is faster than full SDPA from {min(faster)} tokens on")
    if options.out is not None:
        draw(found, options.out)


def _seconds(found: dict[str, dict[int, dict[str, float] | None]], kind: str, n: int) -> float:
    result = found[kind][n]
    return float("inf") if result is None else result["seconds"]


if __name__ == "__main__":
    main()
