"""The reading path names files that exist, and stays short."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 5500


def test_the_reading_path_is_short():
    text = (ROOT / "docs" / "reading.md").read_text("utf-8")
    rows = re.findall(r"^\d+\. `(src/everybert/[\w/]+\.py)`: (.+(?:\n +.+)*)$", text, re.MULTILINE)
    lines = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name, _ in rows}
    assert 12 <= len(rows) <= 18 and sum(lines.values()) <= MOST, lines
    for name, taught in rows:
        assert len(re.findall(r"[.:](?=\s+[A-Z]|$)", taught)) >= 2, f"{name}: two sentences"
    order = "config ragged embeddings attention encoder heads masking packs step loop pretrain classify engine model"
    named = [Path(name).stem for name in lines]
    assert [stem for stem in named if stem in order.split()] == order.split()
