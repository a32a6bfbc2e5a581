"""`python -m everybert` is the `everybert` command (and what `torchrun -m` starts)."""

import os
import sys
from pathlib import Path

from everybert.cli.main import run

if __name__ == "__main__":
    if os.environ.get("RANK", "0") != "0":  # of ranks that train together the first one speaks
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    run()
