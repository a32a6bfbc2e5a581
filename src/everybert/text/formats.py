"""Tokenizer files of the BERT family, read into one `tokenizers` backend.

`tokenizer.json` holds a vocabulary and the pipeline around it; the older files hold the vocabulary alone, and the
pipeline is the family's own. Ids equal those `transformers`' fast tokenizers give for the same files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordPiece

from everybert.errors import EverybertError
from everybert.text.pipelines import (
    BERT_NAMES,
    ROBERTA_NAMES,
    add_specials,
    albert_pipeline,
    bert_pipeline,
    content,
    roberta_pipeline,
    xlm_roberta_pipeline,
)


def read_backend(path: str | Path) -> tuple[Backend, dict[str, Any]]:
    """The backend in a folder or file, and the settings beside it (config, special tokens)."""
    path = Path(path)
    if not path.exists():
        raise EverybertError(f"no tokenizer at {path}: give a folder or a tokenizer file that exists")
    folder = path if path.is_dir() else path.parent
    settings = _settings(folder)
    file = _choose_file(path)
    with one_line_errors(f"{file} is not a tokenizer file that can be read", "fetch it again"):
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


@contextmanager
def one_line_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn the crate's failures into one line: it raises bare Exception, and panics outside of that."""
    try:
        yield
    except (EverybertError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise EverybertError(f"{problem} ({_one_line(error)}): {remedy}") from error


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
            content = _json(file)
            if isinstance(content, dict):
                settings.update({k: v for k, v in content.items() if v is not None})
    return settings


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise EverybertError(f"{file} is not JSON ({_one_line(error)}): repair or delete it") from error


def _add_later(backend: Backend, folder: Path, settings: dict[str, Any]) -> None:
    """Tokens added after training, which the older files keep in added_tokens.json or the config."""
    added = {int(i): AddedToken(**token) for i, token in settings.get("added_tokens_decoder", {}).items()}
    if (folder / "added_tokens.json").is_file():
        listed = _json(folder / "added_tokens.json")
        added = {i: AddedToken(token, normalized=False) for token, i in listed.items()} | added
    for i, token in sorted(added.items()):
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != i:
            raise EverybertError(f"{folder} adds {token.content!r} as id {i}, which its vocabulary cannot give it")


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
    vocab = {token: i for i, token in enumerate(lines if lines[-1] else lines[:-1])}
    unk, cls, sep = (content(special_token(settings, role) or BERT_NAMES[role]) for role in ("unk", "cls", "sep"))
    for token in (unk, cls, sep):
        if token not in vocab:
            raise EverybertError(f"{file} has no line {token}: a WordPiece vocabulary is needed, a token a line")
    backend = Backend(WordPiece(vocab, unk_token=unk))
    capital = any(token.lower() != token for token in vocab if not (token.startswith("[") and token.endswith("]")))
    add_specials(backend, _special_tokens(settings, BERT_NAMES, vocab))
    pipeline = bert_pipeline(
        backend,
        lowercase=settings.get("do_lower_case", not capital),
        strip_accents=settings.get("strip_accents"),
        chinese=settings.get("tokenize_chinese_chars", True),
        cls=cls,
        sep=sep,
    )
    return pipeline.install(backend)


def _from_merges(folder: Path, settings: dict[str, Any]) -> Backend:
    """RoBERTa's vocab.json + merges.txt."""
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise EverybertError(f"{folder} has no {name}: a byte-level BPE is vocab.json and merges.txt together")
    model = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = Backend(model)
    if backend.token_to_id("<s>") is None or backend.token_to_id("</s>") is None:
        raise EverybertError(
            f"{folder / 'vocab.json'} lacks <s> and </s>: give tokenizer.json, or a RoBERTa vocabulary"
        )
    add_specials(backend, _special_tokens(settings, ROBERTA_NAMES, backend.get_vocab()))
    return roberta_pipeline(backend, settings.get("add_prefix_space", False)).install(backend)


def read_pieces(model: bytes) -> tuple[list[Any], bytes | None]:
    """The pieces of a Unigram SentencePiece model (each with piece, score, type) and its character map."""
    try:
        from sentencepiece import sentencepiece_model_pb2 as messages
    except ImportError as error:
        raise EverybertError(
            "SentencePiece models need sentencepiece: pip install 'everybert[sentencepiece]'"
        ) from error
    proto: Any = messages.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM or not proto.pieces:
        raise EverybertError("not a Unigram SentencePiece model: only those of ALBERT and XLM-R are read")
    return list(proto.pieces), proto.normalizer_spec.precompiled_charsmap or None


def _from_sentencepiece(file: Path, settings: dict[str, Any]) -> Backend:
    """ALBERT's spiece.model (its pieces hold [CLS]) or XLM-R's sentencepiece.bpe.model (they do not)."""
    if "camembert" in str(settings.get("tokenizer_class", "")).lower():
        raise EverybertError(f"{file} numbers its pieces as CamemBERT does: save it as tokenizer.json first")
    messages, charsmap = read_pieces(file.read_bytes())
    pieces = [(message.piece, message.score) for message in messages]
    if any(piece == "[CLS]" for piece, _ in pieces):
        backend = Backend(Unigram(pieces, unk_id=1, byte_fallback=False))
        names = BERT_NAMES | {"pad": "<pad>", "unk": "<unk>"}
        lowercase, keep_accents = settings.get("do_lower_case", True), settings.get("keep_accents", False)
        pipeline = albert_pipeline(backend, charsmap, lowercase, keep_accents)
    else:
        # fairseq's four specials replace SentencePiece's own three: every later piece moves up by one.
        fairseq = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
        backend = Backend(Unigram([*fairseq, *pieces[3:], ("<mask>", 0.0)], unk_id=3, byte_fallback=False))
        names = ROBERTA_NAMES
        pipeline = xlm_roberta_pipeline(backend, charsmap)
    vocab = backend.get_vocab()
    add_specials(backend, _special_tokens(settings, names, vocab))
    # Control pieces (type 3) are special; user-defined ones (4) are found whole in text, as in transformers.
    whole = [m for m in messages if m.type in (3, 4) and m.piece in vocab]
    backend.add_tokens([AddedToken(m.piece, special=m.type == 3, normalized=False) for m in whole])
    return pipeline.install(backend)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
