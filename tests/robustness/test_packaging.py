"""The built package: what is in it, and that it works where there is no checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import doc_machines as machines
import doc_pages as pages
import pytest

from everybert import __version__

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **env: str) -> str:
    return machines.run([str(word) for word in command], cwd, **env)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and, from it, wheel."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(place, filter="data")
    return next(place.iterdir())


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel installed; dependencies come from the one that runs this, everybert does not."""
    place = tmp_path_factory.mktemp("fresh")
    python = machines.new_environment(place / "venv")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet"]
    run(*pip, next(built.glob("*.whl")), cwd=place, **machines.NO_INDEX)
    return python


def files(folder: Path) -> set[str]:
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.as_posix() for p in found}


def test_the_wheel_holds_the_package_and_nothing_else(built: Path):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = [n for n in wheel.namelist() if not n.endswith("/")]
        size = sum(i.compress_size for i in wheel.infolist())
    inside = {n.removeprefix("everybert/") for n in names if n.startswith("everybert/")}
    others = {n for n in names if not n.startswith("everybert/")}
    assert all(n.split("/")[0].endswith(".dist-info") for n in others), others
    assert inside == files(ROOT / "src" / "everybert") | {f"recipes/{n}" for n in files(ROOT / "recipes")}
    assert not [n for n in names if n.endswith((".pyc", ".log", "~", ".orig")) or "/test" in n]
    assert any("LICENSE" in n for n in others)
    assert size < 55 << 20  # the bundled models have 47 MB


def test_the_sdist_has_what_a_packager_needs(unpacked: Path):
    for name in ("src/everybert/py.typed", "recipes/bert-base.toml", "tests/conftest.py", "LICENSE", "README.md"):
        assert (unpacked / name).is_file(), name
    top = {p.name for p in unpacked.iterdir()}
    assert {"tests", "docs", "benchmarks", "pyproject.toml", "PKG-INFO", "CITATION.cff", "CONTRIBUTING.md"} <= top
    assert not top & {".venv", "build", "dist", ".hypothesis", "runs", "quickstart", ".git"}


def test_the_installed_package_runs(fresh: Path, tmp_path: Path):
    where = run(fresh, "-c", "import everybert; print(everybert.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(fresh.parents[1]), where
    assert run(fresh.with_name("everybert"), "--version", cwd=tmp_path).strip() == f"everybert {__version__}"
    assert "bert-base" in run(fresh, "-m", "everybert", "pretrain", "--list", cwd=tmp_path)
    assert "BERT-base as Devlin" in run(fresh, "-m", "everybert", "pretrain", "bert-base", "--show", cwd=tmp_path)
    assert "parameters" in run(fresh, "-m", "everybert", "plan", "bert-base", cwd=tmp_path)


def test_the_commands_of_readme_print_what_it_shows(fresh: Path, tmp_path: Path):
    """In an empty folder, offline, with nothing but the wheel."""
    shown = [block for block in pages.blocks((ROOT / "README.md").read_text("utf-8")) if block.output is not None]
    assert len(shown) >= 5
    for block in shown:
        if block.language == "python":
            command = [fresh, "-c", block.text]
        else:
            ((_, *words),) = pages.commands(block.text)
            command = [fresh.with_name("everybert"), *words]
        printed = run(*command, cwd=tmp_path, HF_HUB_OFFLINE="1", COLUMNS="100")
        assert pages.same(block.output, printed), f"{block.text}\n{printed}"


def test_type_checkers_read_the_annotations(fresh: Path, tmp_path: Path):
    sample = """
import everybert

model = everybert.load("everybert-small")
best: str = model.fill("a [MASK]")[0][0].token
score: float = model.next_sentence("a", "b")
label: int = model.classify("a")[0].label
"""
    (tmp_path / "sample.py").write_text(sample, encoding="utf-8")
    checked = subprocess.run(
        [fresh, "-m", "mypy", "--ignore-missing-imports", "--python-executable", fresh, "sample.py"],
        cwd=tmp_path,
        env=machines.environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    errors = [line for line in checked.stdout.splitlines() if line.startswith("sample.py")]
    assert len(errors) == 1 and "sample.py:7" in errors[0] and '"str"' in errors[0], checked.stdout


def test_the_tests_pass_without_the_source_tree(fresh: Path, unpacked: Path, tmp_path: Path):
    for name in ("tests", "docs", "pyproject.toml", "README.md", "LICENSE"):
        source, target = unpacked / name, tmp_path / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    chosen = [
        "tests/training/test_recipe.py",  # recipes are package data
        "tests/training/test_plan.py",
        "tests/store/test_huggingface.py",
        "tests/text/test_windows.py",
        "tests/model/test_config.py",
        "tests/inside/test_attention.py",  # inside/web is package data
        "tests/serving/test_playground.py",  # serving/web too
    ]
    said = run(fresh, "-m", "pytest", "-p", "no:cacheprovider", *chosen, cwd=tmp_path, CI="true")
    assert " passed" in said and " failed" not in said
