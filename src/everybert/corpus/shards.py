"""Token shards on disk, the memory-mapped corpus that batches are read from, and the layout of special tokens.

A corpus folder holds

    corpus.json              dtype, vocabulary, tokenizer digest, languages, splits, counts, files with their hashes
    tokenizer/               the tokenizer that encoded it
    unigram.npy              int64 count of every token id over the training split
    pmi.npz                  mined collocations (only after `--pmi`)
    shards/NAME.tokens.bin   flat little-endian token ids, no special tokens
    shards/NAME.sentences.npy  int64 token offset of every sentence, and the end      (n_sentences + 1)
    shards/NAME.documents.npy  int64 sentence index of every document, and the end    (n_documents + 1)
    shards/NAME.languages.npy  uint8 language of every document (only with several languages)
"""

from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from everybert.errors import EverybertError
from everybert.files import read_json, sha256, sync
from everybert.text.tokenizer import Tokenizer

VERSION = 1
OPEN_SHARDS = 256  # memory maps that are open at once: each holds a file descriptor, and limits of 1,024 are common


def offsets(counts: np.ndarray) -> np.ndarray:
    """int64 running sum that begins with 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64: the numbers starts[i] … starts[i] + counts[i] − 1 for every i, concatenated."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest unsigned little-endian type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(folder: Path, name: str, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> list[Path]:
    """Write and sync the files of one shard: its tokens and named arrays. Returns their paths."""
    paths = [folder / f"{name}.tokens.bin"]
    tokens.tofile(paths[0])
    for kind, array in arrays.items():
        paths.append(folder / f"{name}.{kind}.npy")
        np.save(paths[-1], array, allow_pickle=False)
    for path in paths:
        sync(path)
    return paths


class Corpus:
    """A split of a corpus folder, numbered globally over its shards. Token ids stay on disk until they are read.

    `document_sentences` (n_documents + 1) and `sentence_offsets` (n_sentences + 1) are int64 arrays in
    memory: document d is sentences `document_sentences[d]:document_sentences[d + 1]`, sentence s is tokens
    `sentence_offsets[s]:sentence_offsets[s + 1]`. `documents`, `sentences` and `token_count` are their numbers.
    `document_language` indexes `languages`, or is None.
    """

    def __init__(self, path: str | Path, split: str = "train"):
        self.path = Path(path)
        self.split = split
        self.meta = read_meta(self.path)
        names = self.meta["splits"].get(split)
        if names is None:
            raise EverybertError(f"{path} has no split {split!r}: it has {', '.join(self.meta['splits'])}")
        if not names:
            raise EverybertError(f"the {split} split of {path} is empty: build it with another heldout")
        self.vocab_size: int = self.meta["vocab_size"]
        self.dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        self.tokenizer_path = self.path / "tokenizer"
        self.tokenizer_digest: str = self.meta["tokenizer_digest"]
        self.languages: tuple[str, ...] = tuple(self.meta["languages"])
        self._names: list[str] = names
        self._checked = cache(partial(check_file, self.path, self.meta))  # the hash of a large file takes a while
        self._tokens_of = lru_cache(OPEN_SHARDS)(self._map_tokens)
        sentences = [self._array(name, "sentences") for name in names]
        self._bases = np.cumsum([0, *(int(array[-1]) for array in sentences)])
        for name in names:
            check_file(self.path, self.meta, f"shards/{name}.tokens.bin", content=False)
        self.sentence_offsets = _chain(sentences)
        self.document_sentences = _chain([self._array(name, "documents") for name in names])
        self.documents, self.sentences = len(self.document_sentences) - 1, len(self.sentence_offsets) - 1
        self.token_count = int(self._bases[-1])
        self.document_language: np.ndarray | None = None
        if len(self.languages) > 1:
            self.document_language = np.concatenate([self._array(name, "languages") for name in names])

    @classmethod
    def open(cls, path: str | Path, split: str = "train") -> "Corpus":
        """Map the shards of one split ("train" or "heldout")."""
        try:
            return cls(path, split)
        except EverybertError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EverybertError(f"{path}/corpus.json is damaged ({error!r}): build the corpus again") from error

    def __reduce__(self):
        # Data workers reopen the files: cheaper than sending the offsets, and maps cannot be pickled.
        return Corpus, (self.path, self.split)

    def _array(self, name: str, kind: str) -> np.ndarray:
        return np.load(check_file(self.path, self.meta, f"shards/{name}.{kind}.npy"), mmap_mode="r", allow_pickle=False)

    def check_tokenizer(self, digest: str) -> None:
        """Raise an error unless the digest is of the tokenizer that the corpus was built with."""
        if digest != self.tokenizer_digest:
            raise EverybertError(f"the tokenizer does not belong to the corpus {self.path}: use {self.tokenizer_path}")

    def _map_tokens(self, shard: int) -> np.ndarray:
        return np.memmap(self._checked(f"shards/{self._names[shard]}.tokens.bin"), dtype=self.dtype, mode="r")

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """The ids from global token offset `start` to `stop`."""
        return self.gather(np.array([start]), np.array([stop]))

    def gather(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """The runs `starts[i]:stops[i]` of global token offsets, concatenated."""
        index = ranges(starts, stops - starts)
        if not len(index):
            return np.empty(0, self.dtype)
        if index.min() < 0 or index.max() >= self.token_count:
            raise IndexError(f"tokens outside a corpus of {self.token_count}")
        shards = np.searchsorted(self._bases, index, side="right") - 1
        out = np.empty(len(index), self.dtype)
        for shard in np.unique(shards):
            here = shards == shard
            out[here] = self._tokens_of(int(shard))[index[here] - self._bases[shard]]
        return out

    def unigram(self) -> np.ndarray:
        """Count of every token id over the training split, int64 (V,)."""
        return np.load(check_file(self.path, self.meta, "unigram.npy"), allow_pickle=False)

    def collocations(self) -> list[tuple[int, ...]] | None:
        """The mined collocations as tuples of token ids, longest first. None if none were mined."""
        if "pmi.npz" not in self.meta.get("files", ()):  # an unfinished file does not count
            return None
        with np.load(check_file(self.path, self.meta, "pmi.npz"), allow_pickle=False) as data:
            ids, edges = data["ids"].tolist(), data["offsets"].tolist()
        return [tuple(ids[a:b]) for a, b in pairwise(edges)]


def _chain(arrays: list[np.ndarray]) -> np.ndarray:
    """Join per-shard offsets (each from 0 to its end) into one array from 0 to the sum of the ends."""
    out = np.zeros(sum(len(array) - 1 for array in arrays) + 1, np.int64)
    at = 0
    for array in arrays:
        np.add(array[1:], out[at], out=out[at + 1 : at + len(array)])
        at += len(array) - 1
    return out


def check_file(folder: Path, meta: dict[str, Any], name: str, content: bool = True) -> Path:
    """The path of a file of a corpus. It is an error if its size, or its hash, is not that of corpus.json."""
    path, (size, digest) = folder / name, meta["files"][name]
    try:
        unchanged = path.stat().st_size == size and (not content or sha256(path) == digest)
    except OSError as error:
        raise EverybertError(f"{path} cannot be read ({error.strerror}): build the corpus again") from error
    if not unchanged:
        raise EverybertError(f"{path} was changed or cut short: build the corpus again")
    return path


def read_meta(path: str | Path) -> dict[str, Any]:
    """The corpus.json of a folder. Raises an error unless this version reads it."""
    path = Path(path)
    file = path / "corpus.json"
    if not file.exists():
        if Path(f"{path.absolute()}.building").exists():
            raise EverybertError(f"{path} is not finished: run its `everybert corpus build` again to continue")
        raise EverybertError(f"{path} is not a corpus folder: make one with `everybert corpus build`")
    meta = read_json(file, "build the corpus again")
    if (version := meta.get("version")) != VERSION:
        raise EverybertError(f"{path} has corpus format {version}, this everybert reads {VERSION}: build it again")
    return meta


@dataclass(frozen=True, eq=False)
class ExampleLayout:
    """The ids that examples are built with: [CLS] A [SEP] B [SEP] in BERT, <s> A </s></s> B </s> in RoBERTa."""

    cls_id: int
    sep_id: int
    pad_id: int
    mask_id: int
    vocab_size: int
    special_V: np.ndarray
    """bool: special tokens, which are neither masked nor drawn as replacements."""
    continues_V: np.ndarray
    """bool: tokens that continue a word."""
    pair_separators: int = 1
    """Separators between the two segments of a pair."""
    segments: bool = True
    """Whether the second segment has its own segment id."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ExampleLayout":
        """The layout that the tokenizer uses for a pair of texts."""
        needed = {"cls_id": "[CLS]", "sep_id": "[SEP]", "pad_id": "[PAD]", "mask_id": "[MASK]"}
        ids = {name: getattr(tokenizer, name) for name in needed}
        for name, token in needed.items():
            if ids[name] is None:
                raise EverybertError(f"the tokenizer has no {token} token, which pre-training needs")
        plain = next(i for i in range(tokenizer.size) if i not in tokenizer.special_ids)
        pair, segments = tokenizer.build([plain], [plain])
        special = np.zeros(tokenizer.size, bool)
        special[list(tokenizer.special_ids)] = True
        return cls(
            **ids,
            vocab_size=tokenizer.size,
            special_V=special,
            continues_V=np.asarray(tokenizer.continues_word(), bool),
            pair_separators=len(pair) - 4,
            segments=any(segments),
        )
