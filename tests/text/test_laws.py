"""Laws of readers and tokenizers over texts nobody would write: nothing is lost, and nothing but a line is said."""

import csv
import io
import json
import logging

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizer_samples import sentences, write_bpe, write_sentencepiece, write_wordpiece

from everybert.errors import EverybertError
from everybert.text.readers import RECORD_KINDS, read_documents, read_records
from everybert.text.tokenizer import Tokenizer

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MARKS = "ab1é漢\U0001f642 \t\n\r\"',;:{}[]\\-\u2028\u0085\u00a0"
cells = st.text(MARKS, max_size=12)
noise = st.binary(max_size=200) | st.text(MARKS + "\0\ufeff", max_size=120).map(str.encode)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    logging.getLogger("everybert").setLevel(logging.ERROR)
    yield
    logging.getLogger("everybert").setLevel(logging.NOTSET)


# ── readers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _csv(rows: list[dict[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["id", "text"], lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _tsv(rows: list[dict[str, str]]) -> str:
    return "\n".join("\t".join(row) for row in (("id", "text"), *(row.values() for row in rows))) + "\n"


def _lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "write"), [("x.csv", _csv), ("x.tsv", _tsv), ("x.jsonl", _lines), ("x.json", json.dumps)]
)
@given(texts=st.lists(cells, min_size=1, max_size=5))
@QUICK
def test_records_come_back_as_they_were_written(tmp_path, name, write, texts):
    if name == "x.tsv":  # which has no way to write these
        texts = [" ".join(text.split()) for text in texts]
    if name == "x.csv":  # a line may end in any of three ways, and is read as ending in one
        texts = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    rows = [{"id": f"r{i}", "text": text} for i, text in enumerate(texts)]
    (tmp_path / name).write_text(write(rows), "utf-8", newline="")
    assert list(read_records(tmp_path / name)) == rows
    assert list(read_documents(tmp_path / name, column="text")) == [text.strip() for text in texts if text.strip()]


@pytest.mark.parametrize("kind", [*RECORD_KINDS, ".txt", ".xml", ".txt.gz", ".csv.bz2", ".jsonl.xz", ".jsonl.zst"])
@given(content=noise)
@example(content=b"[" * 5000)
@example(content=b'{"text": ' * 3000)
@example(content=b"\xff\xfea\0")
@example(content=b'"')
@example(content=b"a,b\n1")
@QUICK
def test_noise_is_read_or_refused_in_a_line(tmp_path, kind, content):
    path = tmp_path / f"x{kind}"
    path.write_bytes(content)
    readings = [lambda: read_documents(path), lambda: read_documents(path, errors="replace")]
    if kind in RECORD_KINDS:
        readings += [lambda: read_records(path), lambda: read_records(path, skip_bad=True)]
    for reading in readings:
        try:
            assert all(reading())  # none of them empty
        except EverybertError as error:
            assert "\n" not in str(error) and path.name in str(error)


# ── tokenizers ───────────────────────────────────────────────────────────────────────────────────────────────

WORDS = sorted({word for text in sentences(60) for word in text.lower().split() if word.isascii() and word.isalpha()})
wild = st.text(max_size=40) | st.text(MARKS + "\u0301ﬀ\u200b", max_size=60) | st.sampled_from(sentences(20))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {
        "bpe": write_bpe(root / "bpe"),
        "wordpiece": write_wordpiece(root / "wordpiece", lowercase=False),
        "unigram": write_sentencepiece(root / "unigram", albert=True),
    }
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


@given(text=wild)
@QUICK
def test_byte_level_pairs_lose_nothing(made, text):
    encoding = made["bpe"].encode(text, specials=False)
    assert made["bpe"].decode(encoding.ids, skip_special=False) == text.encode("utf-8", "replace").decode()
    covered = {i for start, end in encoding.offsets for i in range(start, end)}
    assert covered >= {i for i, letter in enumerate(text) if not letter.isspace()}


@pytest.mark.parametrize("name", ["bpe", "wordpiece", "unigram"])
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=20))
@QUICK
def test_known_words_come_back(made, name, words):
    encoding = made[name].encode(" ".join(words))
    assert made[name].decode(encoding.ids).strip() == " ".join(words)
    pieces = [(start, end) for (start, end), special in zip(encoding.offsets, encoding.special) if not special]
    assert "".join(" ".join(words)[start:end] for start, end in pieces).replace(" ", "") == "".join(words)


@pytest.mark.parametrize("name", ["bpe", "wordpiece", "unigram"])
@given(texts=st.lists(wild, min_size=1, max_size=4))
@QUICK
def test_a_batch_is_its_texts_one_by_one(made, name, texts):
    batch = made[name].encode_batch(texts)
    assert [e.ids for e in batch] == [made[name].encode(text).ids for text in texts] == made[name].ids_batch(texts)
    assert [e.offsets for e in batch] == [made[name].encode(text).offsets for text in texts]


@pytest.mark.parametrize("name", ["bpe", "wordpiece", "unigram"])
@given(text=wild)
@QUICK
def test_what_is_saved_reads_the_same(made, name, text, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"saved-{name}"
    if not folder.exists():
        made[name].save(folder)
    again = Tokenizer.load(folder)
    assert again.digest == made[name].digest and again.encode(text).ids == made[name].encode(text).ids
