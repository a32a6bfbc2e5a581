"""What the library computes is what it computed when data/outputs.json was recorded (see record.py).

Text, whole numbers and hashes of batches are compared exactly. Floats may differ by 1e-6 (relative or absolute) on
the recorded kind of processor with the recorded torch, by 1e-4 elsewhere; hashes of weights are compared there only.
Sentences meant for people (PROSE) may be reworded freely. One group: `pytest tests/golden -k pretraining`.
"""

import json
import math
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import record

RECORDED = json.loads(record.OUTPUTS.read_text())
SAME = RECORDED["machine"] == record.machine()
CLOSE = 1e-6 if SAME else 1e-4
SLOW = {"pretraining_kinds", "finetuning_options", "finetuning_modes"}
PROSE = {"message", "notes", "words", "advice", "remedy", "examples", "target", "title", "titles", "equation"}


def is_text(value):
    return isinstance(value, str) or (isinstance(value, list) and all(map(is_text, value)))


def differences(was, now, path=""):
    """What differs, one line each."""
    key = path.rpartition(".")[2]
    if key in PROSE and is_text(was) and is_text(now):
        return []
    if key == "sha256" and not SAME:
        return []
    if path.endswith((".batches.others", ".batches.count")):  # how evaluations are batched is the engine's business
        return []
    if key == "one line" and now:
        return []
    if key == "nouns":
        return [f"{path}: {word!r} is not named" for word in was if word not in now]
    if isinstance(was, dict) and isinstance(now, dict):
        lost = [f"{path}.{k}: gone" for k in was if k not in now] + [f"{path}.{k}: new" for k in now if k not in was]
        return lost + [line for k in was if k in now for line in differences(was[k], now[k], f"{path}.{k}")]
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [line for i, (a, b) in enumerate(zip(was, now)) for line in differences(a, b, f"{path}[{i}]")]
    close = CLOSE if SAME or not re.search("int8|quantize", path) else 0.1  # products in int8 differ between processors
    if isinstance(was, float) and isinstance(now, int | float) and math.isclose(was, now, rel_tol=close, abs_tol=close):
        return []
    same = was == now and isinstance(was, bool) == isinstance(now, bool)
    return [] if same or was != was != now != now else [f"{path}: was {str(was)[:200]!r}, is {str(now)[:200]!r}"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in record.GROUPS]
)
def test_as_recorded(name, tmp_path):
    was, now = RECORDED[name], record.compute(name, tmp_path)
    found = [f"{name}/{entry}: {'gone' if entry in was else 'new'}" for entry in was.keys() ^ now.keys()]
    for entry in was.keys() & now.keys():
        full = f"{name}/{entry}"
        if "int8" in entry and not SAME:  # products of whole numbers are rounded in each processor's way
            continue
        found += [f"{full}{line}" for line in differences(was[entry], now[entry])[:5]]
    assert not found, "\n" + "\n".join(sorted(found)[:40])


def test_a_stopped_run_ends_as_one_that_was_not():
    runs = RECORDED["pretraining"]
    assert runs["resumed"]["weights"] == runs["pairs"]["weights"] == runs["pairs, 2 workers"]["weights"]
    assert runs["resumed"]["log"] == runs["pairs"]["log"] == runs["pairs, 2 workers"]["log"]
    stopped = runs["stopped"]["batches"]["training"]
    assert stopped + runs["resumed"]["batches"]["training"] == runs["pairs"]["batches"]["training"]
