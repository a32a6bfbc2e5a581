"""One tokenizer over the `tokenizers` library: WordPiece, byte-level BPE and Unigram; text to ids and back.

A character that UTF-8 cannot encode (a lone surrogate) is read as U+FFFD, so that offsets refer to the caller's text.
Nothing is truncated or padded here, whatever a tokenizer.json says.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Backend

from everybert.errors import EverybertError
from everybert.files import write_json
from everybert.text import formats

MASK = "[MASK]"  # accepted in text with every vocabulary, whatever its own mask token is
ROLES = tuple(formats.BERT_NAMES)
MAX_GAPS = 1_000_000  # ids that a vocabulary may leave out
_KINDS = {models.WordPiece: "wordpiece", models.BPE: "bpe", models.Unigram: "unigram"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_PARALLEL = "TOKENIZERS_PARALLELISM"


if hasattr(os, "register_at_fork") and _PARALLEL not in os.environ:
    # Forked processes tokenize on one thread: the threads of `tokenizers` do not survive a fork.
    os.register_at_fork(
        before=lambda: os.environ.update({_PARALLEL: "false"}), after_in_parent=lambda: os.environ.pop(_PARALLEL, None)
    )


class Encoding:
    """The tokens of a text or pair. Each attribute is a list with one entry per token, computed on first use."""

    def __init__(self, raw: Any, tokenizer: "Tokenizer"):
        self._raw, self._by = raw, tokenizer

    def __len__(self) -> int:
        return len(self._raw)

    @cached_property
    def ids(self) -> list[int]:
        """Token ids."""
        ids, alias, mask = self._raw.ids, self._by.alias, self._by.mask_id or 0
        return [mask if i == alias else i for i in ids] if alias in ids else ids

    @cached_property
    def tokens(self) -> list[str]:
        """The tokens as written in the vocabulary."""
        named, mask = zip(self._raw.tokens, self._raw.ids, strict=True), self._by.mask_token or ""
        tokens = [mask if i == self._by.alias else token for token, i in named]
        return [token.strip() or token for token in tokens]  # a mask token may include the space before it

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
        return self._raw.offsets


class Tokenizer:
    """Text to token ids and back, for every vocabulary of the family. Use `Tokenizer.load`."""

    def __init__(self, backend: Backend, settings: dict[str, Any] | None = None):
        settings = settings or {}
        kind = next((name for model, name in _KINDS.items() if isinstance(backend.model, model)), None)
        if kind is None:
            name = type(backend.model).__name__
            raise EverybertError(f"a {name} tokenizer is not of the BERT family: WordPiece, BPE or Unigram is needed")
        backend.no_truncation()
        backend.no_padding()
        self.kind: str = kind
        length = settings.get("model_max_length")  # transformers writes 1e30 for none
        self.max_length: int | None = int(length) if isinstance(length, int | float) and 0 < length < 1e9 else None
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.size: int = max(self._vocab.values(), default=-1) + 1
        if self.size > len(self._vocab) + MAX_GAPS:  # tables of this size are allocated
            raise EverybertError(f"the tokenizer has {len(self._vocab)} tokens, but the id {self.size - 1}: restore it")
        special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        self._roles = _find_roles(self._vocab, special, settings)
        if len(ends := backend.encode("").tokens) > 1 and {*ends} <= {*special}:  # other names
            self._roles = {"cls": ends[0], "sep": ends[-1]} | self._roles
        formats.add_specials(backend, [formats.special_token(settings, *role) for role in self._roles.items()])
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
        self._work, self.alias = self._working_backend()  # the id that "[MASK]" is read as, if the mask is another

    @classmethod
    def load(cls, path: str | Path, specials: bool = True) -> "Tokenizer":
        """Read a folder or file: tokenizer.json, vocab.txt, vocab.json + merges.txt, SentencePiece model.

        Without `specials`, no tokens are added around a text.
        """
        backend, settings = formats.read_backend(path)
        if not specials:
            settings |= {"model_max_length": (backend.truncation or settings).get("max_length")}
            backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
        with formats.one_line_errors(f"the tokenizer in {path} cannot be used", "use another model or tokenizer"):
            return cls(backend, settings)

    def __reduce__(self) -> Any:
        return Tokenizer, (self._backend, self._settings())

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

    def describe(self, text: str) -> dict[str, Any]:
        """How a text is cut: the tokens without special ones, and what a comparison of tokenizers counts."""
        encoding, words = self.encode(text, specials=False), max(1, len(text.split()))
        case, unknown = "uncased" if self.lowercase else "cased", sum(i == self.unk_id for i in encoding.ids)
        counts = {"tokens": len(encoding), "unknown": unknown, "tokens_per_word": len(encoding) / words}
        kind = {"kind": self.kind, "case": case, "vocabulary": len(self._vocab)}
        return kind | counts | {"pieces": self.readable(encoding.tokens), "ids": encoding.ids}

    # ── text to ids

    def encode(self, text: str, pair: str | None = None, specials: bool = True) -> Encoding:
        """Tokenize one text or pair of texts, with special tokens around it by default."""
        return self.encode_batch([text if pair is None else (text, pair)], specials)[0]

    def encode_batch(self, texts: Sequence[str | tuple[str, str]], specials: bool = True) -> list[Encoding]:
        """Tokenize texts and pairs on all cores."""
        return [Encoding(raw, self) for raw in self._run(self._work.encode_batch, texts, specials)]

    def ids_batch(self, texts: Sequence[str | tuple[str, str]], specials: bool = True) -> list[list[int]]:
        """The ids of texts and pairs. Faster than `encode_batch`, which computes offsets."""
        raws = self._run(self._work.encode_batch_fast, texts, specials)
        return [Encoding(raw, self).ids if self.alias else raw.ids for raw in raws]

    def _run(self, encode: Any, texts: Sequence[str | tuple[str, str]], specials: bool) -> list[Any]:
        """Encode. On a TypeError (a lone surrogate, or an object that is not text), clean or refuse the texts."""
        with formats.one_line_errors("the tokenizer cannot encode this", "its files may be damaged"):
            try:
                if not all(isinstance(text, str | tuple | list) for text in texts):  # a table is read as its names
                    raise TypeError
                return encode(texts, add_special_tokens=specials)
            except TypeError:
                return encode([_clean(text, i) for i, text in enumerate(texts)], add_special_tokens=specials)

    def _working_backend(self) -> tuple[Backend, int | None]:
        """A backend with the same ids, in which byte-level offsets exclude the space before a word; id of "[MASK]".

        If the mask token is another one, the working backend also has "[MASK]", with an id of its own.
        """
        backend = self._backend
        parts = (backend.pre_tokenizer, backend.post_processor)
        splitter, template = (str(part.__getstate__()) if part else "" for part in parts)
        trims = '"ByteLevel"' not in splitter or not template or '"trim_offsets":true' in template
        if trims and (self.mask_id is None or MASK in self._vocab):
            return backend, None
        working = Backend.from_str(backend.to_str())
        if not trims:
            trim = processors.ByteLevel(add_prefix_space='"add_prefix_space":true' in splitter, trim_offsets=True)
            working.post_processor = processors.Sequence([trim, backend.post_processor])
        if self.mask_id is None or MASK in self._vocab:
            return working, None
        mask: Any = backend.get_added_tokens_decoder()[self.mask_id]
        working.add_tokens([AddedToken(**mask.__getstate__() | {"content": MASK})])
        alias = working.token_to_id(MASK)
        return working, alias if alias not in self._vocab.values() else None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids."""
        ids = [int(i) for i in ids]
        if ids and (min(ids) < 0 or max(ids) >= self.size):
            raise EverybertError(f"an id is outside the vocabulary: ids run from 0 to {self.size - 1}")
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    @cached_property
    def _samples(self) -> tuple[Encoding, Encoding]:
        """A text and a pair, as templates of their special tokens."""
        return self.encode("a"), self.encode("a", "a")

    def build(self, ids_a: Sequence[int], ids_b: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Add special tokens around ids as the model family does; returns (ids, segments)."""
        ids: list[int] = []
        segments: list[int] = []
        sample, texts = self._samples[ids_b is not None], [ids_a, ids_b or []]
        for token, segment, text in zip(sample.ids, sample.segments, sample.sequence, strict=True):
            new = [token] if text is None else texts[text]
            ids += new
            segments += [segment] * len(new)
            if text is not None:
                texts[text] = []  # the text of the sample may have several tokens
        if any(texts):
            raise EverybertError("the tokenizer drops the letter a: it is no tokenizer of running text")
        return ids, segments

    # ── files

    def _settings(self) -> dict[str, Any]:
        tokens: dict[str, Any] = {f"{role}_token": name for role, name in self._roles.items()}
        return tokens | ({"model_max_length": self.max_length} if self.max_length else {})

    def save(self, folder: str | Path, max_length: int | None = None, segments: bool = True) -> None:
        """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json, as `transformers` reads them.

        For other libraries there is vocab.txt of a WordPiece, or vocab.json and merges.txt of a byte-level BPE.
        `max_length` is the number of positions of the model, to which other libraries truncate; without `segments`
        they do not give it any.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = self._settings() | ({"model_max_length": max_length} if max_length else {})
        # transformers 5 rebuilds the pipeline of any other class from its arguments and ignores that of tokenizer.json.
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
        pair = ["token_type_ids"] if segments and 1 in self._backend.encode("a", "a").type_ids else []
        config["model_input_names"] = ["input_ids", *pair, "attention_mask"]
        whole = self._backend.to_str(pretty=True)  # Backend.save() hides disk errors
        (folder / "tokenizer.json").write_text(whole, encoding="utf-8", newline="\n")
        words = self.kind == "wordpiece" and sorted(json.loads(whole)["model"]["vocab"].values())
        if words and words == list(range(len(words))):  # vocab.txt leaves out no id
            self._backend.model.save(str(folder))
            config["do_lower_case"] = self.lowercase
        elif self.kind == "bpe" and isinstance(self._backend.decoder, decoders.ByteLevel):
            self._backend.model.save(str(folder))
        tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
        write_json(folder / "tokenizer_config.json", dict(sorted(config.items())))
        write_json(folder / "special_tokens_map.json", dict(sorted(tokens.items())))


def _find_roles(vocab: dict[str, int], special: list[str], settings: dict[str, Any]) -> dict[str, str]:
    """Role → token: from the settings, by its usual name, or by a special token that is named like the role."""
    roles: dict[str, str] = {}
    for role in ROLES:
        usual = formats.BERT_NAMES[role], formats.ROBERTA_NAMES[role]
        names = [formats.special_token(settings, role, usual[0]).content, *usual]
        names += [token for token in special if token.strip("[]<>|").lower() == role]
        token = next((name for name in names if name in vocab), None)
        if token is not None:
            roles[role] = token
    return roles


def _clean(text: Any, index: int) -> Any:
    """Replace lone surrogates in a text or pair; anything that is not text is an error."""
    if isinstance(text, str):
        return _SURROGATE.sub("\ufffd", text)
    if isinstance(text, list | tuple) and len(text) == 2 and all(isinstance(t, str) for t in text):
        return tuple(_SURROGATE.sub("\ufffd", t) for t in text)
    raise EverybertError(f"text {index} is {type(text).__name__}, not a string or a pair of strings")
