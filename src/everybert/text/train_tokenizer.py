"""Train a WordPiece, byte-level BPE or Unigram tokenizer on a stream of texts, reproducibly.

Words are counted while the texts are read (memory is bounded: the rarest words are dropped when there are too many),
then the trainer gets each word with its count. The WordPiece and Unigram trainers of `tokenizers` iterate in hash
order, so their results vary from run to run. Here WordPiece is trained as BPE over letters in a fixed order, and
Unigram by SentencePiece.
"""

from __future__ import annotations

import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from everybert.errors import EverybertError
from everybert.text import formats
from everybert.text.tokenizer import Tokenizer

Kind = Literal["wordpiece", "bpe", "unigram"]
Progress = Callable[[str, int], None]  # called with the stage and the number of characters read

_CHUNK = 1 << 20  # characters of a line that are split at once
_RUNS = 1_000_000  # different strings between spaces that are held before they are split into words
_WORDS = 2_000_000  # different words that are held before the rarer half is dropped
_WORD_LENGTH = 100  # longer words are split; WordPiece maps them to the unknown token
_FED_WORDS = 50_000_000  # words given to the BPE trainer; above it, counts are scaled to avoid overflow
_COVERAGE = 0.9999  # share of the letters of the text that the alphabet covers (WordPiece and Unigram)
_HELD_OUT_CHARACTERS = 2_000_000
_CONTINUING = 0xF0000  # private-use characters that stand for the letters inside a word (WordPiece)
_ALBERT = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


@dataclass(frozen=True)
class TokenizerReport:
    """Statistics of the training text, and of the vocabulary on held-out text."""

    kind: str
    size: int  # tokens in the vocabulary
    model_size: int  # embedding rows of a model: the size rounded up to a multiple of 64
    texts: int
    characters: int
    words: int  # different words counted
    held_out: bool  # False if there was too little text to hold any out
    measured_characters: int
    coverage: float  # share of non-space characters that are covered by known tokens
    unknown_rate: float  # share of tokens that are the unknown token
    characters_per_token: float
    tokens_per_word: float

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary."""
        return asdict(self)


def model_size(size: int) -> int:
    """Embedding rows for a vocabulary: its size rounded up to a multiple of 64, which is fast on GPUs."""
    return -(-size // 64) * 64


def train_tokenizer(
    texts: Iterable[str],
    kind: Kind = "wordpiece",
    size: int = 30_000,
    lowercase: bool = True,
    min_frequency: int = 2,
    progress: Progress | None = None,
) -> tuple[Tokenizer, TokenizerReport]:
    """Train on a stream of texts; about one line in a hundred is held out for the report.

    With `lowercase`, text is lower-cased and accents are removed. The vocabulary is smaller than `size` if the text
    has fewer pieces that occur `min_frequency` times.
    """
    if kind not in _TRAINERS:
        raise EverybertError(f"no tokenizer kind {kind!r}: choose wordpiece, bpe or unigram")
    show = progress or (lambda stage, done: None)
    reading = _Reading(show)
    words = _count_words(reading.training_lines(texts), kind, lowercase)
    if not words:
        raise EverybertError("there is no text to train a tokenizer on: check the files and their text column")
    show("training", reading.characters)
    tokenizer = Tokenizer(_TRAINERS[kind](words, size, lowercase, min_frequency))
    show("measuring", reading.characters)
    return tokenizer, _report(tokenizer, reading, len(words))


class _Reading:
    """Splits texts into lines for training and held-out lines, which are chosen by hash."""

    def __init__(self, show: Progress):
        self.texts = self.characters = 0
        self.held: dict[str, int] = {}
        self.first: list[str] = []  # used for the report if nothing is held out
        self._show = show
        self._below = (1 << 32) // 100

    def training_lines(self, texts: Iterable[str]) -> Iterator[str]:
        """The lines to train on."""
        held = 0
        for text in texts:
            self.texts += 1
            self.characters += len(text)
            for line in text.splitlines():
                encoded = line.encode("utf-8", "replace")
                key = zlib.crc32(encoded)
                if key < self._below:
                    self.held[line] = key
                    held += len(line)
                else:
                    yield line if line.isascii() else encoded.decode()
                    if len(self.first) < 1000:
                        self.first.append(line)
                while held > _HELD_OUT_CHARACTERS and len(self.held) > 1:  # halve the share from here on
                    self._below //= 2
                    self.held = {line: key for line, key in self.held.items() if key < self._below}
                    held = sum(map(len, self.held))
            self._show("counting words", self.characters)


def _install(kind: Kind, lowercase: bool, backend: Backend, charsmap: bytes | None = None) -> Backend:
    """Install the pipeline of BERT (WordPiece), RoBERTa (BPE) or ALBERT (Unigram)."""
    if kind == "wordpiece":
        return formats.bert_pipeline(backend, lowercase).install(backend)
    if kind == "unigram":
        return formats.albert_pipeline(backend, charsmap, lowercase, keep_accents=not lowercase).install(backend)
    if lowercase:
        n = normalizers
        backend.normalizer = n.Sequence([n.NFD(), n.StripAccents(), n.Lowercase(), n.NFC()])
    return formats.roberta_pipeline(backend).install(backend)


def _splitter(kind: Kind, lowercase: bool) -> Callable[[str], list[str]]:
    """A function that splits a string between spaces into words, as the tokenizer will."""
    names = dict.fromkeys([*formats.BERT_NAMES.values(), *formats.ROBERTA_NAMES.values()])
    specials = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    backend = _install(kind, lowercase, Backend(specials))
    normalizer: Any = backend.normalizer or normalizers.Sequence([])
    pre_tokenizer: Any = backend.pre_tokenizer
    if kind == "unigram":  # SentencePiece adds the word marker itself
        pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def split(run: str) -> list[str]:
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(run))]

    return split


def _count_words(lines: Iterable[str], kind: Kind, lowercase: bool) -> Counter[str]:
    """Count words. Strings between spaces are counted first, so that each different one is split only once."""
    split = _splitter(kind, lowercase)
    words: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    read = 0
    for line in lines:
        for start in range(0, len(line), _CHUNK):
            found = line[start : start + _CHUNK].split()
            if kind == "bpe":  # in byte-level BPE the first word of a line differs from one after a space
                found[1:] = map(" ".__add__, found[1:])
            runs.update(found)
        read += len(line)
        if len(runs) > _RUNS or read > 64 * _CHUNK:
            _add(words, runs, split)
            runs, read = Counter(), 0
    _add(words, runs, split)
    return words


def _add(words: Counter[str], runs: Counter[str], split: Callable[[str], list[str]]) -> None:
    """Add the words of counted strings. Above the limit, drop the rarer half (ties are broken by hash)."""
    for run, count in runs.items():
        for word in split(run):
            for start in range(0, len(word), _WORD_LENGTH):
                words[word[start : start + _WORD_LENGTH]] += count
        if len(words) > _WORDS:
            kept = sorted(words.items(), key=lambda item: (-item[1], zlib.crc32(item[0].encode())))[: _WORDS // 2]
            words.clear()
            words.update(dict(kept))


def _feed(words: dict[str, int]) -> Iterator[str]:
    """Each word as often as it was counted, in lines of about 10,000 words."""
    line: list[str] = []
    for word, count in words.items():
        while count:
            some = min(count, 10_000)
            line += [word] * some
            count -= some
            if len(line) >= 10_000:
                yield " ".join(line)
                line = []
    yield " ".join(line)


def _train_bpe_model(words: dict[str, int], size: int, min_frequency: int, alphabet: list[str]) -> dict[str, Any]:
    """Train BPE on counted words; returns the "model" part of a tokenizer.json."""
    if size < len(alphabet):
        raise EverybertError(f"size is too small for the {len(alphabet)} single letters: give at least twice as many")
    scale = max(1.0, sum(words.values()) / _FED_WORDS)
    scaled = {word: round(count / scale) for word, count in words.items()}
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=max(1, round(min_frequency / scale)),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(_feed(scaled), trainer)
    return json.loads(backend.to_str())["model"]


def _train_wordpiece(words: Counter[str], size: int, lowercase: bool, min_frequency: int) -> Backend:
    """Train WordPiece as BPE in which the letters inside a word differ from the first letter of a word."""
    alphabet = _alphabet(words, size // 32, min_frequency)
    inside = {ord(letter): _CONTINUING + i for i, letter in enumerate(alphabet)}
    known = set(alphabet)
    coded = {word[0] + word[1:].translate(inside): count for word, count in words.items() if known.issuperset(word)}
    specials = list(formats.BERT_NAMES.values())
    model = _train_bpe_model(coded, size - len(specials), min_frequency, alphabet)
    outside = {code: letter for letter, code in inside.items()}
    pieces = [("##" if ord(piece[0]) >= _CONTINUING else "") + piece.translate(outside) for piece in model["vocab"]]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*specials, *pieces]))}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    formats.add_specials(backend, specials)
    return _install("wordpiece", lowercase, backend)


def _alphabet(words: Counter[str], size: int, min_frequency: int) -> list[str]:
    """The most frequent letters in Unicode order: `size` of them, or more if _COVERAGE of the text needs more."""
    letters: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            letters[letter] += count
    left = _COVERAGE * letters.total()
    kept: list[str] = []
    for letter, count in sorted(letters.items(), key=lambda item: (-item[1], item[0])):
        if count < min_frequency or (left <= 0 and len(kept) >= size):
            break
        left -= count
        if ord(letter) < _CONTINUING:
            kept.append(letter)
    return sorted(kept)


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


def _train_unigram(words: Counter[str], size: int, lowercase: bool, min_frequency: int) -> Backend:
    """Unigram by SentencePiece with the ids of ALBERT. The result depends on the number of threads, which is fixed."""
    try:
        import sentencepiece
    except ImportError as error:
        raise EverybertError(
            "training a Unigram tokenizer needs sentencepiece: pip install 'everybert[sentencepiece]'"
        ) from error
    counted = sorted((word, count) for word, count in words.items() if count >= min_frequency and "\0" not in word)
    if not counted:
        raise EverybertError(f"no word occurs {min_frequency} times: lower min_frequency or give more text")
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


def _report(tokenizer: Tokenizer, reading: _Reading, words: int) -> TokenizerReport:
    """Measure the vocabulary on the held-out lines."""
    lines = list(reading.held) or reading.first
    tokens = unknown = lost = 0
    for line, encoding in zip(lines, tokenizer.encode_batch(lines, specials=False), strict=True):
        tokens += len(encoding)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == tokenizer.unk_id:
                unknown += 1
                lost += len("".join(line[start:end].split()))
    characters = sum(map(len, lines))
    runs = [run for line in lines for run in line.split()]
    return TokenizerReport(
        kind=tokenizer.kind,
        size=tokenizer.size,
        model_size=model_size(tokenizer.size),
        texts=reading.texts,
        characters=reading.characters,
        words=words,
        held_out=bool(reading.held),
        measured_characters=characters,
        coverage=1 - lost / max(1, sum(map(len, runs))),
        unknown_rate=unknown / max(1, tokens),
        characters_per_token=characters / max(1, tokens),
        tokens_per_word=tokens / max(1, len(runs)),
    )
