"""The project's own rules: documents name files that exist, rooms import what the map allows, the code stays small."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from everybert import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SOURCES = sorted((ROOT / "src" / "everybert").rglob("*.py"))
TREES = {path: ast.parse(path.read_text("utf-8")) for path in SOURCES}
NODES = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree)]


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "LICENSE-weights.md", "README.md"])
def test_paths_and_targets_that_are_named_exist(name: str):
    text = read(name)
    for path in re.findall(r"`((?:src|tests|recipes|benchmarks|contrib|docs)/[\w./-]+)`", text):
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


# ── the map of rooms ─────────────────────────────────────────────────────────────────────────────────────────

ANYWHERE = {"files", "errors", "data", "__version__"}
STARTS_RAY = {"corpus", "inference"}
LOADS = {"training/finetune.py imports inference.model"}
"""What CONTRIBUTING names as an exception."""


def modules(node: ast.AST) -> list[str]:
    """The modules of everybert that an import statement names: "store.hub"; "*" for the whole of it."""
    if isinstance(node, ast.Import):
        names = [f"{alias.name}.*" if alias.name == "everybert" else alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"everybert.{a.name}" for a in node.names] if node.module == "everybert" else [node.module]
    else:
        return []
    return [name.removeprefix("everybert.") for name in names if name.startswith("everybert.")]


def imports(path: Path) -> set[str]:
    """All imports of a file, those inside functions too, except for type annotations."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    return {name for node in ast.walk(tree) for name in modules(node)}


def test_scripts_import_names_that_exist():
    for script in (file for folder in ("benchmarks", "contrib", "recipes") for file in (ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(script.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "everybert":
                module = import_module(node.module)
                for name in (alias.name for alias in node.names):
                    inside = hasattr(module, "__path__") and find_spec(f"{node.module}.{name}")
                    assert hasattr(module, name) or inside, f"{script.name} imports {name} from {node.module}"


def test_rooms_import_only_what_contributing_says():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", read("CONTRIBUTING.md"), re.MULTILINE)
    rooms = [room for room, _ in rows]
    assert len(rooms) == 11
    allowed: dict[str, set[str]] = {}
    for room, listed in rows:
        names = set(re.findall(r"\w+", listed))
        if room == "cli":
            continue  # everything
        if "all" in names:
            names = set(rooms[: rooms.index(room)])
        allowed[room] = names | ANYWHERE | {room} | ({"cluster"} if room in STARTS_RAY else set())
        for name in names:
            allowed[room] |= allowed[name] - {"cluster"}  # what a room may use, its users may too
    wrong = []
    for path in SOURCES:
        room = path.relative_to(ROOT / "src" / "everybert").parts[0]
        if room in allowed:
            used = {name for name in imports(path) if name.split(".")[0] not in allowed[room]}
            wrong += [f"{room}/{path.name} imports {name}" for name in sorted(used)]
    assert set(wrong) == LOADS, "\n".join(wrong)
    assert imports(ROOT / "src/everybert/files.py") <= {"errors"} and not imports(ROOT / "src/everybert/errors.py")
    assert not any(re.search(r"^\s*(from|import) contrib\b", p.read_text("utf-8"), re.MULTILINE) for p in SOURCES)


# ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────

LINES, FILES = 24_000, 130
LONGEST = 650
LONGER = {"inference/model.py": 775, "tasks/dataset.py": 660}
"""Files above the limit, which may not grow: the Model with all its methods, and the one reader of data."""
MANY_PARAMETERS = 12
MORE_PARAMETERS = {
    "training/finetune.py finetune",  # public
    "cli/finetune.py finetune",  # the options of its command
    "corpus/build.py build_corpus",  # public
    "sklearn.py __init__",  # the settings of an estimator, as scikit-learn requires them
    "model/kernels.py _attention_backward_q",  # a kernel's pointers, strides and sizes
}


def place(path: Path) -> str:
    return path.relative_to(ROOT / "src" / "everybert").as_posix()


def test_files_are_few_and_of_readable_length():
    sizes = {place(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert sum(sizes.values()) <= LINES and len(SOURCES) <= FILES, (sum(sizes.values()), len(SOURCES))
    long = {name: size for name, size in sizes.items() if size > LONGER.get(name, LONGEST)}
    assert not long, f"split these by idea: {long}"
    wide = [
        f"{p.name}:{n}"
        for p in SOURCES
        for n, line in enumerate(p.read_text("utf-8").splitlines(), 1)
        if len(re.sub(r"  # (noqa|type: ignore).*", "", line)) > 120
    ]
    assert not wide, wide


def test_functions_take_few_parameters():
    wrong = []
    for path, node in NODES:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
            count = len([name for name in given if name not in ("self", "cls")])
            if count > MANY_PARAMETERS and f"{place(path)} {node.name}" not in MORE_PARAMETERS:
                wrong.append(f"{place(path)} {node.name} has {count}")
    assert not wrong, wrong


def test_modules_have_no_mutable_state():
    """No `global` statements, and no empty containers that functions could fill."""
    wrong = [f"{path.name}:{node.lineno} global" for path, node in NODES if isinstance(node, ast.Global)]
    for path, tree in TREES.items():
        for node in tree.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is not None and ast.unparse(value) in ("{}", "[]", "set()", "dict()", "list()"):
                wrong.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, wrong


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────

NO_LEGEND = {"model/kernels.py", "corpus/shards.py"}  # letters of Triton's own kind; a table of files


def test_legends_name_every_letter_of_a_files_tensors():
    """`x_TH` is tokens × hidden: the legend in the docstring of a file says so for the names that it defines."""
    wrong = []
    for path, tree in TREES.items():
        nodes = list(ast.walk(tree))
        names = {node.arg for node in nodes if isinstance(node, ast.arg)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        shapes = [m[1] for name in names if (m := re.fullmatch(r"[a-z][a-z0-9_]*_([A-Z0-9]*[A-Z][A-Z0-9n]*)", name))]
        _, _, legend = (ast.get_docstring(tree) or "").partition("Legend: ")
        used = {letter for shape in shapes for letter in re.findall("[A-Zn]", shape)}
        unknown = used - set(re.findall(r"\w+", legend))
        if unknown and place(path) not in NO_LEGEND:
            wrong.append(f"{place(path)}: {', '.join(sorted(unknown))}")
    assert not wrong, wrong


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────

REPLACED = {
    "trunk": "encoder",
    "mend": "fix",
    "flavour": "architecture",
    "likeness": "similarity",
    "said aloud": "printed",
    "go on from": "resume",
    "keeper": "best weights",
    "shelf": "model registry",
    "refusal": "HTTP error",
}
"""Words that do not belong to the vocabulary of the field → what to write."""


PROSE = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(p for p in (ROOT / "docs").rglob("*.md") if p.name != "LOG.md")]
PROSE += [p for folder in ("recipes", "benchmarks", "contrib") for p in (ROOT / folder).iterdir() if p.is_file()]
PROSE += (ROOT / "src" / "everybert" / "models").glob("*/README.md")


def test_words_are_those_of_the_field():
    wrong = []
    for path in [*SOURCES, *PROSE]:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            for word, plain in REPLACED.items():
                if re.search(rf"\b{word}(s|ed|ing)?\b", line.replace("_", " "), re.IGNORECASE):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {word!r}, write {plain!r}")
    assert not wrong, "\n".join(wrong)


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
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} if isinstance(node, ast.Import) else {node.module or ""}
                assert not {name.split(".")[0] for name in names} & POSIX_ONLY, (path, names)


def test_text_files_are_opened_with_their_encoding():
    """Windows would read them in another one."""
    wrong = []
    for path, node in NODES:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
            continue
        name, method = getattr(node.func, "attr", None) or node.func.id, isinstance(node.func, ast.Attribute)
        given = {k.arg for k in node.keywords}
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        reads = name == "read_text" and not (given | set(modes)) & {"encoding", "utf-8", "utf-8-sig", "ascii"}
        opens = name == "open" and modes and not any("b" in m for m in modes) and set(modes[0]) <= set("rwax+t")
        if reads or (method and (name == "write_text" or opens) and "encoding" not in given):
            wrong.append(f"{path.name}:{node.lineno}")
    assert not wrong, wrong


def test_file_names_suit_every_system():
    reserved = {"con", "prn", "aux", "nul", *(f"{n}{i}" for n in ("com", "lpt") for i in range(1, 10))}
    seen: set[str] = set()
    for path in [
        p for folder in ("src", "recipes", "contrib", "tests", "docs", "benchmarks") for p in (ROOT / folder).rglob("*")
    ]:
        if "__pycache__" in path.parts:
            continue
        name = path.relative_to(ROOT).as_posix()
        assert not re.search(r'[<>:"\\|?*\x00-\x1f]', name), name
        assert path.stem.lower() not in reserved, name
        assert name.lower() not in seen, f"{name} differs from another only in case"
        seen.add(name.lower())
