"""Computes what the tests of this folder compare, through public interfaces only, and records it.

    python tests/golden/record.py                 everything
    python tests/golden/record.py commands http   some groups: the others stay as they are
    python tests/golden/record.py --old old       write the folders of data/old first

A group is a function of a scratch folder that gives {entry: function without arguments}. data/outputs.json holds, by
group and entry, what each returned: numbers in full, long arrays as shape, first values, sum and norm.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import golden_models  # noqa: F401 (each adds its groups)
import golden_outside  # noqa: F401
import golden_training
import torch
from golden_tools import DATA, GROUPS, plain

import everybert

OUTPUTS = DATA / "outputs.json"


def compute(name: str, scratch: Path) -> dict[str, Any]:
    """Every entry of a group as JSON values; an entry that raises is recorded as its error's class."""
    out, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry, function in GROUPS[name](scratch).items():
            try:
                value = function()
            except everybert.EverybertError as error:
                value = {"raised": type(error).__name__, "message": str(error)}
            text = json.dumps(plain(value))
            for path, name in ((scratch, "SCRATCH"), (DATA, "DATA"), (Path(everybert.__file__).parent, "PACKAGE")):
                text = text.replace(str(path), name)
            out[entry] = json.loads(text)
    torch.set_num_threads(threads)
    return out


def machine() -> dict[str, str]:
    """What decides the last digits of a float."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        fields = dict(re.findall(r"^(.*?)\s*: (.*)$", first, re.MULTILINE))
        cpu = ", ".join(fields.get(name, "") for name in ("model name", "cpu family", "model"))
    return {"platform": f"{platform.system()} {platform.machine()}", "cpu": cpu, "torch": torch.__version__}


def main(names: list[str]) -> None:
    """Record these groups, or all."""
    recorded = json.loads(OUTPUTS.read_text()) if OUTPUTS.exists() else {}
    recorded["machine"] = machine()
    for name in names or GROUPS:
        with tempfile.TemporaryDirectory() as scratch:
            recorded[name] = compute(name, Path(scratch))
        lines = [
            f"{json.dumps(key)}: {{\n"
            + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in value.items())
            + "\n}"
            for key, value in recorded.items()
        ]
        OUTPUTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{name}: {len(recorded[name])} entries")


if __name__ == "__main__":
    if "--old" in sys.argv:
        golden_training.write_old()
    main([name for name in sys.argv[1:] if name != "--old"])
