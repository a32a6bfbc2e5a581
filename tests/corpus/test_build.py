import bz2
import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from corpus_texts import documents, tokenizer

from everybert.corpus import build, encode
from everybert.corpus.build import build_corpus, summarise, verify
from everybert.corpus.shards import Corpus
from everybert.errors import EverybertError
from everybert.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t") / "tokenizer"
    tokenizer("wordpiece").save(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("\n\n".join(documents(200)), "utf-8")
    return path


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def words(text):
    return "".join(text.split())


def corpus_documents(folder, split="train"):
    corpus = Corpus.open(folder, split)
    made_by = Tokenizer.load(corpus.tokenizer_path)
    bounds = corpus.sentence_offsets[corpus.document_sentences]
    return [words(made_by.decode(corpus.tokens(a, b).tolist())) for a, b in pairwise(bounds)]


def normal(tok, text):
    return words(tok.decode(tok.encode(text, specials=False).ids))


def small(monkeypatch, unit=300):
    monkeypatch.setattr(build, "UNIT", unit)


def test_documents_sentences_and_counts(tmp_path, wordpiece, texts):
    summary = build_corpus(texts, wordpiece, tmp_path / "c", workers=1, heldout=0.1)
    tok = Tokenizer.load(wordpiece)
    train, heldout = (corpus_documents(tmp_path / "c", split) for split in ("train", "heldout"))
    expected = [normal(tok, text) for text in documents(200)]
    assert sorted(train + heldout) == sorted(expected)
    assert train == [text for text in expected if text in set(train)]  # in the order of the input
    assert 5 < len(heldout) < 40
    corpus = Corpus.open(tmp_path / "c")
    corpus.check_tokenizer(tok.digest)
    assert corpus.dtype.itemsize == 2
    assert summary["splits"]["train"]["documents"] == corpus.documents == len(train)
    assert summary["splits"]["train"]["tokens"] == corpus.token_count == corpus.unigram().sum()
    assert (corpus.unigram() == np.bincount(corpus.tokens(0, corpus.token_count), minlength=tok.size)).all()
    assert summary["counts"]["documents"] == 200
    assert not (tmp_path / "c/records").exists()
    verify(tmp_path / "c")


def test_same_bytes_for_any_number_of_workers(tmp_path, wordpiece, texts, monkeypatch):
    small(monkeypatch)
    made = []
    for count in (1, 2, 3):
        out = tmp_path / f"c{count}"
        build_corpus(texts, wordpiece, out, workers=count, heldout=0.1, shard_characters=4000, pmi=True)
        made.append(contents(out))
    assert len([name for name in made[0] if name.endswith("tokens.bin")]) > 8
    assert made[0] == made[1] == made[2]


def test_copies_are_dropped_and_the_first_stays(tmp_path, wordpiece, monkeypatch):
    small(monkeypatch)
    some = documents(30)
    again = some + some[:10] + documents(5, seed=9) + [f"  {some[3]}\n"]
    (tmp_path / "in.txt").write_text("\n\n".join(again), "utf-8")
    summary = build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / "c", workers=2, heldout=0, shard_characters=999)
    tok = Tokenizer.load(wordpiece)
    assert corpus_documents(tmp_path / "c") == [normal(tok, t) for t in some + documents(5, seed=9)]
    assert summary["counts"]["duplicates"] == 11


def test_heldout_depends_on_the_document_alone(tmp_path, wordpiece):
    some = documents(100)
    found = []
    for seed in (1, 2):
        random.Random(seed).shuffle(some)
        (tmp_path / "in.txt").write_text("\n\n".join(some), "utf-8")
        build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / str(seed), workers=1, heldout=0.2)
        found.append(sorted(corpus_documents(tmp_path / str(seed), "heldout")))
    assert found[0] == found[1]


def test_too_little_held_out_text_is_told(tmp_path, wordpiece, texts, caplog):
    build_corpus(texts, wordpiece, tmp_path / "some", workers=1, heldout=0.5)
    build_corpus(texts, wordpiece, tmp_path / "none", workers=1, heldout=0)
    assert not caplog.text
    build_corpus(texts, wordpiece, tmp_path / "few", workers=1, heldout=0.01)
    assert "tokens are held out, too few to measure a model: raise heldout" in caplog.text


def interrupted(monkeypatch, after):
    """Make the build die after so many shards."""
    close = build.ShardWriter.close

    def dying(self, number, digest):
        if number == after:
            raise KeyboardInterrupt
        close(self, number, digest)

    monkeypatch.setattr(build.ShardWriter, "close", dying)
    return lambda: monkeypatch.setattr(build.ShardWriter, "close", close)


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_build_continues_without_redoing_shards(tmp_path, wordpiece, texts, monkeypatch, count):
    small(monkeypatch)
    kwargs = {"heldout": 0.1, "shard_characters": 4000}
    build_corpus(texts, wordpiece, tmp_path / "whole", workers=1, **kwargs)
    recover = interrupted(monkeypatch, after=3)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(texts, wordpiece, tmp_path / "c", workers=count, **kwargs)
    recover()
    assert not (tmp_path / "c").exists()
    with pytest.raises(EverybertError, match="not finished"):
        Corpus.open(tmp_path / "c")
    tokenized = []
    original = encode.DocumentEncoder.sentences
    monkeypatch.setattr(
        encode.DocumentEncoder, "sentences", lambda s, text: tokenized.append(text) or original(s, text)
    )
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "c.building/shards").iterdir()}
    summary = build_corpus(texts, wordpiece, tmp_path / "c", workers=1, **kwargs)
    assert summary["kept_shards"] == 3
    assert tokenized
    assert not set(tokenized) & set(documents(200)[:20])
    finished = [name for name in before if name < "00003"]
    assert len(finished) >= 9
    assert all((tmp_path / "c/shards" / name).stat().st_mtime_ns == before[name] for name in finished)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")
    assert not (tmp_path / "c.building").exists()


KILLED = """
import sys, time
from everybert.corpus import build, encode
build.UNIT = 300
original = encode.DocumentEncoder.__call__
def slow(self, pieces):
    time.sleep(0.02)
    return original(self, pieces)
encode.DocumentEncoder.__call__ = slow
build.build_corpus(sys.argv[1], sys.argv[2], sys.argv[3], workers=2, shard_characters=2000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_outright_it_continues_and_leaves_no_worker(tmp_path, wordpiece, texts, monkeypatch):
    out = tmp_path / "c"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(texts), str(wordpiece), str(out)])
    records = tmp_path / "c.building/records"
    deadline = time.monotonic() + 300
    while len(list(records.glob("*.json")) if records.exists() else []) < 2:
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    family = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    assert len(family) == 2
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    small(monkeypatch)
    summary = build_corpus(texts, wordpiece, out, workers=1, shard_characters=2000)
    assert summary["kept_shards"] >= 2
    assert summary["counts"]["documents"] == 200
    build_corpus(texts, wordpiece, tmp_path / "whole", workers=1, shard_characters=2000)
    assert contents(out) == contents(tmp_path / "whole")
    while any(Path(f"/proc/{worker}").exists() for worker in family):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_changes_are_noticed(tmp_path, wordpiece, texts, monkeypatch):
    small(monkeypatch)
    kwargs = {"workers": 1, "shard_characters": 4000}
    recover = interrupted(monkeypatch, after=2)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(texts, wordpiece, tmp_path / "c", **kwargs)
    recover()
    tokenizer("bpe").save(tmp_path / "other")
    with pytest.raises(EverybertError, match=r"other tokenizer_digest.*fresh=True"):
        build_corpus(texts, tmp_path / "other", tmp_path / "c", **kwargs)
    with pytest.raises(EverybertError, match="other options"):
        build_corpus(texts, wordpiece, tmp_path / "c", heldout=0.2, **kwargs)
    original = texts.read_text("utf-8")
    texts.write_text("A new start.\n\n" + original, "utf-8")
    with pytest.raises(EverybertError, match="inputs differ"):
        build_corpus(texts, wordpiece, tmp_path / "c", **kwargs)
    texts.write_text(original[:3000], "utf-8")
    with pytest.raises(EverybertError, match="inputs differ"):
        build_corpus(texts, wordpiece, tmp_path / "c", **kwargs)
    summary = build_corpus(texts, wordpiece, tmp_path / "c", fresh=True, **kwargs)
    assert summary["kept_shards"] == 0


def test_a_finished_corpus_is_left_alone_or_replaced(tmp_path, wordpiece, texts):
    first = build_corpus(texts, wordpiece, tmp_path / "c", workers=1)
    before = contents(tmp_path / "c")
    again = build_corpus(texts, wordpiece, tmp_path / "c", workers=2)
    assert again["counts"] == first["counts"]
    assert contents(tmp_path / "c") == before
    with pytest.raises(EverybertError, match=r"other options.*fresh=True"):
        build_corpus(texts, wordpiece, tmp_path / "c", workers=1, wrapped=True)
    texts.write_text("Another text.", "utf-8")
    with pytest.raises(EverybertError, match="other inputs"):
        build_corpus(texts, wordpiece, tmp_path / "c", workers=1)
    assert build_corpus(texts, wordpiece, tmp_path / "c", workers=1, heldout=0, fresh=True)["counts"]["documents"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "in.txt"]
    mined = build_corpus(texts, wordpiece, tmp_path / "c", workers=1, heldout=0, pmi=True)
    assert mined["collocations"] == 0
    assert Corpus.open(tmp_path / "c").collocations() == []
    verify(tmp_path / "c")


def test_foreign_folders_are_never_replaced(tmp_path, wordpiece, texts):
    (tmp_path / "c").mkdir()
    (tmp_path / "c/thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(EverybertError, match="not a corpus"):
            build_corpus(texts, wordpiece, tmp_path / "c", fresh=fresh)
    (tmp_path / "c/thesis.txt").unlink()
    build_corpus(texts, wordpiece, tmp_path / "c", workers=1)


def test_languages_are_stored_by_document(tmp_path, wordpiece):
    for n, name in enumerate(("de", "en", "fr")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("\n\n".join(documents(5 + n, seed=n)), "utf-8")
    languages = {"fr": tmp_path / "fr", "en": [tmp_path / "en/x.txt"], "de": tmp_path / "de"}
    summary = build_corpus(None, wordpiece, tmp_path / "c", languages=languages, workers=1, heldout=0)
    corpus = Corpus.open(tmp_path / "c")
    assert corpus.languages == ("de", "en", "fr")
    assert np.bincount(corpus.document_language).tolist() == [5, 6, 7]
    assert summary["languages"] == {"de": 5, "en": 6, "fr": 7}
    with pytest.raises(EverybertError, match="LANGUAGE=FILE"):
        build_corpus([tmp_path / "en/x.txt"], wordpiece, tmp_path / "d", languages=languages)


def test_a_document_longer_than_a_unit_is_whole(tmp_path, wordpiece, monkeypatch):
    small(monkeypatch, unit=1000)
    (tmp_path / "in.txt").write_text("the river sings " * 5000 + "x" * 5000, "utf-8")
    summary = build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / "c", workers=2, heldout=0)
    assert summary["counts"]["documents"] == 1
    (text,) = corpus_documents(tmp_path / "c")
    assert text.count("theriversings") == 5000


def test_large_vocabularies_take_four_bytes(tmp_path, texts):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    vocabulary = {"[UNK]": 0} | {f"w{n}": n for n in range(1, 70_000)}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    (tmp_path / "in.txt").write_text("w69999 w1 huh", "utf-8")
    summary = build_corpus(tmp_path / "in.txt", Tokenizer(backend), tmp_path / "c", workers=1, heldout=0)
    corpus = Corpus.open(tmp_path / "c")
    assert corpus.dtype.itemsize == 4
    assert corpus.tokens(0, 3).tolist() == [69999, 1, 0]
    assert summary["unknown_rate"] == pytest.approx(1 / 3)


def test_bad_text_is_located_or_replaced(tmp_path, wordpiece):
    (tmp_path / "in.txt").write_bytes("The café.\n\n".encode() + "The café.".encode("latin-1"))
    with pytest.raises(EverybertError, match=r"in\.txt is not UTF-8 at byte 19"):
        build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / "c", workers=2, heldout=0)
    # What was read before the bad byte is the same either way, so the build goes on.
    summary = build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / "c", errors="replace", workers=2, heldout=0)
    assert (summary["counts"]["documents"], summary["counts"]["replaced"]) == (2, 1)


def test_nothing_to_build_is_an_error(tmp_path, wordpiece):
    (tmp_path / "in.txt").write_text(" \n\n \n")
    with pytest.raises(EverybertError, match="no documents in 1 files"):
        build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / "c", workers=1)
    (tmp_path / "in.txt").write_text("\x01\x02")  # text, but no token
    with pytest.raises(EverybertError, match="no documents"):
        build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / "c", workers=1)
    (tmp_path / "in.txt").write_text("one text")
    with pytest.raises(EverybertError, match="lower heldout"):
        build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / "c", workers=1, heldout=0.99999999)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.txt"]
    for kwargs in ({"heldout": 1.0}, {"heldout": -0.1}, {"workers": 0}):
        with pytest.raises(EverybertError, match="must be"):
            build_corpus(tmp_path / "in.txt", wordpiece, tmp_path / "c", **kwargs)


def test_a_full_disk_is_told_and_the_build_continues(tmp_path, wordpiece, texts, monkeypatch):
    small(monkeypatch)
    original = build.write_shard

    def full(folder, name, *rest):
        if name == "00002":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(folder, name, *rest)

    monkeypatch.setattr(build, "write_shard", full)
    with pytest.raises(EverybertError, match="disk is full"):
        build_corpus(texts, wordpiece, tmp_path / "c", workers=2, shard_characters=4000)
    monkeypatch.setattr(build, "write_shard", original)
    assert build_corpus(texts, wordpiece, tmp_path / "c", workers=1, shard_characters=4000)["kept_shards"] == 2


def test_unwritable_place_is_told(tmp_path, wordpiece, texts):
    (tmp_path / "file").write_text("x")
    with pytest.raises(EverybertError, match="could not be written"):
        build_corpus(texts, wordpiece, tmp_path / "file/c", workers=1)


def test_a_killed_worker_is_told(tmp_path, wordpiece, texts, monkeypatch):
    monkeypatch.setattr(encode, "_encode", die)
    with pytest.raises(EverybertError, match="worker was killed"):
        build_corpus(texts, wordpiece, tmp_path / "c", workers=2)


def die(pieces):
    os._exit(9)


def test_compressed_texts_and_records_are_read(tmp_path, wordpiece):
    (tmp_path / "w.txt.bz2").write_bytes(bz2.compress(b"the old town.\n\nthe old town.\n"))
    rows = [json.dumps({"body": f"{text}\nA \ud800."}) for text in ("the river", "a bridge")]
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    inputs = [tmp_path / "w.txt.bz2", tmp_path / "r.jsonl.gz"]
    summary = build_corpus(inputs, wordpiece, tmp_path / "c", workers=2, heldout=0)
    assert (summary["counts"]["documents"], summary["counts"]["duplicates"]) == (3, 1)
    assert corpus_documents(tmp_path / "c")[0] == "theoldtown."


def test_damage_is_found(tmp_path, wordpiece, texts):
    build_corpus(texts, wordpiece, tmp_path / "c", workers=1)
    assert summarise(tmp_path / "c")["counts"]["documents"] == 200
    file = tmp_path / "c/shards/00000.tokens.bin"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(EverybertError, match="was changed"):
        verify(tmp_path / "c")
