"""Tokenizer files: every published format is read, saved folders give transformers the same ids, damage is one line."""

import json
import shutil

import pytest
import transformers
from refusals import refuses
from tokenizer_samples import BERT, sentences

from everybert.errors import EverybertError
from everybert.text.tokenizer import Tokenizer

FORMATS = ["bert", "uncased", "cased", "roberta", "albert", "xlm-roberta"]


@pytest.mark.parametrize("name", FORMATS)
def test_saved_folders_give_transformers_the_same_ids(ours, name, tmp_path):
    ours[name].save(tmp_path / "saved", max_length=77)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert loaded.model_max_length == again.max_length == 77
    assert loaded.mask_token_id == again.mask_id == ours[name].mask_id
    assert again.digest == ours[name].digest
    pair, mine = loaded("a cat", "b"), ours[name].encode("a cat", "b")
    assert pair.input_ids == mine.ids and pair.get("token_type_ids", [0] * len(mine)) == mine.segments
    for text in [*sentences(20, seed=1), "Café PARIS (naïve) <mask> [SEP] 中文 \u0301 ``x''", ""]:
        assert loaded(text).input_ids == ours[name].encode(text).ids == again.encode(text).ids
        assert loaded.backend_tokenizer.encode(text).ids == ours[name].encode(text).ids
        ids = ours[name].encode(text).ids
        assert loaded.decode(ids, skip_special_tokens=True) == ours[name].decode(ids)


def test_xlm_roberta_numbering(ours, folders):
    """fairseq's order: <s>, <pad>, </s>, <unk>, SentencePiece's own pieces one up, <mask> last."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folders["xlm-roberta"] / "sentencepiece.bpe.model"))
    tokenizer = ours["xlm-roberta"]
    assert [tokenizer.token(i) for i in range(4)] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert all(tokenizer.token(i + 1) == pieces.id_to_piece(i) for i in range(3, len(pieces)))
    assert tokenizer.mask_id == tokenizer.size - 1 == len(pieces) + 1


def test_one_file_is_enough(folders, ours):
    for name, file in [("bert", "vocab.txt"), ("roberta", "merges.txt"), ("albert", "spiece.model")]:
        assert Tokenizer.load(folders[name] / file).digest == ours[name].digest


def test_settings_beside_old_files_are_followed(folders, tmp_path):
    shutil.copytree(folders["roberta"], tmp_path / "roberta")
    flags = {"content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
    (tmp_path / "roberta" / "special_tokens_map.json").write_text(json.dumps({"mask_token": flags}))
    assert Tokenizer.load(tmp_path / "roberta").encode("a <mask>", specials=False).tokens[-2:] == ["a", "<mask>"]
    shutil.copytree(folders["bert"], tmp_path / "bert")
    (tmp_path / "bert" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    (tmp_path / "bert" / "added_tokens.json").write_text('{"<new>": 30522}')
    tokenizer = Tokenizer.load(tmp_path / "bert")
    assert tokenizer.encode("Day <new>", specials=False).ids == [100, 30522] and not tokenizer.lowercase
    (tmp_path / "bert" / "added_tokens.json").write_text('{"<new>": 7}')
    refuses("<new>", Tokenizer.load, tmp_path / "bert")


def test_special_tokens_and_template_missing_from_tokenizer_json_are_added(bert, tmp_path):
    content = json.loads((BERT / "tokenizer.json").read_text(encoding="utf-8"))
    content.update(added_tokens=[], post_processor=None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert Tokenizer.load(tmp_path).encode("a [MASK]", "b").ids == bert.encode("a [MASK]", "b").ids


CLASSES = [  # a file, its neighbour, and the class that is refused
    ("bert/vocab.txt", "tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer"}),
    ("bert/vocab.txt", "config.json", {"model_type": "mpnet"}),
    ("roberta/vocab.json", "config.json", {"tokenizer_class": "BertweetTokenizer", "model_type": "roberta"}),
    ("roberta/merges.txt", "config.json", {"model_type": "deberta"}),
    ("xlm-roberta/sentencepiece.bpe.model", "config.json", {"model_type": "camembert"}),
    ("xlm-roberta/sentencepiece.bpe.model", "config.json", {"model_type": "deberta-v2"}),
    ("albert/spiece.model", "tokenizer_config.json", {"tokenizer_class": "XLNetTokenizer"}),
    ("saved/tokenizer.json", "tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer"}),
]


@pytest.mark.parametrize("kind", ["BertTokenizer", "DistilBertTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "settings", [{"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}, {}]
)
def test_settings_that_contradict_tokenizer_json_hold_as_in_transformers(bert, tmp_path, caplog, kind, settings):
    bert.save(tmp_path)
    told = {"do_lower_case": bert.lowercase, "tokenizer_class": kind} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    theirs, mine = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    for text in ("Café PARIS (naïve) 中文", *sentences(5, seed=2)):
        assert mine.encode(text).ids == theirs(text).input_ids, text
    assert ("as tokenizer_config.json says" in caplog.text) == (bool(settings) and kind[0] != "P")


@pytest.mark.parametrize(("file", "beside", "settings"), CLASSES)
def test_files_of_another_class_are_refused(folders, bert, tmp_path, file, beside, settings):
    if file.startswith("saved"):
        bert.save(tmp_path / "saved")
    else:
        shutil.copytree(folders[file.partition("/")[0]], tmp_path / file.partition("/")[0])
    path = tmp_path / file
    (path.parent / "tokenizer_config.json").unlink(missing_ok=True)
    (path.parent / beside).write_text(json.dumps(settings))
    for read in (path, path.parent):
        refuses("which everybert does not implement", Tokenizer.load, read)


RESIDUES = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]


def test_proteins_have_the_ids_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(RESIDUES))
    theirs = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = Tokenizer.load(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    for text in ("MKTV", "", "MK<mask>T JJ M k", "A<cls>B-.", "mktJ <null_1>A", "MKé\tV\n", "A <mask> B"):
        wanted = theirs(text)["input_ids"]
        assert ours.encode(text).ids == Tokenizer.load(tmp_path / "ours").encode(text).ids == wanted
        assert saved(text)["input_ids"] == wanted
    assert ours.encode("MK", "AG").ids == theirs("MK", "AG")["input_ids"]
    assert (ours.cls_id, ours.sep_id, ours.pad_id, ours.mask_id, ours.unk_id) == (0, 2, 1, 32, 3)
    (tmp_path / "ours" / "tokenizer_config.json").write_text('{"tokenizer_class": "RoFormerTokenizer"}')
    with pytest.raises(EverybertError, match="which everybert does not implement"):
        Tokenizer.load(tmp_path / "ours")


def test_special_tokens_of_other_names_have_their_roles(bert, tmp_path):
    """EuroBERT begins with <|begin_of_text|> and ends with <|end_of_text|>."""
    bert.save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    for old, new in (("[CLS]", "<|begin_of_text|>"), ("[SEP]", "<|end_of_text|>"), ("[MASK]", "<|mask|>")):
        whole = whole.replace(old, new)
    (tmp_path / "tokenizer.json").write_text(whole)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|begin_of_text|>"}')
    renamed = Tokenizer.load(tmp_path)
    assert (renamed.cls_id, renamed.sep_id, renamed.mask_id) == (bert.cls_id, bert.sep_id, bert.mask_id)
    assert renamed.encode("a b").ids == bert.encode("a b").ids


def test_a_bare_file_that_could_be_read_in_two_ways(folders, tmp_path, caplog):
    shutil.copy(folders["cased"] / "vocab.txt", tmp_path)
    refuses("has capitals, but nothing says", Tokenizer.load, tmp_path)
    shutil.copy(folders["xlm-roberta"] / "sentencepiece.bpe.model", tmp_path)
    Tokenizer.load(tmp_path / "sentencepiece.bpe.model")
    assert "is read as XLM-R's" in caplog.text


@pytest.mark.parametrize("pattern", [{"String": "a"}, {"Regex": ""}])
def test_replacements_that_blow_up_are_refused(bert, tmp_path, pattern):
    bert.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    step = {"type": "Replace", "pattern": pattern, "content": "aaaaaaaaaa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [step] * 12}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    refuses("times as long", Tokenizer.load, tmp_path)


CHARSMAP = b'"normalizer": {"type": "Precompiled", "precompiled_charsmap": []}'
_DAMAGE = {
    "empty folder": {},
    "empty json": {"tokenizer.json": b""},
    "not a tokenizer": {"tokenizer.json": b'{"model_type": "bert"}'},
    "binary json": {"tokenizer.json": b"\x80\x04\x95"},
    "half a json": {"tokenizer.json": (BERT / "tokenizer.json").read_bytes()[:200_000]},
    "panicking json": {"tokenizer.json": b'{"model": {"type": "WordPiece", "vocab": {}}, ' + CHARSMAP + b"}"},
    "word level": {"tokenizer.json": b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'},
    "no template": {"vocab.txt": b"[UNK]\n[CLS]\n"},
    "no unknown": {"vocab.txt": b"a\nb\n"},
    "binary vocab": {"vocab.txt": b"\xff\xfe\x00"},
    "no merges": {"vocab.json": b'{"<s>": 0}'},
    "bad merges": {"vocab.json": b'{"a": 0}', "merges.txt": b"a b c d\n"},
    "not SentencePiece": {"spiece.model": b"hello"},
    "bad settings": {"vocab.txt": b"[UNK]\n", "tokenizer_config.json": b"{"},
}


@pytest.mark.parametrize("case", [*_DAMAGE, "missing folder"])
def test_damaged_files_are_one_line(case, tmp_path):
    for name, content in _DAMAGE.get(case, {}).items():
        (tmp_path / name).write_bytes(content)
    said = refuses(".", Tokenizer.load, tmp_path / "nowhere" if case == "missing folder" else tmp_path)
    assert str(tmp_path) in said or case == "word level"


def test_an_unsupported_tokenizer_is_not_called_damaged(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text('{"version": "1.0", "model": {"type": "Neural", "vocab": {}}}')
    assert "again" not in refuses("upgrade, or use another model", Tokenizer.load, file)
    file.write_text('{"version": ')
    refuses("download it again", Tokenizer.load, file)
