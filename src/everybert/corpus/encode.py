"""Documents to arrays of token ids, in worker processes.

Words repeat, so each distinct word is tokenized once and its ids are looked up afterwards. This is several times as
fast as tokenizing whole sentences, and gives the same ids if the tokenizer treats the words between spaces
independently (`words_are_independent`). Otherwise whole sentences are tokenized.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from everybert.corpus.shards import dtype_for, offsets
from everybert.errors import EverybertError
from everybert.text.sentences import split_sentences
from everybert.text.tokenizer import Tokenizer

CACHED_CHARACTERS = 1 << 22  # total length of the cached words: about half a million words, 100 MB per process
# Parts of a tokenizer that split at spaces, and all that never look beyond a space.
SPLITTING = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace"}
LOCAL = SPLITTING | {"Punctuation", "Digits", "Sequence", "Replace", "BertNormalizer", "NFC", "NFD", "NFKC", "NFKD"}
LOCAL |= {"Nmt", "Precompiled", "Lowercase", "StripAccents", "Strip"}

Document = tuple[str, int]
"""The text of a document and the number of its language."""


class EncodedDocuments(NamedTuple):
    """Documents as flat arrays."""

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    """Tokens per sentence."""
    document_sentences: np.ndarray
    """Sentences per document."""
    languages: np.ndarray
    unknown: int
    """Number of unknown tokens."""
    empty: int
    """Documents that were left out because they have no tokens."""


class DocumentEncoder:
    """Turns documents into arrays and caches the ids of words."""

    def __init__(self, folder: Path, wrapped: bool):
        self.tokenizer = Tokenizer.load(folder)
        self.dtype = dtype_for(self.tokenizer.size)
        self.wrapped = wrapped
        self.by_words = words_are_independent(folder)
        self._clear_cache()
        self.special = np.zeros(self.tokenizer.size, bool)
        self.special[list(self.tokenizer.special_ids - {self.tokenizer.unk_id})] = True

    def __call__(self, documents: list[Document]) -> EncodedDocuments:
        """Tokenize the documents of one unit of work."""
        sentences = [self.sentences(text) for text, _ in documents]
        ids = self.encode(list(chain.from_iterable(sentences)))
        lengths = np.array([len(some) for some in ids], np.int64) // self.dtype.itemsize
        tokens = np.frombuffer(b"".join(ids), self.dtype)
        special = self.special[tokens]
        if special.any():  # text that spells a special token ("[SEP]") must not act as one
            sentence = np.repeat(np.arange(len(lengths)), lengths)
            lengths = lengths - np.bincount(sentence[special], minlength=len(lengths))
            tokens = tokens[~special]
        document = np.repeat(np.arange(len(documents)), [len(some) for some in sentences])
        counts = np.bincount(document[lengths > 0], minlength=len(documents))
        languages = np.array([language for _, language in documents], np.uint8)
        unknown = int((tokens == self.tokenizer.unk_id).sum()) if self.tokenizer.unk_id is not None else 0
        filled = counts > 0
        empty = int((~filled).sum())
        return EncodedDocuments(tokens, lengths[lengths > 0], counts[filled], languages[filled], unknown, empty)

    def sentences(self, text: str) -> list[str]:
        """The sentences of a document. All but the first start with a space.

        Byte-level vocabularies distinguish a word after a space, which is how it occurs in running text.
        """
        if self.wrapped:
            sentences = [sentence.replace("\n", " ") for sentence in split_sentences(text)]
        else:
            sentences = [sentence for line in text.split("\n") for sentence in split_sentences(line)]
        return sentences[:1] + [f" {sentence}" for sentence in sentences[1:]]

    def encode(self, sentences: list[str]) -> list[bytes]:
        """The ids of each sentence, as the bytes of an array."""
        if not self.by_words:
            return self._tokenize(sentences)
        if self.characters > CACHED_CHARACTERS:
            self._clear_cache()
        split = [_words(sentence) for sentence in sentences]
        new = set().union(*filter(None, split)).difference(self.words)
        first = [word for word in new if word[0] == "\n"]
        later = list(new.difference(first))
        self.words.update(zip(first, self._tokenize([word[1:] for word in first])))
        self.words.update(zip(later, self._tokenize_words(later)))
        self.characters += sum(map(len, new))
        whole = iter(self._tokenize([sentence for sentence, words in zip(sentences, split) if not words]))
        find = self.words.__getitem__
        return [b"".join(map(find, words)) if words else next(whole) for words in split]

    def _clear_cache(self) -> None:
        self.words: dict[str, bytes] = {"\n": b""}
        self.characters = 0

    def _tokenize(self, texts: list[str]) -> list[bytes]:
        ids = self.tokenizer.ids_batch(texts, specials=False)
        return [np.array(some, self.dtype).tobytes() for some in ids]

    def _tokenize_words(self, words: list[str]) -> list[bytes]:
        """The ids of words that follow a space: of all in one text, as a text for each takes twice as long."""
        starts = np.cumsum([0, *(len(word) + 1 for word in words)])
        encoding = self.tokenizer.encode(" " + " ".join(words), specials=False)
        at = np.array([start for start, _ in encoding.offsets], np.int64)
        counts = np.bincount(np.searchsorted(starts, at, side="right") - 1, minlength=len(words))
        ends = offsets(counts) * self.dtype.itemsize
        data = np.array(encoding.ids, self.dtype).tobytes()
        return [data[a:b] for a, b in pairwise(ends.tolist())]


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
    parts = json.dumps([spec["normalizer"], spec["pre_tokenizer"]])
    types = set(re.findall(r'"type": "(\w+)"', parts))
    joins = '"split": false' in parts or '"use_regex": false' in parts
    patterns = set(re.findall(r'"pattern": (\{.*?\})', parts)) - {'{"Regex": " {2,}"}'}
    local = all(pattern.startswith('{"String"') and " " not in pattern[11:] for pattern in patterns)
    single = all(" " not in token["content"].strip() for token in spec["added_tokens"])
    return bool(types & SPLITTING) and types <= LOCAL and local and single and not joins


# ── worker processes ────────────────────────────────────────────────────────────────────────────────────────


class ProcessPool:
    """Runs an encoder in `workers` processes (default: one per core; 1: in this process)."""

    def __init__(self, encoder: DocumentEncoder, workers: int | None):
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

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise EverybertError("a worker was killed (out of memory?): run again with fewer workers") from error

    def submit(self, documents: list[Document]) -> Callable[[], EncodedDocuments]:
        """Begin to encode. The returned function waits for the result."""
        if self._executor is None:
            return partial(self.encoder, documents)
        return self._executor.submit(_encode, documents).result


def _start(parent: int, encoder: DocumentEncoder) -> None:
    def exit_with_parent() -> None:  # a parent that is killed cannot stop its workers
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=exit_with_parent, daemon=True).start()
    vars(multiprocessing.current_process())["encoder"] = encoder  # state of this worker; a module has none


def _encode(documents: list[Document]) -> EncodedDocuments:
    return encode_documents(vars(multiprocessing.current_process())["encoder"], documents)


def encode_documents(encoder: DocumentEncoder, documents: list[Document]) -> EncodedDocuments:
    """Encode in a worker process, of which there is one per core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return encoder(documents)
