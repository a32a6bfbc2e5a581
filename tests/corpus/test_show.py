"""What is shown are the examples of the packs, token by token, and the masks of each epoch."""

import json

import corpus_texts
import pytest
from typer.testing import CliRunner

from everybert.cli.main import app
from everybert.corpus.build import build_corpus
from everybert.corpus.examples import KINDS, ExampleConfig
from everybert.corpus.masking import MaskingConfig
from everybert.corpus.packs import PackStream
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.corpus.show import LABELS, as_lines, show_examples, text_examples
from everybert.errors import EverybertError
from everybert.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A corpus, and one whose words are cut into pieces."""
    place = tmp_path_factory.mktemp("corpora")
    corpus_texts.tokenizer().save(place / "tokenizer")
    text = "\n\n".join(corpus_texts.documents(40))
    for name, some in (("plain", text), ("pieces", text.replace("river", "riverstone"))):
        (place / f"{name}.txt").write_text(some, encoding="utf-8")
        build_corpus(place / f"{name}.txt", place / "tokenizer", place / name, workers=1, heldout=0)
    return place


def stream(folder, kind="pairs", causal=False, **masking):
    corpus = Corpus.open(folder)
    layout = ExampleLayout.of(Tokenizer.load(corpus.tokenizer_path))
    return PackStream(corpus, layout, ExampleConfig(kind, 32), MaskingConfig(**masking), capacity=64, causal=causal)


@pytest.fixture(scope="module")
def vocabulary(folders):
    return Tokenizer.load(folders / "tokenizer")  # another training of the same texts may give another one


@pytest.mark.parametrize("causal", [False, True, "reverse"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_are_those_of_the_packs(folders, vocabulary, kind, causal):
    packs = stream(folders / "plain", kind, causal)
    shown = list(show_examples(packs, vocabulary, count=5))
    positions = list(packs.positions(epochs=1))
    assert [one["pack"] for one in shown] == [0, 1, 2, 3, 4], "across packs"
    for one in shown:
        pack = packs.make(positions[one["pack"]])
        n = int(pack["lengths"][0])
        assert one["tokens"] == [vocabulary.token(i) for i in pack["tokens"][:n]]
        assert one["segments"] == pack["segments"][:n].tolist()
        expected = [(int(i), vocabulary.token(t)) for i, t in zip(pack["mask_index"], pack["mask_label"]) if i < n]
        assert list(zip(one["predicted"], one["was"])) == expected
        names, label = LABELS.get(kind), int(pack["pair_label"][0])
        assert one["label"] == (names[label] if names and label >= 0 else None)
        for i, was, how in zip(one["predicted"], one["was"], one["how"]):
            read = one["tokens"][i]
            assert how == ("next" if causal else "mask" if read == "[MASK]" else "kept" if read == was else "random")


def test_all_kinds_of_masks_and_labels_occur(folders, vocabulary):
    shown = list(show_examples(stream(folders / "plain", rate=0.5), vocabulary, count=60))
    assert {how for one in shown for how in one["how"]} == {"mask", "random", "kept"}
    assert {one["label"] for one in shown} == {"IsNext", "NotNext", None}


@pytest.mark.parametrize(("copies", "same"), [(None, False), (1, True), (2, False)])
def test_epochs_show_dynamic_and_static_masks(folders, vocabulary, copies, same):
    shown = list(show_examples(stream(folders / "plain", static_duplicates=copies), vocabulary, count=8, epochs=3))
    assert [(one["example"], one["epoch"]) for one in shown[:4]] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    first, second, third = ([one["tokens"] for one in shown[e::3]] for e in range(3))
    assert (first == second) is same
    assert (first == third) is (copies is not None), "two copies: the third epoch repeats the first"


@pytest.mark.parametrize("strategy", ["word", "span"])
def test_units_are_shown_together(folders, vocabulary, strategy):
    packs = stream(folders / "pieces", "full", strategy=strategy, rate=0.3)
    shown = list(show_examples(packs, vocabulary, count=20))
    for one in shown:
        assert [i for first, end in one["units"] for i in range(first, end)] == one["predicted"]
        words = dict(zip(one["predicted"], one["was"]))
        # after [CLS] stands the rest of a word, where the sequence before ended within one
        assert not any(words[first].startswith("##") for first, _ in one["units"] if first > 1)
    long = next(one for one in shown if any(end - first > 1 for first, end in one["units"]))
    assert "⟨" in "".join(as_lines(long)) and "⟩" in "".join(as_lines(long))


def test_lines_are_those_of_a_slide(folders, vocabulary):
    one = next(
        one for one in show_examples(stream(folders / "plain"), vocabulary, count=40) if one["label"] == "NotNext"
    )
    head, first, second = as_lines(one)
    assert head.startswith(f"example {one['example']}: NotNext, pack {one['pack']}, epoch 0 (")
    assert first.startswith("   A  [CLS]") and first.endswith("[SEP]") and second.startswith("   B  ")
    for i, was in zip(one["predicted"], one["was"]):
        assert f"{one['tokens'][i]}→{was}" in first + second


def run(*arguments):
    return CliRunner().invoke(app, ["corpus", "show", *map(str, arguments)])


def test_the_command(folders, tmp_path):
    line = [folders / "plain", "--recipe", "bert-base", "--length", "16", "--count", "2"]
    shown, data = run(*line).stdout, json.loads(run(*line, "--json").stdout)
    assert [(one["example"], one["epoch"]) for one in data] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(f"{one['tokens'][i]}→{was}" in shown for one in data for i, was in zip(one["predicted"], one["was"]))
    assert max(len(one["tokens"]) for one in data) <= 16
    fixed = json.loads(run(*line, "--set", "mask.static_duplicates=1", "--json").stdout)
    assert fixed[0]["tokens"] == fixed[1]["tokens"] and data[0]["tokens"] != data[1]["tokens"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "is not a corpus folder: make one with"),
        (["--recipe", "nosuch"], "there is no recipe 'nosuch': give a .toml file, or one of"),
        (["--set", "mask.rat=1"], "there is no such key; did you mean rate"),
        (["--set", "model.causal=true"], "a causal model does not learn sentence pairs"),
        (["--set", "mask.strategy=pmi"], "pmi masking needs collocations: run `everybert corpus build` with --pmi"),
        (["--length", "4000"], "length 4000 is more than the model's 512 positions"),
    ],
)
def test_wrong_input_is_one_clear_line(folders, tmp_path, arguments, told):
    result = run(folders / "plain" if arguments else tmp_path, *arguments)
    assert result.exit_code == 2 and told in result.stderr and result.stderr.count("\n") == 1


# ── a text without a corpus ──

TEXT = "The old river sings. It walks over New York.\n\nA quiet town was green. Light was near the bridge."


def test_a_text_is_cut_as_a_corpus_is(vocabulary):
    shown = text_examples(TEXT, vocabulary, "document", seed=1)
    assert [(one["example"], one["epoch"]) for one in shown] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    read = {" ".join(restored(one)) for one in shown}
    pieces = (" ".join(vocabulary.encode(document).tokens) for document in TEXT.split("\n\n"))
    assert read == set(pieces), "each document is an example"


def restored(one):
    tokens = list(one["tokens"])
    for i, was in zip(one["predicted"], one["was"]):
        tokens[i] = was
    return tokens


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_named_collocations_are_masked_as_wholes(kind):
    tokenizer = corpus_texts.tokenizer(kind)
    phrase = [tokenizer.token(i) for i in tokenizer.ids_batch([" New York"], specials=False)[0]]
    phrase = tokenizer.readable(phrase)
    found = 0
    for seed in range(20):
        settings = {"rate": 0.3, "collocations": ["New York"], "seed": seed}
        for one in text_examples(TEXT.replace("York.", "York over."), tokenizer, "full", "pmi", **settings):
            tokens = restored(one)
            at = next((i for i in range(len(tokens)) if tokens[i : i + len(phrase)] == phrase), None)
            if at is not None and {at, at + len(phrase) - 1} & set(one["predicted"]):
                assert (at, at + len(phrase)) in map(tuple, one["units"])
                found += 1
    assert found, "in some epochs it is masked"


def test_static_masks_repeat(vocabulary):
    for static in (False, True):
        shown = text_examples(TEXT, vocabulary, "full", rate=0.5, static=static)
        assert (shown[0]["tokens"] == shown[1]["tokens"]) is static


@pytest.mark.parametrize("text", ["", " \n\n ", "[SEP] [MASK]"])
def test_a_text_without_words_is_refused(vocabulary, text):
    with pytest.raises(EverybertError, match="the text has no words to make examples of; give some sentences"):
        text_examples(text, vocabulary)


def test_one_document_has_no_pairs(vocabulary):
    with pytest.raises(EverybertError, match="pairs need sentences of other documents"):
        text_examples(TEXT.replace("\n", " "), vocabulary)
    assert text_examples(TEXT.replace("\n", "\0"), vocabulary, "full"), "what is not text does not matter"
