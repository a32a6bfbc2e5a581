"""Curves: in the terminal as characters, and as a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

BLOCKS = " ▁▂▃▄▅▆▇█"


def text_plot(values: Sequence[float], name: str, end: str = "", width: int = 64, height: int = 8) -> str:
    """A curve of `height` lines; values are averaged into `width` columns."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    unit = (high - low) / (height * 8 - 1) or 1.0
    levels = [1 + round((mean - low) / unit) for mean in means]
    lines = []
    for row in reversed(range(height)):
        mark = f"{high:8.2f} ┤" if row == height - 1 else f"{low:8.2f} ┤" if row == 0 else " " * 9 + "│"
        lines.append(mark + "".join(BLOCKS[min(max(level - 8 * row, 0), 8)] for level in levels))
    return "\n".join([*lines, f"{name:>8} └" + "─" * max(columns - len(end) - 1, 0) + f" {end}"])


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, name: str) -> bool:
    """Draw (step, value) curves into a PNG; False where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, marker="o" if len(points) < 20 else "")
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
