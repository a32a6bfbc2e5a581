"""Documents to arrays of token ids: the work that corpus building spreads over processes.

Words repeat, so each distinct word is tokenized once and its ids are looked up afterwards: several times as fast
as tokenizing whole sentences, and the same ids wherever the tokenizer treats the words between spaces one by one
(`words_apart` says whether it does; otherwise sentences are tokenized whole).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

import numpy as np

from everybert.corpus.shards import dtype_for
from everybert.text.sentences import split_sentences
from everybert.text.tokenizer import Tokenizer

CACHED_CHARACTERS = 1 << 22  # of words kept: about half a million words, 100 MB in each process
SPLITTING = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace"))
LOCAL = SPLITTING | {"Punctuation", "Digits"}
LOCAL_NORMALIZERS = frozenset(
    ("BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Lowercase", "StripAccents", "Strip")
)


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one too long to tokenize at once."""

    text: str
    first: bool = True
    last: bool = True
    language: int = 0


@dataclass(frozen=True)
class Encoded:
    """The sentences of some pieces: all ids, tokens in each sentence, sentences in each kept piece."""

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    piece_sentences: np.ndarray
    piece_first: np.ndarray  # whether the piece begins a document
    piece_language: np.ndarray
    unknown: int
    short: int  # documents left out for having too few tokens


class Encoder:
    """Turns pieces into arrays; holds the words met so far."""

    def __init__(self, folder: Path, min_tokens: int, wrapped: bool):
        self.tokenizer = Tokenizer.load(folder)
        self.dtype = dtype_for(self.tokenizer.size)
        self.min_tokens = min_tokens
        self.wrapped = wrapped
        self.by_words = words_apart(folder)
        self._forget()
        unwanted = self.tokenizer.special_ids - {self.tokenizer.unk_id}
        self.special = np.zeros(self.tokenizer.size, bool)
        self.special[list(unwanted)] = True

    def __call__(self, pieces: list[Piece]) -> Encoded:
        """Tokenize the pieces of one unit of work."""
        sentences = [self.sentences(piece) for piece in pieces]
        counts = np.array([len(some) for some in sentences], np.int64)
        ids = self.encode(list(chain.from_iterable(sentences)))
        lengths = np.array([len(some) for some in ids], np.int64) // self.dtype.itemsize
        tokens = np.frombuffer(b"".join(ids), self.dtype)
        tokens, lengths = self._without_specials(tokens, lengths)
        return self._kept(pieces, tokens, lengths, counts)

    def sentences(self, piece: Piece) -> list[str]:
        """The piece's sentences; all but a document's first start with a space.

        Byte-level vocabularies tell a word after a space from one without, and in running text there is one.
        """
        text = piece.text
        if self.wrapped:
            found = [sentence.replace("\n", " ") for sentence in split_sentences(text)]
        else:
            found = [sentence for line in text.split("\n") for sentence in split_sentences(line)]
        spaced = [f" {sentence}" for sentence in found]
        if piece.first and found:
            spaced[0] = found[0]
        return spaced

    def encode(self, sentences: list[str]) -> list[bytes]:
        """The ids of each sentence, as the bytes of an array."""
        if not self.by_words:
            return self._tokenize(sentences)
        if self.characters > CACHED_CHARACTERS:
            self._forget()
        split = [_words(sentence) for sentence in sentences]
        used = chain.from_iterable(words for words in split if words)
        self._learn(set(filterfalse(self.words.__contains__, used)))
        whole = iter(self._tokenize([sentence for sentence, words in zip(sentences, split) if not words]))
        find = self.words.__getitem__
        return [b"".join(map(find, words)) if words else next(whole) for words in split]

    def _forget(self) -> None:
        self.words: dict[str, bytes] = {"\n": b""}
        self.characters = 0

    def _learn(self, new: set[str]) -> None:
        """Tokenize words not met before, each with the space before it where there is one."""
        texts = [word[1:] if word[0] == "\n" else " " + word for word in new]
        self.words.update(zip(new, self._tokenize(texts)))
        self.characters += sum(map(len, texts))

    def _tokenize(self, texts: list[str]) -> list[bytes]:
        ids = self.tokenizer.ids_batch(texts, specials=False)
        return [np.array(some, self.dtype).tobytes() for some in ids]

    def _without_specials(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Text that spells a special token ("[SEP]") must not act as one."""
        special = self.special[tokens]
        if special.any():
            sentence = np.repeat(np.arange(len(lengths)), lengths)
            lengths = lengths - np.bincount(sentence[special], minlength=len(lengths))
            tokens = tokens[~special]
        return tokens, lengths

    def _kept(self, pieces: list[Piece], tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> Encoded:
        """Leave out sentences without tokens and documents with too few."""
        piece_of = np.repeat(np.arange(len(pieces)), counts)
        sizes = np.bincount(piece_of, weights=lengths, minlength=len(pieces))
        whole = np.array([piece.first and piece.last for piece in pieces], bool)
        keep = (sizes >= self.min_tokens) | ~whole
        if not keep[piece_of].all():
            tokens = tokens[np.repeat(keep[piece_of], lengths)]
        used = keep[piece_of] & (lengths > 0)
        piece_sentences = np.bincount(piece_of[used], minlength=len(pieces))
        unknown = int((tokens == self.tokenizer.unk_id).sum()) if self.tokenizer.unk_id is not None else 0
        return Encoded(
            tokens,
            lengths[used],
            piece_sentences[keep],
            np.array([piece.first for piece in pieces], bool)[keep],
            np.array([piece.language for piece in pieces], np.uint8)[keep],
            unknown,
            int((~keep).sum()),
        )


def _words(sentence: str) -> list[str] | None:
    """The words after each space; the one at the start, often empty, is marked by a line end.

    None where spaces stand together or last: which word they belong to is for the tokenizer to say.
    """
    if "  " in sentence or sentence.endswith(" ") or "\n" in sentence:
        return None
    words = sentence.split(" ")
    words[0] = "\n" + words[0]
    return words


def words_apart(folder: Path) -> bool:
    """Whether the tokenizer of a folder treats the words between single spaces one by one."""
    spec = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    before = list(_members(spec["pre_tokenizer"], "pretokenizers"))
    names = {part["type"] for part in before}
    apart = names <= LOCAL and bool(names & SPLITTING)
    whole = any(not part.get("split", True) or not part.get("use_regex", True) for part in before)
    normal = all(_is_local(part) for part in _members(spec["normalizer"], "normalizers"))
    tokens = all(" " not in token["content"].strip() for token in spec["added_tokens"])
    return apart and normal and tokens and not whole


def _members(part: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    if part is not None and part["type"] == "Sequence":
        for member in part[key]:
            yield from _members(member, key)
    elif part is not None:
        yield part


def _is_local(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"]
        return pattern == {"Regex": " {2,}"} or " " not in pattern.get("String", " ")
    return normalizer["type"] in LOCAL_NORMALIZERS
