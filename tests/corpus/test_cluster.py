"""Corpora built on a real Ray cluster of several processes on this machine: the same bytes, whoever is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpus_texts import documents, tokenizer
from processes import descendants, is_alive

from everybert import cluster as module
from everybert.cluster import cluster
from everybert.corpus import build
from everybert.corpus.build import build_corpus
from everybert.errors import EverybertError

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
SHARD = 4000


@pytest.fixture(scope="module")
def two_workers():
    with cluster(workers=2) as ray:
        yield ray


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    tokenizer("wordpiece").save(folder / "tokenizer")
    (folder / "in.txt").write_text("\n\n".join(documents(200)), "utf-8")
    return folder


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(build, "UNIT", 300)


@pytest.fixture
def local(texts, tmp_path, small_units):
    """The bytes that the local engine makes."""
    build_corpus(texts / "in.txt", texts / "tokenizer", tmp_path / "local", workers=1, shard_characters=SHARD)
    return contents(tmp_path / "local")


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def on_cluster(texts, out, **more):
    return build_corpus(texts / "in.txt", texts / "tokenizer", out, engine="ray", shard_characters=SHARD, **more)


def killer(mark: Path, times: int):
    """`encode_documents`, but a worker kills itself by SIGKILL, `times` times in all, in the middle of the corpus."""
    encode = build.encode_documents

    def dying(encoder, documents):  # known here alone, so it is sent to the workers as it is
        import os
        import signal

        at = sum(1 for _ in mark.iterdir())
        if any("Paris" in text for text, _ in documents) and at < times:
            (mark / f"{at}-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(encoder, documents)

    return dying


def test_same_bytes_as_the_local_engine(two_workers, texts, tmp_path, local):
    on_cluster(texts, tmp_path / "c")
    assert contents(tmp_path / "c") == local
    assert len([name for name in local if name.endswith("tokens.bin")]) > 8
    assert two_workers.is_initialized()  # the caller's connection is left open


def test_a_killed_worker_loses_nothing(two_workers, texts, tmp_path, local, monkeypatch):
    (tmp_path / "killed").mkdir()
    monkeypatch.setattr(build, "encode_documents", killer(tmp_path / "killed", times=2))
    summary = on_cluster(texts, tmp_path / "c")
    assert len(list((tmp_path / "killed").iterdir())) >= 2
    assert summary["counts"]["documents"] == 200
    assert contents(tmp_path / "c") == local


def test_work_that_kills_every_worker_ends_and_what_was_done_is_kept(two_workers, texts, tmp_path, local, monkeypatch):
    (tmp_path / "killed").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "RETRIES", 0)
        patch.setattr(build, "encode_documents", killer(tmp_path / "killed", times=1000))
        with pytest.raises(EverybertError, match="out of memory"):
            on_cluster(texts, tmp_path / "c", workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(build, "encode_documents", lambda encoder, pieces: 1 / 0)
        with pytest.raises(EverybertError, match=r"ZeroDivisionError.*same everybert"):
            on_cluster(texts, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    on_cluster(texts, tmp_path / "c")
    assert contents(tmp_path / "c") == local


STOPPED = """
from everybert.cli.main import run
from everybert.corpus import build
build.UNIT = 300
build.BuildOptions.__init__.__defaults__ = (0.005, False, 4000, None, "strict", False)
run()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("blow", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_stopped_build_leaves_no_process_and_goes_on_in_either_engine(tmp_path, texts, blow):
    (tmp_path / "in.txt").write_text("\n\n".join(documents(4000)), "utf-8")
    command = ["corpus", "build", "in.txt", "--tokenizer", str(texts / "tokenizer"), "--out", "c", "--heldout", "0"]
    command += ["--engine", "ray", "--workers", "2"]
    child = subprocess.Popen([sys.executable, "-c", STOPPED, *command], cwd=tmp_path, stderr=subprocess.PIPE)
    records, deadline = tmp_path / "c.building/records", time.monotonic() + 200
    while not (records.exists() and any(records.glob("*.json"))):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    family = descendants(child.pid)
    assert len(family) > 3
    os.kill(child.pid, blow)
    error = child.communicate(timeout=120)[1].decode()
    assert child.returncode == (130 if blow == signal.SIGINT else -blow)
    assert blow == signal.SIGKILL or error.strip().splitlines()[-1].startswith("stopped: finished shards are kept")
    while alive := [pid for pid in family if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    options = {"heldout": 0, "workers": 1, "shard_characters": SHARD}
    assert build_corpus(tmp_path / "in.txt", texts / "tokenizer", tmp_path / "c", **options)["kept_shards"] >= 1
    build_corpus(tmp_path / "in.txt", texts / "tokenizer", tmp_path / "whole", **options)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_lost_machine_loses_nothing(texts, tmp_path, local, monkeypatch):
    from ray.cluster_utils import Cluster

    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    lost = machines.add_node(num_cpus=2)
    encode = build.encode_documents

    def slow(encoder, pieces):
        import time

        time.sleep(0.05)
        return encode(encoder, documents)

    monkeypatch.setattr(build, "encode_documents", slow)
    close = build.ShardWriter.close

    def losing(self, number, digest):
        if number == 2:
            machines.remove_node(lost, allow_graceful=False)
        close(self, number, digest)

    monkeypatch.setattr(build.ShardWriter, "close", losing)
    try:
        on_cluster(texts, tmp_path / "c", address=machines.address)
    finally:
        machines.shutdown()
    assert contents(tmp_path / "c") == local


def test_what_is_wrong_is_told(texts, tmp_path, monkeypatch):
    build_text = (texts / "in.txt", texts / "tokenizer", tmp_path / "c")
    with pytest.raises(EverybertError, match="give engine ray"):
        build_corpus(*build_text, address="auto")
    with pytest.raises(EverybertError, match="no engine 'spark'"):
        build_corpus(*build_text, engine="spark")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EverybertError, match=r"pip install 'everybert\[scale\]'"):
        build_corpus(*build_text, engine="ray")


def test_a_cluster_that_is_not_there_is_told_at_once(texts, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # the other tests' cluster
    start = time.monotonic()
    with pytest.raises(EverybertError, match=r"no Ray cluster at 127\.0\.0\.1:1 .*docs/CLUSTER\.md"):
        on_cluster(texts, tmp_path / "c", address="127.0.0.1:1")
    assert time.monotonic() - start < 30

    def slow(*args, **kwargs):
        raise Exception("The current node timed out during startup.\nMore")

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(EverybertError, match=r"could not be started \(The current node timed out") as caught:
        on_cluster(texts, tmp_path / "c")
    assert "\n" not in str(caught.value)
