"""Files on a real Ray cluster of several processes on this machine: the same rows, whoever is killed."""

import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import tiny_model
from commandline import run
from processes import descendants, is_alive
from pyarrow import parquet
from refusals import refuses

from everybert.cluster import cluster
from everybert.inference import files as module
from everybert.inference.files import predict_files

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(300)
TEXTS = [f"the {a} was {b}" for a in ("film", "food", "song") for b in ("good", "bad", "great", "awful")] * 5


@pytest.fixture(scope="module")
def two_workers():
    with cluster(workers=2) as ray:
        yield ray


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("m") / "m", {"classify": 2}, ["neg", "pos"])


@pytest.fixture
def files(tmp_path):
    for name in ("a", "b"):
        table = pa.table({"id": [f"{name}{i}" for i in range(60)], "text": TEXTS})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=11)
    return [tmp_path / "a.parquet", tmp_path / "b.parquet"]


def contents(path):
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


def test_a_killed_worker_loses_nothing_and_the_bytes_are_the_local_engines(
    two_workers, folder, files, tmp_path, monkeypatch
):
    mark = tmp_path / "killed"

    write = module.Predictor.write

    def dying(predictor, part):  # known here alone, so it is sent to the workers as it is
        if part[0] == 3 and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return write(predictor, part)

    monkeypatch.setattr(module.Predictor, "write", dying)
    seen = []
    how = {"part_rows": 16, "progress": seen.append}
    done = predict_files("embed", folder, files, tmp_path / "ray", engine="ray", **how)
    assert mark.exists() and done.rows == 120
    assert len(seen) == 8 and seen[-1] == 120
    predict_files("embed", folder, files, tmp_path / "local", **how)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_a_stopped_run_goes_on_in_the_other_engine(two_workers, folder, files, tmp_path):
    def stop(rows):
        if rows >= 32:
            raise KeyboardInterrupt

    how = {"options": {"scores": True}, "part_rows": 16, "columns": {}}
    assert predict_files("classify", folder, files, tmp_path / "c", progress=stop, **how).stopped
    words = ["classify", *files, "--model", folder, "--scores", "--part-rows", 16, "--engine", "ray"]
    found = run(*words, "--out", tmp_path / "c")
    assert "120 rows, " in found.output and "from before" in found.output
    predict_files("classify", folder, files, tmp_path / "whole", **how)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_what_is_wrong_is_told_with_file_and_row(two_workers, folder, files, tmp_path):
    parquet.write_table(pa.table({"id": ["x"] * 40, "text": [*TEXTS[:30], None, *TEXTS[:9]]}), files[1])
    why = r"b\.parquet:31: the column 'text' has no text; skip_bad=True"
    refuses(why, predict_files, "embed", folder, files, tmp_path / "out", part_rows=16, engine="ray")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_leaves_no_process(folder, tmp_path):
    parquet.write_table(pa.table({"text": TEXTS * 1000}), tmp_path / "in.parquet")
    words = ["embed", "in.parquet", "--model", str(folder), "--out", "out", "--engine", "ray", "--workers", "2"]
    child = subprocess.Popen(
        [sys.executable, "-m", "everybert", *words, "--part-rows", "100"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 200
    while not list((tmp_path).glob("out.building/part-*")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(child.pid)
    assert len(family) > 3
    os.kill(child.pid, signal.SIGINT)
    error = child.communicate(timeout=120)[1].decode()
    assert child.returncode == 130 and "run the same command again" in error
    while alive := [pid for pid in family if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
