"""HTML that asks for nothing else: the attention viewer with its data inlined, and text with shaded pieces."""

from __future__ import annotations

import base64
import json
import zlib
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from everybert.inside.attention import Attention
    from everybert.inside.attribution import Attribution

FINE = 4 << 20
"""Weights up to which a page keeps sixteen bits of each; above, eight."""
FOR, AGAINST = "43, 77, 189", "163, 70, 10"


def asset(name: str) -> str:
    """One of the viewer's own files."""
    return (files("everybert.inside") / "web" / name).read_text(encoding="utf-8")


def inlined(*names: str) -> str:
    """Modules one after the other as one script: what they import from each other is then in scope already."""
    lines = [line for name in names for line in asset(name).splitlines() if not line.startswith("import ")]
    return "\n".join(line.removeprefix("export ") for line in lines)


def attention_page(attention: Attention, title: str) -> str:
    """See Attention.html."""
    from everybert.inside.attention import quantised

    layers, heads = attention.weights.shape[:2]
    fine = attention.weights.size <= FINE
    values = quantised(attention.weights) if fine else np.rint(attention.weights * 255).astype(np.uint8)
    small = attention.thumbnails()
    data = {
        "tokens": attention.labels or attention.tokens,
        "texts": attention.texts or [0] * len(attention.tokens),
        "layers": layers,
        "heads": heads,
        "size": small.shape[-1],
        "bits": 16 if fine else 8,
        "thumbnails": base64.b64encode(small.tobytes()).decode(),
        "weights": base64.b64encode(zlib.compress(values.tobytes())).decode(),
    }
    parts = {
        "__TITLE__": escape(title),
        "__STYLE__": asset("colours.css") + asset("attention-view.css"),
        "__SCRIPT__": inlined("attention-draw.js", "attention-view.js"),
        # "<" would let a token end the script element; JSON may spell it otherwise.
        "__DATA__": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = asset("page.html")
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page


def frame(page: str, height: int = 720) -> str:
    """A page inside another, a notebook's for example."""
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe title="everybert" srcdoc="{escape(page)}" style="{style}"></iframe>'


def highlighted(attribution: Attribution) -> str:
    """The text, blue where it speaks for the prediction and brown where against it."""
    top = float(np.abs(attribution.scores).max()) or 1.0
    body = "<br>".join(
        _shaded(text, attribution, number, top)
        for number, text in enumerate((attribution.text, attribution.pair))
        if text is not None
    )
    note = f"{escape(attribution.target)}: {attribution.value:+.3f}, of which the text {attribution.scores.sum():+.3f}"
    return f'<div style="line-height: 1.9">{body}<br><small>{note}</small></div>'


def _shaded(text: str, attribution: Attribution, number: int, top: float) -> str:
    out, at = [], 0
    for (start, end), owner, score in zip(attribution.offsets, attribution.texts, attribution.scores):
        if owner != number or end <= at:
            continue
        start = max(start, at)
        out.append(escape(text[at:start]))
        colour = FOR if score > 0 else AGAINST
        style = f"background: rgba({colour}, {abs(score) / top * 0.55:.2f}); border-radius: 3px; padding: .1em 0"
        out.append(f'<span style="{style}" title="{score:+.3f}">{escape(text[start:end])}</span>')
        at = end
    return "".join(out) + escape(text[at:])
