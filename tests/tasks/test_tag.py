"""Tagging: words keep their labels whatever the pieces, windows own each word once, spans have exact places."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import tiny_bert as tiny
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.errors import EverybertError
from everybert.store.huggingface import load_network
from everybert.tasks import tag
from everybert.tasks.features import Reading, batch
from everybert.tasks.folder import task_of
from everybert.text.tokenizer import Tokenizer

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tiny.save(tmp_path_factory.mktemp("m"), "ForTokenClassification", labels=LABELS)
    return load_network(folder), Tokenizer.load(folder), folder


def task_for(bert, **changes):
    loaded = bert[0]
    return replace(task_of("tag", loaded.network, loaded.labels), **changes)


WORD = st.sampled_from([*tiny.WORDS[:30], "unseen", "john's", "x-y", "\u200b", "中文", "[MASK]", "Émile", "a" * 120])


@settings(max_examples=60, deadline=None)
@given(sentences=st.lists(st.lists(WORD, max_size=40), min_size=1, max_size=4), size=st.sampled_from([12, 24, 64]))
def test_every_word_is_owned_once_by_its_first_piece(bert, sentences, size):
    loaded, tokenizer, _ = bert
    features = tag.word_features(tokenizer, loaded.config, sentences, Reading(size, size // 4))
    for words, places in zip(sentences, features.back):
        owned = np.concatenate([p.word for p in places])
        assert owned.tolist() == list(range(len(words)))
        for place in places:
            start, stop = features.starts_S1[place.sequence : place.sequence + 2]
            tokens = [tokenizer.token(int(i)) for i in features.tokens_N[start:stop]]
            for at, word in zip(place.at, place.word):
                assert 0 < at < len(tokens) - 1
                assert not tokens[at].startswith("##"), (tokens[at], words[word])
    assert features.lengths_S.max() <= size


def test_pieces_are_those_of_transformers_on_split_words(bert):
    loaded, tokenizer, _ = bert
    words = ["unseen", "john", "'s", "x-y", "likes", "food", "."]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend, cls_token="[CLS]", sep_token="[SEP]"
    )(words, is_split_into_words=True)
    features = tag.word_features(tokenizer, loaded.config, [words], Reading(64, 16))
    assert features.tokens_N.tolist() == theirs["input_ids"]
    first = [theirs.word_ids().index(i) for i in range(len(words))]
    assert features.back[0][0].at.tolist() == first


def test_raw_text_and_its_words_are_tagged_alike(bert):
    """What is trained is what is predicted: a text that falls into the training words gets the same tags."""
    loaded, tokenizer, _ = bert
    sentences = [["john", "does", "n't", "like", "x-y", "food", "."], ["mary", "'s", "cat", "eats", ",", "x-y", "!"]]
    task = task_for(bert, splitter=tag.learn_splitter(sentences))
    texts = ["john doesn't like x-y food.", "mary's cat eats, x-y!"]
    raw = list(tag.predict_tags(loaded.network, tokenizer, task, texts))
    split = list(tag.predict_tags(loaded.network, tokenizer, task, sentences))
    for (_, words, tags, sure), (_, _, tags_of_words, sure_of_words), sentence in zip(raw, split, sentences):
        assert [w.text for w in words] == sentence
        assert tags == tags_of_words and sure.tolist() == pytest.approx(sure_of_words.tolist())


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="ab jo.,'’-\n\t中é", max_size=60), decode=st.sampled_from(["greedy", "constrained"]))
def test_spans_are_in_the_text(bert, text, decode):
    loaded, tokenizer, _ = bert
    (spans,) = tag.predict(loaded.network, tokenizer, task_for(bert, decode=decode), [text])
    for span in spans:
        assert span.text == text[span.start : span.end] and span.label in ("PER", "LOC") and 0 <= span.score <= 1
    assert all(a.end <= b.start for a, b in pairwise(spans))


def test_long_texts_agree_with_short_ones_where_both_apply(bert):
    """A text as long as the window is one sequence; the same words in windows keep their count and order."""
    loaded, tokenizer, _ = bert
    words = [tiny.WORDS[i % 30] for i in range(20_000)]
    task = task_for(bert)
    ((_, found, tags, _),) = tag.predict_tags(loaded.network, tokenizer, task, [words])
    assert len(tags) == len(found) == 20_000
    assert all(t.startswith(("O", "B-", "I-")) for t in tags)


def test_constrained_tags_are_well_formed(bert):
    from everybert.tasks import schemes

    loaded, tokenizer, _ = bert
    words = [tiny.WORDS[i % 37] for i in range(500)]
    ((_, _, tags, _),) = tag.predict_tags(loaded.network, tokenizer, task_for(bert), [words])
    assert schemes.convert(tags, "BIO") == tags
    ((_, _, greedy, _),) = tag.predict_tags(loaded.network, tokenizer, task_for(bert, decode="greedy"), [words])
    assert schemes.convert(greedy, "BIO") != greedy  # a random model breaks the rules


def test_loss_is_that_of_transformers(bert):
    loaded, tokenizer, folder = bert
    examples = tag.read([(["john", "unseen", "paris"], ["B-PER", "I-PER", "B-LOC"])])
    task = task_for(bert)
    features = task.features(tokenizer, loaded.config, examples)
    model = transformers.BertForTokenClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor(features.tokens_N[None].astype(np.int64)),
            labels=torch.tensor(features.labels["tag_T"][None]),
        ).loss
        for fill in (None, 32):
            assert float(task.loss(loaded.network, batch(features, np.array([0]), fill=fill))) == pytest.approx(
                float(expected), abs=1e-5
            )


def test_all_pieces_may_learn(bert):
    loaded, tokenizer, _ = bert
    examples = tag.read([(["john", "unseen"], ["O", "B-PER"])])
    first, every = (
        task_for(bert, pieces=p).features(tokenizer, loaded.config, examples).labels["tag_T"] for p in ("first", "all")
    )
    pieces = len(tokenizer.ids_batch(["unseen"], specials=False)[0])
    assert first.tolist() == [-100, 0, 1, *[-100] * pieces]
    assert every.tolist() == [-100, 0, 1, *[2] * (pieces - 1), -100]


def test_conll_2003s_own_file(tmp_path):
    path = tmp_path / "eng.train"
    path.write_text(
        "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\nGerman JJ I-NP I-MISC\nBritish JJ I-NP B-MISC\n"
    )
    examples = tag.read(path)
    assert examples.inputs == [["EU", "rejects", "German", "British"]]
    assert examples.targets == [["B-ORG", "O", "B-MISC", "B-MISC"]]
    assert any("from IOB1 to BIO" in n for n in examples.notes)
    assert tag.read(path, scheme="BIOES").targets == [["S-ORG", "O", "S-MISC", "S-MISC"]]


def test_marked_places_become_tags():
    spans = [{"start": 15, "end": 19, "label": "ORG"}, {"start": 0, "end": 10, "label": "PER"}]
    rows = [
        {"text": "John Smith, of Acme.", "spans": spans},
        {"text": "in Paris", "spans": [[4, 8, "LOC"]]},
        {"text": "nobody", "spans": []},
    ]
    examples = tag.read(rows)
    assert examples.inputs == [["John", "Smith", ",", "of", "Acme", "."], ["in", "Paris"], ["nobody"]]
    assert examples.targets == [["B-PER", "I-PER", "O", "O", "B-ORG", "O"], ["O", "B-LOC"], ["O"]]
    for spans, message in [
        ([[0, 4, "A"], [2, 6, "B"]], "overlaps"),
        ([[0, 99, "A"]], "lies outside the text of 8"),
        ([[5, 5, "A"]], "lies outside"),
        ([[2, 3, "A"]], "holds no word"),
    ]:
        with pytest.raises(EverybertError, match=f"row 1: .*{message}"):
            tag.read([{"text": "in Paris", "spans": spans}])
        assert len(tag.read([{"text": "in Paris", "spans": spans}, rows[1]], skip_bad=True).bad) == 1


def test_a_dev_set_without_entities(bert):
    assert tag.read([(["a", "b"], ["O", "O"])], scheme="BIO").targets == [["O", "O"]]


def test_conllu_columns(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_text("# text = It is\n1\tIt\tit\tPRON\tPRP\t_\t0\troot\t_\t_\n2\tis\tbe\tAUX\tVBZ\t_\t1\tx\t_\t_\n\n")
    assert tag.read(path).targets == [["PRON", "AUX"]]
    assert tag.read(path, {"label": "xpos"}).targets == [["PRP", "VBZ"]]
    with pytest.raises(EverybertError, match="no B-, I-"):
        tag.read(path, scheme="BIO")


def test_scores_and_labels_of_parts_of_speech(bert):
    loaded, tokenizer, folder = bert
    rows = [(["john", "eats", "."], ["NOUN", "VERB", "PUNCT"]), (["mary", "is"], ["NOUN", "AUX"])]
    examples = tag.read(rows)
    task = tag.begin(examples, loaded.config)
    assert (task.scheme, task.labels, task.metric) == ("plain", ("AUX", "NOUN", "PUNCT", "VERB"), "accuracy")
    network = load_network(folder, heads={"tag": 4}).network
    features = task.features(tokenizer, loaded.config, examples)
    scores = task.evaluate(network, features, examples)
    guessed = [tags for _, _, tags, _ in tag.predict_tags(network, tokenizer, task, [words for words, _ in rows])]
    right = sum(a == b for (_, gold), tags in zip(rows, guessed) for a, b in zip(gold, tags))
    assert scores["accuracy"] == pytest.approx(right / 5)
    (spans, _) = tag.predict(network, tokenizer, task, ["john eats.", ""])
    assert [s.text for s in spans] == ["john", "eats", "."]


def test_settings_survive_json(bert):
    loaded = bert[0]
    examples = tag.read([(["john", "'s"], ["B-PER", "O"]), (["x-y", "."], ["O", "O"])])
    task = tag.begin(examples, loaded.config, decode="greedy")
    again = tag.of(task.state(), loaded.config)
    assert (again.labels, again.scheme, again.decode, again.splitter) == (
        task.labels,
        task.scheme,
        task.decode,
        task.splitter,
    )
