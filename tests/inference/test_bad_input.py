"""What users get wrong: one line that names the cause and the remedy, or the right answer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses

import everybert
from everybert.errors import EverybertError
from everybert.inference.model import Model


def test_an_unknown_name_gets_close_ones():
    assert ";" in refuses("bert-base-uncased", everybert.load, "bert-base-uncase")


PLAIN = ("top", "text 2 is a int", "window or cut", "no layer")
"""What these say is the remedy."""


@pytest.mark.parametrize(
    ("name", "call", "why"),
    [
        ("bert", lambda m: m.hidden([[2, 1_000_000, 3]]), "outside the vocabulary"),
        ("bert", lambda m: m.hidden([[-1, 3]]), "outside the vocabulary"),
        ("bert", lambda m: m.hidden([[5] * 33]), r"33 tokens.*32 positions"),
        ("bert", lambda m: m.hidden([[2, 3], []]), "empty"),
        ("bert", lambda m: m.hidden([[2, 3]], segments=[[0, 0.5]]), "lists of token ids"),
        ("bert", lambda m: m.hidden([[2, 3]], global_tokens=[[0]]), "no global attention"),
        ("roberta", lambda m: m.hidden([[2, 3]], segments=[[0, 1]]), "no second segment"),
        ("bert", lambda m: m.fill("The dog plays"), r"no \[MASK\]"),
        ("bert", lambda m: m.fill("The [MASK]", top=0), "top"),
        ("minilm", lambda m: m.fill("a [MASK]"), "no mlm head"),
        ("minilm", lambda m: m.score("a"), "no mlm head"),
        ("minilm", lambda m: m.next_sentence("a", "b"), "no nsp head"),
        ("bert", lambda m: m.embed(["a", 3]), "text 2 is a int"),
        ("bert", lambda m: m.embed(["text"], pooling="best"), "no pooling 'best'"),
        ("bert", lambda m: m.embed(["text"], long="drop"), "window or cut"),
        ("bert", lambda m: m.embed(["a"], dimensions=0), "vectors have 48"),
        ("bert", lambda m: m.embed(["a"], dimensions=49), "vectors have 48"),
        ("bert", lambda m: m.tokens("the dog", layer=4), "no layer"),
        ("bert", lambda m: m.tokens("the dog", layer=-5), "no layer"),
        *(
            ("bert", lambda m, second=second: m.next_sentence("a", second), "the second text is a")
            for second in (None, ["b"], 3)
        ),
        *(
            ("bert", lambda m, given=given: m.tag(given), r"text \d is a .*; give strings or words")
            for given in ([None], ["John", 3], [["John", 3]])
        ),
    ],
)
def test_a_wrong_call_is_one_line(request, name, call, why):
    assert ";" in refuses(why, call, request.getfixturevalue(name)) or why in PLAIN


def test_more_candidates_than_tokens(bert: Model):
    (blank,) = bert.fill("The [MASK]", top=10**6)
    assert len(blank) == bert.tokenizer.size
    assert sum(candidate.score for candidate in blank) <= 1 + 1e-5


@pytest.mark.parametrize("text", ["", " ", "\ud800", "a\udfffb", "\x00", "\u202e"])
def test_strange_texts_get_an_answer(bert: Model, roberta: Model, text):
    for model in (bert, roberta):
        assert np.isfinite(model.embed([text])).all()
        found = model.tokens(text)
        assert len(found.tokens) == len(found.vectors) >= 2
        assert np.isfinite(model.score(text).total)
        assert model.attention(text).weights.shape[-1] == len(found.tokens)


def test_a_megabyte_of_text(bert: Model):
    text = "the dog plays in the garden . " * 35_000
    assert len(text) > 1_000_000
    (vector,) = bert.embed([text])
    assert np.isfinite(vector).all()
    refuses(r"245,002 tokens.*32", bert.attention, text)
    refuses(r"245000 tokens.*4096", bert.score, text)
    refuses("the pair has", bert.next_sentence, text, "b")
    (blank,) = bert.fill(text + "[MASK]", top=1)
    assert len(blank) == 1


def test_attention_is_capped(bert: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("everybert.inside.attention.MOST_BYTES", 3 * 4 * 5 * 5 * 4)
    assert bert.attention("the dog plays").weights.shape == (3, 4, 5, 5)
    refuses("at most 5 tokens", bert.attention, "the dog plays in")


class Frame:
    """A table of an unknown library."""

    columns = ("text", "pair", "label")

    def __iter__(self):
        return iter(self.columns)


@pytest.mark.parametrize("given", [{"text": "a"}, {"a", "b"}, Frame(), None, 5])
@pytest.mark.parametrize("task", ["embed", "classify", "regress", "tag", "answer", "choose", "neighbours"])
def test_tables_and_what_is_no_text_are_refused(bert: Model, task, given):
    """Lists of them would be the names of columns, or have no order."""
    calls = {
        "answer": lambda: bert.answer(given, "a text"),
        "choose": lambda: bert.choose("a text", given),
        "neighbours": lambda: bert.neighbours("a", given),
    }
    call = calls.get(task, lambda: getattr(bert, task)(given))
    assert ";" in refuses("is no list of texts|lists of equal length", call)


@pytest.mark.parametrize("method", ["tokens", "fill", "score", "attention", "trace"])
def test_a_table_is_not_one_text(bert: Model, method):
    """Its two columns would be read as a pair of texts."""
    pandas = pytest.importorskip("pandas")
    with pytest.raises(EverybertError, match="is DataFrame, not a string"):
        getattr(bert, method)(pandas.DataFrame({"the [MASK]": ["a"], "label": ["b"]}))


@pytest.mark.parametrize("given", ["text", ["text"], [2, 3], [[2.0, float("nan")]], [[2.5, 3]], [[[2]]]])
def test_hidden_takes_ids_alone(bert: Model, roberta: Model, given):
    assert ";" in refuses(r"lists of token ids.*tokens\(text\)", bert.hidden, given)
    assert roberta.hidden([[2, 3]], segments=[[0, 0]])[0].shape[0] == 2  # it has one segment


@pytest.mark.parametrize("own", [{"normalise": True}, {"normalize": 1}])
def test_odd_settings_of_embeddings_are_refused(bert: Model, own):
    extras = {"embedding": own}
    assert ";" in refuses("embedding", Model, bert.network, bert.tokenizer, extras=extras)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, "float7", 5])
def test_a_dtype_that_is_not_computed_is_refused(bert_folder: Path, dtype):
    assert ";" in refuses("no dtype", everybert.load, bert_folder, dtype=dtype)
