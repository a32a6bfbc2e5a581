"""Folders are complete or absent. (Kills and full disks at every step: tests/robustness/test_writes.py.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from refusals import refuses

from everybert.errors import EverybertError
from everybert.files import (
    accept_folder,
    as_type,
    atomic_folder,
    inside,
    is_complete,
    read_json,
    recover,
    remove_stale,
    verify_folder,
    write_json,
)


def write(path: Path, word: str) -> None:
    with atomic_folder(path) as tmp:
        (tmp / "config.json").write_text(json.dumps({"word": word}))
        (tmp / "part").mkdir()
        (tmp / "part" / "weights.bin").write_bytes(word.encode() * 1000)


def version(path: Path) -> str:
    """The version a reader sees; fails if it is not whole."""
    path = recover(path)
    verify_folder(path)
    word = read_json(path / "config.json")["word"]
    assert (path / "part" / "weights.bin").read_bytes() == word.encode() * 1000
    return word


def leftovers(parent: Path) -> list[str]:
    return [p.name for p in parent.iterdir() if p.name.startswith(".")]


def test_a_full_disk_inside_the_block_is_named(tmp_path: Path):
    write(tmp_path / "model", "old")
    with pytest.raises(EverybertError, match="disk is full"), atomic_folder(tmp_path / "model") as tmp:
        (tmp / "config.json").write_text("{}")
        with Path("/dev/full").open("w") as full:
            full.write("x" * 100_000)
    assert version(tmp_path / "model") == "old"
    assert leftovers(tmp_path) == []


def test_permissions_follow_the_umask(tmp_path: Path):
    with atomic_folder(tmp_path / "model") as tmp:
        (tmp / "private").write_text("x")
        (tmp / "private").chmod(0o600)  # as safetensors leaves its files
        (tmp / "plain").write_text("x")
    modes = {(tmp_path / "model" / name).stat().st_mode for name in ("private", "plain")}
    assert len(modes) == 1


def test_an_exception_in_the_block_passes_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(KeyError), atomic_folder(tmp_path / "a" / "model") as tmp:
        (tmp / "x").write_text("x")
        raise KeyError("mine")
    assert list((tmp_path / "a").iterdir()) == []


def test_a_place_that_may_not_be_written_is_named_and_a_missing_file_is_not_called_damaged(tmp_path: Path):
    refuses(r"could not be written .* that you may write to", write, Path("/proc/nowhere/model"), "new")
    refuses("there is no file", read_json, tmp_path / "nowhere.json")


def test_what_is_not_ours_is_not_replaced(tmp_path: Path, monkeypatch):
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.txt").write_text("years of work")
    refuses("everybert did not write", write, foreign, "new")
    assert (foreign / "chapter.txt").read_text() == "years of work"

    mine = tmp_path / "model"
    write(mine, "old")
    (mine / "notes.txt").write_text("added by hand")
    refuses(r"notes\.txt", write, mine, "new")
    assert version(mine) == "old"

    (tmp_path / "file").write_text("")
    refuses("is a file", write, tmp_path / "file", "new")
    monkeypatch.chdir(foreign)
    refuses("current folder", write, tmp_path, "new")


def test_an_empty_folder_and_a_link_are_filled(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "new")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write(tmp_path / "link", "next")
    assert version(tmp_path / "empty") == "next"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), "bytes where"),
        (lambda f: f.write_bytes(b"x" + f.read_bytes()[1:]), "damaged or was edited"),
        (lambda f: f.unlink(), "missing"),
    ],
)
def test_damage_is_found(tmp_path: Path, damage, cause: str):
    path = tmp_path / "model"
    write(path, "old")
    verify_folder(path)
    damage(path / "part" / "weights.bin")
    refuses(cause, verify_folder, path)
    assert is_complete(path) == (cause == "damaged or was edited")  # sizes only


def test_edited_settings_of_a_model_warn_and_its_weights_are_accepted_on_request(tmp_path: Path):
    path = tmp_path / "model"
    write(path, "old")
    (path / "config.json").write_text('{"word": "edited"}')
    with pytest.warns(UserWarning, match=r"config\.json changed since .* everybert info --accept"):
        verify_folder(path)
    (path / "part" / "weights.bin").write_bytes(b"other")
    refuses(r"weights\.bin has 5 bytes .* everybert info --accept", verify_folder, path)
    (path / "notes").write_text("mine")
    assert accept_folder(path) == ["config.json", "part/weights.bin"]
    verify_folder(path)  # without a warning
    refuses("notes", write, path, "new")  # it is still not ours
    (path / "config.json").unlink()
    refuses(r"config\.json is missing", verify_folder, path)


def test_checkpoints_are_never_edited(tmp_path: Path):
    with atomic_folder(tmp_path / "step") as tmp:
        (tmp / "progress.json").write_text("{}")
    (tmp_path / "step" / "progress.json").write_text('{"step": 9}')
    refuses(r"restore it$", verify_folder, tmp_path / "step")
    refuses("nothing to accept", accept_folder, tmp_path / "step")


def test_folders_from_elsewhere_have_no_list(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    verify_folder(tmp_path)
    assert not is_complete(tmp_path)


def test_a_hostile_list_is_refused(tmp_path: Path):
    (tmp_path / "manifest.json").write_text('{"everybert": 1, "files": {"x": 7}}')
    refuses("damaged", verify_folder, tmp_path)


def test_the_work_of_a_live_writer_is_left_alone(tmp_path: Path):
    with atomic_folder(tmp_path / "one") as tmp:
        (tmp / "a").write_text("a")
        write(tmp_path / "two", "new")  # clears leftovers beside it
        remove_stale(tmp_path)
        assert (tmp / "a").exists()
        assert not recover(tmp_path / "one").exists()
    assert is_complete(tmp_path / "one")


def test_writers_at_once_leave_one_whole_version(tmp_path: Path):
    code = """if True:
        import sys; sys.path[:0] = sys.argv[3:]
        from test_files import EverybertError, Path, write
        for _ in range(30):
            try: write(Path(sys.argv[1]), sys.argv[2])
            except EverybertError as error: assert chr(10) not in str(error)
    """
    here, command = Path(__file__).parent, [sys.executable, "-c", code, tmp_path / "model"]
    writers = [subprocess.Popen([*command, word, here, here / "laws"]) for word in ("one", "two")]
    assert [w.wait() for w in writers] == [0, 0]
    assert version(tmp_path / "model") in ("one", "two")
    assert leftovers(tmp_path) == []


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path):
    write_json(tmp_path / "a.json", {"é": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"b": object()})
    assert read_json(tmp_path / "a.json") == {"é": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": ' * 100_000, "\xff", "1" * 10_000, "nul"])
def test_bad_json_is_one_line(tmp_path: Path, text: str):
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    refuses(r"a\.json", read_json, tmp_path / "a.json")


def test_files_stay_inside(tmp_path: Path):
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("s")
    (folder / "plain").write_text("p")
    assert inside(folder, "plain").read_text() == "p"
    for name in ("../secret", str(secret), "a/../../secret", "..\\secret", ""):
        refuses("outside itself", inside, folder, name)
    (folder / "link").symlink_to(secret)
    refuses("link out of its folder", inside, folder, "link")
    os.mkfifo(folder / "pipe")
    refuses("regular file", inside, folder, "pipe")


def test_a_hub_cache_links_to_its_blobs(tmp_path: Path):
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "0123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    assert inside(snapshot, "config.json").read_text() == "{}"


def test_a_card_may_be_edited(tmp_path: Path):
    with atomic_folder(tmp_path / "model") as tmp:
        (tmp / "README.md").write_text("card", encoding="utf-8")
        (tmp / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model" / "README.md").write_text("a better card", encoding="utf-8")
    verify_folder(tmp_path / "model")
    assert is_complete(tmp_path / "model")


@pytest.mark.parametrize(
    ("value", "hint", "found"),
    [
        (3, float, 3.0),
        (None, float | None, None),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, 2], tuple[float, float] | float, (1.0, 2.0)),
        ("a", Literal["a", "b"], "a"),
        ("c", Literal["a", "b"], "one of a, b"),
        ("3", int | None, "a whole number"),
        (True, int, "a whole number"),
        (1, bool, "true or false"),
        ([1, 2, 3], tuple[int, int], "a list of 2"),
        *((number, float, "a number") for number in (float("nan"), float("inf"), 10**400, True)),
    ],
)
def test_values_of_a_file_as_the_types_of_fields(value, hint, found):
    if isinstance(found, str) and found != value:
        with pytest.raises(TypeError, match=f"^{found}$"):
            as_type(value, hint)
    else:
        assert as_type(value, hint) == found and type(as_type(value, hint)) is type(found)
