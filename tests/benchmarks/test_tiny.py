"""The scripts that measure on a GPU run in miniature on a CPU, peers included: a GPU is not for finding typos."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "pretrain_gpu.py --tiny --quick": "| everybert ",
    "pretrain_gpu.py --preset everybert-small --tiny --profile": "| everybert ",
    "infer_gpu.py --tiny --device cpu": "everybert",
    "versions.py {root} {root} --tiny --rounds 1 --only fine,strings": "fine-tuning, batch 32",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_in_miniature(command: str):
    words = command.format(root=ROOT).split()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "REHEARSE": "1"}
    script = [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:]]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert COMMANDS[command] in done.stdout and "not measured" not in done.stdout
