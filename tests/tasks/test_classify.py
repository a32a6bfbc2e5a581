"""Classification and regression: losses are `transformers`', predictions are trained ones, long texts are whole."""

import numpy as np
import pytest
import tiny_bert as tiny
import torch
import transformers
from refusals import refuses

from everybert.store.huggingface import load_network
from everybert.tasks import Classify, Regress, load_task
from everybert.tasks.features import Encoded, make_batch, make_features
from everybert.text.tokenizer import Tokenizer
from everybert.text.windows import WindowConfig, windows

HEAD = ("ForSequenceClassification", 0, ["a", "b", "c"])


def task_for(bert, **options):
    loaded = bert[0]
    return load_task("classify", loaded.network, loaded.labels, loaded.problem_type, options)


def test_predictions_are_those_of_transformers(bert):
    loaded, tokenizer, folder = bert
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    texts = ["the cat is good", ("the dog", "is bad , they eat"), "film"]
    found = list(task_for(bert).predict(loaded.network, tokenizer, texts))
    for text, prediction in zip(texts, found):
        encoding = tokenizer.encode(text) if isinstance(text, str) else tokenizer.encode(*text)
        ids, segments = (torch.tensor([x]) for x in (encoding.ids, encoding.segments))
        with torch.no_grad():
            p = model(input_ids=ids, token_type_ids=segments).logits.softmax(-1)[0]
        assert list(prediction.scores.values()) == pytest.approx(p.tolist(), abs=1e-5)
        assert prediction.label == "abc"[int(p.argmax())] and prediction.score == pytest.approx(
            float(p.max()), abs=1e-5
        )


def test_a_long_text_is_the_mean_of_its_windows(bert):
    loaded, tokenizer, _ = bert
    task = task_for(bert)
    text = " ".join(np.random.default_rng(0).choice(tiny.WORDS[:40], 150))
    (prediction,) = task.predict(loaded.network, tokenizer, [text])
    parts = tokenizer.ids_batch([text], specials=False)[0]
    logits, weights = [], []
    for w in windows(len(parts), task.window.size - 2, task.window.overlap):
        ids = tokenizer.build(parts[w.start : w.stop])[0]
        one = make_features([[Encoded(ids)]], loaded.config, task.window.size, [0])
        logits.append(task.example_logits(loaded.network, one)[0])
        weights.append(w.own_stop - w.own_start)
    expected = task.probabilities(np.average(logits, axis=0, weights=weights)[None])[0]
    assert list(prediction.scores.values()) == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(weights) > 2


def test_cut_is_reported(bert):
    loaded, tokenizer, _ = bert
    task = Classify(labels=("a", "b", "c"), window=WindowConfig(32, 8, "cut"))
    found = list(task.predict(loaded.network, tokenizer, ["good " * 100, "bad"]))
    assert [p.cut for p in found] == [70, 0]


def test_weighted_losses_add_up_over_parts(bert):
    """Gradient accumulation: shares of parts times their means is the mean of the whole, weights included."""
    loaded, tokenizer, _ = bert
    rows = [("good cat", "a"), ("bad dog is", "b"), ("a film", "b"), ("the night", "c"), ("poor", "a")]
    task = Classify.from_examples(Classify.read(rows), loaded.config, class_weights=[1.0, 5.0, 0.5])
    features = task.features(tokenizer, loaded.config, Classify.read(rows))
    whole = np.arange(5)
    with torch.no_grad():
        expected = task.loss(loaded.network, make_batch(features, whole))
        total = task.share(features, whole)
        parts = [
            task.loss(loaded.network, make_batch(features, part)) * task.share(features, part) / total
            for part in np.array_split(whole, 2)
        ]
    assert float(sum(parts)) == pytest.approx(float(expected), abs=1e-6)


def test_multi_label_loss_and_prediction(bert):
    loaded, tokenizer, _ = bert
    examples = Classify.read([{"text": "good cat", "labels": ["a", "b"]}, {"text": "bad", "labels": ["c"]}])
    task = Classify.from_examples(examples, loaded.config)
    features = task.features(tokenizer, loaded.config, examples)
    logits = torch.tensor(task.example_logits(loaded.network, features))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(task.gold(examples)).double())
    with torch.no_grad():
        loss = task.loss(loaded.network, make_batch(features, np.arange(2)))
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    (found,) = task.predict(loaded.network, tokenizer, ["good cat"])
    assert found.labels == tuple(n for n, p in found.scores.items() if p >= 0.5)
    assert set(task.score(loaded.network, features, examples)) == {"accuracy", "f1", "f1_macro", "f1_micro"}


def test_temperature_keeps_the_labels_and_lowers_the_error(bert):
    loaded, tokenizer, _ = bert
    draw = np.random.default_rng(0)
    rows = [(" ".join(draw.choice(tiny.WORDS[:40], 5)), str(draw.choice(["a", "b", "c"]))) for _ in range(60)]
    task = Classify.from_examples(Classify.read(rows), loaded.config, calibrate=True)
    features = task.features(tokenizer, loaded.config, Classify.read(rows))
    tuned = task.tuned(loaded.network, features, Classify.read(rows))
    before, after = (t.score(loaded.network, features, Classify.read(rows)) for t in (task, tuned))
    assert tuned.temperature != 1.0 and before["accuracy"] == after["accuracy"]
    assert after["ece"] <= before["ece"] + 0.02
    assert Classify.from_state(tuned.state(), loaded.config).temperature == tuned.temperature


def test_regression_folds_its_scale_into_the_head(bert):
    _, tokenizer, folder = bert
    network = load_network(folder, heads={"classify": 1}).network
    rows = [("good cat", 900.0), ("bad dog", 1100.0), ("film", 1300.0)]
    examples = Regress.read(rows)
    task = Regress.from_examples(examples, network.config)
    assert (task.shift, task.scale) == (pytest.approx(1100), pytest.approx(np.std([900, 1100, 1300])))
    texts = [text for text, _ in rows]
    before = list(task.predict(network, tokenizer, texts))
    folded = task.finish(network)
    assert (folded.scale, folded.shift) == (1.0, 0.0)
    assert list(folded.predict(network, tokenizer, texts)) == pytest.approx(before, rel=1e-5)


def test_one_output_is_one_labels_probability(tmp_path):
    """As in the pipeline of transformers."""
    folder = tiny.save(tmp_path, "ForSequenceClassification", labels=["toxic"])
    loaded, tokenizer = load_network(folder), Tokenizer.load(folder)
    texts = ["the cat is good", "bad dog"]
    model = transformers.BertForSequenceClassification.from_pretrained(folder)
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer_of(tokenizer))(texts)
    ours = load_task("classify", loaded.network, loaded.labels).predict(loaded.network, tokenizer, texts)
    for mine, other in zip(ours, theirs):
        assert (mine.label, mine.score) == (other["label"], pytest.approx(other["score"], abs=1e-5))
        assert mine.labels == (("toxic",) if mine.score >= 0.5 else ())


def tokenizer_of(tokenizer):
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, **names)


def test_a_model_that_does_something_else_says_what_to_do(bert):
    loaded = bert[0]
    refuses(r"no tag head \(it has: classify\); train one: everybert", load_task, "tag", loaded.network)
    for name in ("classify", "regress"):  # neither sends the user to the other
        refuses("predicts 3 numbers per text, regress one", load_task, name, loaded.network, problem_type="regression")
    refuses("predicts labels; use classify", load_task, "regress", loaded.network)  # three outputs
    refuses("there is no 'translate'", load_task, "translate", loaded.network)


@pytest.mark.parametrize(
    "task, state",
    [
        ("classify", "good"),
        *(("classify", {"labels": labels}) for labels in ("abc", ["a", "b"], ["a", "b", 3], ["a", "b", "b"], None, 3)),
        *(("classify", {"temperature": t}) for t in (float("nan"), float("inf"), 0, -1, "1", None, True, [])),
        *(("classify", {"threshold": t}) for t in (float("nan"), "0.5")),
        *(("classify", {"multi": multi}) for multi in ("false", 1, None)),
        *(("classify", {"window": w}) for w in (5, {"size": "a"}, {"length": 3}, {"size": 64, "overlap": -1}, [1])),
        *(("embed", {"pooling": pooling}) for pooling in ("best", 3, ["mean"])),
    ],
)
def test_hostile_settings_are_refused(bert, task, state):
    loaded = bert[0]
    state = {"task": task, **state} if isinstance(state, dict) else state
    refuses(r"settings|window|overlap", load_task, task, loaded.network, loaded.labels, extras={"task": state})
