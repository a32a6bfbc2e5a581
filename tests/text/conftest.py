"""A folder of each format in which tokenizers of the family are published, and the tokenizers of both libraries."""

import shutil

import pytest
from tokenizer_samples import BERT, sentences, write_bpe, write_sentencepiece, write_wordpiece

from everybert.text.tokenizer import Tokenizer

_CLASSES = {"roberta": "RobertaTokenizer", "albert": "AlbertTokenizer", "xlm-roberta": "XLMRobertaTokenizer"}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A folder of each format the family is published in."""
    root = tmp_path_factory.mktemp("formats")
    bert = root / "bert"
    bert.mkdir()
    shutil.copy(BERT / "vocab.txt", bert)
    made = {
        "bert": bert,
        "uncased": write_wordpiece(root / "uncased", lowercase=True),
        "cased": write_wordpiece(root / "cased", lowercase=False),
        "roberta": write_bpe(root / "roberta"),
        "albert": write_sentencepiece(root / "albert", albert=True),
        "xlm-roberta": write_sentencepiece(root / "xlm-roberta", albert=False),
    }
    (made["cased"] / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    (made["xlm-roberta"] / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    return made


@pytest.fixture(scope="session")
def ours(folders):
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def theirs(folders):
    import transformers

    oracles = {}
    for name, folder in folders.items():
        options = {} if name in _CLASSES else {"do_lower_case": name != "cased"}
        cls = getattr(transformers, _CLASSES.get(name, "BertTokenizer"))
        oracles[name] = cls.from_pretrained(folder, **options)
        ids = oracles[name](sentences(1)[0]).input_ids
        assert ids.count(oracles[name].unk_token_id) < len(ids) / 4
    return oracles


@pytest.fixture(scope="session")
def bert():
    return Tokenizer.load(BERT)
