"""What is shown are the examples of the packs, token by token, and the masks of each epoch."""

import json

import corpus_texts
import pytest
from show_examples import LABELS, as_lines, main, show_examples

from everybert.corpus.build import build_corpus
from everybert.corpus.examples import KINDS, ExampleConfig
from everybert.corpus.masking import MaskingConfig
from everybert.corpus.packs import PackStream
from everybert.corpus.shards import Corpus, ExampleLayout


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
    corpus, layout = Corpus.open(folder), ExampleLayout.of(corpus_texts.tokenizer())
    return PackStream(corpus, layout, ExampleConfig(kind, 32), MaskingConfig(**masking), capacity=64, causal=causal)


@pytest.fixture(scope="module")
def vocabulary():
    return corpus_texts.tokenizer()


@pytest.mark.parametrize("causal", [False, True, "reverse"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_are_those_of_the_packs(folders, vocabulary, kind, causal):
    packs = stream(folders / "plain", kind, causal)
    shown = list(show_examples(packs, vocabulary, count=5))
    positions = list(packs.positions(epochs=1))
    assert [one["pack"] for one in shown] == [1, 2, 3, 4, 5], "across packs"
    for one in shown:
        pack = packs.make(positions[one["pack"] - 1])
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
    assert [(one["example"], one["epoch"]) for one in shown[:4]] == [(1, 1), (1, 2), (1, 3), (2, 1)]
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
        assert not any(words[first].startswith("##") for first, _ in one["units"])
    long = next(one for one in shown if any(end - first > 1 for first, end in one["units"]))
    assert "⟨" in "".join(as_lines(long)) and "⟩" in "".join(as_lines(long))


def test_lines_are_those_of_a_slide(folders, vocabulary):
    one = next(
        one for one in show_examples(stream(folders / "plain"), vocabulary, count=40) if one["label"] == "NotNext"
    )
    head, first, second = as_lines(one)
    assert head.startswith(f"{one['example']}. NotNext (pack {one['pack']}, epoch 1: ")
    assert first.startswith("   A  [CLS]") and first.endswith("[SEP]") and second.startswith("   B  ")
    for i, was in zip(one["predicted"], one["was"]):
        assert f"{one['tokens'][i]}→{was}" in first + second


def test_the_command(folders, capsys):
    line = [str(folders / "plain"), "--recipe", "bert-base", "--length", "16", "--count", "2", "--epochs", "2"]
    main(line)
    shown = capsys.readouterr().out
    main([*line, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert [(one["example"], one["epoch"]) for one in data] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(f"{one['tokens'][i]}→{was}" in shown for one in data for i, was in zip(one["predicted"], one["was"]))
    for wrong, told in (
        ([str(folders)], "is not a corpus folder"),
        ([*line, "--set", "mask.rat=1"], "there is no such key; did you mean rate"),
        ([*line, "--set", "model.causal=true"], "a causal model does not learn sentence pairs"),
    ):
        with pytest.raises(SystemExit, match=told):
            main(wrong)
