from types import SimpleNamespace

import numpy as np
import pytest

from everybert.corpus.layout import Layout
from everybert.errors import EverybertError
from everybert.text.tokenizer import Tokenizer


def test_bert_layout(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b", "##c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    found = Layout.of(Tokenizer.load(tmp_path))
    assert (found.cls_id, found.sep_id, found.pad_id, found.mask_id) == (2, 3, 0, 4)
    assert found.vocab_size == 9 and found.pair_separators == 1 and found.segments
    assert np.flatnonzero(found.special_V).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(found.continues_V).tolist() == [7, 8]


def test_roberta_layout(tmp_path):
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "Ġ", "Ġa", "Ġb"]
    quoted = ", ".join(f'"{w}": {i}' for i, w in enumerate(words))
    (tmp_path / "vocab.json").write_text("{" + quoted + "}", encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\nĠ b\n", encoding="utf-8")
    found = Layout.of(Tokenizer.load(tmp_path))
    assert (found.cls_id, found.sep_id, found.pad_id, found.mask_id) == (0, 2, 1, 4)
    assert found.pair_separators == 2 and not found.segments
    assert np.flatnonzero(found.continues_V).tolist() == [5, 6]


def test_a_vocabulary_without_a_mask_is_refused():
    tokenizer = SimpleNamespace(cls_id=0, sep_id=1, pad_id=2, mask_id=None)
    with pytest.raises(EverybertError, match=r"\[MASK\]"):
        Layout.of(tokenizer)
