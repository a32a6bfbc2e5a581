"""Draw the throughput and latency that `everybert bench --json` measured.

everybert bench ./my-model --dtype fp32,int8 --json > speed.json
python benchmarks/plot_bench.py speed.json speed.png
"""

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # Okabe & Ito: distinct for the colour-blind
MARKERS = "osD^v"


def draw(found: dict, path: str) -> None:
    """Throughput and latency by length, side by side."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for way, colour, marker in zip((w["name"] for w in found["ways"]), COLOURS, MARKERS):
        cells = [c for c in found["cells"] if c["way"] == way and c["tokens_per_s"] and c["p50_ms"]]
        x, p50, p99 = ([c[key] for c in cells] for key in ("length", "p50_ms", "p99_ms"))
        left.plot(x, [c["tokens_per_s"] for c in cells], color=colour, marker=marker, label=way)
        right.plot(x, p50, color=colour, marker=marker, label=f"{way}, p50")
        right.fill_between(x, p50, p99, color=colour, alpha=0.18, lw=0)
    lengths = sorted({c["length"] for c in found["cells"]})
    for axes, title, unit in ((left, "Throughput", "tokens/s"), (right, "Latency of one text", "milliseconds")):
        axes.set_title(title, loc="left")
        axes.set_ylabel(unit)
        axes.set_xlabel("tokens per text")
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
    figure.suptitle(f"{found['model']} on {found['device']}", x=0.01, ha="left", fontsize="large")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text("utf-8")), sys.argv[2])
