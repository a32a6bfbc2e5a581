"""Model.classify, regress, tag, answer, choose; adapters and feature-based heads; long texts are read whole."""

import pytest
import tiny_model

import everybert
from everybert.errors import EverybertError

ROWS = [("the film was good", "pos"), ("the food was bad", "neg"), ("a great song", "pos"), ("an awful day", "neg")] * 5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Two adapters on one trunk, with labels of their own, and a feature-based head."""
    out = tmp_path_factory.mktemp("tuned")
    settings = {"epochs": 1, "batch_size": 8, "lr": 1e-2, "quiet": True, "device": "cpu"}
    other = [(text, {"pos": "joy", "neg": "anger"}[label]) for text, label in ROWS]
    everybert.finetune(base, "classify", ROWS, ROWS, out / "first", mode="lora", **settings)
    everybert.finetune(base, "classify", other, other, out / "second", mode="lora", **settings)
    everybert.finetune(base, "classify", ROWS, ROWS, out / "frozen", mode="frozen", features="sum", **settings)
    return out


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """A folder with one head of each kind."""
    parent = tmp_path_factory.mktemp("every")
    tags = ["O", "B-PER", "I-PER"]
    return {
        "classify": tiny_model.save(parent / "c", {"classify": 3}, ["a", "b", "c"]),
        "regress": tiny_model.save(parent / "r", {"classify": 1}, problem_type="regression"),
        "tag": tiny_model.save(parent / "t", {"tag": 3}, tags, seed=1),
        "answer": tiny_model.save(parent / "q", {"answer": None}),
        "choose": tiny_model.save(parent / "m", {"choose": None}),
    }


def test_classify_gives_probabilities_of_every_label_for_texts_and_pairs(every):
    model = everybert.load(every["classify"])
    found = model.classify(["the film was good", ("john lives in paris", "mary works")])
    assert [set(p.scores) for p in found] == [{"a", "b", "c"}] * 2
    for p in found:
        assert sum(p.scores.values()) == pytest.approx(1)
        assert p.score == max(p.scores.values()) == p.scores[p.label]
    assert [p.label for p in model.classify("the film was good")] == [found[0].label]
    assert model.classify([]) == []


def test_a_prediction_does_not_depend_on_its_neighbours(every):
    model = everybert.load(every["classify"])
    texts = ["the film was good", "a", "john smith lives in paris and works in london " * 12]
    together = model.classify(texts)
    for text, p in zip(texts, together):
        alone = model.classify([text])[0]
        assert alone.scores == pytest.approx(p.scores, abs=1e-6)


def test_long_texts_are_read_to_their_end(every):
    model = everybert.load(every["classify"])
    long = "the film was good and " * 100
    assert model.classify([long])[0].scores != pytest.approx(model.classify([long + "awful bad poor " * 20])[0].scores)


def test_a_book_is_read_whole_in_flat_memory(every, tmp_path):
    """20,000 words: what stands at their end is found there, and no batch grows with the text."""
    import resource

    book = "the dog eats the food and he sees it . " * 2000
    end = len(book)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answerer = everybert.load(every["answer"])
    found = answerer.answer("who?", book + "mary smith works in london .", top=20)
    assert all(book[a.start : a.end] == a.text or a.end > end for a in found)
    tagger = everybert.load(every["tag"])
    spans = tagger.tag(book + "John Smith")
    assert max((s.end for s in spans), default=0) > end * 0.9
    scores = [
        everybert.load(every["classify"]).classify(book + tail)[0].scores for tail in ("", "bad awful poor " * 500)
    ]
    assert scores[0] != pytest.approx(scores[1], abs=1e-7)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_regress_gives_numbers_and_refuses_to_classify(every):
    model = everybert.load(every["regress"])
    values = model.regress(["the film", ("the film", "the song")])
    assert all(isinstance(v, float) for v in values)
    with pytest.raises(EverybertError, match="predicts a number"):
        model.classify("the film")


def test_tag_spans_are_places_in_the_text(every):
    model = everybert.load(every["tag"])
    text = "John Smith lives in  Paris."
    spans = model.tag(text)
    assert all(text[s.start : s.end] == s.text and s.label == "PER" for s in spans)
    places = [[(s.start, s.end) for s in one] for one in model.tag([text, "the dog"])]
    assert places == [[(s.start, s.end) for s in one] for one in (spans, model.tag("the dog"))]
    words = model.tag([["John", "Smith", "lives"]])
    assert all("John Smith lives"[s.start : s.end] == s.text for s in words[0])


def test_answers_are_spans_of_the_context_best_first(every):
    model = everybert.load(every["answer"])
    context = "john lives in london. " * 30 + "mary works in paris."
    found = model.answer("where does mary work?", context, top=4)
    assert len(found) == 4 and [a.score for a in found] == sorted((a.score for a in found), reverse=True)
    assert all(context[a.start : a.end] == a.text for a in found)
    both = model.answer(["who?", "where?"], context)
    assert [len(one) for one in both] == [1, 1]
    with pytest.raises(EverybertError, match="2 questions but 1 contexts"):
        model.answer(["who?", "where?"], [context])


def test_choose_scores_every_ending(every):
    model = everybert.load(every["choose"])
    choice = model.choose("the dog", ["eats .", "is red .", "lives in paris ."])
    assert sum(choice.scores) == pytest.approx(1) and choice.scores[choice.index] == choice.score == max(choice.scores)
    assert choice.text == ["eats .", "is red .", "lives in paris ."][choice.index]


def test_a_task_the_model_lacks_says_what_to_do(every):
    with pytest.raises(EverybertError, match="everybert finetune tag"):
        everybert.load(every["classify"]).tag("john")


def test_wrong_input_is_named(every):
    with pytest.raises(EverybertError, match="text 2 is a int"):
        everybert.load(every["classify"]).classify(["fine", 3])


def test_adapters_share_a_trunk_and_switch(base, adapters):
    model = everybert.load(base)
    first, second = model.add_adapter(adapters / "first"), model.add_adapter(adapters / "second", "mood")
    text = "the film was good"
    a, b = model.classify(text, adapter=first)[0], model.classify(text, adapter=second)[0]
    assert set(a.scores) == {"pos", "neg"} and set(b.scores) == {"joy", "anger"}
    assert model.classify(text, adapter=first)[0] == a
    with pytest.raises(EverybertError, match="no classify head"):
        model.classify(text)  # the bare trunk again
    with pytest.raises(EverybertError, match="no adapter 'third'"):
        model.classify(text, adapter="third")


def test_an_adapters_folder_loads_as_a_model_and_merges(base, adapters, tmp_path):
    model = everybert.load(adapters / "first")
    before = model.classify("the food was bad")[0]
    with pytest.raises(EverybertError, match="merge"):
        model.save(tmp_path / "unmerged")
    model.merge()
    model.save(tmp_path / "merged")
    after = everybert.load(tmp_path / "merged").classify("the food was bad")[0]
    assert after.scores == pytest.approx(before.scores, abs=1e-5)
    trunk = everybert.load(base)
    assert (trunk.embed(["the food"]) != model.embed(["the food"])).any()


def test_feature_based_heads_survive_load_and_save(adapters, tmp_path):
    model = everybert.load(adapters / "frozen")
    before = model.classify("an awful day")[0]
    model.save(tmp_path / "again")
    assert everybert.load(tmp_path / "again").classify("an awful day")[0].scores == pytest.approx(before.scores)


def test_an_adapter_without_its_base_says_how_to_load_it(adapters, tmp_path):
    import json
    import shutil

    shutil.copytree(adapters / "first", tmp_path / "moved")
    (tmp_path / "moved" / "manifest.json").unlink()
    config = tmp_path / "moved" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "/nowhere/base"}))
    with pytest.raises(EverybertError, match=r"add_adapter\(folder\)"):
        everybert.load(tmp_path / "moved")
