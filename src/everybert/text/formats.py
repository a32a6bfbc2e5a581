"""Tokenizer files of the BERT family, and the pipelines that `transformers` puts around their vocabularies.

`tokenizer.json` holds a vocabulary and its pipeline: a normalizer, a word splitter, a template of special tokens and a
decoder. The older files (vocab.txt, vocab.json + merges.txt, SentencePiece models) hold the vocabulary alone; the
pipeline is that of the family. Ids equal those of the fast tokenizers of `transformers` for the same files.
"""

import json
import logging
import re
import string
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordPiece

from everybert.errors import EverybertError, one_line
from everybert.files import read_json

BERT_NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_NAMES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
ESM_NAMES = {"cls": "<cls>", "pad": "<pad>", "sep": "<eos>", "unk": "<unk>", "mask": "<mask>"}
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model")
"""The files that a folder's tokenizer is read from, in order of preference."""
CLASSES = {
    ".txt": ("Bert", "ConvBert", "DistilBert", "Electra", "Esm", "MobileBert", "SqueezeBert"),
    ".json": ("Longformer", "Roberta"),
    ".model": ("Albert", "XLMRoberta"),
}
"""The classes of transformers (less "Tokenizer") whose files are read by their extension; tokenizer.json has it all."""
OWN_SPLITTERS = ("BertJapanese", "Bertweet", "Phobert", "RoFormer")
"""Classes that split words by code, whatever their files are."""
MODEL_CLASSES = {"camembert": "Camembert", "deberta": "Deberta", "deberta-v2": "DebertaV2", "mpnet": "MPNet"}
MODEL_CLASSES |= {"esm": "Esm", "roformer": "RoFormer", "xlm-roberta": "XLMRoberta"}
log = logging.getLogger("everybert")


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────────────────


def template(backend: Backend, cls: str, sep: str, pair_segment: int, separators: int) -> Any:
    """`cls A sep [sep] B sep`, with B in segment 0 or 1."""
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
) -> Backend:
    """BERT: cleaning, lower-casing, accent stripping; splits at spaces, punctuation and CJK characters."""
    backend.normalizer = normalizers.BertNormalizer(True, chinese, strip_accents, lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = template(backend, cls, sep, pair_segment=1, separators=1)
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def roberta_pipeline(backend: Backend, add_prefix_space: bool = False) -> Backend:
    """RoBERTa: byte-level words as in GPT-2; `<s> A </s></s> B </s>`, all in segment 0."""
    sep, cls = ((token, backend.token_to_id(token)) for token in ("</s>", "<s>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.post_processor = processors.RobertaProcessing(sep, cls, True, add_prefix_space)  # type: ignore[arg-type]
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_pipeline(backend: Backend, normalizer: Any, post_processor: Any) -> Backend:
    """ALBERT and XLM-R: words begin with ▁."""
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.post_processor, backend.decoder = post_processor, decoders.Metaspace()
    return backend


def albert_pipeline(
    backend: Backend, charsmap: bytes | None, lowercase: bool = True, keep_accents: bool = False
) -> Backend:
    """ALBERT: quotes, accents (NFKD) and lower case, then the character map of SentencePiece."""
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not keep_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lowercase:
        steps.append(normalizers.Lowercase())
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    return sentencepiece_pipeline(backend, normalizers.Sequence(steps), template(backend, "[CLS]", "[SEP]", 1, 1))


# ── special tokens ──────────────────────────────────────────────────────────────────────────────────────────


def add_specials(backend: Backend, tokens: Iterable[str | AddedToken]) -> None:
    """Register special tokens: they are matched in text before normalization and are never split."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in tokens]
    backend.add_special_tokens([t for t in new if t.content not in known])


def special_token(settings: dict[str, Any], role: str, usual: str) -> AddedToken:
    """The special token of a role ("cls", "mask" …) in the settings of a folder, a string or with flags; or `usual`."""
    value: Any = settings.get(f"{role}_token")
    described = value if isinstance(value, dict) else {"content": value}
    if not isinstance(described.get("content"), str):
        described = {"content": usual}
    flags = {k: bool(described[k]) for k in ("single_word", "lstrip", "rstrip") if k in described}
    return AddedToken(described["content"], special=True, normalized=False, **flags)


def _add_family(backend: Backend, settings: dict[str, Any], names: dict[str, str]) -> None:
    """Register the special tokens of a family that the vocabulary has, as the settings define them."""
    vocab, tokens = backend.get_vocab(), [special_token(settings, role, name) for role, name in names.items()]
    add_specials(backend, [token for token in tokens if token.content in vocab])


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer of any kind."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def read_backend(path: str | Path) -> tuple[Backend, dict[str, Any]]:
    """The backend of a folder or file, and the settings of tokenizer_config.json and special_tokens_map.json."""
    path = Path(path)
    if not path.exists():
        raise EverybertError(f"no tokenizer at {path}: give a folder or a tokenizer file that exists")
    folder = path if path.is_dir() else path.parent
    settings = _settings(folder)
    file = path if path.is_file() else next((path / name for name in TOKENIZER_FILES if (path / name).is_file()), None)
    if file is None:
        raise EverybertError(f"no tokenizer in {path}: it needs one of {', '.join(TOKENIZER_FILES)}")
    _check_class(file, settings)
    remedy = f"tokenizers {tokenizers.__version__} may lack a part of it; upgrade, or use another model"
    with one_line_errors(f"{file} is not a tokenizer file that can be read", remedy):
        if file.name.endswith(".model"):
            backend = _from_sentencepiece(file, settings)
        elif file.suffix == ".txt" and file.name != "merges.txt":
            backend = _from_vocab(file, settings)
        elif file.name in ("vocab.json", "merges.txt"):
            backend = _from_merges(file.parent, settings)
        else:
            try:
                backend = Backend.from_file(str(file))
            except Exception:
                read_json(file, "download it again")  # what is no JSON is damaged
                raise
            _check_growth(backend, file)
            _follow_settings(backend, file, settings)
            return backend, settings
        _add_later(backend, folder, settings)
        return backend, settings


def _check_class(file: Path, settings: dict[str, Any]) -> None:
    """Refuse the files of a class of transformers that is not implemented here."""
    name = settings.get("tokenizer_class")
    family = str(name).removesuffix("Fast").removesuffix("Tokenizer")
    if file.suffix == ".json" and file.name != "vocab.json":
        refused = family in OWN_SPLITTERS
    else:
        read = CLASSES.get(".json" if file.name == "merges.txt" else file.suffix, ())
        refused = name is not None and family not in read
    if refused:
        raise EverybertError(
            f"{file} is for {name}, which everybert does not implement: use a model with a tokenizer.json, "
            "which transformers writes with AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )


def _follow_settings(backend: Backend, file: Path, settings: dict[str, Any]) -> None:
    """Where tokenizer_config.json contradicts the normalizer of a BERT class, the former holds, as in transformers."""
    kinds = tuple(f"{family}Tokenizer" for family in (*CLASSES[".txt"], "MPNet"))
    normalizer, names = backend.normalizer, {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
    bert = str(settings.get("tokenizer_class")).startswith(kinds) and isinstance(normalizer, normalizers.BertNormalizer)
    for name, ours in (names | {"tokenize_chinese_chars": "handle_chinese_chars"}).items():
        if bert and name in settings and getattr(normalizer, ours) != settings[name]:
            log.warning("%s is read with %s %s, as tokenizer_config.json says", file, name, settings[name])
            setattr(normalizer, ours, settings[name])  # in the backend too


def _check_growth(backend: Backend, file: Path) -> None:
    """Refuse replacements that make a text more than a thousand times as long: memory would not suffice."""
    growth = 1.0

    def multiply(node: dict[str, Any]) -> dict[str, Any]:
        nonlocal growth
        if node.get("type") == "Replace":  # a regular expression may match between any two characters
            length, replaced = len(node["content"]), node["pattern"].get("String")
            growth *= max(1, length / len(replaced)) if replaced else 1 + length
        return node

    for part in filter(None, (backend.normalizer, backend.decoder)):
        json.loads(part.__getstate__(), object_hook=multiply)
    if growth > 1000:
        raise EverybertError(f"{file} replaces text by text {growth:.0e} times as long: it may not be meant to be used")


@contextmanager
def one_line_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn errors of `tokenizers` into one-line errors. It raises plain Exceptions and, on a panic, BaseExceptions."""
    try:
        yield
    except (EverybertError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise EverybertError(f"{problem} ({one_line(error)}): {remedy}") from error


def _settings(folder: Path) -> dict[str, Any]:
    """The content of special_tokens_map.json and tokenizer_config.json, and the class that config.json implies."""
    settings: dict[str, Any] = {}
    for name in ("config.json", "special_tokens_map.json", "tokenizer_config.json"):
        content = read_json(folder / name, "restore or delete it") if (folder / name).is_file() else {}
        if name == "config.json":
            implied = MODEL_CLASSES.get(str(content.get("model_type")))
            content = {"tokenizer_class": content.get("tokenizer_class") or implied}
        settings |= {k: v for k, v in content.items() if v is not None}
    return settings


def _add_later(backend: Backend, folder: Path, settings: dict[str, Any]) -> None:
    """Add the tokens of added_tokens.json and of the settings, which older formats keep apart from the vocabulary."""
    added = {int(i): AddedToken(**token) for i, token in settings.get("added_tokens_decoder", {}).items()}
    if (folder / "added_tokens.json").is_file():
        listed = read_json(folder / "added_tokens.json")
        added = {i: AddedToken(token, normalized=False) for token, i in listed.items()} | added
    for i, token in sorted(added.items()):
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != i:
            raise EverybertError(f"{folder} adds {token.content!r} as id {i}, which its vocabulary cannot give it")


def _from_vocab(file: Path, settings: dict[str, Any]) -> Backend:
    """BERT: vocab.txt, one token per line. Without a setting it is uncased, as in transformers."""
    lines = file.read_text(encoding="utf-8").split("\n")
    vocab = {token: i for i, token in enumerate(lines if lines[-1] else lines[:-1])}
    if str(settings.get("tokenizer_class")).startswith("Esm"):
        return _residues(vocab, settings)
    unk, cls, sep = (special_token(settings, role, BERT_NAMES[role]).content for role in ("unk", "cls", "sep"))
    for token in (unk, cls, sep):
        if token not in vocab:
            raise EverybertError(f"{file} has no line {token}: a WordPiece vocabulary is needed, one token per line")
    backend = Backend(WordPiece(vocab, unk_token=unk))
    capitals = sum(token.removeprefix("##")[:1] in string.ascii_uppercase for token in vocab if token)
    if "do_lower_case" not in settings and capitals > len(vocab) / 100:
        raise EverybertError(
            f"{file} has capitals, but nothing says whether text is lower-cased (transformers does it by default): "
            'put tokenizer_config.json with {"do_lower_case": false} beside it'
        )
    _add_family(backend, settings, BERT_NAMES)
    return bert_pipeline(
        backend,
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        chinese=settings.get("tokenize_chinese_chars", True),
        cls=cls,
        sep=sep,
    )


def _residues(vocab: dict[str, int], settings: dict[str, Any]) -> Backend:
    """ESM: every token of the vocabulary wherever it stands, mostly one letter; what is between them is unknown."""
    backend = Backend(WordPiece(vocab, unk_token="<unk>"))
    _add_family(backend, settings, ESM_NAMES)
    tokens = Regex("|".join(map(re.escape, sorted(filter(None, vocab), key=len, reverse=True))))
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(tokens, "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    backend.post_processor, backend.decoder = template(backend, "<cls>", "<eos>", 0, 1), decoders.WordPiece()
    return backend


def _from_merges(folder: Path, settings: dict[str, Any]) -> Backend:
    """RoBERTa: vocab.json and merges.txt."""
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).is_file():
            raise EverybertError(f"{folder} has no {name}: a byte-level BPE is vocab.json and merges.txt together")
    backend = Backend(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    if backend.token_to_id("<s>") is None or backend.token_to_id("</s>") is None:
        raise EverybertError(f"{folder / 'vocab.json'} lacks <s> and </s>: give RoBERTa's, or a tokenizer.json")
    _add_family(backend, settings, ROBERTA_NAMES)
    return roberta_pipeline(backend, settings.get("add_prefix_space", False))


def read_pieces(model: bytes) -> tuple[list[Any], bytes | None]:
    """The pieces of a Unigram SentencePiece model (with piece, score, type) and its character map."""
    try:
        from sentencepiece import sentencepiece_model_pb2 as messages
    except ImportError as error:
        raise EverybertError("this needs sentencepiece: pip install 'everybert[sentencepiece]'") from error
    proto: Any = messages.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM or not proto.pieces:
        raise EverybertError("not a Unigram SentencePiece model: use a model with a tokenizer.json")
    return list(proto.pieces), proto.normalizer_spec.precompiled_charsmap or None


def _from_sentencepiece(file: Path, settings: dict[str, Any]) -> Backend:
    """ALBERT (the pieces include [CLS]) or XLM-R (they do not)."""
    messages, charsmap = read_pieces(file.read_bytes())
    pieces = [(message.piece, message.score) for message in messages]
    if any(piece == "[CLS]" for piece, _ in pieces):
        backend = Backend(Unigram(pieces, unk_id=1, byte_fallback=False))
        names = BERT_NAMES | {"pad": "<pad>", "unk": "<unk>"}
        lowercase, keep_accents = settings.get("do_lower_case", True), settings.get("keep_accents", False)
        albert_pipeline(backend, charsmap, lowercase, keep_accents)
    else:
        if "tokenizer_class" not in settings:
            log.warning("%s is read as XLM-R's, as nothing beside it names its class: CamemBERT's has other ids", file)
        # The four special tokens of fairseq replace the three of SentencePiece: all other ids move up by one.
        fairseq = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
        backend = Backend(Unigram([*fairseq, *pieces[3:], ("<mask>", 0.0)], unk_id=3, byte_fallback=False))
        names = ROBERTA_NAMES
        normalizer = normalizers.Precompiled(charsmap) if charsmap else None
        sentencepiece_pipeline(backend, normalizer, template(backend, "<s>", "</s>", pair_segment=0, separators=2))
    _add_family(backend, settings, names)
    # As in transformers, control pieces (type 3) are special and user-defined pieces (4) are never split.
    whole = [m for m in messages if m.type in (3, 4) and backend.token_to_id(m.piece) is not None]
    backend.add_tokens([AddedToken(m.piece, special=m.type == 3, normalized=False) for m in whole])
    return backend
