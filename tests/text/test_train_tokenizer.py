"""Trained vocabularies: right in shape, the same in every process, bounded in memory, honest in their report."""

import gzip
import json
import subprocess
import sys

import pytest
from tokenizer_samples import sentences
from typer.testing import CliRunner

from everybert.errors import EverybertError
from everybert.text import train_tokenizer as training
from everybert.text.tokenizer import Tokenizer
from everybert.text.train_tokenizer import model_size, train_tokenizer

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
    assert tokenizer.size <= 350 and report.size == tokenizer.size
    assert None not in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)


@pytest.mark.parametrize("kind", KINDS)
def test_training_text_is_covered_and_comes_back(kind):
    texts = sentences(300)
    tokenizer, report = train_tokenizer(texts, kind, 400, lowercase=False)
    assert report.coverage > 0.999 and report.unknown_rate < 0.001
    assert 1.5 < report.characters_per_token < 12 and report.tokens_per_word >= 1
    assert report.held_out or report.measured_characters
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


def test_other_text_another_digest():
    first, second = (train_tokenizer(sentences(100, seed), "bpe", 300)[0].digest for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_bounded(monkeypatch, kind):
    """With small limits, many different words pass through, and the frequent ones survive."""
    monkeypatch.setattr(training, "_RUNS", 200)
    monkeypatch.setattr(training, "_WORDS", 400)
    held = []
    add = training._add
    monkeypatch.setattr(training, "_add", lambda words, *rest: (add(words, *rest), held.append(len(words))))
    texts = (f"common word number{i} x{i * 7919}" for i in range(3000))
    tokenizer, report = train_tokenizer(texts, kind, 330)
    assert max(held) <= 400 and len(held) > 5
    assert report.words <= 400
    assert len(tokenizer.encode("common word", specials=False)) <= 6


def test_counts_are_scaled_rather_than_overflow(monkeypatch):
    fed = []
    feed = training._feed
    monkeypatch.setattr(training, "_FED_WORDS", 1000)
    monkeypatch.setattr(training, "_feed", lambda words: (fed.append(sum(words.values())), feed(words))[1])
    tokenizer, _ = train_tokenizer(["the cat " * 5000], "wordpiece", 50)
    assert fed == [1000]
    assert tokenizer.encode("the cat", specials=False).tokens == ["the", "cat"]


def test_feed_repeats_each_word():
    words = {"a": 25_000, "b": 1, "c": 0, "d": 9_999}
    lines = list(training._feed(words))
    assert max(len(line.split()) for line in lines) < 20_000
    everything = " ".join(lines).split()
    assert {word: everything.count(word) for word in words} == words


def test_the_report_is_measured_on_lines_kept_from_training():
    texts = [f"line {i} says something" for i in range(2000)]
    reading = training._Reading(lambda *_: None)
    trained = set(reading.training_lines(texts))
    assert reading.held and trained.isdisjoint(reading.held)
    assert trained | reading.held.keys() == set(texts)
    assert 5 <= len(reading.held) <= 40


def test_held_out_text_is_bounded_and_thins_evenly(monkeypatch):
    monkeypatch.setattr(training, "_HELD_OUT_CHARACTERS", 500)
    reading = training._Reading(lambda *_: None)
    assert sum(1 for _ in reading.training_lines(f"line number {i}" for i in range(20_000))) > 19_000
    assert 0 < sum(map(len, reading.held)) <= 500
    assert max(int(line.split()[-1]) for line in reading.held) > 5000


def test_unknown_letters_are_reported():
    reading = training._Reading(lambda *_: None)
    reading.held = {"aaaa ж": 0}
    tokenizer, _ = train_tokenizer(["aaaa bbbb " * 40], "wordpiece", 40)
    report = training._report(tokenizer, reading, 2)
    assert (report.coverage, report.unknown_rate, report.characters_per_token) == (0.8, 0.5, 3.0)
    assert report.held_out and report.tokens_per_word == 1


def test_strange_text_does_not_stop_training():
    texts = ["\ud800 lone", "\x00\x01\x02", "", "\n\n", "a" * 5000, "中文" * 300, "\U000f0001 private", "ok fine " * 20]
    for kind in KINDS:
        tokenizer, _ = train_tokenizer(texts, kind, 400)
        assert tokenizer.encode("ok fine").ids


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_train_on(kind):
    with pytest.raises(EverybertError, match="no text"):
        train_tokenizer(["", "  \n "], kind, 300)


def test_impossible_requests():
    with pytest.raises(EverybertError, match="choose wordpiece, bpe or unigram"):
        train_tokenizer(["a"], "words")  # type: ignore[arg-type]
    with pytest.raises(EverybertError, match="too small"):
        train_tokenizer(["some text " * 5], "bpe", 100)
    with pytest.raises(EverybertError, match="no word occurs 2 times"):
        train_tokenizer(["every word differs"], "unigram", 300)
    with pytest.raises(EverybertError, match="size"):
        train_tokenizer(["some text " * 5], "unigram", 8)


@pytest.mark.parametrize(("size", "rows"), [(1, 64), (64, 64), (65, 128), (30_000, 30_016), (30_522, 30_528)])
def test_model_size(size, rows):
    assert model_size(size) == rows


def test_command_line(tmp_path):
    from everybert.cli.main import app

    (tmp_path / "a.txt").write_text("\n\n".join(sentences(300)), encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in sentences(300, seed=1))
    runner = CliRunner()
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl.gz")]
    command = [
        "tokenizer",
        "train",
        *files,
        "--kind",
        "bpe",
        "--size",
        "400",
        "--cased",
        "--out",
        str(tmp_path / "out"),
    ]
    done = runner.invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert report["texts"] == 600 and report["size"] == tokenizer.size and report["model_size"] == 448
    assert not tokenizer.lowercase and tokenizer.max_length == 512
    plain = runner.invoke(app, command)
    assert plain.exit_code == 0 and "characters per token" in plain.stdout
    assert Tokenizer.load(tmp_path / "out").digest == tokenizer.digest
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    refused = runner.invoke(app, [*command[:-1], str(tmp_path / "mine")])
    assert refused.exit_code == 2
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
