"""One tokenizer over the `tokenizers` library: WordPiece, byte-level BPE and Unigram; text to ids and back.

A character that UTF-8 cannot encode (a lone surrogate) is read as U+FFFD, so that offsets refer to the caller's text.
Nothing is truncated or padded here, whatever a tokenizer.json says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from everybert.errors import EverybertError
from everybert.text import formats

MASK = "[MASK]"  # accepted in text with every vocabulary, whatever its own mask token is
ROLES = tuple(formats.BERT_NAMES)
MAX_GAPS = 1_000_000  # ids that a vocabulary may leave out
_KINDS = {models.WordPiece: "wordpiece", models.BPE: "bpe", models.Unigram: "unigram"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_PARALLEL = "TOKENIZERS_PARALLELISM"


def _disable_parallelism_in_forks() -> None:
    """Make forked processes tokenize on one thread: the threads of `tokenizers` do not survive a fork.

    The variable is set during the fork alone, and only if the user has not set it.
    """
    unset = False

    def before() -> None:
        nonlocal unset
        unset = _PARALLEL not in os.environ
        if unset:
            os.environ[_PARALLEL] = "false"

    def after_in_parent() -> None:
        if unset:
            os.environ.pop(_PARALLEL, None)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after_in_parent)


_disable_parallelism_in_forks()


class Encoding:
    """The tokens of a text or pair. Each attribute is a list with one entry per token, computed on first use."""

    def __init__(self, raw: Any, texts: tuple[str, ...] | None = None, mask: str = MASK):
        self._raw = raw
        self._texts = texts  # the caller's texts, if "[MASK]" in them was replaced by a token of another length
        self._mask = mask

    def __len__(self) -> int:
        return len(self._raw)

    def __repr__(self) -> str:
        return f"Encoding({' '.join(self.tokens)})"

    @cached_property
    def ids(self) -> list[int]:
        """Token ids."""
        return self._raw.ids

    @cached_property
    def tokens(self) -> list[str]:
        """The tokens as written in the vocabulary."""
        return [token.strip() or token for token in self._raw.tokens]  # a mask token may include the space before it

    @cached_property
    def segments(self) -> list[int]:
        """Segment ids (token types): 1 for the second text of a BERT pair."""
        return self._raw.type_ids

    @cached_property
    def special(self) -> list[bool]:
        """Whether the token was added around the texts."""
        return list(map(bool, self._raw.special_tokens_mask))

    @cached_property
    def words(self) -> list[int | None]:
        """The index of the token's word in its text; None for added tokens."""
        return self._raw.word_ids

    @cached_property
    def sequence(self) -> list[int | None]:
        """The text that the token is from, 0 or 1; None for added tokens."""
        return self._raw.sequence_ids

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """(start, end) of the token in characters of its text; (0, 0) for added tokens."""
        if self._texts is None:
            return self._raw.offsets
        where = [_positions(text, self._mask) for text in self._texts]
        return [
            (where[s or 0][start], where[s or 0][end])
            for (start, end), s in zip(self._raw.offsets, self.sequence, strict=True)
        ]


def _positions(text: str, mask: str) -> list[int]:
    """Map positions in the text with "[MASK]" replaced by the mask token to positions in the text itself."""
    where: list[int] = []
    start = 0
    for part in text.split(MASK):
        if start:
            where += [start - len(MASK)] * len(mask)
        where += range(start, start + len(part))
        start += len(part) + len(MASK)
    return [*where, len(text)]


class Tokenizer:
    """Text to token ids and back, for every vocabulary of the family. Use `Tokenizer.load`."""

    def __init__(self, backend: Backend, settings: dict[str, Any] | None = None):
        settings = settings or {}
        kind = next((name for model, name in _KINDS.items() if isinstance(backend.model, model)), None)
        if kind is None:
            found = type(backend.model).__name__
            raise EverybertError(f"a {found} tokenizer is not of the BERT family: WordPiece, BPE or Unigram is needed")
        backend.no_truncation()
        backend.no_padding()
        self.kind: str = kind
        self.max_length: int | None = _max_length(settings)
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.size: int = max(self._vocab.values(), default=-1) + 1
        if self.size > len(self._vocab) + MAX_GAPS:  # tables of this size are allocated
            raise EverybertError(
                f"the tokenizer has {len(self._vocab)} tokens but an id of {self.size - 1}: download it again"
            )
        special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        self._roles = _find_roles(self._vocab, special, settings)
        tokens = [formats.special_token(settings, role) or name for role, name in self._roles.items()]
        formats.add_specials(backend, tokens)
        if backend.post_processor is None and {"cls", "sep"} <= self._roles.keys():
            cls, sep = self._roles["cls"], self._roles["sep"]
            pair = (0, 2) if cls == "<s>" else (1, 1)  # as in RoBERTa or BERT
            backend.post_processor = formats.template(backend, cls, sep, *pair)
        self._backend = backend
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            self._vocab.get(self._roles.get(role, "")) for role in ROLES
        )
        self.mask_token: str | None = self._roles.get("mask")
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.single_special: int = backend.num_special_tokens_to_add(False)
        self.pair_special: int = backend.num_special_tokens_to_add(True)
        self._work = _trimming(backend)
        self._alias = self.mask_token not in (None, MASK) and MASK not in self._vocab

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a folder or file: tokenizer.json, vocab.txt, vocab.json + merges.txt, SentencePiece model."""
        backend, settings = formats.read_backend(path)
        with formats.one_line_errors(f"the tokenizer in {path} is damaged", "download it again"):
            return cls(backend, settings)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.size} tokens, {'uncased' if self.lowercase else 'cased'})"

    def __reduce__(self) -> Any:
        return _restore, (self._backend.to_str(), self._settings())

    # ── the vocabulary

    @cached_property
    def lowercase(self) -> bool:
        """Whether text is lower-cased."""
        normalizer = self._backend.normalizer
        return normalizer is not None and "a" in normalizer.normalize_str("A")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokenizer.json in canonical form: equal digests give equal ids."""
        # JSON may change the last bit of a Unigram score, so scores are rounded.
        content = json.loads(self._backend.to_str(), parse_float=lambda number: round(float(number), 6))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def vocab(self) -> dict[str, int]:
        """A copy of the vocabulary, token to id."""
        return dict(self._vocab)

    def id(self, token: str) -> int | None:
        """The id of a token, or None."""
        return self._vocab.get(token)

    def token(self, id: int) -> str:
        """The token of an id."""
        token = self._backend.id_to_token(id) if 0 <= id < self.size else None
        if token is None:
            raise EverybertError(f"no token has id {id}: the vocabulary's ids run from 0 to {self.size - 1}")
        return token

    def text(self, id: int) -> str:
        """The text of a single token; a token of white space as the vocabulary spells it."""
        return self.decode([id], skip_special=False).strip() or self.token(id)

    def readable(self, tokens: Sequence[str]) -> list[str]:
        """Tokens in readable form: the bytes of byte-level BPE as letters, where a token holds whole letters."""
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            return list(tokens)
        read = [re.sub("^ ", "Ġ", self._backend.decoder.decode([token])) for token in tokens]
        return [token if re.search(r"\ufffd|\s", text) else text for token, text in zip(tokens, read)]

    def continues_word(self) -> np.ndarray:
        """(V,) bool: whether a token continues a word (## in WordPiece; no space marker in BPE and Unigram)."""
        mark = "##" if self.kind == "wordpiece" else "Ġ" if any(t.startswith("Ġ") for t in self._vocab) else "▁"
        continues = np.zeros(self.size, dtype=bool)
        for token, i in self._vocab.items():
            continues[i] = token.startswith(mark) == (self.kind == "wordpiece")
        continues[list(self.special_ids)] = False
        return continues

    # ── text to ids

    def encode(self, text: str, pair: str | None = None, specials: bool = True) -> Encoding:
        """Tokenize one text or pair of texts, with special tokens around it by default."""
        return self.encode_batch([text if pair is None else (text, pair)], specials)[0]

    def encode_batch(self, texts: Sequence[str | tuple[str, str]], specials: bool = True) -> list[Encoding]:
        """Tokenize texts and pairs on all cores."""
        raws = self._run(self._work.encode_batch, texts, specials)
        if not self._alias or len(self.mask_token or "") == len(MASK):
            return [Encoding(raw) for raw in raws]
        parts = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        return [
            Encoding(raw, part if any(MASK in t for t in part) else None, self.mask_token or MASK)
            for raw, part in zip(raws, parts, strict=True)
        ]

    def ids_batch(self, texts: Sequence[str | tuple[str, str]], specials: bool = True) -> list[list[int]]:
        """The ids of texts and pairs. Faster than `encode_batch`, which computes offsets."""
        return [raw.ids for raw in self._run(self._work.encode_batch_fast, texts, specials)]

    def _run(self, encode: Any, texts: Sequence[str | tuple[str, str]], specials: bool) -> list[Any]:
        """Encode. On a TypeError (a lone surrogate, or an object that is not text), clean or refuse the texts."""
        with formats.one_line_errors("the tokenizer cannot encode this", "its files may be damaged"):
            try:
                return encode(list(map(self._own_mask, texts)) if self._alias else texts, add_special_tokens=specials)
            except TypeError:
                cleaned = [self._own_mask(_clean(text, i)) for i, text in enumerate(texts)]
                return encode(cleaned, add_special_tokens=specials)

    def _own_mask(self, text: Any) -> Any:
        """The text with "[MASK]" replaced by the mask token of this vocabulary."""
        if not self._alias:
            return text
        if isinstance(text, str):
            return text.replace(MASK, self.mask_token or MASK) if MASK in text else text
        return tuple(map(self._own_mask, text)) if isinstance(text, list | tuple) else text

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids."""
        ids = [int(i) for i in ids]
        if ids and (min(ids) < 0 or max(ids) >= self.size):
            raise EverybertError(f"an id is outside the vocabulary: ids run from 0 to {self.size - 1}")
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    @cached_property
    def _layouts(self) -> tuple[list[tuple[list[int], list[int], int]], ...]:
        """For one text and for a pair: (special ids, their segments, segment of the text that follows) per text."""
        return _layout(self.encode("a")), _layout(self.encode("a", "a"))

    def build(self, ids_a: Sequence[int], ids_b: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Add special tokens around ids as the model family does; returns (ids, segments)."""
        ids: list[int] = []
        segments: list[int] = []
        texts = [ids_a] if ids_b is None else [ids_a, ids_b]
        for (special, special_segments, segment), text in zip(self._layouts[len(texts) - 1], [*texts, []], strict=True):
            ids += [*special, *text]
            segments += special_segments + [segment] * len(text)
        return ids, segments

    # ── files

    def _settings(self) -> dict[str, Any]:
        tokens: dict[str, Any] = {f"{role}_token": name for role, name in self._roles.items()}
        return tokens | ({"model_max_length": self.max_length} if self.max_length else {})

    def save(self, folder: str | Path, max_length: int | None = None) -> None:
        """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json, as `transformers` reads them.

        `max_length` is the number of positions of the model, to which other libraries truncate.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = self._settings() | ({"model_max_length": max_length} if max_length else {})
        config = formats.class_settings(self._backend, self._roles) | settings
        whole = self._backend.to_str(pretty=True)  # Backend.save() hides disk errors
        (folder / "tokenizer.json").write_text(whole, encoding="utf-8", newline="\n")
        tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
        for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", tokens)):
            text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
            (folder / name).write_text(text, encoding="utf-8")


def _restore(serialised: str, settings: dict[str, Any]) -> Tokenizer:
    return Tokenizer(Backend.from_str(serialised), settings)


def _find_roles(vocab: dict[str, int], special: list[str], settings: dict[str, Any]) -> dict[str, str]:
    """Role → token: from the settings, by its usual name, or by a special token that is named like the role."""
    roles: dict[str, str] = {}
    for role in ROLES:
        usual = formats.BERT_NAMES[role], formats.ROBERTA_NAMES[role]
        names = [formats.content(formats.special_token(settings, role) or usual[0]), *usual]
        names += [token for token in special if token.strip("[]<>|").lower() == role]
        found = next((name for name in names if name in vocab), None)
        if found is not None:
            roles[role] = found
    return roles


def _max_length(settings: dict[str, Any]) -> int | None:
    """The maximum length in the settings; transformers writes 1e30 for none."""
    length = settings.get("model_max_length")
    return int(length) if isinstance(length, int | float) and 0 < length < 1e9 else None


def _trimming(backend: Backend) -> Backend:
    """A backend with the same ids, whose byte-level offsets exclude the space before a word."""
    splitter, template = (
        str(part.__getstate__()) if part else "" for part in (backend.pre_tokenizer, backend.post_processor)
    )
    if '"ByteLevel"' not in splitter or not template or '"trim_offsets":true' in template:
        return backend
    trim = processors.ByteLevel(add_prefix_space='"add_prefix_space":true' in splitter, trim_offsets=True)
    working = Backend.from_str(backend.to_str())
    working.post_processor = processors.Sequence([trim, backend.post_processor])
    return working


def _layout(encoding: Encoding) -> list[tuple[list[int], list[int], int]]:
    """The special tokens before each text of an encoding, and after the last."""
    runs: list[tuple[list[int], list[int], int]] = [([], [], 0)]
    previous: int | None = None
    for token, segment, sequence in zip(encoding.ids, encoding.segments, encoding.sequence, strict=True):
        if sequence is None:
            runs[-1][0].append(token)
            runs[-1][1].append(segment)
        elif sequence != previous:
            runs[-1] = (*runs[-1][:2], segment)
            runs.append(([], [], 0))
        previous = sequence if sequence is not None else previous
    return runs


def _clean(text: Any, index: int) -> Any:
    """Replace lone surrogates in a text or pair; anything that is not text is an error."""
    if isinstance(text, str):
        return _SURROGATE.sub("\ufffd", text)
    if isinstance(text, list | tuple) and len(text) == 2 and all(isinstance(t, str) for t in text):
        return tuple(_SURROGATE.sub("\ufffd", t) for t in text)
    raise EverybertError(f"text {index} is {type(text).__name__}, not a string or a pair of strings")
