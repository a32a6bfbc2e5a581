"""Train a WordPiece, byte-level BPE or Unigram tokenizer on a stream of texts, reproducibly.

Words are counted while the texts are read (memory is bounded: the rarest words are dropped when there are too many),
then the trainer gets each word with its count. The WordPiece and Unigram trainers of `tokenizers` iterate in hash
order, so their results vary from run to run. Here WordPiece is trained as BPE over letters in a fixed order, and
Unigram by SentencePiece.
"""

import io
import json
import logging
import unicodedata
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice
from typing import Any, Literal

from tokenizers import AddedToken, PreTokenizedString, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from everybert.errors import EverybertError
from everybert.text import formats
from everybert.text.tokenizer import Tokenizer

TokenizerKind = Literal["wordpiece", "bpe", "unigram"]
log = logging.getLogger("everybert")

_RUNS = 1 << 19  # different strings between spaces that are counted before they are split into words
_AT_ONCE = 1_000  # of these, split in one text
_WORDS = 2_000_000  # different words that are held before the rarer half is dropped
_WORD_LENGTH = 100  # longer words are split; WordPiece maps them to the unknown token
_FED_WORDS = 50_000_000  # words given to the BPE trainer; above it, counts are scaled to avoid overflow
_COVERAGE = 0.9999  # share of the letters of the text that the alphabet covers (WordPiece and Unigram)
_HELD_OUT_CHARACTERS = 2_000_000
_ALBERT = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def train_tokenizer(
    texts: Iterable[str],
    kind: TokenizerKind = "wordpiece",
    size: int = 30_000,
    lowercase: bool = True,
    min_frequency: int | None = None,
    progress: Callable[[int], None] = lambda characters: None,
) -> tuple[Tokenizer, dict[str, Any]]:
    """Train on a stream of texts; returns the tokenizer and a report.

    With `lowercase`, text is lower-cased and accents are removed. WordPiece and BPE leave out pieces that occur less
    than `min_frequency` times (2 by default). About one line in a hundred is held out to measure the vocabulary:
    `coverage` is the share of its non-space characters in known tokens, `unknown_rate` the share of unknown tokens.
    """
    if kind not in _TRAINERS:
        raise EverybertError(f"no tokenizer kind {kind!r}: choose wordpiece, bpe or unigram")
    if kind == "unigram" and min_frequency is not None:
        raise EverybertError("a Unigram vocabulary has no least frequency: leave out --min-frequency")
    held: dict[str, None] = {}
    seen = {"texts": 0, "characters": 0}
    first: list[str] = []  # measured if nothing is held out

    def training_lines() -> Iterator[str]:
        room = _HELD_OUT_CHARACTERS
        for text in texts:
            seen["texts"] += 1
            seen["characters"] += len(text)
            for line in text.splitlines():
                encoded = line.encode("utf-8", "replace")
                if zlib.crc32(encoded) < (1 << 32) // 100 and (room > 0 or line in held):
                    held[line] = None
                    room -= len(line)
                else:
                    yield line if line.isascii() else encoded.decode()
                    if len(first) < 1000:
                        first.append(line)
            progress(seen["characters"])

    words = _count_words(training_lines(), kind, lowercase)
    if not words:
        raise EverybertError("there is no text to train a tokenizer on: check the files and their text column")
    tokenizer = Tokenizer(_TRAINERS[kind](words, size, lowercase, min_frequency or 2))
    report: dict[str, Any] = {"kind": kind, "size": tokenizer.size, **seen, "words": len(words), "held_out": bool(held)}
    report |= measure(tokenizer, list(held) or first)
    if report["coverage"] < 0.995:
        log.warning("only %.1f %% of characters are covered: give more text", 100 * report["coverage"])
    letters = unicodedata.normalize("NFD", "".join(held or first))
    marks = sum(unicodedata.category(c) == "Mn" for c in letters) / max(1, len(letters))
    if lowercase and marks > 0.05:
        log.warning("accents and vowel signs, %.1f %% of the text, are removed: --cased keeps them", 100 * marks)
    if tokenizer.size < 0.8 * size:
        log.warning("the vocabulary has %d tokens instead of %d: give more text", tokenizer.size, size)
    return tokenizer, report


def measure(tokenizer: Tokenizer, lines: list[str]) -> dict[str, float]:
    """How a vocabulary covers lines of text."""
    tokens = unknown = lost = 0
    for line, encoding in zip(lines, tokenizer.encode_batch(lines, specials=False), strict=True):
        tokens += len(encoding)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == tokenizer.unk_id:
                unknown += 1
                lost += len("".join(line[start:end].split()))
    return {
        "coverage": 1 - lost / max(1, sum(len(run) for line in lines for run in line.split())),
        "unknown_rate": unknown / max(1, tokens),
        "characters_per_token": sum(map(len, lines)) / max(1, tokens),
    }


def _install(kind: TokenizerKind, lowercase: bool, backend: Backend, charsmap: bytes | None = None) -> Backend:
    """Install the pipeline of BERT (WordPiece), RoBERTa (BPE) or ALBERT (Unigram)."""
    if kind == "wordpiece":
        return formats.bert_pipeline(backend, lowercase)
    if kind == "unigram":
        return formats.albert_pipeline(backend, charsmap, lowercase, keep_accents=not lowercase)
    if lowercase:
        n = normalizers
        backend.normalizer = n.Sequence([n.NFD(), n.StripAccents(), n.Lowercase(), n.NFC()])
    return formats.roberta_pipeline(backend)


def _count_words(lines: Iterable[str], kind: TokenizerKind, lowercase: bool) -> Counter[str]:
    """Count words, split as the tokenizer will. Above the limit, the rarer half is dropped (ties broken by hash)."""
    names = dict.fromkeys([*formats.BERT_NAMES.values(), *formats.ROBERTA_NAMES.values()])
    specials = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    backend = _install(kind, lowercase, Backend(specials))
    normalizer: Any = backend.normalizer or normalizers.Sequence([])
    pre_tokenizer: Any = backend.pre_tokenizer
    if kind == "unigram":  # SentencePiece adds the word marker itself
        pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words: Counter[str] = Counter()
    runs: Counter[str] = Counter()

    def split() -> None:
        """Count the words of the runs, many runs in one text: a text for each would take twice as long."""
        pairs = iter(runs.items())
        while some := list(islice(pairs, _AT_ONCE)):
            text = PreTokenizedString("\n".join(run for run, _ in some))
            text.normalize(normalizer.normalize)
            pre_tokenizer.pre_tokenize(text)
            ends = list(accumulate(len(run) + 1 for run, _ in some))  # after the line end of a run, which is no word
            for word, (start, _), _ in text.get_splits("original", "char"):
                number = bisect_right(ends, start)
                if start < ends[number] - 1:
                    for i in range(0, len(word), _WORD_LENGTH):
                        words[word[i : i + _WORD_LENGTH]] += some[number][1]
        runs.clear()
        if len(words) > _WORDS:
            ranked = sorted(words.items(), key=lambda item: (-item[1], zlib.crc32(item[0].encode())))
            for word, _ in ranked[_WORDS // 2 :]:
                del words[word]

    for line in lines:
        line_runs = line.split()
        if kind == "bpe":  # in byte-level BPE the first word of a line differs from one after a space
            line_runs[1:] = map(" ".__add__, line_runs[1:])
        runs.update(line_runs)
        if len(runs) > _RUNS:
            split()
    split()
    return words


def _feed(words: dict[str, int]) -> Iterator[str]:
    """Each word as often as it was counted, in lines of at most 10,000 words."""
    for word, count in words.items():
        for start in range(0, count, 10_000):
            yield " ".join([word] * min(10_000, count - start))


def _train_bpe_model(
    words: dict[str, int], size: int, min_frequency: int, alphabet: list[str], mark: str = ""
) -> dict[str, Any]:
    """Train BPE on counted words; returns the "model" part of a tokenizer.json. `mark` begins pieces inside a word."""
    if size < (letters := sum(len(piece) == 1 for piece in alphabet)):
        raise EverybertError(f"size is too small for the {letters} single letters: give at least twice as many")
    scale = max(1.0, sum(words.values()) / _FED_WORDS)
    scaled = {word: round(count / scale) for word, count in words.items()}
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=max(1, round(min_frequency / scale)),
        special_tokens=alphabet,  # in this order, whereas the trainer would take letters in hash order
        continuing_subword_prefix=mark,
        show_progress=False,
    )
    backend.train_from_iterator(_feed(scaled), trainer)
    return json.loads(backend.to_str())["model"]


def _train_wordpiece(words: Counter[str], size: int, lowercase: bool, min_frequency: int) -> Backend:
    """Train WordPiece as BPE in which the letters inside a word differ from the first letter of a word."""
    letters = _alphabet(words, size // 32, min_frequency)
    known = set(letters)
    covered = {word: count for word, count in words.items() if known.issuperset(word)}
    inside = sorted({letter for word in covered for letter in word[1:]})
    specials = list(formats.BERT_NAMES.values())
    alphabet = [*letters, *("##" + letter for letter in inside)]
    model = _train_bpe_model(covered, size - len(specials), min_frequency, alphabet, "##")
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*specials, *model["vocab"]]))}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    formats.add_specials(backend, specials)
    return _install("wordpiece", lowercase, backend)


def _alphabet(words: Counter[str], size: int, min_frequency: int) -> list[str]:
    """The most frequent letters in Unicode order: `size` of them, or more if _COVERAGE of the text needs more."""
    letters: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            letters[letter] += count
    ranked = sorted(letters.items(), key=lambda item: (-item[1], item[0]))
    covering = 1 + bisect_left(list(accumulate(count for _, count in ranked)), _COVERAGE * letters.total())
    return sorted(letter for letter, count in ranked[: max(size, covering)] if count >= min_frequency)


def _train_bpe(words: Counter[str], size: int, lowercase: bool, min_frequency: int) -> Backend:
    """Byte-level BPE with the ids of RoBERTa: four special tokens first, the mask last."""
    *first, mask = formats.ROBERTA_NAMES.values()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = _train_bpe_model(words, size - len(first) - 1, min_frequency, alphabet)
    vocab = {piece: i for i, piece in enumerate([*first, *model["vocab"], mask])}
    backend = Backend(models.BPE(vocab, [tuple(pair) for pair in model["merges"]]))
    # The mask token includes the space before it, as a word does.
    formats.add_specials(backend, [*first, AddedToken(mask, lstrip=True, special=True, normalized=False)])
    return _install("bpe", lowercase, backend)


def _train_unigram(words: Counter[str], size: int, lowercase: bool, _: int) -> Backend:
    """Unigram by SentencePiece with the ids of ALBERT. The result depends on the number of threads, which is fixed."""
    try:
        import sentencepiece
    except ImportError as error:
        raise EverybertError("Unigram training needs sentencepiece: pip install 'everybert[sentencepiece]'") from error
    counted = sorted((word, count) for word, count in words.items() if "\0" not in word)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{word}\t{count}" for word, count in counted),
            input_format="tsv",
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=_COVERAGE,
            normalization_rule_name="nmt_nfkc",
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            control_symbols=_ALBERT[2:],
            num_threads=4,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise EverybertError(f"SentencePiece could not train {size} pieces ({error}): try another size") from error
    pieces, charsmap = formats.read_pieces(model.getvalue())
    backend = Backend(models.Unigram([(p.piece, p.score) for p in pieces], unk_id=1, byte_fallback=False))
    formats.add_specials(backend, _ALBERT)
    return _install("unigram", lowercase, backend, charsmap)


_TRAINERS: dict[str, Callable[[Counter[str], int, bool, int], Backend]] = {
    "wordpiece": _train_wordpiece,
    "bpe": _train_bpe,
    "unigram": _train_unigram,
}
