"""What surrounds a vocabulary in each member of the family, as `transformers` builds it.

A pipeline is a normaliser, a word splitter, a template of special tokens and a decoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordPiece

# What the family calls its special tokens, the likelier name first.
ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
_EMPTY_CHARSMAP = b"\0\0\0\0"  # the smallest the crate takes: stands for any, where pipelines are compared
BERT_NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_NAMES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


@dataclass(frozen=True)
class Pipeline:
    """What surrounds a vocabulary, and the `transformers` class (with arguments) that would rebuild it."""

    normalizer: Any
    pre_tokenizer: Any
    post_processor: Any
    decoder: Any
    tokenizer_class: str
    arguments: dict[str, Any]

    def install(self, backend: Backend) -> Backend:
        """Put the four parts into a backend and return it."""
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if getattr(self, part) is not None:
                setattr(backend, part, getattr(self, part))
        return backend

    def matches(self, backend: Backend) -> bool:
        """Whether a backend has these parts exactly (the SentencePiece character map aside: it is data)."""
        parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
        return all(_state(getattr(self, part)) == _state(getattr(backend, part)) for part in parts)


def _state(part: Any) -> Any:
    """A part as JSON, its precompiled character map left out."""
    if part is None:
        return None

    def strip(node: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in node.items() if k != "precompiled_charsmap"}

    return json.loads(part.__getstate__(), object_hook=strip)


def template(backend: Backend, cls: str, sep: str, pair_segment: int, separators: int) -> Any:
    """`cls A sep [sep] B sep`, B in segment 0 or 1."""
    b = f"{' '.join([f'{sep}:0'] * separators)} $B:{pair_segment} {sep}:{pair_segment}"
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((cls, sep))]
    return processors.TemplateProcessing(single=f"{cls}:0 $A:0 {sep}:0", pair=f"{cls}:0 $A:0 {b}", special_tokens=ids)


def bert_pipeline(
    backend: Backend,
    lowercase: bool,
    strip_accents: bool | None = None,
    chinese: bool = True,
    cls: str = "[CLS]",
    sep: str = "[SEP]",
) -> Pipeline:
    """BERT's cleaning, lower-casing and accent stripping; splits at spaces, punctuation, CJK characters."""
    return Pipeline(
        normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
        ),
        pre_tokenizers.BertPreTokenizer(),
        template(backend, cls, sep, pair_segment=1, separators=1),
        decoders.WordPiece(prefix="##"),
        "BertTokenizer",
        {"do_lower_case": lowercase, "strip_accents": strip_accents, "tokenize_chinese_chars": chinese},
    )


def roberta_pipeline(backend: Backend, add_prefix_space: bool = False) -> Pipeline:
    """GPT-2's byte-level words; `<s> A </s></s> B </s>` all in segment 0."""
    ids: dict[str, Any] = {token: backend.token_to_id(token) for token in ("</s>", "<s>")}
    return Pipeline(
        None,
        pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space),
        processors.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"]), True, add_prefix_space),
        decoders.ByteLevel(),
        "RobertaTokenizer",
        {"add_prefix_space": add_prefix_space},
    )


def _metaspace(kind: Any) -> Any:
    return kind.Metaspace(replacement="▁", prepend_scheme="always")


def albert_pipeline(
    backend: Backend, charsmap: bytes | None, lowercase: bool = True, keep_accents: bool = False
) -> Pipeline:
    """ALBERT's quotes, accents (NFKD) and lower case, then SentencePiece's character map."""
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not keep_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lowercase:
        steps.append(normalizers.Lowercase())
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    return Pipeline(
        normalizers.Sequence(steps),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), _metaspace(pre_tokenizers)]),
        template(backend, "[CLS]", "[SEP]", pair_segment=1, separators=1),
        _metaspace(decoders),
        "AlbertTokenizer",
        {"do_lower_case": lowercase, "keep_accents": keep_accents},
    )


def xlm_roberta_pipeline(backend: Backend, charsmap: bytes | None) -> Pipeline:
    """XLM-R: SentencePiece's character map; `<s> A </s></s> B </s>` all in segment 0."""
    return Pipeline(
        normalizers.Precompiled(charsmap) if charsmap else None,
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), _metaspace(pre_tokenizers)]),
        template(backend, "<s>", "</s>", pair_segment=0, separators=2),
        _metaspace(decoders),
        "XLMRobertaTokenizer",
        {},
    )


def class_settings(backend: Backend, roles: dict[str, str]) -> dict[str, Any]:
    """tokenizer_config.json's class and its arguments.

    `transformers` 5 rebuilds the pipeline of a named class from its arguments and ignores tokenizer.json's.
    So a class is named only where that gives this backend; elsewhere the plain one, which reads the file.
    """
    for pipeline in _candidates(backend, roles):
        if pipeline.matches(backend):
            return {"tokenizer_class": pipeline.tokenizer_class, **pipeline.arguments}
    inputs = ["input_ids", "attention_mask"]
    if 1 in backend.encode("a", "a").type_ids:
        inputs.insert(1, "token_type_ids")
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}


def _candidates(backend: Backend, roles: dict[str, str]) -> Iterable[Pipeline]:
    """The pipelines of the classes whose vocabulary model is set as the backend's is."""
    model: Any = backend.model
    roberta = set(ROBERTA_NAMES.values()) <= set(roles.values())
    if isinstance(model, WordPiece) and isinstance(backend.normalizer, normalizers.BertNormalizer):
        bert: Any = backend.normalizer
        if {"cls", "sep"} <= roles.keys() and model.max_input_chars_per_word == 100:
            options = bert.lowercase, bert.strip_accents, bert.handle_chinese_chars
            yield bert_pipeline(backend, *options, roles["cls"], roles["sep"])
    elif isinstance(model, BPE) and roberta and model.unk_token is None and not model.ignore_merges:
        for add_prefix_space in (False, True):
            yield roberta_pipeline(backend, add_prefix_space)
    elif isinstance(model, Unigram):
        unk_id = json.loads(backend.to_str())["model"]["unk_id"]
        for charsmap in (None, _EMPTY_CHARSMAP):
            if {"[CLS]", "[SEP]"} <= set(roles.values()) and unk_id == 1:
                for lowercase, keep_accents in product((True, False), repeat=2):
                    yield albert_pipeline(backend, charsmap, lowercase, keep_accents)
            elif roberta and unk_id == 3:
                yield xlm_roberta_pipeline(backend, charsmap)


def content(token: str | AddedToken) -> str:
    """The spelling of a special token."""
    return token if isinstance(token, str) else token.content


def add_specials(backend: Backend, tokens: Iterable[str | AddedToken]) -> None:
    """Make tokens of the vocabulary special: found whole in text, before any normalisation."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in tokens]
    backend.add_special_tokens([t for t in new if t.content not in known])
