"""The tokenizer gives transformers' ids on the same files, offsets into the caller's text, and survives anything."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses
from tokenizer_samples import BERT, sentences, wild_text
from tokenizers import Tokenizer as Backend

from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import train_tokenizer

FORMATS = ["bert", "uncased", "cased", "roberta", "albert", "xlm-roberta"]
_QUICK = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


def test_golden_single(bert):
    encoding = bert.encode("Sinan loves a beautiful day")
    assert encoding.tokens == ["[CLS]", "sin", "##an", "loves", "a", "beautiful", "day", "[SEP]"]
    assert encoding.offsets == [(0, 0), (0, 3), (3, 5), (6, 11), (12, 13), (14, 23), (24, 27), (0, 0)]
    assert encoding.words == [None, 0, 0, 1, 2, 3, 4, None]
    assert encoding.special == [True, *[False] * 6, True]
    assert encoding.ids[0] == 101 and encoding.ids[-1] == 102


def test_golden_pair(bert):
    encoding = bert.encode("Paris is a beautiful city", "I love Paris")
    assert len(encoding) == 11
    assert encoding.segments == [0] * 7 + [1] * 4
    assert encoding.sequence == [None, 0, 0, 0, 0, 0, None, 1, 1, 1, None]
    assert encoding.offsets[7:10] == [(0, 1), (2, 6), (7, 12)]


def test_golden_normalisation(bert):
    assert bert.encode("Café Dupont", specials=False).tokens == ["cafe", "dupont"]
    assert bert.encode("北京abc", specials=False).tokens == ["北", "京", "abc"]
    assert (bert.kind, bert.size, bert.lowercase) == ("wordpiece", 30522, True)
    assert (bert.pad_id, bert.unk_id, bert.cls_id, bert.sep_id, bert.mask_id) == (0, 100, 101, 102, 103)
    assert bert.special_ids == {0, 100, 101, 102, 103}
    assert (bert.single_special, bert.pair_special, bert.max_length) == (2, 3, 512)


def test_truncation_and_padding_of_the_file_are_ignored(bert):
    content = json.loads((BERT / "tokenizer.json").read_text(encoding="utf-8"))
    assert content["truncation"] and content["padding"], "the sample no longer shows the trap"
    assert len(bert.encode("word " * 1000)) == 1002
    assert len(bert.encode("word")) == 3


@pytest.mark.parametrize("name", FORMATS)
@given(text=wild_text)
@_QUICK
def test_same_ids_as_transformers(ours, theirs, name, text):
    encoding = ours[name].encode(text)
    expected = theirs[name](text, return_offsets_mapping=True, return_token_type_ids=True)
    assert encoding.ids == expected.input_ids
    assert encoding.segments == expected.token_type_ids
    assert encoding.offsets == [tuple(pair) for pair in expected.offset_mapping]
    assert ours[name].ids_batch([text]) == [encoding.ids]


@pytest.mark.parametrize("name", FORMATS)
@given(first=wild_text, second=wild_text.filter(bool))
@settings(_QUICK, max_examples=20)
def test_same_pairs_as_transformers(ours, theirs, name, first, second):
    encoding = ours[name].encode(first, second)
    expected = theirs[name](first, second, return_token_type_ids=True, return_special_tokens_mask=True)
    assert encoding.ids == expected.input_ids
    assert encoding.segments == expected.token_type_ids
    assert list(map(int, encoding.special)) == expected.special_tokens_mask
    assert encoding.words == expected.word_ids()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("letter", list("aé中🙂\u0301"))
def test_words_of_ten_thousand_characters(ours, theirs, name, letter):
    text = f"a {letter * 10_000} b"
    assert ours[name].encode(text).ids == theirs[name](text).input_ids


@pytest.mark.parametrize("name", FORMATS)
@given(first=wild_text, second=wild_text)
@settings(_QUICK, max_examples=20)
def test_build_is_what_encode_does(ours, name, first, second):
    a, b = (ours[name].encode(text, specials=False).ids for text in (first, second))
    pair, single = ours[name].encode(first, second), ours[name].encode(first)
    assert ours[name].build(a, b) == (pair.ids, pair.segments)
    assert ours[name].build(a) == (single.ids, single.segments)
    assert len(pair) == len(a) + len(b) + ours[name].pair_special


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@pytest.mark.parametrize("lowercase", [True, False])
def test_trained_tokenizers_give_transformers_the_same_ids(kind, lowercase, tmp_path):
    tokenizer, _ = train_tokenizer(sentences(300), kind, 400, lowercase)
    tokenizer.save(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [*sentences(20, seed=2), "Café PARIS  (naïve) 中文 \u0301 ``x''", f"a {tokenizer.mask_token} b"]
    assert [loaded(text).input_ids for text in texts] == [tokenizer.encode(text).ids for text in texts]
    assert loaded("a", "b").input_ids == tokenizer.encode("a", "b").ids
    assert tokenizer.lowercase == lowercase


@pytest.mark.parametrize(("kind", "lowercase"), [("wordpiece", True), ("wordpiece", False), ("bpe", False)])
def test_the_files_of_older_libraries_give_the_same_ids(kind, lowercase, tmp_path):
    """vocab.txt, or vocab.json and merges.txt, without tokenizer.json."""
    trained, _ = train_tokenizer(sentences(300), kind, 400, lowercase)
    trained.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "BertTokenizer" if kind == "wordpiece" else "RobertaTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(tmp_path), getattr(transformers, config["tokenizer_class"]).from_pretrained(tmp_path)
    for text in [*sentences(20, seed=2), "Ünïcode and CAPITALS, 日本"]:
        assert ours.encode(text).ids == trained.encode(text).ids == theirs(text)["input_ids"], text


def test_mask_of_roberta_is_understood(ours):
    roberta = ours["roberta"]
    assert roberta.mask_token == "<mask>"
    encoding = roberta.encode("the [MASK] sleeps", "a [MASK]")
    places = [i for i, token in enumerate(encoding.ids) if token == roberta.mask_id]
    assert [encoding.sequence[i] for i in places] == [0, 1]
    assert [encoding.offsets[i] for i in places] == [(4, 10), (2, 8)]
    assert encoding.ids == roberta.encode("the <mask> sleeps", "a <mask>").ids
    assert roberta.ids_batch(["[MASK]"]) == [roberta.encode("<mask>").ids]


@given(parts=st.lists(st.text("ab c中\u0301", max_size=6), min_size=1, max_size=5))
@_QUICK
def test_mask_of_any_length_keeps_the_callers_offsets(long_mask, parts):
    text = "[MASK]".join(parts)
    encoding = long_mask.encode(text, text)
    masks = [i for i, token in enumerate(encoding.ids) if token == long_mask.mask_id]
    assert len(masks) == 2 * (len(parts) - 1)
    assert all(text[slice(*encoding.offsets[i])] == "[MASK]" for i in masks)
    plain = [o for o, token in zip(encoding.offsets, encoding.ids) if token not in long_mask.special_ids]
    assert not any("[MASK]" in text[slice(*offset)] for offset in plain)
    assert long_mask.ids_batch([(text, text)]) == [encoding.ids]


@pytest.fixture(scope="session")
def long_mask(tmp_path_factory):
    """A vocabulary whose mask is longer than [MASK]."""
    folder = tmp_path_factory.mktemp("long") / "tokenizer"
    train_tokenizer(sentences(100), "wordpiece", 150)[0].save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        content = (folder / name).read_text(encoding="utf-8").replace("[MASK]", "<|the mask|>")
        (folder / name).write_text(content, encoding="utf-8")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.mask_token == "<|the mask|>"
    return tokenizer


@pytest.mark.parametrize("name", FORMATS)
def test_empty_text(ours, name):
    assert ours[name].encode("").ids == ours[name].build([])[0]
    assert ours[name].encode("", "").ids == ours[name].build([], [])[0]
    assert ours[name].encode_batch([]) == []
    assert ours[name].decode([]) == ""


@pytest.mark.parametrize("name", FORMATS)
def test_lone_surrogates_are_replacement_characters(ours, name):
    encoding = ours[name].encode("a\ud800 dog", "\udfff")
    assert encoding.ids == ours[name].encode("a\ufffd dog", "\ufffd").ids
    assert ours[name].encode("a\ud800 dog").offsets[-2][1] == 6


@pytest.mark.parametrize("name", FORMATS)
def test_a_megabyte(ours, name):
    text = " ".join(sentences(25_000))[:1_000_000]
    encoding = ours[name].encode(text)
    assert encoding.offsets[-2][1] == len(text.rstrip())


@pytest.mark.parametrize("wrong", [None, 3, b"bytes", ("a", None), ("a",), ("a", "b", "c")])
def test_what_is_not_text_is_named(bert, wrong):
    refuses("text 1 is ", bert.encode_batch, ["fine", wrong])


def test_lists_of_two_are_pairs(bert, ours):
    assert bert.encode_batch([["a", "b"]])[0].ids == bert.encode("a", "b").ids
    assert ours["roberta"].encode_batch([["a", "[MASK]"]])[0].ids == ours["roberta"].encode("a", "[MASK]").ids


def test_ids_and_tokens(bert):
    assert bert.token(2154) == "day" and bert.id("day") == 2154 and bert.id("no such piece") is None
    assert bert.decode(bert.encode("a beautiful day").ids) == "a beautiful day"
    assert bert.decode(np.array([101, 2154, 102]), skip_special=False) == "[CLS] day [SEP]"
    for call in (lambda: bert.token(30522), lambda: bert.decode([-1]), lambda: bert.decode([30522])):
        refuses("ids run from 0 to 30521", call)


def test_continues_word(bert, ours):
    continues = bert.continues_word()
    assert continues.shape == (bert.size,) and continues.dtype == bool
    encoding = bert.encode("sinan is here")
    assert continues[encoding.ids].tolist() == [False, False, True, False, False, False]
    for name in ("roberta", "albert", "xlm-roberta"):
        encoding = ours[name].encode("ab the cat")
        first = [i for i in range(2, len(encoding) - 1) if encoding.words[i] != encoding.words[i - 1]]
        continues = ours[name].continues_word()
        assert not continues[[encoding.ids[i] for i in first]].any()
        assert not continues[sorted(ours[name].special_ids)].any() and continues.any()


def test_byte_level_pieces_are_spelt_in_letters(ours):
    tokenizer, _ = train_tokenizer(["cat مرحبا שלום 👩‍👧\n"] * 20, "bpe", 330)
    tokens = tokenizer.encode("cat مرحبا שלום 👩‍👧 ق").tokens
    readable = tokenizer.readable(tokens)
    assert readable[:5] == ["<s>", "cat", "Ġمرحبا", "Ġשלום", "Ġ👩‍👧"] and "Ġمرحبا" not in tokens
    assert readable[5:-1] == tokens[5:-1] and len(tokens) > 6, "half a letter stays as the vocabulary has it"
    assert tokenizer.readable(["Ċ", "Ġ", "ĠĠ", "<mask>"]) == ["Ċ", "Ġ", "ĠĠ", "<mask>"], "spaces stay visible"
    assert ours["bert"].readable(["Ã©", "##s"]) == ["Ã©", "##s"]


def test_byte_level_offsets_leave_out_the_space(ours):
    """ModernBERT's tokenizer.json has a plain template, with which the crate counts the space into a word."""
    backend = Backend.from_str(ours["roberta"]._backend.to_str())
    from tokenizers import processors

    template = {"single": "<s> $A </s>", "pair": "<s> $A </s> $B </s>", "special_tokens": [("<s>", 0), ("</s>", 2)]}
    backend.post_processor = processors.TemplateProcessing(**template)
    tokenizer = Tokenizer(backend)
    for text in ["the cat", " the  cat sleeps ", "", "  ", "\n the", "café [MASK]  (naïve)"]:
        assert tokenizer.encode(text).offsets == ours["roberta"].encode(text).offsets
        assert tokenizer.encode(text, text).offsets[-2] == ours["roberta"].encode(text).offsets[-2]
    backend.post_processor = processors.Sequence([processors.ByteLevel(add_prefix_space=False), backend.post_processor])
    assert Tokenizer(backend).encode("the cat").offsets == ours["roberta"].encode("the cat").offsets


def test_special_tokens_are_known_by_name(bert, tmp_path):
    content = (BERT / "tokenizer.json").read_text(encoding="utf-8").replace("[MASK]", "<|Mask|>")
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.mask_token == "<|Mask|>" and tokenizer.mask_id == bert.mask_id
    assert tokenizer.encode("a [MASK] b").ids == bert.encode("a [MASK] b").ids


def test_a_vocabulary_that_cannot_encode_says_so(tmp_path):
    model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"b": 0}}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    tokenizer = Tokenizer.load(tmp_path)
    refuses("cannot encode", tokenizer.encode, "unknown")


def test_pickled(ours):
    for tokenizer in ours.values():
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.digest == tokenizer.digest and copy.mask_id == tokenizer.mask_id
    assert pickle.loads(pickle.dumps(ours["bert"].encode("a day"))).ids == [101, 1037, 2154, 102]


_FORKING = """
import os, sys
from everybert.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(sys.argv[1])
assert "torch" not in sys.modules
tokenizer.encode_batch(["hello"] * 1000)
child = os.fork()
if child == 0:
    alone = os.environ["TOKENIZERS_PARALLELISM"] == "false"  # the parent's threads are not here
    os._exit(0 if alone and len(tokenizer.encode_batch(["hello"] * 1000)) == 1000 else 3)
assert os.waitpid(child, 0)[1] == 0
assert "TOKENIZERS_PARALLELISM" not in os.environ
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_neither_warns_nor_hangs():
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", _FORKING, str(BERT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# ── laws ─────────────────────────────────────────────────────────────────────────────────────────────────────

WORDS = sorted({word for text in sentences(60) for word in text.lower().split() if word.isascii() and word.isalpha()})


@given(text=wild_text)
@_QUICK
def test_byte_level_pairs_lose_nothing(ours, text):
    encoding = ours["roberta"].encode(text, specials=False)
    assert ours["roberta"].decode(encoding.ids, skip_special=False) == text.encode("utf-8", "replace").decode()
    covered = {i for start, end in encoding.offsets for i in range(start, end)}
    assert covered >= {i for i, letter in enumerate(text) if not letter.isspace()}


@pytest.mark.parametrize("name", ["roberta", "cased", "albert"])
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=20))
@_QUICK
def test_known_words_come_back(ours, name, words):
    encoding = ours[name].encode(" ".join(words))
    assert ours[name].decode(encoding.ids).strip() == " ".join(words)
    pieces = [(start, end) for (start, end), special in zip(encoding.offsets, encoding.special) if not special]
    assert "".join(" ".join(words)[start:end] for start, end in pieces).replace(" ", "") == "".join(words)


@pytest.mark.parametrize("name", ["roberta", "cased", "albert"])
@given(texts=st.lists(wild_text, min_size=1, max_size=4))
@_QUICK
def test_a_batch_is_its_texts_one_by_one(ours, name, texts):
    batch = ours[name].encode_batch(texts)
    assert [e.ids for e in batch] == [ours[name].encode(text).ids for text in texts] == ours[name].ids_batch(texts)
    assert [e.offsets for e in batch] == [ours[name].encode(text).offsets for text in texts]
