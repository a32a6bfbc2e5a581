"""Pictures of probes, by matplotlib: a relation over layers × heads, a task over layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everybert.errors import EverybertError
from everybert.inside.probe_heads import Relation
from everybert.inside.probe_layers import LayerProbe

INK, QUIET, ACCENT = "#1d2129", "#667085", "#3450c4"


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # not pyplot: no display, no global state
    except ImportError as error:
        raise EverybertError("pictures need matplotlib: pip install 'everybert[viz]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise EverybertError(f"{path} could not be written ({error}); name a .png, .svg or .pdf file") from None


def draw_heads(relation: Relation, path: Path, title: str = "") -> None:
    """Layers × heads: the share of words for which each head is right, in its better direction."""
    right_LA = relation.right.max(0) * 100
    layers, heads = right_LA.shape
    figure, axes = _figure(1.6 + 0.52 * heads, 1.5 + 0.42 * layers)
    image = axes.imshow(right_LA, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for layer in range(layers):
        for head in range(heads):
            value = right_LA[layer, head]
            colour = "white" if value > 60 else INK
            axes.text(head, layer, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(heads), [str(h) for h in range(heads)])
    axes.set_yticks(range(layers), [str(i) for i in range(layers)])
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title(title or f"{relation.name}: % right ({relation.count:,} words)", fontsize=10, color=INK, loc="left")
    figure.colorbar(image, ax=axes, label="% right", shrink=0.85)
    _save(figure, path)


def draw_layers(probe: LayerProbe, path: Path, title: str = "") -> None:
    """Accuracy over layers, with the commonest label's as the floor."""
    figure, axes = _figure(5.6, 3.2)
    scores = [100 * score for score in probe.scores]
    axes.plot(scores, color=ACCENT, marker="o", markersize=4)
    axes.axhline(100 * probe.majority, color=QUIET, linewidth=1, linestyle=":")
    axes.text(0, 100 * probe.majority, " commonest label", color=QUIET, fontsize=8, va="bottom")
    axes.annotate(
        f"{scores[probe.best]:.1f}",
        (probe.best, scores[probe.best]),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=INK,
    )
    axes.set_xticks(range(len(scores)), ["emb.", *map(str, range(1, len(scores)))])
    axes.set(xlabel="layer", ylabel="accuracy, %", ylim=(0, 105), yticks=range(0, 101, 20))
    axes.set_title(title or "What a linear probe reads off each layer", fontsize=10, color=INK, loc="left")
    _save(figure, path)
