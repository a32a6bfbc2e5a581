"""Trained vocabularies: right in shape, the same in every process, bounded in memory, honest in their report."""

import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import mistake, run
from refusals import refuses
from tokenizer_samples import sentences

from everybert.text import train_tokenizer as training
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import measure, train_tokenizer

KINDS = ["wordpiece", "bpe", "unigram"]


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("wordpiece", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], None),
        ("bpe", ["<s>", "<pad>", "</s>", "<unk>"], "<mask>"),
        ("unigram", ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"], None),
    ],
)
def test_special_tokens_stand_where_the_family_has_them(kind, first, last):
    tokenizer, report = train_tokenizer(sentences(300), kind, 350)
    assert [tokenizer.token(i) for i in range(len(first))] == first
    assert last is None or tokenizer.token(tokenizer.size - 1) == last
    assert sorted(tokenizer.vocab().values()) == list(range(tokenizer.size)), "no id is missing"
    assert tokenizer.size <= 350 and report["size"] == tokenizer.size
    assert None not in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)


@pytest.mark.parametrize("kind", KINDS)
def test_training_text_is_covered_and_comes_back(kind):
    texts = sentences(300)
    tokenizer, report = train_tokenizer(texts, kind, 400, lowercase=False)
    assert report["coverage"] > 0.999 and report["unknown_rate"] < 0.001
    assert 1.5 < report["characters_per_token"] < 12
    text = "My sister sings loudly in the garden"
    assert tokenizer.decode(tokenizer.encode(text).ids).strip() == text
    assert len(tokenizer.encode(text, specials=False)) < 20, "frequent words are few pieces"


def test_the_most_frequent_words_are_whole():
    tokenizer, _ = train_tokenizer(["unhappy happily " * 50, "zebra " * 3], "wordpiece", 60)
    assert tokenizer.encode("unhappy happily", specials=False).tokens == ["unhappy", "happily"]
    vocab = tokenizer.vocab()
    assert {"u", "##n", "h", "##y", "z"} <= vocab.keys() and "n" in vocab, "every letter can begin a word"


def test_merges_are_those_of_byte_pair_encoding():
    """low ×5, lower ×2, newest ×6, widest ×3: Sennrich et al. 2016, algorithm 1."""
    text = " ".join(["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3)
    tokenizer, _ = train_tokenizer([text], "wordpiece", 100)
    pieces = [tokenizer.token(i) for i in range(5, tokenizer.size)]
    learnt = [piece for piece in pieces if len(piece.removeprefix("##")) > 1]
    assert learnt[:4] == ["##es", "##est", "lo", "low"]


@pytest.mark.parametrize(("lowercase", "expected"), [(True, "cafe zoe"), (False, "Café Zoë")])
@pytest.mark.parametrize("kind", KINDS)
def test_case_and_accents(kind, lowercase, expected):
    tokenizer, _ = train_tokenizer(["Café Zoë drinks. " * 30] * 3, kind, 300, lowercase)
    assert tokenizer.lowercase == lowercase
    assert tokenizer.decode(tokenizer.encode("Café Zoë").ids).strip() == expected


_TRAIN = """
import sys
from tokenizer_samples import sentences
from everybert.text.train_tokenizer import train_tokenizer
for kind in ("wordpiece", "bpe", "unigram"):
    print(train_tokenizer(sentences(600, seed=3), kind, 500)[0].digest)
"""


def test_the_same_in_every_process(request):
    environment = {"PYTHONPATH": str(request.path.parent), "PATH": ""}
    runs = [
        subprocess.run(
            [sys.executable, "-c", _TRAIN],
            env=environment | {"PYTHONHASHSEED": str(seed), "TOKENIZERS_PARALLELISM": parallel},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, parallel in [(0, "true"), (1, "true"), (2, "false")]
    ]
    assert runs[0] == runs[1] == runs[2] and len(runs[0].split()) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_bounded(monkeypatch, kind):
    """With small limits, many different words pass through, and the frequent ones survive."""
    monkeypatch.setattr(training, "_RUNS", 200)
    monkeypatch.setattr(training, "_WORDS", 400)
    texts = (f"common word number{i} x{i * 7919}" for i in range(3000))
    tokenizer, report = train_tokenizer(texts, kind, 330)
    assert report["words"] <= 400
    assert len(tokenizer.encode("common word", specials=False)) <= 6


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_are_split_in_one_text_count_as_by_themselves(monkeypatch, kind, lowercase):
    odd = ["Don't", "3.14", "北京，東京。", "naïve\u0301", "\u0301x", "ﬁ", "x\u200by", "´s", "[SEP]", "a" * 250, "🙂🙂"]
    drawn = random.Random(0)
    lines = [" ".join(drawn.choices(odd, k=drawn.randint(0, 9))) for _ in range(60)]
    together = training._count_words(lines, kind, lowercase)
    monkeypatch.setattr(training, "_RUNS", 5)
    assert training._count_words(lines, kind, lowercase) == together
    monkeypatch.setattr(training, "_AT_ONCE", 1)
    assert training._count_words(lines, kind, lowercase) == together and max(map(len, together)) == 100


def test_counts_are_scaled_rather_than_overflow(monkeypatch):
    fed = []
    feed = training._feed
    monkeypatch.setattr(training, "_FED_WORDS", 1000)
    monkeypatch.setattr(training, "_feed", lambda words: (fed.append(sum(words.values())), feed(words))[1])
    tokenizer, _ = train_tokenizer(["the cat " * 5000], "wordpiece", 50)
    assert fed == [1000]
    assert tokenizer.encode("the cat", specials=False).tokens == ["the", "cat"]


@pytest.mark.parametrize(("most", "least"), [(10**6, 500), (500, 30)])
def test_the_report_is_measured_on_lines_kept_from_training(monkeypatch, most, least):
    monkeypatch.setattr(training, "_HELD_OUT_CHARACTERS", most)
    trained, measured = [], []
    count, measured_by = training._count_words, training.measure
    monkeypatch.setattr(training, "_count_words", lambda lines, *rest: count(trained.extend(lines) or trained, *rest))
    monkeypatch.setattr(training, "measure", lambda tok, lines: measured_by(tok, measured.extend(lines) or measured))
    texts = [f"line {i} says something" for i in range(20_000)]
    assert train_tokenizer(texts, "wordpiece", 100)[1]["held_out"]
    assert set(trained).isdisjoint(measured) and {*trained, *measured} == set(texts)
    assert least / 3 < len(measured) < least


def test_unknown_letters_are_reported():
    tokenizer, _ = train_tokenizer(["aaaa bbbb " * 40], "wordpiece", 40)
    report = measure(tokenizer, ["aaaa ж"])
    assert report == {"coverage": 0.8, "unknown_rate": 0.5, "characters_per_token": 3.0}


def test_chinese_sentences_that_occur_once_make_a_unigram_vocabulary(caplog):
    rng = random.Random(0)
    words = ["".join(chr(0x4E00 + rng.randrange(400)) for _ in range(rng.randint(1, 3))) for _ in range(300)]
    texts = ["".join(rng.choices(words, k=12)) + "。" for _ in range(1500)]
    tokenizer, report = train_tokenizer(texts, "unigram", 800, lowercase=False)
    assert report["coverage"] > 0.995 and tokenizer.size > 640 and not caplog.text
    train_tokenizer(texts[:20], "unigram", 5000, lowercase=False)
    assert "tokens instead of 5000: give more text" in caplog.text
    train_tokenizer(texts, "wordpiece", 300, lowercase=False, min_frequency=300)
    assert "% of characters are covered" in caplog.text
    refuses("--min-frequency", train_tokenizer, texts, "unigram", 800, min_frequency=2)


@pytest.mark.parametrize("text", ["हिन्दी में लिखी हुई पंक्तियाँ", "ガラスのビンがいっぱいです", "Tiếng Việt có nhiều dấu"])
def test_text_that_loses_its_vowel_signs_is_told(text, caplog):
    train_tokenizer([text] * 20, "wordpiece", 60, lowercase=False)
    train_tokenizer(["The cat has had a café au lait, which it liked."] * 20, "wordpiece", 60)
    assert "are removed" not in caplog.text
    train_tokenizer([text] * 20, "wordpiece", 60)
    assert "are removed: --cased keeps them" in caplog.text


def test_recipes_train_cased_vocabularies_for_cased_models():
    for recipe in (Path(__file__).parents[2] / "recipes").glob("*.toml"):
        text = recipe.read_text("utf-8")
        if re.search(r'preset = ".*(-cased|roberta)', text) and "tokenizer train" in text:
            assert re.search("tokenizer train .* --cased", text), recipe
        assert not re.search(r"corpus build \w+=", text), recipe


def test_strange_text_does_not_stop_training():
    texts = ["\ud800 lone", "\x00\x01\x02", "", "\n\n", "a" * 5000, "中文" * 300, "\U000f0001 private", "ok fine " * 20]
    for kind in KINDS:
        tokenizer, _ = train_tokenizer(texts, kind, 400)
        assert tokenizer.encode("ok fine").ids


@pytest.mark.parametrize(
    ("text", "kind", "size", "why"),
    [
        *((" \n ", kind, 300, "no text") for kind in KINDS),
        ("a", "words", 300, "choose wordpiece, bpe or unigram"),
        ("some text " * 5, "bpe", 100, "too small"),
        ("some text " * 5, "unigram", 8, "size"),
        ("some text " * 5, "wordpiece", 10, "too small for the 6 single letters"),
    ],
)
def test_impossible_requests(text, kind, size, why):
    refuses(why, train_tokenizer, ["", text], kind, size)


def test_the_smallest_vocabulary_has_every_letter():
    vocab = train_tokenizer(["some text " * 5], "wordpiece", 11)[0].vocab()
    assert vocab.keys() - {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} == {*"emostx", *(f"##{c}" for c in "emotx")}


def test_command_line(tmp_path):
    """Its JSON, and each kind, are in tests/golden."""
    (tmp_path / "a.txt").write_text("\n\n".join(sentences(300)), encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in sentences(300, seed=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    command = ["tokenizer", "train", tmp_path / "a.txt", tmp_path / "b.jsonl.gz", "--kind", "bpe", "--size", 400]
    assert "characters per token" in run(*command, "--cased", "--out", tmp_path / "out").stdout
    tokenizer = Tokenizer.load(tmp_path / "out")
    report = json.loads(run(*command, "--cased", "--out", tmp_path / "out", "--json").stdout)
    assert report["texts"] == 600 and report["size"] == tokenizer.size
    assert not tokenizer.lowercase and tokenizer.max_length == 512
    assert Tokenizer.load(tmp_path / "out").digest == tokenizer.digest
    mistake(*command, "--cased", "--out", tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
