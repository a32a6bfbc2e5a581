"""Draw docs/images/speed.svg from docs/results.json:  python docs/chart.py

A bar per row, as long as the lower of the measured ratios; a lighter part reaches to the higher one. Colours follow
the reader's light or dark theme.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, LEFT, ROW, TOP = 860, 400, 34, 52
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2430 } .small { font-size: 11px; fill: #5b6270 }
.title { font-size: 15px; font-weight: 600 } .bar { fill: #2b4dbd } .more { fill: #2b4dbd; opacity: .4 }
.one { stroke: #8a90a0; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaf0 } .small { fill: #a4abba } .bar, .more { fill: #8ea6ff } .one { stroke: #7a8194 }
}
"""


def draw(rows: list[dict]) -> str:
    """The chart as SVG."""
    scale = (WIDTH - LEFT - 90) / max(row["high"] for row in rows)
    height = TOP + ROW * len(rows) + 30
    parts = [
        '<text class="title" x="16" y="26">Speed as a multiple of the named library, same machine, same run</text>'
    ]
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        low, high = row["low"] * scale, row["high"] * scale
        span = f"{row['low']:g} ×" if row["low"] == row["high"] else f"{row['low']:g} – {row['high']:g} ×"
        parts += [
            f'<text x="{LEFT - 12}" y="{y + 12}" text-anchor="end">{escape(row["what"])}</text>',
            f'<text class="small" x="{LEFT - 12}" y="{y + 26}" text-anchor="end">'
            f"{escape(row['peer'])} · {escape(row['on'])}</text>",
            f'<rect class="more" x="{LEFT}" y="{y + 4}" width="{high:.1f}" height="18" rx="2"/>',
            f'<rect class="bar" x="{LEFT}" y="{y + 4}" width="{low:.1f}" height="18" rx="2"/>',
            f'<text x="{LEFT + high + 8:.1f}" y="{y + 18}">{span}</text>',
        ]
    x, end = LEFT + scale, TOP + ROW * len(rows)
    parts += [
        f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{end}"/>',
        f'<text class="small" x="{x:.1f}" y="{end + 16}" text-anchor="middle">1 ×: the other library</text>',
    ]
    label = "; ".join(f"{r['what']}: {r['low']:g} to {r['high']:g} times {r['peer']}" for r in rows)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    return "\n".join([f'{head} aria-label="{escape(label)}">', f"<style>{STYLE}</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    rows = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    (HERE / "images" / "speed.svg").write_text(draw(rows), encoding="utf-8")
