"""Tokenizer files of the BERT family, read into one `tokenizers` backend.

A backend is a vocabulary model (WordPiece, BPE, Unigram) inside a pipeline: normaliser, word splitter,
template of special tokens, decoder. `tokenizer.json` carries both; the older files carry the vocabulary
alone, and the pipeline is the family's own, written down below. Ids equal those of `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordPiece

from everybert.errors import EverybertError

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
    return processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0", pair=f"{cls}:0 $A:0 {b}", special_tokens=ids
    )


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
    ids = {token: backend.token_to_id(token) for token in ("</s>", "<s>")}
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


def add_specials(backend: Backend, tokens: Iterable[str | AddedToken]) -> None:
    """Make tokens of the vocabulary special: found whole in text, before any normalisation."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in tokens]
    backend.add_special_tokens([t for t in new if t.content not in known])


def read_backend(path: str | Path) -> tuple[Backend, dict[str, Any]]:
    """The backend in a folder or file, and the settings beside it (config, special tokens)."""
    path = Path(path)
    if not path.exists():
        raise EverybertError(f"no tokenizer at {path}: give a folder or a tokenizer file that exists")
    folder = path if path.is_dir() else path.parent
    settings = _settings(folder)
    file = _choose_file(path)
    try:
        if file.name.endswith(".model"):
            backend = _from_sentencepiece(file, settings)
        elif file.suffix == ".txt" and file.name != "merges.txt":
            backend = _from_vocab(file, settings)
        elif file.name in ("vocab.json", "merges.txt"):
            backend = _from_merges(file.parent, settings)
        else:
            return Backend.from_file(str(file)), settings
        _add_later(backend, folder, settings)
        return backend, settings
    except EverybertError:
        raise
    except Exception as error:  # the crate raises bare Exception for every kind of bad file
        raise EverybertError(
            f"{file} is not a tokenizer file that can be read ({_one_line(error)}): fetch it again"
        ) from error


def _choose_file(path: Path) -> Path:
    """The file to read: the given one, or the richest in the folder."""
    if path.is_file():
        return path
    for name in ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"):
        if (path / name).is_file():
            return path / name
    raise EverybertError(
        f"no tokenizer in {path}: it needs tokenizer.json, vocab.txt, vocab.json with merges.txt, "
        "spiece.model or sentencepiece.bpe.model"
    )


def _settings(folder: Path) -> dict[str, Any]:
    """What stands in tokenizer_config.json and special_tokens_map.json, where there are any."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise EverybertError(
                    f"{file} is not JSON ({_one_line(error)}): repair or delete it"
                ) from error
            if isinstance(content, dict):
                settings.update({k: v for k, v in content.items() if v is not None})
    return settings


def _add_later(backend: Backend, folder: Path, settings: dict[str, Any]) -> None:
    """Tokens added after training, which the older files keep in added_tokens.json or the config."""
    added = {int(i): AddedToken(**token) for i, token in settings.get("added_tokens_decoder", {}).items()}
    if (folder / "added_tokens.json").is_file():
        listed = json.loads((folder / "added_tokens.json").read_text(encoding="utf-8"))
        added = {i: AddedToken(token, normalized=False) for token, i in listed.items()} | added
    for i, token in sorted(added.items()):
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != i:
            raise EverybertError(
                f"{folder} adds {token.content!r} as id {i}, which its vocabulary cannot give it"
            )


def special_token(settings: dict[str, Any], role: str) -> str | AddedToken | None:
    """A special token as the settings name it: a string, or with its flags."""
    value = settings.get(f"{role}_token")
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {k: bool(value[k]) for k in ("single_word", "lstrip", "rstrip") if k in value}
        return AddedToken(value["content"], special=True, normalized=False, **flags)
    return value if isinstance(value, str) else None


def _special_tokens(settings: dict[str, Any], names: dict[str, str], vocab: Any) -> list[str | AddedToken]:
    """The family's special tokens that the vocabulary has, as the settings call them."""
    tokens = [special_token(settings, role) or name for role, name in names.items()]
    return [t for t in tokens if (t if isinstance(t, str) else t.content) in vocab]


def _from_vocab(file: Path, settings: dict[str, Any]) -> Backend:
    """BERT's vocab.txt: a token a line. Without a setting, one that has no capitals is an uncased one."""
    lines = file.read_text(encoding="utf-8").split("\n")
    vocab = {token.rstrip("\r"): i for i, token in enumerate(lines if lines[-1] else lines[:-1])}
    unk = str(special_token(settings, "unk") or "[UNK]")
    if unk not in vocab:
        raise EverybertError(
            f"{file} has no {unk} line, so it is not a WordPiece vocabulary: a token a line is needed"
        )
    backend = Backend(WordPiece(vocab, unk_token=unk))
    capital = any(
        token.lower() != token for token in vocab if not (token.startswith("[") and token.endswith("]"))
    )
    add_specials(backend, _special_tokens(settings, BERT_NAMES, vocab))
    pipeline = bert_pipeline(
        backend,
        lowercase=settings.get("do_lower_case", not capital),
        strip_accents=settings.get("strip_accents"),
        chinese=settings.get("tokenize_chinese_chars", True),
        cls=content(special_token(settings, "cls") or "[CLS]"),
        sep=content(special_token(settings, "sep") or "[SEP]"),
    )
    return pipeline.install(backend)


def _from_merges(folder: Path, settings: dict[str, Any]) -> Backend:
    """RoBERTa's vocab.json + merges.txt."""
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise EverybertError(
                f"{folder} has no {name}: a byte-level BPE is vocab.json and merges.txt together"
            )
    model = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = Backend(model)
    if backend.token_to_id("<s>") is None or backend.token_to_id("</s>") is None:
        raise EverybertError(
            f"{folder / 'vocab.json'} lacks <s> and </s>: give tokenizer.json, or a RoBERTa vocabulary"
        )
    add_specials(backend, _special_tokens(settings, ROBERTA_NAMES, backend.get_vocab()))
    return roberta_pipeline(backend, settings.get("add_prefix_space", False)).install(backend)


def _from_sentencepiece(file: Path, settings: dict[str, Any]) -> Backend:
    """ALBERT's spiece.model (its pieces hold [CLS]) or XLM-R's sentencepiece.bpe.model (they do not)."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise EverybertError(
            f"reading {file.name} needs sentencepiece: pip install 'everybert[sentencepiece]'"
        ) from error
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(file.read_bytes())
    if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM or not proto.pieces:
        raise EverybertError(
            f"{file} is not a Unigram SentencePiece model: only those of ALBERT and XLM-R are read"
        )
    if "camembert" in str(settings.get("tokenizer_class", "")).lower():
        raise EverybertError(
            f"{file} numbers its pieces as CamemBERT does: save it as tokenizer.json with transformers first"
        )
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    charsmap = proto.normalizer_spec.precompiled_charsmap or None
    # Control pieces are special; user-defined symbols are found whole in text, as in transformers.
    kinds = proto.SentencePiece
    whole = [p for p in proto.pieces if p.type in (kinds.CONTROL, kinds.USER_DEFINED)]
    if any(piece == "[CLS]" for piece, _ in pieces):
        backend = Backend(Unigram(pieces, unk_id=1, byte_fallback=False))
        names = BERT_NAMES | {"pad": "<pad>", "unk": "<unk>"}
        pipeline = albert_pipeline(
            backend, charsmap, settings.get("do_lower_case", True), settings.get("keep_accents", False)
        )
    else:
        # fairseq's four specials replace SentencePiece's own three: every later piece moves up by one.
        fairseq = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
        backend = Backend(Unigram([*fairseq, *pieces[3:], ("<mask>", 0.0)], unk_id=3, byte_fallback=False))
        names = ROBERTA_NAMES
        pipeline = xlm_roberta_pipeline(backend, charsmap)
    vocab = backend.get_vocab()
    add_specials(backend, _special_tokens(settings, names, vocab))
    backend.add_tokens(
        [
            AddedToken(p.piece, special=p.type == kinds.CONTROL, normalized=False)
            for p in whole
            if p.piece in vocab
        ]
    )
    return pipeline.install(backend)


def content(token: str | AddedToken) -> str:
    """The spelling of a special token."""
    return token if isinstance(token, str) else token.content


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
