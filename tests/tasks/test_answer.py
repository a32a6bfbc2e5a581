"""Question answering: training positions, windows of any number, and the best span of all."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_bert as tiny
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.model.ragged import Ragged
from everybert.tasks import AnswerQuestions, answer, load_task
from everybert.tasks.answer import Passage, best_over, best_spans, log_partition, normalise, thresholds
from everybert.tasks.features import make_batch
from everybert.text.windows import WindowConfig, windows

HEAD = ("ForQuestionAnswering",)


def context_of(draw, size):
    return " ".join(draw.choice(tiny.WORDS[:40], size))


@settings(deadline=None)  # torch.testing is imported on the first call
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_softmax_of_each_sequence_does_not_overflow(lengths):
    torch.manual_seed(1)
    batch = Ragged.of([[0] * n for n in lengths])
    logits = torch.randn(sum(lengths)) * 50  # far beyond what exp of fp32 holds without the shift
    for mine, part in zip(log_partition(logits, batch), batch.split(logits)):
        torch.testing.assert_close(mine, part.logsumexp(0))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(20, 64))
def test_training_positions_are_the_answers_tokens(bert, seed, size):
    loaded, tokenizer, _ = bert
    draw = np.random.default_rng(seed)
    context = context_of(draw, 80)
    words = context.split()
    first = int(draw.integers(0, 77))
    text = " ".join(words[first : first + int(draw.integers(1, 4))])
    start = len(" ".join(words[:first])) + (first > 0)
    examples = AnswerQuestions.read([("who is it ?", context, {"text": [text], "answer_start": [start]})])
    task = AnswerQuestions(window=WindowConfig(size, size // 4))
    features = task.features(tokenizer, loaded.config, examples)
    wanted = tokenizer.ids_batch([text], specials=False)[0]
    hits = 0
    for i, (a, b) in enumerate(zip(features.targets["start_B"], features.targets["end_B"])):
        ids = features.ids[i].tolist()
        assert len(ids) <= size
        if a or b:
            assert ids[a : b + 1] == wanted
            hits += 1
    assert hits >= 1  # in the middle of an overlap, in two windows


def test_half_a_word_and_unicode(bert):
    """Answers that cut words take the pieces they touch, as the official scripts do."""
    loaded, tokenizer, _ = bert
    context = "the unseen café in paris"
    examples = AnswerQuestions.read([("what ?", context, {"text": ["afé in"], "answer_start": [12]})])
    features = AnswerQuestions(window=WindowConfig(64, 16)).features(tokenizer, loaded.config, examples)
    start, end = features.targets["start_B"][0], features.targets["end_B"][0]
    tokens = [tokenizer.token(int(i)) for i in features.ids[0][start : end + 1]]
    assert tokens == ["##a", "##f", "##e", "in"]


def brute(passage, logits, longest, best):
    found, words = [], passage.words
    for sequence, lead, w in passage.places:
        for i in range(w.own_start, w.own_stop):
            for j in range(i, min(i + longest, w.stop)):
                if (i and words[i - 1] == words[i]) or (j + 1 < len(words) and words[j + 1] == words[j]):
                    continue  # a word would be cut
                score = logits[sequence][lead + i - w.start, 0] + logits[sequence][lead + j - w.start, 1]
                found.append((score, passage.offsets[i, 0], passage.offsets[j, 1]))
    return sorted(found, reverse=True)[:best]


@settings(max_examples=50, deadline=None)
@given(n=st.integers(0, 40), size=st.integers(2, 16), longest=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_the_best_spans_are_those_of_a_search_through_all(n, size, longest, seed):
    draw = np.random.default_rng(seed)
    lead = 3
    places = [(i, lead, w) for i, w in enumerate(windows(n, size, size // 2))]
    logits = [draw.normal(size=(lead + w.stop - w.start + 1, 2)).astype(np.float32) for *_, w in places]
    offsets = np.stack((np.arange(n) * 5, np.arange(n) * 5 + 4), axis=1)
    passage = Passage(offsets, np.cumsum(draw.random(n) < 0.6), places)
    found = best_spans(passage, logits, longest, 8)
    expected = brute(passage, logits, longest, 8)
    assert found.scores.tolist() == pytest.approx([e[0] for e in expected])
    assert [tuple(s) for s in found.spans] == [(e[1], e[2]) for e in expected]
    assert found.null == pytest.approx(min(float(x[0].sum()) for x in logits))


def test_one_window_is_as_transformers_scores_it(bert):
    loaded, tokenizer, folder = bert
    draw = np.random.default_rng(0)
    question, context = "where does john live ?", context_of(draw, 30)
    model = transformers.BertForQuestionAnswering.from_pretrained(folder).eval()
    encoding = tokenizer.encode(question, context)
    with torch.no_grad():
        out = model(input_ids=torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.segments]))
    start, end = out.start_logits[0].numpy(), out.end_logits[0].numpy()
    inside = [i for i, s in enumerate(encoding.sequence) if s == 1]
    words = encoding.words
    firsts = [i for i in inside if words[i - 1] != words[i]]
    lasts = [j for j in inside if words[j + 1] != words[j]]
    pairs = [(start[i] + end[j], i, j) for i in firsts for j in lasts if i <= j < i + 30]
    _, i, j = max(pairs)
    ((best,),) = load_task("answer", loaded.network).predict(loaded.network, tokenizer, [(question, context)])
    assert (best.start, best.end) == (encoding.offsets[i][0], encoding.offsets[j][1])
    assert best.text == context[best.start : best.end]
    top = np.sort([p[0] for p in pairs])[::-1][:20]
    assert best.score == pytest.approx(float(1 / np.exp(top - top[0]).sum()), abs=1e-4)


def test_contexts_of_any_length(bert):
    loaded, tokenizer, _ = bert
    draw = np.random.default_rng(1)
    context = context_of(draw, 20_000)
    task = load_task("answer", loaded.network)
    (found,) = task.predict(loaded.network, tokenizer, [("where ?", context)], top=40)
    assert len(found) == 40 and all(a.text == context[a.start : a.end] for a in found)
    assert max(a.start for a in found) > 10_000
    assert sum(a.score for a in found) == pytest.approx(1)
    assert list(task.predict(loaded.network, tokenizer, [("where ?", "")])) == [[answer.Answer("", 0, 0, 1.0)]]


def test_no_answer_stands_where_the_threshold_puts_it(monkeypatch):
    found = answer.Candidates(np.array([[0, 4], [5, 9]]), np.array([3.0, 1.0]), null=2.0)
    monkeypatch.setattr(answer, "best_spans", lambda *_: found)
    asked = ([], SimpleNamespace(origins=[None], cut=[0]), [("who ?", "john mary")])
    for threshold, first in [(-2.0, ""), (-0.5, "john")]:
        task = AnswerQuestions(window=WindowConfig(64, 16), no_answer=True, threshold=threshold)
        (answers,) = task.decode(*asked, top=3)
        assert answers[0].text == first
        assert {a.text for a in answers} == {"john", "mary", ""}
        assert sum(a.score for a in answers) == pytest.approx(1)
    (answers,) = AnswerQuestions(window=WindowConfig(64, 16)).decode(*asked, top=3)
    assert [a.text for a in answers] == ["john", "mary"]


def test_long_questions_leave_room_and_say_so(bert):
    loaded, tokenizer, _ = bert
    task = AnswerQuestions(window=WindowConfig(64, 16))
    features = task.encode(tokenizer, loaded.config, [("who " * 100, "john is in paris"), ("who ?", "john")])
    assert features.cut == [100 - 30, 0] and features.lengths_S.max() <= 64
    found = list(task.predict(loaded.network, tokenizer, [("who " * 100, "john is in paris"), ("who ?", "john")]))
    assert [answers[0].cut for answers in found] == [70, 0]


def test_loss_and_scores(bert):
    loaded, tokenizer, folder = bert
    rows = [
        ("where ?", "john is in paris and it is fine", {"text": ["paris"], "answer_start": [11]}),
        ("who ?", "mary sees the cat in london today and", {"text": [], "answer_start": []}),
    ]
    examples = AnswerQuestions.read(rows)
    task = AnswerQuestions.from_examples(examples, loaded.config)
    assert task.no_answer and task.metric == "best_f1"
    features = task.features(tokenizer, loaded.config, examples)
    model = transformers.BertForQuestionAnswering.from_pretrained(folder).eval()
    with torch.no_grad():
        losses = []
        for i in range(2):
            losses.append(
                model(
                    input_ids=torch.tensor([features.ids[i].tolist()]),
                    token_type_ids=torch.tensor([features.segments[i].tolist()]),
                    start_positions=torch.tensor(features.targets["start_B"][[i]]),
                    end_positions=torch.tensor(features.targets["end_B"][[i]]),
                ).loss
            )
        for fill in (None, 64):
            ours = task.loss(loaded.network, make_batch(features, np.array([0, 1]), fill=fill))
            assert float(ours) == pytest.approx(float(sum(losses)) / 2, abs=1e-5)
    tuned = task.tuned(loaded.network, features, examples)
    scores = tuned.score(loaded.network, features, examples)
    assert scores["f1"] == pytest.approx(scores["best_f1"])
    again = AnswerQuestions.from_state(tuned.state(), loaded.config)
    assert (again.threshold, again.no_answer) == (tuned.threshold, True)


# ── SQuAD's scores, by hand ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text, normal",
    [
        ("The Eiffel Tower.", "eiffel tower"),
        ("an  apple,\ta day", "apple day"),
        ("theatre and anagram", "theatre and anagram"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("a-b", "ab"),  # punctuation goes before articles do, so "a" is no word here
        ("the", ""),
        ("“Café”…", "“café”…"),  # only ASCII punctuation is removed
        ("Ａ Ⅷ", "ａ ⅷ"),
        ("25%", "25"),
    ],
)
def test_normalise(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    "guess, golds, version_1, version_2",
    [
        ("the Paris", ["Paris"], (1, 1), (1, 1)),
        ("in Paris France", ["Paris", "Paris, France"], (0, 0.8), (0, 0.8)),
        ("Paris Paris", ["Paris"], (0, 2 / 3), (0, 2 / 3)),
        ("London", ["Paris"], (0, 0), (0, 0)),
        ("", ["Paris"], (0, 0), (0, 0)),
        ("", [], (0, 0), (1, 1)),
        ("Paris", [], (0, 0), (0, 0)),
        ("the", ["a"], (1, 0), (1, 1)),  # 1.1 finds no common word; 2.0 reads both as no answer
    ],
)
def test_scores_by_hand(guess, golds, version_1, version_2):
    assert best_over(guess, golds) == pytest.approx(version_1)
    assert best_over(guess, golds, no_answer=True) == pytest.approx(version_2)


GUESSES = st.sampled_from(["", "john", "in paris", "paris"])
GOLDS = st.sampled_from([[], ["paris"], ["john", "mary"]])


@given(st.lists(st.tuples(st.integers(-5, 5), GUESSES, GOLDS), min_size=1, max_size=30))
def test_the_threshold_is_the_best_of_all(rows):
    gaps, guesses, golds = map(list, zip(*rows))
    gaps = [gap + i / 100 for i, gap in enumerate(gaps)]  # no ties: the sweep's order is then unique

    def total(threshold, which):
        given = ["" if gap > threshold else guess for gap, guess in zip(gaps, guesses)]
        return np.mean([best_over(guess, gold, True)[which] for guess, gold in zip(given, golds)])

    for which, (value, score) in enumerate(thresholds(gaps, guesses, golds)):
        assert score == pytest.approx(max(total(t, which) for t in [min(gaps) - 1, *gaps]))
        assert score == pytest.approx(total(value, which))


def test_the_official_sweep_by_hand():
    # Sorted by gap: −2 (right), 0 (unanswerable, but answered), 3 (half right). Never answering: 1 of 3.
    found = thresholds([3.0, -2.0, 0.0], ["a b paris x y", "john", "mary"], [["paris"], ["john"], []])
    assert found == [(-2.0, pytest.approx(2 / 3)), (-2.0, pytest.approx(2 / 3))]
