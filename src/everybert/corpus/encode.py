"""Documents to arrays of token ids, in worker processes.

Words repeat, so each distinct word is tokenized once and its ids are looked up afterwards. This is several times as
fast as tokenizing whole sentences, and gives the same ids if the tokenizer treats the words between spaces
independently (`words_are_independent`). Otherwise whole sentences are tokenized.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

import numpy as np

from everybert.corpus.shards import dtype_for
from everybert.errors import EverybertError
from everybert.text.sentences import split_sentences
from everybert.text.tokenizer import Tokenizer

CACHED_CHARACTERS = 1 << 22  # total length of the cached words: about half a million words, 100 MB per process
SPLITTING = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace"))
LOCAL = SPLITTING | {"Punctuation", "Digits"}
LOCAL_NORMALIZERS = frozenset(
    ("BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Lowercase", "StripAccents", "Strip")
)


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a document that is too long to tokenize at once."""

    text: str
    first: bool = True
    last: bool = True
    language: int = 0


@dataclass(frozen=True)
class Encoded:
    """The sentences of some pieces as flat arrays."""

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    """Tokens per sentence."""
    piece_sentences: np.ndarray
    """Sentences per piece that was kept."""
    piece_first: np.ndarray
    """Whether the piece begins a document."""
    piece_language: np.ndarray
    unknown: int
    """Number of unknown tokens."""
    short: int
    """Documents that were left out because they have too few tokens."""


class Encoder:
    """Turns pieces into arrays and caches the ids of words."""

    def __init__(self, folder: Path, min_tokens: int, wrapped: bool):
        self.tokenizer = Tokenizer.load(folder)
        self.dtype = dtype_for(self.tokenizer.size)
        self.min_tokens = min_tokens
        self.wrapped = wrapped
        self.by_words = words_are_independent(folder)
        self._clear_cache()
        self.special = np.zeros(self.tokenizer.size, bool)
        self.special[list(self.tokenizer.special_ids - {self.tokenizer.unk_id})] = True

    def __call__(self, pieces: list[Piece]) -> Encoded:
        """Tokenize the pieces of one unit of work."""
        sentences = [self.sentences(piece) for piece in pieces]
        counts = np.array([len(some) for some in sentences], np.int64)
        ids = self.encode(list(chain.from_iterable(sentences)))
        lengths = np.array([len(some) for some in ids], np.int64) // self.dtype.itemsize
        tokens = np.frombuffer(b"".join(ids), self.dtype)
        special = self.special[tokens]
        if special.any():  # text that spells a special token ("[SEP]") must not act as one
            sentence = np.repeat(np.arange(len(lengths)), lengths)
            lengths = lengths - np.bincount(sentence[special], minlength=len(lengths))
            tokens = tokens[~special]
        return self._keep(pieces, tokens, lengths, counts)

    def sentences(self, piece: Piece) -> list[str]:
        """The sentences of a piece. All but the first of a document start with a space.

        Byte-level vocabularies distinguish a word after a space, which is how it occurs in running text.
        """
        if self.wrapped:
            found = [sentence.replace("\n", " ") for sentence in split_sentences(piece.text)]
        else:
            found = [sentence for line in piece.text.split("\n") for sentence in split_sentences(line)]
        spaced = [f" {sentence}" for sentence in found]
        if piece.first and found:
            spaced[0] = found[0]
        return spaced

    def encode(self, sentences: list[str]) -> list[bytes]:
        """The ids of each sentence, as the bytes of an array."""
        if not self.by_words:
            return self._tokenize(sentences)
        if self.characters > CACHED_CHARACTERS:
            self._clear_cache()
        split = [_words(sentence) for sentence in sentences]
        used = chain.from_iterable(words for words in split if words)
        new = set(filterfalse(self.words.__contains__, used))
        texts = [word[1:] if word[0] == "\n" else " " + word for word in new]
        self.words.update(zip(new, self._tokenize(texts)))
        self.characters += sum(map(len, texts))
        whole = iter(self._tokenize([sentence for sentence, words in zip(sentences, split) if not words]))
        find = self.words.__getitem__
        return [b"".join(map(find, words)) if words else next(whole) for words in split]

    def _clear_cache(self) -> None:
        self.words: dict[str, bytes] = {"\n": b""}
        self.characters = 0

    def _tokenize(self, texts: list[str]) -> list[bytes]:
        ids = self.tokenizer.ids_batch(texts, specials=False)
        return [np.array(some, self.dtype).tobytes() for some in ids]

    def _keep(self, pieces: list[Piece], tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> Encoded:
        """Leave out sentences without tokens and documents with too few."""
        piece_of = np.repeat(np.arange(len(pieces)), counts)
        sizes = np.bincount(piece_of, weights=lengths, minlength=len(pieces))
        whole = np.array([piece.first and piece.last for piece in pieces], bool)
        keep = (sizes >= self.min_tokens) | ~whole
        if not keep[piece_of].all():
            tokens = tokens[np.repeat(keep[piece_of], lengths)]
        used = keep[piece_of] & (lengths > 0)
        return Encoded(
            tokens,
            lengths[used],
            np.bincount(piece_of[used], minlength=len(pieces))[keep],
            np.array([piece.first for piece in pieces], bool)[keep],
            np.array([piece.language for piece in pieces], np.uint8)[keep],
            unknown=0 if self.tokenizer.unk_id is None else int((tokens == self.tokenizer.unk_id).sum()),
            short=int((~keep).sum()),
        )


def _words(sentence: str) -> list[str] | None:
    """The words after each space. The word at the start of the sentence, often empty, is marked by a line end.

    None if spaces are repeated or end the sentence: only the tokenizer knows which word they belong to.
    """
    if "  " in sentence or sentence.endswith(" ") or "\n" in sentence:
        return None
    words = sentence.split(" ")
    words[0] = "\n" + words[0]
    return words


def words_are_independent(folder: Path) -> bool:
    """Whether the tokenizer of a folder treats the words between single spaces independently of each other."""
    spec = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    before = list(_members(spec["pre_tokenizer"], "pretokenizers"))
    names = {part["type"] for part in before}
    splits = names <= LOCAL and bool(names & SPLITTING)
    joins = any(not part.get("split", True) or not part.get("use_regex", True) for part in before)
    local = all(_is_local(part) for part in _members(spec["normalizer"], "normalizers"))
    single = all(" " not in token["content"].strip() for token in spec["added_tokens"])
    return splits and local and single and not joins


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


# ── worker processes ────────────────────────────────────────────────────────────────────────────────────────


class ProcessPool:
    """Runs an encoder in `workers` processes (default: one per core; 1: in this process)."""

    def __init__(self, encoder: Encoder, workers: int | None):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.encoder, self.workers = encoder, workers or cores
        self.depth = 3 * self.workers  # units in flight: enough to keep all workers busy while a shard is written
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "ProcessPool":
        if self.workers > 1:
            # Forked workers need no import guard in the caller's script. Other platforms start Python again.
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            self._executor = ProcessPoolExecutor(self.workers, context, _start, (os.getpid(), self.encoder))
            self._executor.submit(int).result()  # fork now, before a progress bar starts threads
        return self

    def __exit__(self, *error: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, pieces: list[Piece]) -> Callable[[], Encoded]:
        """Begin to encode. The returned function waits for the result."""
        if self._executor is None:
            return partial(self.encoder, pieces)
        return partial(_result, self._executor.submit(_encode, pieces))


def _result(future) -> Encoded:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise EverybertError(
            "a worker process was killed (out of memory?): run again with fewer --workers to continue"
        ) from error


def _start(parent: int, encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    vars(multiprocessing.current_process())["encoder"] = encoder


def _exit_with(parent: int) -> None:
    """A parent that is killed cannot stop its workers, so they stop themselves."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _encode(pieces: list[Piece]) -> Encoded:
    return encode_pieces(vars(multiprocessing.current_process())["encoder"], pieces)


def encode_pieces(encoder: Encoder, pieces: list[Piece]) -> Encoded:
    """Encode in a worker process, of which there is one per core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return encoder(pieces)
