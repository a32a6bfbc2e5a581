"""Tagging: words keep their labels whatever the pieces, windows own each word once, spans have exact places."""

import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import tiny_bert as tiny
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from seqeval.metrics import classification_report

from everybert.errors import EverybertError
from everybert.store.huggingface import load_network
from everybert.tasks import Tag, load_task
from everybert.tasks.features import make_batch
from everybert.tasks.tag import entity_scores, viterbi
from everybert.tasks.words import Entity, convert_tags, entities, learn_splitter
from everybert.text.windows import WindowConfig

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
HEAD = ("ForTokenClassification", 0, LABELS)


def tags_of(task, network, tokenizer, inputs):
    """(words, tags, probabilities) of each input."""
    features = task.encode(tokenizer, network.config, inputs)
    outputs = task.run(network, features)
    return [(text.words, *task.tags(outputs, text)) for text in features.origins]


def task_for(bert, **changes):
    loaded = bert[0]
    return replace(load_task("tag", loaded.network, loaded.labels), **changes)


WORD = st.sampled_from([*tiny.WORDS[:30], "unseen", "john's", "x-y", "\u200b", "中文", "[MASK]", "Émile", "a" * 120])


@settings(max_examples=60, deadline=None)
@given(sentences=st.lists(st.lists(WORD, max_size=40), min_size=1, max_size=4), size=st.sampled_from([12, 24, 64]))
def test_every_word_is_owned_once_by_its_first_piece(bert, sentences, size):
    loaded, tokenizer, _ = bert
    features = task_for(bert, window=WindowConfig(size, size // 4)).encode(tokenizer, loaded.config, sentences)
    for words, text in zip(sentences, features.origins):
        assert len(text.at) == len(words)
        for (sequence, at), word in zip(text.at, words):
            tokens = [tokenizer.token(int(i)) for i in features.ids[sequence]]
            assert 0 < at < len(tokens) - 1
            assert not tokens[at].startswith("##"), (tokens[at], word)
    assert features.lengths_S.max() <= size


def test_pieces_are_those_of_transformers_on_split_words(bert):
    loaded, tokenizer, _ = bert
    words = ["unseen", "john", "'s", "x-y", "likes", "food", "."]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend, cls_token="[CLS]", sep_token="[SEP]"
    )(words, is_split_into_words=True)
    features = task_for(bert).encode(tokenizer, loaded.config, [words])
    assert features.ids[0].tolist() == theirs["input_ids"]
    first = [theirs.word_ids().index(i) for i in range(len(words))]
    assert features.origins[0].at.tolist() == [[0, i] for i in first]


def test_raw_text_and_its_words_are_tagged_alike(bert):
    """What is trained is what is predicted: a text that falls into the training words gets the same tags."""
    loaded, tokenizer, _ = bert
    sentences = [["john", "does", "n't", "like", "x-y", "food", "."], ["mary", "'s", "cat", "eats", ",", "x-y", "!"]]
    task = task_for(bert, splitter=learn_splitter(sentences))
    texts = ["john doesn't like x-y food.", "mary's cat eats, x-y!"]
    raw, split = (tags_of(task, loaded.network, tokenizer, inputs) for inputs in (texts, sentences))
    for (words, tags, p), (_, tags_of_words, p_of_words), sentence in zip(raw, split, sentences):
        assert [w.text for w in words] == sentence
        assert tags == tags_of_words and p.tolist() == pytest.approx(p_of_words.tolist())


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="ab jo.,'’-\n\t中é", max_size=60), decode=st.sampled_from(["greedy", "constrained"]))
def test_spans_are_in_the_text(bert, text, decode):
    loaded, tokenizer, _ = bert
    (spans,) = task_for(bert, decoding=decode).predict(loaded.network, tokenizer, [text])
    for span in spans:
        assert span.text == text[span.start : span.end] and span.label in ("PER", "LOC") and 0 <= span.score <= 1
    assert all(a.end <= b.start for a, b in pairwise(spans))


def test_long_texts_agree_with_short_ones_where_both_apply(bert):
    """A text as long as the window is one sequence; the same words in windows keep their count and order."""
    loaded, tokenizer, _ = bert
    words = [tiny.WORDS[i % 30] for i in range(20_000)]
    task = task_for(bert)
    ((found, tags, _),) = tags_of(task, loaded.network, tokenizer, [words])
    assert len(tags) == len(found) == 20_000
    assert all(t.startswith(("O", "B-", "I-")) for t in tags)


def test_constrained_tags_are_well_formed(bert):
    loaded, tokenizer, _ = bert
    words = [tiny.WORDS[i % 37] for i in range(500)]
    ((_, tags, _),) = tags_of(task_for(bert, decoding="constrained"), loaded.network, tokenizer, [words])
    assert convert_tags(tags, "BIO") == tags
    ((_, greedy, _),) = tags_of(task_for(bert, decoding="greedy"), loaded.network, tokenizer, [words])
    assert convert_tags(greedy, "BIO") != greedy  # a random model breaks the rules


def test_loss_is_that_of_transformers(bert):
    loaded, tokenizer, folder = bert
    examples = Tag.read([(["john", "unseen", "paris"], ["B-PER", "I-PER", "B-LOC"])])
    task = task_for(bert)
    features = task.features(tokenizer, loaded.config, examples)
    model = transformers.BertForTokenClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor([features.ids[0].tolist()]),
            labels=torch.tensor(features.targets["tag_T"][0][None]),
        ).loss
        for fill in (None, 32):
            assert float(task.loss(loaded.network, make_batch(features, np.array([0]), fill=fill))) == pytest.approx(
                float(expected), abs=1e-5
            )


def test_folders_from_elsewhere_are_read_leniently(bert):
    """IOB1 (the best-known CoNLL checkpoint): an entity may begin with I-, as transformers' pipeline reads it."""
    loaded, tokenizer, _ = bert
    task = load_task("tag", loaded.network, loaded.labels)
    features = task.encode(tokenizer, loaded.config, [["john", "smith", "likes", "paris"]])
    outputs = [np.zeros((len(features.ids[0]), len(LABELS)))]
    for (_, at), label in zip(features.origins[0].at, ["I-PER", "I-PER", "O", "I-LOC"]):
        outputs[0][at, LABELS.index(label)] = 9
    ((john, paris),) = task.decode(outputs, features, [[]])
    assert (john.text, john.label, paris.text, paris.label) == ("john smith", "PER", "paris", "LOC")


@pytest.mark.parametrize(
    "state",
    [
        {"decode": "best"},
        {"scheme": "IOB9"},
        {"words": 3},
        {"words": {"inside": ""}},
        {"words": {"inside": "", "digits": "", "endings": 3, "whole": []}},
        {"labels": [1, 2, 3, 4, 5]},
    ],
)
def test_hostile_settings_are_refused(bert, state):
    loaded = bert[0]
    with pytest.raises(EverybertError, match="settings of tag cannot be used"):
        load_task("tag", loaded.network, loaded.labels, extras={"task": {"task": "tag", **state}})


def test_conll_2003s_own_file(tmp_path):
    path = tmp_path / "eng.train"
    path.write_text(
        "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\nGerman JJ I-NP I-MISC\nBritish JJ I-NP B-MISC\n"
    )
    examples = Tag.read(path)
    assert examples.inputs == [["EU", "rejects", "German", "British"]]
    assert examples.targets == [["B-ORG", "O", "B-MISC", "B-MISC"]]
    assert any("IOB1" in n for n in examples.notes)
    assert Tag.read([(["a", "b"], ["O", "O"])], scheme="BIO").targets == [["O", "O"]]  # a dev set without entities
    assert Tag.read(path, scheme="BIOES").targets == [["S-ORG", "O", "S-MISC", "S-MISC"]]


def test_marked_places_become_tags():
    spans = [{"start": 15, "end": 19, "label": "ORG"}, {"start": 0, "end": 10, "label": "PER"}]
    rows = [
        {"text": "John Smith, of Acme.", "spans": spans},
        {"text": "in Paris", "spans": [[4, 8, "LOC"]]},
        {"text": "nobody", "spans": []},
    ]
    examples = Tag.read(rows)
    assert examples.inputs == [["John", "Smith", ",", "of", "Acme", "."], ["in", "Paris"], ["nobody"]]
    assert examples.targets == [["B-PER", "I-PER", "O", "O", "B-ORG", "O"], ["O", "B-LOC"], ["O"]]
    for spans, message in [
        ([[0, 4, "A"], [2, 6, "B"]], "overlaps"),
        ([[0, 99, "A"]], "lies outside"),
        ([[5, 5, "A"]], "lies outside"),
        ([[2, 3, "A"]], "contains no word"),
    ]:
        refuses(f"row 1: .*{message}", Tag.read, [{"text": "in Paris", "spans": spans}])
        assert len(Tag.read([{"text": "in Paris", "spans": spans}, rows[1]], skip_bad=True).bad) == 1


def test_conllu_columns(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_text("# text = It is\n1\tIt\tit\tPRON\tPRP\t_\t0\troot\t_\t_\n2\tis\tbe\tAUX\tVBZ\t_\t1\tx\t_\t_\n\n")
    assert Tag.read(path).targets == [["PRON", "AUX"]]
    assert Tag.read(path, {"label": "xpos"}).targets == [["PRP", "VBZ"]]
    refuses("no B-, I-", Tag.read, path, scheme="BIO")


def test_scores_and_labels_of_parts_of_speech(bert):
    loaded, tokenizer, folder = bert
    rows = [(["john", "eats", "."], ["NOUN", "VERB", "PUNCT"]), (["mary", "is"], ["NOUN", "AUX"])]
    examples = Tag.read(rows)
    task = Tag.from_examples(examples, loaded.config)
    assert (task.scheme, task.labels, task.metric) == ("plain", ("AUX", "NOUN", "PUNCT", "VERB"), "accuracy")
    network = load_network(folder, heads={"tag": 4}).network
    features = task.features(tokenizer, loaded.config, examples)
    scores = task.score(network, features, examples)
    guessed = [tags for _, tags, _ in tags_of(task, network, tokenizer, [words for words, _ in rows])]
    right = sum(a == b for (_, gold), tags in zip(rows, guessed) for a, b in zip(gold, tags))
    assert scores["accuracy"] == pytest.approx(right / 5)
    (spans, _) = task.predict(network, tokenizer, ["john eats.", ""])
    assert [s.text for s in spans] == ["john", "eats", "."]


def test_a_word_outside_is_no_span(bert):
    """O and labels without prefixes, as some folders have them."""
    loaded, tokenizer, _ = bert
    task = load_task("tag", loaded.network, ["O", "PER", "LOC", "ORG", "MISC"])
    features = task.encode(tokenizer, loaded.config, ["john likes paris"])
    outputs = [np.zeros((len(features.ids[0]), 5))]
    outputs[0][features.origins[0].at[:, 1], [1, 0, 2]] = 9
    (spans,) = task.decode(outputs, features, [])
    assert [(s.text, s.label) for s in spans] == [("john", "PER"), ("paris", "LOC")]


def test_settings_survive_json(bert):
    loaded = bert[0]
    examples = Tag.read([(["john", "'s"], ["B-PER", "O"]), (["x-y", "."], ["O", "O"])])
    task = replace(Tag.from_examples(examples, loaded.config), decoding="greedy")
    again = Tag.from_state(task.state(), loaded.config)
    for name in ("labels", "scheme", "decoding", "splitter"):
        assert getattr(again, name) == getattr(task, name)


# ── decoding and entity scores ───────────────────────────────────────────────────────────────────────────────

BIO = ["O", "B-A", "I-A", "B-B", "I-B"]
BIOES = [*BIO, "E-A", "S-A", "E-B", "S-B"]


def corpora(labels):
    sentence = st.integers(1, 8).flatmap(
        lambda n: st.tuples(*[st.lists(st.sampled_from(labels), min_size=n, max_size=n)] * 2)
    )
    return st.lists(sentence, min_size=1, max_size=4)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=100, deadline=None)
@given(st.sampled_from([BIO, BIOES]).flatmap(corpora))
def test_entity_scores_equal_seqeval(pairs):
    gold, guess = [list(side) for side in zip(*pairs)]
    expected = classification_report(gold, guess, output_dict=True, zero_division=0)
    ours = entity_scores(gold, guess)
    if "micro avg" in expected:
        theirs = [expected["micro avg"][k] for k in ("precision", "recall", "f1-score")]
        assert [ours[k] for k in ("precision", "recall", "f1")] == pytest.approx(theirs)
    for label in "AB":
        if label in expected:
            assert ours[f"f1/{label}"] == pytest.approx(expected[label]["f1-score"])


def test_conlleval_by_hand():
    # conlleval's own rule: I-LOC after O begins an entity; I-PER after B-LOC too.
    tags = ["I-LOC", "O", "B-LOC", "I-PER", "I-PER", "B-PER"]
    places = [("LOC", 0, 1), ("LOC", 2, 3), ("PER", 3, 5), ("PER", 5, 6)]
    assert entities(tags) == [Entity(*place) for place in places]
    scores = entity_scores([tags], [["I-LOC", "O", "O", "I-PER", "I-PER", "I-PER"]])
    assert (scores["precision"], scores["recall"]) == (0.5, 0.25)
    assert scores["accuracy"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("labels", [BIO, BIOES])
@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_viterbi_is_the_best_allowed_path(labels, n, seed):
    scores = np.random.default_rng(seed).normal(size=(n, len(labels)))
    scheme = "BIOES" if labels is BIOES else "BIO"

    def allowed(path):
        tags = [labels[i] for i in path]
        return convert_tags(tags, scheme) == tags

    best = max(
        (p for p in itertools.product(range(len(labels)), repeat=n) if allowed(p)),
        key=lambda p: sum(scores[i, c] for i, c in enumerate(p)),
    )
    assert tuple(viterbi(scores, labels)) == best


def test_viterbi_of_the_impossible():
    assert list(viterbi(np.zeros((1, 1)), ["I-A"])) == [0]


def test_a_cut_text_is_tagged_up_to_the_window(bert, caplog):
    loaded, tokenizer, _ = bert
    task = task_for(bert, window=WindowConfig(12, 3, "cut"), scheme="plain")
    (spans, short) = task.predict(loaded.network, tokenizer, ["cat " * 50, "cat"])
    assert len(spans) == 10 and len(short) == 1
    assert "40 tokens beyond the window were cut off" in caplog.text
