"""The commands that use a model, and how the command line behaves: help, errors, interruption, start."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tiny_model
import torch
from commandline import mistake, run

from everybert.cli.main import COMMANDS
from everybert.inference.model import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"mlm": None, "nsp": None}
    return tiny_model.save(tmp_path_factory.mktemp("cli") / "model", heads, hidden_size=16, max_positions=24)


def python(*arguments: object, **more) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120, **more)


def test_help_lists_every_command_with_a_line():
    out = run("--help").output
    for name, (_, line, _) in COMMANDS.items():
        assert name in out and line.split()[0] in out


def test_what_people_read(folder: Path, tmp_path: Path):
    """The JSON of these commands is in tests/golden."""
    model, text, pair = load(folder, device="cpu"), "the [MASK] plays . [MASK]", ("the dog plays", "the cat")
    shown = run("fill", text, "--model", folder, "--top", 3).stdout
    assert all(mask[0].token in shown for mask in model.fill(text, top=3))
    assert "(16 values)" in run("embed", "the dog", "--model", folder).stdout
    assert "layer  2" in run("tokens", "the dog", "--model", folder).stdout
    (tmp_path / "pairs.tsv").write_text("the dog plays\tthe cat\nthe\tdog\n")
    title, first, _ = run("next", "--file", tmp_path / "pairs.tsv", "--model", folder).stdout.splitlines()
    assert title.split() == ["first", "second", "probability"]
    assert first.endswith(f"{model.next_sentence(*pair):.4f}")


def test_embed_from_arguments_a_file_and_a_pipe(folder: Path, tmp_path: Path):
    texts = ["the dog", "", "the 日 sleeps"]
    expected = load(folder, device="cpu").embed(texts)
    file = tmp_path / "texts.txt"
    file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    for arguments, stdin in ((texts, None), (["--file", file], None), (["--file", "-"], file.read_text("utf-8"))):
        found = json.loads(run("embed", *arguments, "--model", folder, "--json", input=stdin).stdout)
        assert [entry["text"] for entry in found] == texts
        np.testing.assert_allclose([entry["vector"] for entry in found], expected, atol=1e-6)
    result = run("embed", "--file", file, "--model", folder, "--out", tmp_path / "v.npy")
    assert "3 vectors of 16 numbers" in result.stdout
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-6)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "the dog"}\n{"text": \n{"text": "the cat"}\n', encoding="utf-8")
    result = run("embed", rows, "--model", folder, "--out", tmp_path / "w.npy", "--skip-bad")
    assert "2 vectors" in result.stdout and "left out: " in result.stderr and "rows.jsonl:2" in result.stderr


def test_embed_prints_the_words_of_a_splade_model(folder: Path, tmp_path: Path):
    model = tmp_path / "splade"
    load(folder, device="cpu").save(model)
    kinds = ["models.MLMTransformer", "models.SpladePooling"]
    listed = [
        {"idx": i, "name": "", "path": "p" * i, "type": f"sentence_transformers.{k}"} for i, k in enumerate(kinds)
    ]
    (model / "modules.json").write_text(json.dumps(listed))
    result = run("embed", "the dog", "the cat", "--model", model, "--json")
    loaded = load(model, device="cpu")
    for entry, one in zip(json.loads(result.stdout), loaded.sparse(["the dog", "the cat"]), strict=True):
        assert entry["indices"] == one.indices.tolist() and len(entry["tokens"]) == len(one.indices)
        np.testing.assert_allclose(entry["weights"], one.weights, atol=1e-6)
    for more in (["--out", tmp_path / "v.npy"], ["--normalize"], ["--dimensions", 4]):
        assert "sparse vectors are printed" in mistake("embed", "the dog", "--model", model, *more)
    assert "16 values" in run("embed", "the dog", "--model", model, "--pooling", "mean").stdout


def test_embed_says_what_was_cut(folder: Path):
    long = "the dog " * 20
    result = run("embed", long, "--model", folder, "--long", "cut", "--json")
    assert "18 tokens were left out" in result.stderr
    json.loads(result.stdout)
    assert "left out" not in run("embed", long, "--model", folder, "--json").stderr


def test_info(folder: Path, tmp_path: Path):
    assert "109,482,240" in run("info", "bert-base-uncased").stdout
    load(folder, device="cpu").save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert json.loads(run("info", "--accept", tmp_path / "model", "--json").stdout)["accepted"] == ["config.json"]
    assert "2,307" in run("info", "bert-base-uncased", "--task", "classify", "--labels", 3).stdout
    rows = run("info", "--compare").stdout.splitlines()
    assert any("79.6" in row for row in rows) and any("Devlin et al. 2019" in row for row in rows)
    assert not any("*" in row for row in rows), "no figure is unchecked"
    assert any("66,362,880" in row for row in rows) and any("559,890,432" in row for row in rows)


def test_info_counts_what_a_task_adds_to_the_default_model_or_another(folder: Path):
    (found,) = json.loads(run("info", "--task", "classify", "--labels", 3, "--json").stdout)
    assert found == json.loads(run("info", "everybert-small", "--task", "classify", "--labels", 3, "--json").stdout)[0]
    assert "give a model, or --compare" in mistake("info", "--compare", "--task", "tag")
    assert "regress has no labels to count" in mistake("info", folder, "--task", "regress", "--labels", 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((f"{name} --file rows.csv", "is a table, not lines") for name in ("fill", "tokens", "rank dog", "next")),
        ("embed report.pdf", "is a file, not a text"),
        *((f"{name} lines.txt", "is a file, not a text") for name in ("fill", "explain", "neighbours the", "next dog")),
        ("attention lines.txt --out page.html", "is a file, not a text"),
        ("attention dog --out rows.csv", "give --out F.html"),
        ("embed dog --out rows.csv", "written as .npy"),
        *((f"{name} absent.xlsx", "absent.xlsx does not exist") for name in ("classify", "tag", "classify --file")),
        ("classify rows.csv.gz", "say where its predictions go"),
        ("tag lines.txt", "say where its predictions go"),
    ],
)
def test_files_are_never_read_as_texts(folder: Path, tmp_path: Path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\nthe dog,x\n")
    Path("rows.csv.gz").write_bytes(gzip.compress(b"text,label\nthe dog,x\n"))
    Path("lines.txt").write_text("the dog\n")
    assert message in mistake(*line.split(), "--model", folder)
    assert Path("rows.csv").read_text() == "text,label\nthe dog,x\n"


def test_a_compressed_table_is_read_as_a_table(folder: Path, tmp_path: Path):
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"text,label\nthe dog,x\n"))
    result = run("embed", "--file", tmp_path / "rows.csv.gz", "--json", "--model", folder)
    assert [row["text"] for row in json.loads(result.output)] == ["the dog"]


def test_a_tab_inside_a_text_stays_there(folder: Path):
    (row,) = json.loads(run("next", "the\tdog", "plays", "--json", "--model", folder).output)
    assert (row["first"], row["second"]) == ("the\tdog", "plays")


def test_the_folder_of_a_run_and_pickled_weights_are_refused_with_the_remedy(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "run" / "model")
    refused = mistake("fill", "the [MASK]", "--model", tmp_path / "run")
    assert f"did you mean {tmp_path / 'run' / 'model'}?" in refused
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    torch.save(safetensors.torch.load_file(old / "model.safetensors"), old / "pytorch_model.bin")
    for name in ("model.safetensors", "manifest.json"):
        (old / name).unlink()
    assert "give --allow-pickle" in mistake("fill", "the [MASK]", "--model", old)
    run("export", "hf", old, tmp_path / "new", "--allow-pickle")
    lines = ([folder], [tmp_path / "new"], [old, "--allow-pickle"])
    texts = [run("fill", "the [MASK]", "--model", *line).stdout for line in lines]
    assert texts[0] == texts[1] == texts[2]


def test_a_lone_surrogate_and_a_broken_file(folder: Path, tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "not UTF-8" in mistake("embed", "--file", tmp_path / "latin.txt", "--model", folder)
    argument = b"the \xff dog"  # Python hands it on as a lone surrogate
    done = subprocess.run(
        [sys.executable, "-m", "everybert", "tokens", argument, "--model", str(folder)],
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
    )
    assert done.returncode == 0, done.stderr
    assert rb"the \udcff dog" in done.stdout and b"\ndog  " in done.stdout


def test_importing_and_helping_load_no_torch():
    code = "import sys, everybert; assert not {'torch', 'numpy', 'typer'} & set(sys.modules), 'heavy'"
    assert python("-c", code).returncode == 0
    code = (
        "import sys\nfrom everybert.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert end.code in (0, None)\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules), 'heavy'"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_cpu_run_loads_no_compiler(folder: Path):
    code = (
        f"import sys, everybert\nm = everybert.load({str(folder)!r}, device='cpu')\nm.fill('the [MASK]')\n"
        "assert not {'torch._dynamo', 'torch._inductor', 'triton', 'huggingface_hub'} & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_module_runs_and_says_its_version():
    import everybert

    assert python("-m", "everybert", "--version").stdout.strip() == f"everybert {everybert.__version__}"


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interruption_is_quiet():
    code = (
        "import time\nfrom everybert.cli import common, main\n"
        "def stop(*a, **k):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "common.ModelOptions.load = stop\nmain.app(['fill', 'a [MASK]'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and out == ""


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
def test_a_closed_pipe_is_quiet(folder: Path, tmp_path: Path):
    (tmp_path / "many.txt").write_text("the dog plays\n" * 3000)
    command = f"{sys.executable} -m everybert tokens --file {tmp_path / 'many.txt'} --model {folder} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
