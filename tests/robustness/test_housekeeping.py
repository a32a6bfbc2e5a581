"""The papers of the project: they name files that exist, agree with each other, and the code keeps their promises."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from everybert import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SOURCES = sorted((ROOT / "src" / "everybert").rglob("*.py"))


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "LICENSE-weights.md", "README.md"])
def test_paths_and_targets_that_are_named_exist(name: str):
    text = read(name)
    for path in re.findall(r"`((?:src|tests|recipes|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / path).exists(), path
    makefile = read("Makefile")
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_names_that_contributing_gives_exist():
    text = read("CONTRIBUTING.md")
    for path, names in re.findall(r"^\d\. `(src/[\w./]+\.py)`:[^\n]*?((?:`\w+`[^`\n]*)+)$", text, re.MULTILINE):
        code = read(path)
        for name in re.findall(r"`([A-Z]\w+)`", names):
            assert re.search(rf"^(class )?{name}\b", code, re.MULTILINE), (path, name)


def test_the_citation_agrees_with_the_project():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(read("CITATION.cff"))
    assert found["version"] == PROJECT["project"]["version"] == __version__
    assert found["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= found.keys()


def test_rooms_import_only_what_contributing_says():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", read("CONTRIBUTING.md"), re.MULTILINE)
    rooms = [room for room, _ in rows]
    assert len(rooms) == 11
    allowed: dict[str, set[str]] = {}
    for room, said in rows:
        names = set(re.findall(r"\w+", said))
        if "all" in names:
            names = set(rooms[: rooms.index(room)] if "above" in names else rooms)
        allowed[room] = names | {room}
        for name in list(names & allowed.keys()):
            allowed[room] |= allowed[name]  # what a room may use, its users may too
    wrong = []
    for path in SOURCES:
        room = path.relative_to(ROOT / "src" / "everybert").parts[0]
        for node in ast.parse(path.read_text("utf-8")).body if room in allowed else []:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("everybert."):
                used = str(node.module).split(".")[1]
                if used in rooms and used not in allowed[room]:
                    wrong.append(f"{room} imports {node.module} ({path.name})")
    assert not wrong, wrong


def test_lower_bounds_are_the_oldest_that_are_tested():
    said = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", read("constraints-oldest.txt"), re.MULTILINE))
    tested = {name.lower().replace("_", "-"): version for name, version in said.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    for line in [*PROJECT["project"]["dependencies"], *extras["train"], *extras["serve"], *extras["viz"]]:
        name, bound = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)(?:;.*)?", line).groups()
        if name == "torch":
            continue  # one build is at hand
        assert tested[name] == bound or tested[name].startswith(bound + "."), line


# ── other systems ────────────────────────────────────────────────────────────────────────────────────────────

POSIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog", "posix"}


def test_nothing_of_one_system_is_imported_with_the_library():
    """Modules that Windows lacks are imported inside functions, where there is something to do without them."""
    for path in SOURCES:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} if isinstance(node, ast.Import) else {node.module or ""}
                assert not {name.split(".")[0] for name in names} & POSIX_ONLY, (path, names)


def test_text_files_are_opened_with_their_encoding():
    """Windows would read them in another one."""
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            given = {k.arg for k in node.keywords}
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if name == "read_text" and not (given | set(modes)) & {"encoding", "utf-8", "utf-8-sig", "ascii"}:
                wrong.append(f"{path.name}:{node.lineno}")
            if name == "write_text" and isinstance(node.func, ast.Attribute) and "encoding" not in given:
                wrong.append(f"{path.name}:{node.lineno}")
            opens = name == "open" and (not modes or not any("b" in m for m in modes))
            text = opens and isinstance(node.func, ast.Attribute) and modes and set(modes[0]) <= set("rwax+t")
            if text and "encoding" not in given:
                wrong.append(f"{path.name}:{node.lineno}")
    assert not wrong, wrong


def test_file_names_suit_every_system():
    reserved = {"con", "prn", "aux", "nul", *(f"{n}{i}" for n in ("com", "lpt") for i in range(1, 10))}
    seen: set[str] = set()
    for path in [p for folder in ("src", "recipes", "tests", "docs", "benchmarks") for p in (ROOT / folder).rglob("*")]:
        if "__pycache__" in path.parts:
            continue
        name = path.relative_to(ROOT).as_posix()
        assert not re.search(r'[<>:"\\|?*\x00-\x1f]', name), name
        assert path.stem.lower() not in reserved, name
        assert name.lower() not in seen, f"{name} differs from another only in case"
        seen.add(name.lower())
