"""What users get wrong: one line that names the cause and the remedy, or the right answer."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import everybert
from everybert.errors import EverybertError
from everybert.inference.model import Model


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message and ";" in message
    return message


@pytest.fixture
def copy(bert_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert_folder, tmp_path / "copy"))


def test_an_unknown_name_gets_close_ones():
    with pytest.raises(EverybertError) as error:
        everybert.load("bert-base-uncase")
    assert "bert-base-uncased" in one_line(error)


def test_no_default_model_is_bundled_yet_or_it_loads():
    from everybert.store.hub import bundled_names

    if "everybert-small" not in bundled_names():
        with pytest.raises(EverybertError, match="everybert-small"):
            everybert.load("everybert-small")


def test_a_folder_without_weights(copy: Path):
    (copy / "model.safetensors").unlink()
    with pytest.raises(EverybertError, match=r"no weights.*model\.safetensors") as error:
        everybert.load(copy)
    one_line(error)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated_weights(copy: Path, keep):
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(EverybertError, match="truncated or damaged") as error:
        everybert.load(copy)
    one_line(error)


def test_a_damaged_header(copy: Path):
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)
    with pytest.raises(EverybertError, match="damaged"):
        everybert.load(copy)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"])
def test_config_and_weights_that_disagree(copy: Path, field):
    config = json.loads((copy / "config.json").read_text())
    config[field] *= 2
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(EverybertError, match=r"config\.json (asks for|describes)") as error:
        everybert.load(copy)
    one_line(error)


@pytest.mark.parametrize("ids", [[2, 1_000_000, 3], [-1, 3]])
def test_ids_out_of_range(bert: Model, ids):
    with pytest.raises(EverybertError, match="outside the vocabulary") as error:
        bert.hidden([ids])
    one_line(error)


def test_positions_beyond_the_window(bert: Model):
    with pytest.raises(EverybertError, match=r"33 tokens.*32 positions") as error:
        bert.hidden([[5] * 33])
    one_line(error)


def test_an_empty_sequence(bert: Model):
    with pytest.raises(EverybertError, match="empty"):
        bert.hidden([[2, 3], []])


def test_fill_without_a_mask(bert: Model):
    with pytest.raises(EverybertError, match=r"no \[MASK\]") as error:
        bert.fill("The dog plays")
    one_line(error)
    with pytest.raises(EverybertError, match="top"):
        bert.fill("The [MASK]", top=0)


def test_more_candidates_than_tokens(bert: Model):
    (blank,) = bert.fill("The [MASK]", top=10**6)
    assert len(blank) == bert.tokenizer.size
    assert sum(candidate.score for candidate in blank) <= 1 + 1e-5


def test_heads_that_the_model_lacks(minilm: Model):
    for use in (lambda: minilm.fill("a [MASK]"), lambda: minilm.next_sentence("a", "b"), lambda: minilm.score("a")):
        with pytest.raises(EverybertError, match=r"no (mlm|nsp) head") as error:
            use()
        one_line(error)


@pytest.mark.parametrize("text", ["", " ", "\ud800", "a\udfffb", "\x00", "\u202e"])
def test_strange_texts_get_an_answer(bert: Model, roberta: Model, text):
    for model in (bert, roberta):
        assert np.isfinite(model.embed([text])).all()
        found = model.tokens(text)
        assert len(found.tokens) == len(found.vectors) >= 2
        assert np.isfinite(model.score(text).total)
        assert model.attention(text).weights.shape[-1] == len(found.tokens)


def test_texts_that_are_no_texts(bert: Model):
    with pytest.raises(EverybertError, match="text 2 is a int"):
        bert.embed(["a", 3])  # type: ignore[list-item]


def test_a_megabyte_of_text(bert: Model):
    text = "the dog plays in the garden . " * 35_000
    assert len(text) > 1_000_000
    (vector,) = bert.embed([text])
    assert np.isfinite(vector).all()
    with pytest.raises(EverybertError, match=r"245,002 tokens.*32"):
        bert.attention(text)
    with pytest.raises(EverybertError, match=r"245000 tokens.*4096"):
        bert.score(text)
    with pytest.raises(EverybertError, match="the pair has"):
        bert.next_sentence(text, "b")
    (blank,) = bert.fill(text + "[MASK]", top=1)
    assert len(blank) == 1


def test_attention_is_capped(bert: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("everybert.inside.attention.LIMIT", 3 * 4 * 5 * 5 * 4)
    assert bert.attention("the dog plays").weights.shape == (3, 4, 5, 5)
    with pytest.raises(EverybertError, match="at most 5 tokens"):
        bert.attention("the dog plays in")


def test_layers_that_there_are_none_of(bert: Model):
    for layer in (4, -5):
        with pytest.raises(EverybertError, match="no layer"):
            bert.tokens("the dog", layer=layer)


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
    with pytest.raises(EverybertError, match=r"is no list of texts|lists of equal length") as error:
        calls.get(task, lambda: getattr(bert, task)(given))()
    one_line(error)


@pytest.mark.parametrize("method", ["tokens", "fill", "score", "attention", "trace"])
def test_a_table_is_not_one_text(bert: Model, method):
    """Its two columns would be read as a pair of texts."""
    pandas = pytest.importorskip("pandas")
    with pytest.raises(EverybertError, match="is DataFrame, not a string"):
        getattr(bert, method)(pandas.DataFrame({"the [MASK]": ["a"], "label": ["b"]}))


@pytest.mark.parametrize("given", ["text", ["text"], [2, 3], [[2.0, float("nan")]], [[2.5, 3]], [[[2]]]])
def test_hidden_takes_ids_alone(bert: Model, given):
    with pytest.raises(EverybertError, match=r"lists of token ids.*tokens\(text\)") as error:
        bert.hidden(given)
    one_line(error)
    with pytest.raises(EverybertError, match="lists of token ids"):
        bert.hidden([[2, 3]], segments=[[0, 0.5]])


@pytest.mark.parametrize("own", [{"normalise": True}, {"normalize": 1}])
def test_odd_settings_of_embeddings_are_refused(bert: Model, own):
    with pytest.raises(EverybertError, match="embedding") as error:
        Model(bert.network, bert.tokenizer, extras={"embedding": own})
    one_line(error)


@pytest.mark.parametrize("second", [None, ["b"], 3])
def test_two_texts_are_compared(bert: Model, second):
    with pytest.raises(EverybertError, match="the second text is a"):
        bert.next_sentence("a", second)


def test_what_a_family_cannot_use_is_refused(bert: Model, roberta: Model):
    with pytest.raises(EverybertError, match="no global attention"):
        bert.hidden([[2, 3]], global_tokens=[[0]])
    with pytest.raises(EverybertError, match="no second segment"):
        roberta.hidden([[2, 3]], segments=[[0, 1]])
    assert roberta.hidden([[2, 3]], segments=[[0, 0]])[0].shape[0] == 2


@pytest.mark.parametrize("given", [[None], ["John", 3], [["John", 3]]])
def test_tag_names_what_is_no_text(bert: Model, given):
    with pytest.raises(EverybertError, match=r"text \d is a .*; give strings or words"):
        bert.tag(given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, "float7", 5])
def test_a_dtype_that_is_not_computed_is_refused(bert_folder: Path, dtype):
    with pytest.raises(EverybertError, match="no dtype") as error:
        everybert.load(bert_folder, dtype=dtype)
    one_line(error)
