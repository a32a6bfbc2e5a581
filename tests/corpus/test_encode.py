import json
from itertools import pairwise

import numpy as np
import pytest
from corpus_texts import WORDS, documents, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.corpus import encode
from everybert.corpus.encode import DocumentEncoder, words_are_independent

KINDS = ("wordpiece", "bpe", "unigram")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    for kind in KINDS:
        tokenizer(kind).save(root / kind)
    return root


odd = st.sampled_from([*WORDS, "", "\xa0", "\t", "é", "e\u0301", "\u0301x", "[SEP]", "<mask>", "'s", "x\u2028y", "ﬁ"])
texts = st.lists(odd | st.text(max_size=5), min_size=1, max_size=12).map(" ".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(some=st.lists(texts, min_size=1, max_size=4))
def test_words_one_by_one_give_the_ids_of_whole_sentences(folders, kind, some):
    encoder = DocumentEncoder(folders / kind, False)
    assert encoder.by_words
    fast = encoder.encode(some)
    encoder.by_words = False
    assert fast == encoder.encode(some)


def decoded(encoder, result):
    bounds = np.cumsum([0, *result.sentence_lengths])
    return [encoder.tokenizer.decode(result.tokens[a:b].tolist()) for a, b in pairwise(bounds)]


def test_lines_end_sentences_unless_wrapped(folders):
    text = "The old town\nwalks over. A river\nsings."
    plain = DocumentEncoder(folders / "bpe", False)
    assert decoded(plain, plain([(text, 0)])) == ["The old town", " walks over.", " A river", " sings."]
    wrapped = DocumentEncoder(folders / "bpe", True)
    assert decoded(wrapped, wrapped([(text, 0)])) == ["The old town walks over.", " A river sings."]


def test_special_tokens_in_text_do_not_act(folders):
    encoder = DocumentEncoder(folders / "wordpiece", False)
    result = encoder([("the [SEP] river [MASK]. [CLS]\n[PAD]\n☃ hill", 0)])
    assert not set(result.tokens.tolist()) & (encoder.tokenizer.special_ids - {encoder.tokenizer.unk_id})
    assert decoded(encoder, result)[0] == "the river."
    assert result.unknown == 1
    assert result.document_sentences.tolist() == [len(result.sentence_lengths)]
    assert (result.sentence_lengths > 0).all()


def test_documents_without_tokens_are_left_out_and_counted(folders):
    encoder = DocumentEncoder(folders / "wordpiece", False)
    result = encoder([("the river", 1), ("\x01", 0), ("the old town. A hill.", 2)])
    assert decoded(encoder, result) == ["the river", "the old town.", "a hill."]
    assert (result.empty, result.document_sentences.tolist(), result.languages.tolist()) == (1, [1, 2], [1, 2])


def test_a_full_memory_of_words_is_emptied(folders, monkeypatch):
    monkeypatch.setattr(encode, "CACHED_CHARACTERS", 20)
    encoder = DocumentEncoder(folders / "wordpiece", False)
    some = [(text, 0) for text in documents(20)]
    expected = [DocumentEncoder(folders / "wordpiece", False)([document]).tokens.tolist() for document in some]
    assert [encoder([document]).tokens.tolist() for document in some] == expected
    assert encoder.characters < 2000


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ".*"}, "behavior": "Isolated", "invert": False}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a b"}, "content": "ab"}},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"added_tokens": [{"content": "New York"}]},
    ],
)
def test_other_tokenizers_see_sentences_whole(tmp_path, folders, change):
    spec = json.loads((folders / "wordpiece/tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert words_are_independent(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | change))
    assert not words_are_independent(tmp_path)
