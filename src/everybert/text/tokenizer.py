"""One tokenizer over the `tokenizers` library: WordPiece, byte-level BPE and Unigram; text to ids and back.

Text that cannot be UTF-8 (a lone surrogate) is read as U+FFFD in its place, so that offsets stay those of the
caller's text. Nothing is truncated or padded here, whatever a tokenizer.json says.
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
from everybert.text import formats, pipelines

MASK = "[MASK]"  # understood in every model's text, whatever its own mask token is called
HOLES = 1_000_000  # ids that a vocabulary may leave out
_KINDS = {models.WordPiece: "wordpiece", models.BPE: "bpe", models.Unigram: "unigram"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_PARALLEL = "TOKENIZERS_PARALLELISM"


def _quiet_fork() -> None:
    """Let a forked child tokenize on one thread: the crate's threads do not survive a fork (it would warn).

    The variable is set for the moment of the fork alone, and only where the user has not chosen.
    """
    chosen = _PARALLEL in os.environ

    def before() -> None:
        nonlocal chosen
        chosen = _PARALLEL in os.environ
        if not chosen:
            os.environ[_PARALLEL] = "false"

    def after_in_parent() -> None:
        if not chosen:
            os.environ.pop(_PARALLEL, None)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after_in_parent)


_quiet_fork()


class Encoding:
    """A text (or pair) as tokens. Each attribute is a list, one entry a token, read when first asked for."""

    def __init__(self, raw: Any, texts: tuple[str, ...] | None = None, mask: str = MASK):
        self._raw = raw
        self._texts = texts  # the caller's texts, where "[MASK]" was rewritten to a token of another length
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
        """The pieces as the vocabulary spells them."""
        return [token.strip() or token for token in self._raw.tokens]  # the crate shows a space that a mask took

    @cached_property
    def segments(self) -> list[int]:
        """Segment ids (token types): 1 in the second text of a BERT pair."""
        return self._raw.type_ids

    @cached_property
    def special(self) -> list[bool]:
        """Whether the token was added around the texts rather than found in them."""
        return list(map(bool, self._raw.special_tokens_mask))

    @cached_property
    def words(self) -> list[int | None]:
        """The number of the token's word within its own text; None for added tokens."""
        return self._raw.word_ids

    @cached_property
    def sequence(self) -> list[int | None]:
        """Which text the token came from, 0 or 1; None for added tokens."""
        return self._raw.sequence_ids

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """(start, end) in characters of the token's own text; (0, 0) for added tokens."""
        if self._texts is None:
            return self._raw.offsets
        where = [_positions(text, self._mask) for text in self._texts]
        return [
            (where[s or 0][start], where[s or 0][end])
            for (start, end), s in zip(self._raw.offsets, self.sequence, strict=True)
        ]


def _positions(text: str, mask: str) -> list[int]:
    """For each position in the text with "[MASK]" rewritten as the mask token, that in the text itself."""
    where: list[int] = []
    start = 0
    for part in text.split(MASK):
        if start:
            where += [start - len(MASK)] * len(mask)
        where += range(start, start + len(part))
        start += len(part) + len(MASK)
    return [*where, len(text)]


class Tokenizer:
    """Text to token ids and back, for every vocabulary of the family. Made by `Tokenizer.load`."""

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
        if self.size > len(self._vocab) + HOLES:  # tables are made of this size
            raise EverybertError(
                f"the tokenizer has {len(self._vocab)} tokens but an id of {self.size - 1}: fetch it again"
            )
        special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        self._roles = _find_roles(self._vocab, special, settings)
        tokens = [formats.special_token(settings, role) or name for role, name in self._roles.items()]
        pipelines.add_specials(backend, tokens)
        if backend.post_processor is None and {"cls", "sep"} <= self._roles.keys():
            cls, sep = self._roles["cls"], self._roles["sep"]
            pair = (0, 2) if cls == "<s>" else (1, 1)  # as RoBERTa has it, or BERT
            backend.post_processor = pipelines.template(backend, cls, sep, *pair)
        self._backend = backend
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
        with formats.one_line_errors(f"the tokenizer in {path} is damaged", "fetch it again"):
            return cls(backend, settings)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.size} tokens, {'uncased' if self.lowercase else 'cased'})"

    def __reduce__(self) -> Any:
        return _restore, (self._backend.to_str(), self._settings())

    # What the vocabulary holds

    def _role(self, role: str) -> int | None:
        return self._vocab.get(self._roles.get(role, ""))

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token."""
        return self._role("pad")

    @property
    def unk_id(self) -> int | None:
        """Id of the unknown token."""
        return self._role("unk")

    @property
    def cls_id(self) -> int | None:
        """Id of the first token of a sequence ([CLS] or <s>)."""
        return self._role("cls")

    @property
    def sep_id(self) -> int | None:
        """Id of the separator ([SEP] or </s>)."""
        return self._role("sep")

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token."""
        return self._role("mask")

    @property
    def mask_token(self) -> str | None:
        """How this vocabulary spells the mask."""
        return self._roles.get("mask")

    @cached_property
    def lowercase(self) -> bool:
        """Whether text is lower-cased first."""
        normalizer = self._backend.normalizer
        return normalizer is not None and "a" in normalizer.normalize_str("A")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokenizer.json in canonical form: equal digests give equal ids."""
        # The crate's JSON loses the last bit of Unigram scores, so they are rounded to what a file keeps.
        content = json.loads(self._backend.to_str(), parse_float=lambda number: round(float(number), 6))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def vocab(self) -> dict[str, int]:
        """A copy of the vocabulary, token to id."""
        return dict(self._vocab)

    def id(self, token: str) -> int | None:
        """The id of a piece, or None."""
        return self._vocab.get(token)

    def token(self, id: int) -> str:
        """The piece of an id."""
        token = self._backend.id_to_token(id) if 0 <= id < self.size else None
        if token is None:
            raise EverybertError(f"no token has id {id}: the vocabulary's ids run from 0 to {self.size - 1}")
        return token

    def spelt(self, tokens: Sequence[str]) -> list[str]:
        """Pieces as people read them: byte-level BPE's bytes as the letters they are, where a piece has them whole."""
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            return list(tokens)
        read = [re.sub("^ ", "Ġ", self._backend.decoder.decode([token])) for token in tokens]
        return [token if re.search(r"\ufffd|\s", text) else text for token, text in zip(tokens, read)]

    def continues_word(self) -> np.ndarray:
        """(V,) bool: the piece continues a word (## in WordPiece; no space marker in BPE and Unigram)."""
        mark = "##" if self.kind == "wordpiece" else "Ġ" if any(t.startswith("Ġ") for t in self._vocab) else "▁"
        continues = np.zeros(self.size, dtype=bool)
        for token, i in self._vocab.items():
            continues[i] = token.startswith(mark) == (self.kind == "wordpiece")
        continues[list(self.special_ids)] = False
        return continues

    # Text to ids

    def encode(self, text: str, pair: str | None = None, specials: bool = True) -> Encoding:
        """One text, or a pair of texts, as tokens."""
        return self.encode_batch([text if pair is None else (text, pair)], specials)[0]

    def encode_batch(self, texts: Sequence[str | tuple[str, str]], specials: bool = True) -> list[Encoding]:
        """Texts and pairs as tokens, on all cores."""
        raws = self._run(self._work.encode_batch, texts, specials)
        if not self._alias or len(self.mask_token or "") == len(MASK):
            return [Encoding(raw) for raw in raws]
        parts = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        return [
            Encoding(raw, part if any(MASK in t for t in part) else None, self.mask_token or MASK)
            for raw, part in zip(raws, parts, strict=True)
        ]

    def ids_batch(self, texts: Sequence[str | tuple[str, str]], specials: bool = True) -> list[list[int]]:
        """Ids alone, without the work of offsets."""
        return [raw.ids for raw in self._run(self._work.encode_batch_fast, texts, specials)]

    def _run(self, encode: Any, texts: Sequence[str | tuple[str, str]], specials: bool) -> list[Any]:
        """Encode; the crate's TypeError means a lone surrogate or something that is not text: look closer."""
        with formats.one_line_errors("the tokenizer cannot encode this", "its files may be damaged"):
            try:
                return encode(list(map(self._own_mask, texts)) if self._alias else texts, add_special_tokens=specials)
            except TypeError:
                cleaned = [self._own_mask(_clean(text, i)) for i, text in enumerate(texts)]
                return encode(cleaned, add_special_tokens=specials)

    def _own_mask(self, text: Any) -> Any:
        """The text with "[MASK]" spelt as this vocabulary does."""
        if not self._alias:
            return text
        if isinstance(text, str):
            return text.replace(MASK, self.mask_token or MASK) if MASK in text else text
        return tuple(map(self._own_mask, text)) if isinstance(text, list | tuple) else text

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids."""
        ids = [int(i) for i in ids]
        if ids and (min(ids) < 0 or max(ids) >= self.size):
            raise EverybertError(f"an id is outside the vocabulary: ids run from 0 to {self.size - 1}")
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    @cached_property
    def _layouts(self) -> tuple[list[tuple[list[int], list[int], int]], ...]:
        """For a text and a pair: runs of (special ids, their segments, the segment of the text after)."""
        return _layout(self.encode("a")), _layout(self.encode("a", "a"))

    def build(self, ids_a: Sequence[int], ids_b: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Special tokens around raw ids, as the family places them: (ids, segments)."""
        ids: list[int] = []
        segments: list[int] = []
        texts = [ids_a] if ids_b is None else [ids_a, ids_b]
        for (special, special_segments, segment), text in zip(self._layouts[len(texts) - 1], [*texts, []], strict=True):
            ids += [*special, *text]
            segments += special_segments + [segment] * len(text)
        return ids, segments

    # Files

    def _settings(self) -> dict[str, Any]:
        tokens: dict[str, Any] = {f"{role}_token": name for role, name in self._roles.items()}
        return tokens | ({"model_max_length": self.max_length} if self.max_length else {})

    def save(self, folder: str | Path, max_length: int | None = None) -> None:
        """Write tokenizer.json and the two files beside it from which `transformers` reads the same ids.

        `max_length` is the model's number of positions, which other libraries truncate to.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = self._settings() | ({"model_max_length": max_length} if max_length else {})
        config = pipelines.class_settings(self._backend, self._roles) | settings
        whole = self._backend.to_str(pretty=True)  # its own save() hides why a disk refused
        (folder / "tokenizer.json").write_text(whole, encoding="utf-8", newline="\n")
        tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
        for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", tokens)):
            text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
            (folder / name).write_text(text, encoding="utf-8")


def _restore(serialised: str, settings: dict[str, Any]) -> Tokenizer:
    return Tokenizer(Backend.from_str(serialised), settings)


def _find_roles(vocab: dict[str, int], special: list[str], settings: dict[str, Any]) -> dict[str, str]:
    """Which token plays which part: as the settings say, or by its usual name, or by a special token so called."""
    roles: dict[str, str] = {}
    for role, usual in pipelines.ROLES.items():
        names = [pipelines.content(formats.special_token(settings, role) or usual[0]), *usual]
        names += [token for token in special if token.strip("[]<>|").lower() == role]
        found = next((name for name in names if name in vocab), None)
        if found is not None:
            roles[role] = found
    return roles


def _max_length(settings: dict[str, Any]) -> int | None:
    """The length the folder asks for; transformers writes 1e30 where there is none."""
    length = settings.get("model_max_length")
    return int(length) if isinstance(length, int | float) and 0 < length < 1e9 else None


def _trimming(backend: Backend) -> Backend:
    """A backend whose byte-level offsets leave out the space before a word; the ids are the same."""
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
    """Split an encoding at its texts: the specials before each, and after the last."""
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
    """A text or pair the crate can take, or an error that names what is not text."""
    if isinstance(text, str):
        return _SURROGATE.sub("\ufffd", text)
    if isinstance(text, list | tuple) and len(text) == 2 and all(isinstance(t, str) for t in text):
        return tuple(_SURROGATE.sub("\ufffd", t) for t in text)
    raise EverybertError(f"text {index} is {type(text).__name__}, not a string or a pair of strings")
