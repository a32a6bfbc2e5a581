import json
import pickle
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.corpus import shards
from everybert.corpus.shards import Corpus, ExampleLayout, dtype_for, write_shard
from everybert.errors import EverybertError
from everybert.files import size_and_hash
from everybert.text.tokenizer import Tokenizer


def make_corpus(path, parts, vocab_size=100, languages=("en",), collocations=None):
    """A corpus folder from nested lists: shards of documents of sentences of ids."""
    (path / "shards").mkdir(parents=True)
    dtype = dtype_for(vocab_size)
    names = []
    for number, documents in enumerate(parts):
        sentences = [sentence for document in documents for sentence in document]
        names.append(f"{number:05d}")
        write_shard(
            path / "shards",
            names[-1],
            np.array([i for s in sentences for i in s], dtype),
            {
                "sentences": np.cumsum([0, *(len(s) for s in sentences)]),
                "documents": np.cumsum([0, *(len(d) for d in documents)]),
            },
        )
    if collocations:
        ids = np.array([i for c in collocations for i in c], np.int32)
        np.savez(path / "pmi.npz", ids=ids, offsets=np.cumsum([0, *(len(c) for c in collocations)]))
    meta = {
        "version": shards.VERSION,
        "dtype": dtype.name,
        "vocab_size": vocab_size,
        "tokenizer_digest": "abc",
        "languages": list(languages),
        "splits": {"train": names, "heldout": []},
        "files": {str(p.relative_to(path)): size_and_hash(p) for p in path.rglob("*.*") if p.is_file()},
    }
    (path / "corpus.json").write_text(json.dumps(meta))
    return path


corpora = st.lists(
    st.lists(
        st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(corpora, st.data())
def test_global_numbering_matches_flat_lists(tmp_path_factory, parts, data):
    corpus = Corpus.open(make_corpus(tmp_path_factory.mktemp("c") / "corpus", parts))
    documents = [document for part in parts for document in part]
    sentences = [sentence for document in documents for sentence in document]
    flat = [i for sentence in sentences for i in sentence]
    assert (corpus.documents, corpus.sentences, corpus.token_count) == (
        len(documents),
        len(sentences),
        len(flat),
    )
    bounds = corpus.sentence_offsets
    assert [corpus.tokens(a, b).tolist() for a, b in pairwise(bounds)] == sentences
    assert np.diff(corpus.document_sentences).tolist() == [len(d) for d in documents]
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    assert corpus.tokens(start, stop).tolist() == flat[start:stop]
    order = data.draw(st.permutations(range(len(sentences))))
    expected = [i for s in order for i in sentences[s]]
    assert corpus.gather(bounds[order], bounds[np.array(order) + 1]).tolist() == expected


def test_pickles_by_reopening(tmp_path):
    corpus = Corpus.open(make_corpus(tmp_path / "c", [[[[1, 2], [3]]]]))
    corpus.tokens(0, 3)
    assert len(pickle.dumps(corpus)) < 1000
    assert pickle.loads(pickle.dumps(corpus)).tokens(0, 3).tolist() == [1, 2, 3]


def test_keeps_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN_SHARDS", 2)
    corpus = Corpus.open(make_corpus(tmp_path / "c", [[[[n]]] for n in range(6)]))
    assert corpus.tokens(0, 6).tolist() == list(range(6))
    assert corpus._tokens_of.cache_info().currsize == 2


def test_out_of_range_is_an_error(tmp_path):
    corpus = Corpus.open(make_corpus(tmp_path / "c", [[[[1, 2]]]]))
    with pytest.raises(IndexError):
        corpus.tokens(0, 3)
    with pytest.raises(IndexError):
        corpus.gather(np.array([1]), np.array([3]))
    assert corpus.gather(np.array([], int), np.array([], int)).size == 0


def test_small_vocabularies_take_two_bytes():
    assert dtype_for(65536).itemsize == 2
    assert dtype_for(65537).itemsize == 4


def test_collocations(tmp_path):
    assert Corpus.open(make_corpus(tmp_path / "a", [[[[1]]]])).collocations() is None
    mined = [(1, 2, 3), (4, 5)]
    assert Corpus.open(make_corpus(tmp_path / "b", [[[[1]]]], collocations=mined)).collocations() == mined


def rewrite(path, **changes):
    meta = json.loads((path / "corpus.json").read_text())
    (path / "corpus.json").write_text(json.dumps(meta | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "corpus.json").unlink(), "not a corpus folder"),
        (lambda p: (p / "corpus.json").write_text("{"), "could not be read as JSON"),
        (lambda p: (p / "corpus.json").write_text('{"version": 99}'), "format 99"),
        (lambda p: (p / "corpus.json").write_text('{"version": 1}'), r"corpus\.json is damaged \(KeyError"),
        (lambda p: rewrite(p, dtype="words"), "is damaged"),
        (lambda p: rewrite(p, splits={"train": 3}), "is damaged"),
        (lambda p: rewrite(p, files={"shards/00000.tokens.bin": 1}), "is damaged"),
        (lambda p: (p / "shards/00000.tokens.bin").write_bytes(b"x"), "cut short"),
        (lambda p: (p / "shards/00000.tokens.bin").unlink(), "No such file"),
        (lambda p: (p / "shards/00000.documents.npy").write_bytes(b"junk"), "was changed"),
    ],
)
def test_damage_is_told(tmp_path, damage, message):
    path = make_corpus(tmp_path / "c", [[[[1, 2]]]])
    damage(path)
    with pytest.raises(EverybertError, match=message):
        Corpus.open(path)


def test_changed_shards_are_noticed_when_they_are_opened(tmp_path):
    path = make_corpus(tmp_path / "c", [[[[1, 2, 3]]]])
    (path / "shards/00000.tokens.bin").write_bytes(np.array([3, 2, 1], "<u2").tobytes())  # the same size
    with pytest.raises(EverybertError, match=r"tokens\.bin was changed"):
        Corpus.open(path).tokens(0, 3)
    sentences = path / "shards/00000.sentences.npy"
    sentences.write_bytes(sentences.read_bytes()[:-1] + b"\x7f")  # one flipped bit
    with pytest.raises(EverybertError, match=r"sentences\.npy was changed"):
        Corpus.open(path)


def test_empty_or_unknown_split_and_wrong_tokenizer(tmp_path):
    path = make_corpus(tmp_path / "c", [[[[1]]]])
    with pytest.raises(EverybertError, match=r"heldout split .* is empty"):
        Corpus.open(path, "heldout")
    with pytest.raises(EverybertError, match="no split 'test'"):
        Corpus.open(path, "test")
    with pytest.raises(EverybertError, match="does not belong"):
        Corpus.open(path).check_tokenizer("def")
    Corpus.open(path).check_tokenizer("abc")


def test_bert_layout(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b", "##c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    found = ExampleLayout.of(Tokenizer.load(tmp_path))
    assert (found.cls_id, found.sep_id, found.pad_id, found.mask_id) == (2, 3, 0, 4)
    assert found.vocab_size == 9 and found.pair_separators == 1 and found.segments
    assert np.flatnonzero(found.special_V).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(found.continues_V).tolist() == [7, 8]


def test_roberta_layout(tmp_path):
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "Ġ", "Ġa", "Ġb"]
    quoted = ", ".join(f'"{w}": {i}' for i, w in enumerate(words))
    (tmp_path / "vocab.json").write_text("{" + quoted + "}", encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\nĠ b\n", encoding="utf-8")
    found = ExampleLayout.of(Tokenizer.load(tmp_path))
    assert (found.cls_id, found.sep_id, found.pad_id, found.mask_id) == (0, 2, 1, 4)
    assert found.pair_separators == 2 and not found.segments
    assert np.flatnonzero(found.continues_V).tolist() == [5, 6]


def test_a_vocabulary_without_a_mask_is_refused():
    tokenizer = SimpleNamespace(cls_id=0, sep_id=1, pad_id=2, mask_id=None)
    with pytest.raises(EverybertError, match=r"\[MASK\]"):
        ExampleLayout.of(tokenizer)
