"""Pushing to the hub: what is sent, and what is said when it fails. The hub is a small server on this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

from everybert.cli.main import app
from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.store.hub import prepare_push, push
from everybert.store.huggingface import load_network, save_network


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=32, hidden_size=8, layers=1, heads=2, intermediate_size=16, max_positions=8)
    with atomic_folder(tmp_path / "model") as draft:
        save_network(Network(config, {"mlm": None}), draft)
        (draft / "README.md").write_text("# A model\n", encoding="utf-8")
    return tmp_path / "model"


class Hub:
    """The four calls of a push. `refuse` answers one of them with a status; `files` is what arrived."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.tokens: dict[str, str | None] = {}  # by path
        self.private = False
        self.made_private: object = None
        self.refuse: dict[str, int] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size)
                hub.asked.append((self.command, self.path))
                hub.tokens[self.path] = self.headers.get("Authorization")
                status = next((s for part, s in hub.refuse.items() if part in self.path), 200)
                found = hub.reply(self.path, body) if status == 200 else {"error": "no"}
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def reply(self, path: str, body: bytes) -> dict:
        if path.endswith("/repos/create"):
            asked = json.loads(body)  # clients before 2.0 say private, later ones visibility
            self.made_private = asked.get("private") or asked.get("visibility") == "private"
            return {"url": f"{self.url}/org/name", "name": "org/name"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/org/name/commit/{'0' * 40}"}
        return {"id": "org/name", "private": self.private, "siblings": [], "tags": [], "sha": "0" * 40}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def run(*arguments: object):
    return CliRunner().invoke(app, ["push", *map(str, arguments)])


def test_what_arrives_is_the_model_and_no_more(folder: Path, hub: Hub, tmp_path: Path):
    (folder / "notes.txt").write_text("my own", encoding="utf-8")
    (folder / ".env").write_text("SECRET=1", encoding="utf-8")
    (folder / "README.md").write_text("# Edited by hand\n", encoding="utf-8")
    result = run(folder, "org/name")
    assert result.exit_code == 0, result.output
    assert "left out: notes.txt" in result.output and "left out: .env" in result.output
    assert f"pushed to {hub.url}/org/name" in result.output
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors"]
    assert hub.files["README.md"] == b"# Edited by hand\n"
    assert sum("/commit/" in path for _, path in hub.asked) == 1  # all of it at once, or nothing
    own = {path: token for path, token in hub.tokens.items() if "org/name" in path or path.endswith("/repos/create")}
    assert len(own) >= 3 and set(own.values()) == {"Bearer hf_test"}, hub.tokens  # libraries may ask for more, unasked
    assert not hub.made_private

    fetched = tmp_path / "fetched"
    fetched.mkdir()
    for name, content in hub.files.items():
        (fetched / name).write_bytes(content)
    before, after = (load_network(f).network.state_dict() for f in (folder, fetched))
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_dry_run_sends_nothing(folder: Path, hub: Hub):
    result = run(folder, "org/name", "--dry-run", "--json")
    found = json.loads(result.stdout)
    assert not found["pushed"] and found["files"].keys() == {"README.md", "config.json", "model.safetensors"}
    assert "nothing was sent" in run(folder, "org/name", "--dry-run").output
    assert hub.asked == []


def test_private(folder: Path, hub: Hub):
    hub.private = True
    assert run(folder, "org/name", "--private").exit_code == 0
    assert hub.made_private is True
    hub.private, hub.files = False, {}
    result = run(folder, "org/name", "--private")
    assert result.exit_code == 2 and "is public" in result.output
    assert hub.files == {}


@pytest.mark.parametrize(
    ("part", "status", "cause"),
    [
        ("/api/", 401, "does not know the token"),
        ("/api/", 403, "may not write there"),
        ("preupload", 403, "may not write there"),
        ("commit", 400, "the hub answered 400"),
        ("commit", 413, "too large"),
    ],
)
def test_refusals_are_one_line(folder: Path, hub: Hub, part: str, status: int, cause: str):
    hub.refuse = {part: status}
    with pytest.raises(EverybertError, match=cause) as caught:
        push(prepare_push(folder), "org/name")
    assert "\n" not in str(caught.value) and hub.files == {}


def test_no_hub_no_token_no_network(folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(EverybertError, match="not reachable"):
        push(prepare_push(folder), "org/name")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(EverybertError, match="hf auth login"):
        push(prepare_push(folder), "org/name")


@pytest.mark.parametrize("name", ["name", "a/b/c", "../x", "org/", "org/na me", "/etc/passwd"])
def test_names_that_are_none(folder: Path, name: str):
    with pytest.raises(EverybertError, match="org/name"):
        push(prepare_push(folder), name)


def test_folders_that_are_not_sent(folder: Path, tmp_path: Path):
    with pytest.raises(EverybertError, match="there is no folder"):
        prepare_push(tmp_path / "nowhere")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"x")
    with pytest.raises(EverybertError, match="damaged or was edited"):
        prepare_push(folder)
    weights.write_bytes(whole)
    (folder / "README.md").unlink()
    with pytest.raises(EverybertError, match="has no card"):
        prepare_push(folder)
    (folder / "README.md").symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(EverybertError):
        prepare_push(folder)
    (folder / "README.md").unlink()
    (folder / "README.md").write_text("x", encoding="utf-8")
    (folder / "manifest.json").unlink()
    with pytest.raises(EverybertError, match=r"no manifest\.json"):
        prepare_push(folder)


def test_a_card_that_links_elsewhere_is_not_followed(folder: Path, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("s", encoding="utf-8")
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(secret)
    with pytest.raises(EverybertError, match="link out of its folder"):
        prepare_push(folder)
