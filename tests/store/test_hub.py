"""Names to folders, without a network: a hand-made cache, and the hub's own errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from everybert.errors import EverybertError
from everybert.store import hub

SHA = "0123456789abcdef0123456789abcdef01234567"


def refused(name: str | Path, **options) -> str:
    with pytest.raises(EverybertError) as caught:
        hub.resolve(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def raising(monkeypatch, error: BaseException) -> None:
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_a_folder_is_itself(tmp_path: Path, monkeypatch):
    (tmp_path / "model").mkdir()
    assert hub.resolve(tmp_path / "model") == tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("model") == Path("model")
    assert "no revisions" in refused("model", revision="main")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("file")
    assert "empty" in refused(" ")


def test_close_names_are_suggested(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sentiment").mkdir()
    assert "did you mean sentiment?" in refused("sentimnet")
    assert "did you mean bert-base-uncased" in refused("bert-base-uncasd")
    assert f"did you mean {tmp_path / 'sentiment'}" in refused(tmp_path / "sentimen")
    assert "'./nowhere' is no folder" in refused("./nowhere")
    assert "a hub id as org/name" in refused("qqqqqqqq")
    assert "a shape without weights" in refused("prenorm-bert-base")


def test_bundled_models(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(hub, "BUNDLED", tmp_path / "models")
    assert "is no folder, bundled model" in refused("everybert-small")
    (tmp_path / "models" / "everybert-small").mkdir(parents=True)
    (tmp_path / "models" / "everybert-small" / "config.json").write_text("{}")
    assert hub.resolve("everybert-small") == tmp_path / "models" / "everybert-small"
    assert "did you mean everybert-small" in refused("everybert-smal")
    assert hub.bundled("../models/everybert-small") is None


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("GatedRepoError", "accept its terms"),
        ("RepositoryNotFoundError", "is not on the hub"),
        ("RevisionNotFoundError", "has no such revision"),
        ("LocalEntryNotFoundError", "the hub is not reachable"),
        ("OfflineModeIsEnabled", "the hub is not reachable"),
        ("HfHubHTTPError", "could not be fetched"),
    ],
)
def test_the_hubs_errors_are_one_line(monkeypatch, kind: str, cause: str):
    answer = SimpleNamespace(headers={}, request=None, status_code=404, url="", text="")
    cls = getattr(errors, kind)
    error = cls("first\nsecond", response=answer) if issubclass(cls, errors.HfHubHTTPError) else cls("first\nsecond")
    raising(monkeypatch, error)
    assert cause in refused("org/name", revision="v9")
    assert "org/name at revision 'v9'" in refused("org/name", revision="v9")


def test_only_data_is_fetched_and_pickles_only_if_allowed(tmp_path: Path, monkeypatch):
    from huggingface_hub.utils import filter_repo_objects

    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json", "vocab.txt"]
    files += ["model.safetensors.index.json", "1_Pooling/config.json", "spiece.model", "2_Dense/model.safetensors"]
    others = ["modeling_evil.py", "onnx/model.onnx", "tf_model.h5", "model.fp16.safetensors", "pickle.pkl", "README.md"]

    def fetched() -> set[str]:
        choose = {k: asked[k] for k in ("allow_patterns", "ignore_patterns")}
        return set(filter_repo_objects([*files, *others, "pytorch_model.bin"], **choose))

    assert hub.resolve("roberta-base", revision="abc") == tmp_path
    assert asked["repository"] == "FacebookAI/roberta-base" and asked["revision"] == "abc"
    assert fetched() == set(files)
    hub.resolve("org/name", allow_pickle=True)
    assert fetched() == {*files, "pytorch_model.bin"}


def test_the_cache_is_used_offline(tmp_path: Path):
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SHA)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "00").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/00")
    code = (
        "import sys\nfrom everybert.store.hub import resolve\nfrom everybert.errors import EverybertError\n"
        "try: print(resolve(sys.argv[1], revision=sys.argv[2] or None))\nexcept EverybertError as e: print(e)"
    )

    def ask(name: str, revision: str = "") -> str:
        env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
        return subprocess.run(
            [sys.executable, "-c", code, name, revision], env=env, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert ask("org/name") == str(snapshot)
    assert ask("org/name", SHA) == str(snapshot)
    assert "not reachable" in ask("org/name", "f" * 40)
    assert "not reachable" in ask("org/other")
    assert "did you mean" not in ask("google-bert/bert-base-uncased")  # the name is right


def test_names_need_neither_torch_nor_the_hub_client():
    code = (
        "import sys\nfrom everybert.store import hub\nprint('torch' in sys.modules, 'huggingface_hub' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
