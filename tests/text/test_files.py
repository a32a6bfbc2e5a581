import bz2
import gzip
import lzma
import os
import threading

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from everybert.errors import EverybertError
from everybert.text import files
from everybert.text.files import ReadReport, blocks, expand, kind, lines, open_bytes

PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("packing", PACKERS)
def test_packed_files_are_unpacked_and_damage_is_named(tmp_path, packing):
    path = tmp_path / f"a.txt{packing}"
    body = "".join(f"line {n * n}\n" for n in range(5000)).encode()
    packed = PACKERS[packing](body)
    path.write_bytes(packed)
    assert kind(path) == ".txt"
    assert [line for _, line in lines(path)] == body.decode().split("\n")[:-1]
    path.write_bytes(packed[: len(packed) // 2])
    if packing != ".zst":  # a zstd frame cut between its blocks cannot be told from a finished one
        with pytest.raises(EverybertError, match=r"a\.txt\..*damaged"):
            list(lines(path))
    path.write_bytes(b"\0not packed at all")
    with pytest.raises(EverybertError, match="damaged"):
        list(lines(path))


def test_two_streams_in_one_file_are_both_read(tmp_path):
    for packing, pack in PACKERS.items():
        path = tmp_path / f"a.txt{packing}"
        path.write_bytes(pack(b"one\n") + pack(b"two\n"))
        assert [line for _, line in lines(path)] == ["one", "two"]


def test_expand_sorts_folders_and_skips_hidden_files(tmp_path):
    (tmp_path / "d/sub").mkdir(parents=True)
    for name in ("d/b.txt", "d/a.txt", "d/sub/c.txt", "d/.hidden"):
        (tmp_path / name).write_text("x")
    assert [p.name for p in expand([tmp_path / "d"])] == ["a.txt", "b.txt", "c.txt"]
    (tmp_path / "empty").mkdir()
    for bad, message in ((tmp_path / "gone", "does not exist"), (tmp_path / "empty", "no files")):
        with pytest.raises(EverybertError, match=message):
            expand([bad])
    with pytest.raises(EverybertError, match="no input files"):
        expand([])


def test_bad_bytes_are_located_or_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 7)
    path = tmp_path / "mixed.txt"
    path.write_bytes("naïve \ufffd\n".encode() * 3 + "café\n".encode("latin-1") + b"end\n")
    offset = path.read_bytes().index(b"caf\xe9") + 3
    with pytest.raises(EverybertError, match=rf"mixed\.txt is not UTF-8 at byte {offset} \(0xe9\)"):
        list(blocks(path, "strict", ReadReport()))
    with pytest.raises(EverybertError, match=f"byte {offset} "):
        list(lines(path))
    report = ReadReport()
    text = "".join(run for run, _ in blocks(path, "replace", report))
    assert "caf\ufffd" in text
    assert report.replaced == 1  # the three that were there before do not count


def test_binary_and_utf16_are_told(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"abc\ndef\0ghi")
    with pytest.raises(EverybertError, match=r"binary .*byte 7"):
        list(lines(path))
    report = ReadReport()
    assert [line for _, line in lines(path, "replace", report)] == ["abc", "def\ufffdghi"]
    assert report.replaced == 1
    path.write_bytes("hello".encode("utf-16"))
    with pytest.raises(EverybertError, match="UTF-16"):
        list(lines(path))
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert list(lines(path)) == [(1, "hello")]


@given(st.text(st.characters(exclude_characters="\0\r\ufeff", exclude_categories=["Cs"])), st.integers(1, 9))
def test_blocks_lose_nothing(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("b") / "x.txt"
    path.write_text(text, "utf-8", newline="")
    block, files.BLOCK = files.BLOCK, size
    try:
        runs = list(blocks(path, "strict", ReadReport(), 5))
    finally:
        files.BLOCK = block
    assert "".join(run for run, _ in runs) == text
    assert all(run.endswith("\n") != goes_on for run, goes_on in runs[:-1])


def test_report_follows_the_bytes_on_disk(tmp_path):
    report = ReadReport()
    for name in "ab":
        (tmp_path / name).write_bytes(b"x" * 100)
        with open_bytes(tmp_path / name, report) as stream:
            stream.read()
    assert report.bytes_read == 200


def test_unreadable_file_is_told(tmp_path):
    with pytest.raises(EverybertError, match="cannot be read"), open_bytes(tmp_path):
        pass


def test_pipes_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"one\ntwo\n",))
    writer.start()
    report = ReadReport()
    assert [line for _, line in lines(tmp_path / "pipe", report=report)] == ["one", "two"]
    writer.join()
    assert report.bytes_read == 0
