"""The chart of README and the table of speeds show what docs/results.json has."""

import json
import re

import chart
import doc_pages as pages

ROWS = json.loads((pages.DOCS / "results.json").read_text("utf-8"))


def test_the_chart_is_drawn_from_the_results():
    drawn = (pages.DOCS / "images" / "speed.svg").read_text("utf-8")
    assert drawn == chart.draw(ROWS), "run: python docs/chart.py"


def test_pages_for_users_of_other_libraries_give_ratios_of_the_results():
    known = {f"{row[side]:g}" for row in ROWS for side in ("low", "high")}
    for page in sorted((pages.DOCS / "coming-from").glob("*.md")):
        named = set(re.findall(r"(\d+(?:\.\d+)?) ×", page.read_text("utf-8")))
        assert named <= known, f"{page.name}: {sorted(named - known)}"


def test_the_table_of_speeds_has_the_same_figures():
    text = (pages.DOCS / "RESULTS.md").read_text("utf-8")
    for row in ROWS:
        ratio = f"{row['low']:g} ×" + (f" to {row['high']:g} ×" if row["high"] > row["low"] else "")
        assert f"| {row['what']} | {row['peer']} | {row['on']} | {ratio} | `{row['command']}` |" in text, row["what"]
        pages.check(row["command"].split())
