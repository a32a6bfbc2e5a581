"""Where the documentation's other commands run: a copy of the project, an environment of its own, two ranks, a cluster.

Nothing is fetched: a new environment borrows the packages of the one that runs the tests, and pip asks no index.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import doc_pages as pages

LIMIT = 540
"""Seconds for one command."""
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "quickstart", "runs", "__pycache__")
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "off", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""pip's own settings; its NO_BUILD_ISOLATION is turned on by a word for "off"."""


def documented(*heads: str) -> list[str]:
    """Every command of the pages' shell blocks that starts with one of these words, once."""
    found = [
        shlex.join(words)
        for page in pages.pages()
        for block in pages.blocks(page.read_text("utf-8"))
        if block.language in pages.SHELLS
        for words in pages.commands(block.text)
    ]
    return [line for line in dict.fromkeys(found) if line.split()[0] in heads]


def mentioned(pattern: str) -> list[str]:
    """What running text has in `code` that matches, once; the log and the results tell of the past."""
    text = "".join(page.read_text("utf-8") for page in pages.pages() if page.name not in ("LOG.md", "RESULTS.md"))
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return list(dict.fromkeys(re.findall(rf"`({pattern})`", text)))


def environment(**changes: str) -> dict[str, str]:
    """What a command is started with: nothing of this test run's own; the scripts of this environment come first."""
    own = ("PYTHON", "PYTEST", "PIP_", "RAY_", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "CUDA_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    path = os.pathsep.join([sysconfig.get_path("scripts"), clean.get("PATH", "")])
    return clean | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | changes


def run(words: list[str], place: Path, **changes: str) -> str:
    """Run a command to its end; what it printed."""
    done = subprocess.run(
        words,
        cwd=place,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=LIMIT,
    )
    assert done.returncode == 0, f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def copy_of_the_project(place: Path) -> Path:
    """The checkout without what was made in it."""
    return Path(shutil.copytree(pages.ROOT, place / "project", ignore=LEFT_OUT))


def new_environment(place: Path) -> Path:
    """An environment with every package of this one but everybert; its python."""
    run([sys.executable, "-m", "venv", "--without-pip", str(place)], place.parent)
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    borrowed = place / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("everybert", "_everybert")) and entry.suffix != ".pth":
            (borrowed / entry.name).symlink_to(entry)
    packages = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], place).strip())
    (packages / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return python


def lend_scripts(python: Path) -> None:
    """ruff, mypy, mkdocs and the like: pip makes none for packages that are there already."""
    for script in Path(sysconfig.get_path("scripts")).iterdir():
        there = python.with_name(script.name)
        if not there.exists() and not script.name.startswith(("python", "everybert", "activate", "Activate")):
            there.symlink_to(script)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
