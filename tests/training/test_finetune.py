"""Fine-tuning: every task and mode learns a toy problem, and what is saved is what was scored."""

import gc
import json
import math
import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_bert as tiny
import torch
import transformers
from sentiment import FAST, parts, sentiment

import everybert
from everybert.errors import EverybertError
from everybert.model.heads import Network
from everybert.model.lora import AdapterSet
from everybert.store.adapters import load_adapter, read_adapter
from everybert.store.sentence_transformers import Pooling, write_pooling
from everybert.tasks import Classify, load_task
from everybert.tasks.dataset import Examples
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import choose_settings, finetune
from everybert.training.tuning import PAIRS as OF_A_TEXT
from everybert.training.tuning import FullMode, label_pairs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("base"), hidden_dropout_prob=0.1)


# ── modes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "mode, more, at_least",
    [  # on a random encoder, the less that moves the less is learnt
        ("full", {}, 0.9),
        ("lora", {"lr": 1e-2}, 0.9),
        ("top:1", {}, 0.7),
        ("frozen", {"lr": 0.03, "epochs": 20}, 0.7),
        ("frozen", {"lr": 0.03, "epochs": 20, "features": "concat", "pool": "cls"}, 0.7),
        ("frozen", {"lr": 0.03, "epochs": 20, "features": "weighted"}, 0.7),
        ("frozen", {"lr": 0.03, "epochs": 20, "features": "embeddings"}, 0.7),
        ("frozen", {"lr": 0.03, "epochs": 20, "features": "second-to-last"}, 0.7),
    ],
)
def test_each_mode_learns_and_saves_what_it_scored(base, tmp_path, mode, more, at_least):
    dev = sentiment(1)
    out = tmp_path / "out"
    tuned = finetune(base, "classify", sentiment(0), dev, out, mode=mode, **(FAST | more))
    assert tuned.metric.mean > at_least
    texts, gold = zip(*dev)
    if mode == "lora":
        loaded, tokenizer = parts(base)
        adapters = AdapterSet(loaded.network)
        file = read_adapter(out)
        load_adapter(adapters, "sentiment", file)
        adapters.use("sentiment")
        network, task = loaded.network, load_task("classify", loaded.network, extras=file.extras)
    else:
        loaded, tokenizer = parts(out)
        network, task = loaded.network, load_task("classify", loaded.network, loaded.labels, None, loaded.extras)
    assert task.labels == ("no", "yes")
    found = [p.label for p in task.predict(network, tokenizer, texts)]
    assert np.mean([a == b for a, b in zip(found, gold)]) == pytest.approx(tuned.scores["accuracy"].mean)
    written = json.loads((out / "finetune.json").read_text())
    assert written["scores"]["accuracy"]["runs"] == 1 and written["settings"]["mode"] == mode


def test_a_full_folder_loads_in_transformers(base, tmp_path):
    tuned = finetune(base, "classify", sentiment(0), sentiment(1), tmp_path / "out", **FAST)
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert model.config.problem_type == "single_label_classification"
    tokenizer = Tokenizer.load(tmp_path / "out")
    ids = tokenizer.encode("the good cat").ids
    (ours,) = tuned.task.predict(tuned.runs[0].network, tokenizer, ["the good cat"])
    with torch.no_grad():
        p = model(input_ids=torch.tensor([ids])).logits.softmax(-1)[0]
    assert list(ours.scores.values()) == pytest.approx(p.tolist(), abs=1e-5)
    assert tuned.classify("the good cat")[0].scores == pytest.approx(ours.scores)  # as a Model


def test_an_adapter_is_small_and_leaves_the_encoder(base, tmp_path):
    finetune(base, "classify", sentiment(0, 32), sentiment(1, 16), tmp_path / "a", mode="lora", **FAST)
    files = {p.name for p in (tmp_path / "a").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "everybert.json"} <= files
    assert not {"model.safetensors", "config.json"} & files
    with pytest.raises(EverybertError, match="is an adapter"):
        finetune(tmp_path / "a", "classify", sentiment(0, 32), sentiment(1, 16), **FAST)


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_regress_in_the_units_of_the_data(base, tmp_path):
    draw = random.Random(0)
    numbers = {"one": 100.0, "two": 200.0, "three": 300.0, "four": 400.0}
    rows = [(f"{draw.choice(tiny.WORDS[20:30])} {w} film", numbers[w]) for w in draw.choices(list(numbers), k=120)]
    tuned = finetune(base, "regress", rows, rows[:40], tmp_path / "out", **(FAST | {"epochs": 8}))
    assert tuned.scores["spearman"].mean > 0.9
    loaded, tokenizer = parts(tmp_path / "out")
    assert loaded.problem_type == "regression"
    task = load_task("regress", loaded.network, None, loaded.problem_type, loaded.extras)
    found = list(task.predict(loaded.network, tokenizer, [t for t, _ in rows[:40]]))
    assert np.mean([abs(a - b) for a, (_, b) in zip(found, rows)]) == pytest.approx(tuned.scores["mae"].mean, rel=1e-4)
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([tokenizer.encode(rows[0][0]).ids])
    with torch.no_grad():
        assert float(model(input_ids=ids).logits) == pytest.approx(found[0], rel=1e-4)


def tagged(seed, size=80):
    draw = random.Random(seed)
    kind = {"john": "B-PER", "mary": "B-PER", "smith": "I-PER", "paris": "B-LOC", "london": "B-LOC"}
    rows = []
    for _ in range(size):
        words = [
            draw.choice(["john", "mary"]),
            "smith",
            draw.choice(["sees", "likes"]),
            draw.choice(["paris", "london"]),
            ".",
        ]
        rows.append((words, [kind.get(w, "O") for w in words]))
    return rows


@pytest.mark.parametrize(
    "mode, features", [("full", "last"), ("frozen", "last"), ("frozen", "sum"), ("frozen", "weighted")]
)
def test_tag_learns_and_finds_spans(base, tmp_path, mode, features):
    more = {"mode": mode, "features": features} | ({"lr": 0.03, "epochs": 8} if mode == "frozen" else {})
    tuned = finetune(base, "tag", tagged(0), tagged(1, 20), tmp_path / "out", **(FAST | more))
    assert tuned.metric.mean > 0.95
    loaded, tokenizer = parts(tmp_path / "out")
    task = load_task("tag", loaded.network, loaded.labels, None, loaded.extras)
    (spans,) = task.predict(loaded.network, tokenizer, ["John Smith sees Paris."])
    assert [(s.text, s.label, s.start) for s in spans] == [("John Smith", "PER", 0), ("Paris", "LOC", 16)]
    if features == "last":  # the family's own head after all
        model = transformers.BertForTokenClassification.from_pretrained(tmp_path / "out").eval()
        assert list(model.config.id2label.values()) == list(task.labels)


def test_answer_learns_with_and_without_answers(base, tmp_path):
    draw = random.Random(0)
    rows = []
    for i in range(160):
        place = draw.choice(["paris", "london"])
        words = draw.choices(tiny.WORDS[:14], k=12)
        if i % 4:
            words[draw.randrange(12)] = place
        context = " ".join(words)
        gold = {"text": [place], "answer_start": [context.find(place)]} if i % 4 else {"text": [], "answer_start": []}
        rows.append(("where ?", context, gold))
    tuned = finetune(base, "answer", rows, rows[:40], tmp_path / "out", **(FAST | {"epochs": 8}))
    assert tuned.scores["best_f1"].mean > 0.8 and tuned.task.no_answer
    loaded, tokenizer = parts(tmp_path / "out")
    task = load_task("answer", loaded.network, None, None, loaded.extras)
    assert (task.no_answer, task.threshold) == (True, tuned.task.threshold)
    found = [a[0].text for a in task.predict(loaded.network, tokenizer, [(q, c) for q, c, _ in rows[:40]])]
    right = np.mean([f == (g["text"] or [""])[0] for f, (*_, g) in zip(found, rows)])
    assert right == pytest.approx(tuned.scores["exact"].mean)


def test_choose_learns(base, tmp_path):
    draw = random.Random(0)
    rows = []
    for _ in range(100):
        label = draw.randrange(3)
        endings = [" ".join(draw.choices(tiny.WORDS[:12], k=3)) for _ in range(3)]
        endings[label] += " good"
        rows.append(("the film", endings, label))
    tuned = finetune(base, "choose", rows, rows[:30], tmp_path / "out", **FAST)
    assert tuned.metric.mean > 0.9
    loaded, tokenizer = parts(tmp_path / "out")
    task = load_task("choose", loaded.network, None, None, loaded.extras)
    (found,) = task.predict(loaded.network, tokenizer, [rows[0][:2]])
    assert found.index == rows[0][2]


def test_few_shot_trains_the_encoder_on_pairs_and_then_the_head_alone(base, tmp_path, monkeypatch):
    """On 24 rows the head of the tuned encoder beats that of the frozen one; both runs of a seed are the same."""
    monkeypatch.setattr(FullMode, "peak", lambda self, network: 3e-3)  # the encoder is random
    train, dev, how = sentiment(0, 24), sentiment(1), {**FAST, "lr": 0.03, "epochs": 20}
    frozen = finetune(base, "classify", train, dev, mode="frozen", **how)
    few = [finetune(base, "classify", train, dev, tmp_path / name, mode="fewshot", **how) for name in ("a", "b")]
    assert few[0].metric.mean > max(0.9, frozen.metric.mean)
    one, two = (parts(tmp_path / name)[0].network.state_dict() for name in ("a", "b"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(
        one["encoder.layers.0.feed_forward.input.weight"],
        parts(base)[0].network.encoder.layers[0].feed_forward.input.weight,
    )
    found = everybert.load(tmp_path / "a", device="cpu").classify([text for text, _ in dev])
    assert np.mean([p.label == label for p, (_, label) in zip(found, dev)]) == pytest.approx(few[0].metric.mean)
    assert "on pairs of texts" in (tmp_path / "a" / "README.md").read_text()
    for rows, task in (([("a", "b", "x"), ("c", "d", "y")] * 9, "classify"), ([("a", 1.0), ("b", 2.0)] * 9, "regress")):
        with pytest.raises(EverybertError, match="fewshot is for single texts with one label each"):
            finetune(base, task, rows, rows, mode="fewshot", **how)


def test_pairs_of_a_label_and_of_others_are_drawn_by_the_seed():
    examples = Examples(["a", "b", "c", "d"], ["x", "x", "y", "z"], "here")
    pairs = label_pairs(examples, 0)
    label = dict(zip(examples.inputs, examples.targets))
    assert all((label[a] == label[b]) == score and a != b for (a, b), score in zip(pairs.inputs, pairs.targets))
    assert [pairs.targets.count(score) for score in (1.0, 0.0)] == [2 * OF_A_TEXT, 4 * OF_A_TEXT]  # c and d are alone
    assert label_pairs(examples, 0) == pairs != label_pairs(examples, 1)


def test_what_training_does_not_read_of_long_texts_is_said(base):
    rows = [(text + " and so on" * 2000, label) for text, label in sentiment(0, 4)] + sentiment(1, 8)
    notes = finetune(base, "classify", rows, sentiment(2, 4), **{**FAST, "epochs": 1}).notes
    assert [n for n in notes if "4 texts have more than 16 windows" in n]


def test_training_goes_on_from_an_adapter(base, tmp_path):
    """The second run begins where the first ended, not at the bare encoder; other labels are refused."""
    dev, how = sentiment(1, 32), {**FAST, "mode": "lora", "lr": 1e-2}
    first = finetune(base, "classify", sentiment(0, 64), dev, tmp_path / "a", **how)
    again = {**how, "epochs": 1, "log_every": 1, "lr": 1e-9}
    on = finetune(base, "classify", sentiment(2, 32), dev, start=str(first.folder), **again)
    assert on.metric.mean == pytest.approx(first.metric.mean)
    new = finetune(base, "classify", sentiment(2, 32), dev, **again)
    assert on.history[0]["loss"] < 0.7 * new.history[0]["loss"]
    other = [("a good day", "a"), ("a bad day", "b"), ("a day", "c")] * 4
    for rows in (other, [row for row in other if row[1] != "c"]):  # more labels; as many, but others
        with pytest.raises(EverybertError, match="other labels"):
            finetune(base, "classify", rows, rows, start=str(first.folder), **again)
    with pytest.raises(EverybertError, match="use mode lora"):
        finetune(base, "classify", other, other, start=str(first.folder), **FAST)
    config = first.folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"bias"', '"use_dora": true, "bias"'))
    with pytest.raises(EverybertError, match="is a DoRA, which is not trained here"):
        finetune(base, "classify", sentiment(2, 32), dev, start=str(first.folder), **again)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_embed_learns_and_opens_in_sentence_transformers(base, tmp_path, mode):
    draw = random.Random(0)
    twins = [("good", "fine"), ("bad", "awful"), ("film", "song"), ("cat", "dog"), ("day", "night"), ("he", "they")]
    rows = [(f"{a} {draw.choice(['is', 'was'])}", f"{b} {draw.choice(['on', 'in'])}") for a, b in twins * 20]
    more = {"lr": 1e-2} if mode == "lora" else {}
    tuned = finetune(base, "embed", rows, rows[:6], tmp_path / "out", mode=mode, **(FAST | {"batch_size": 6} | more))
    assert tuned.metric.mean >= 0.5  # by chance one in six
    if mode == "lora":
        return
    from sentence_transformers import SentenceTransformer

    ours = tuned.embed(["good is", "fine on"])
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(["good is", "fine on"])
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_long_texts_learn_by_all_their_windows(base):
    draw = random.Random(0)
    rows = []
    for _ in range(60):
        label = draw.choice(["yes", "no"])
        words = draw.choices(tiny.WORDS[20:40], k=150)
        words[140] = {"yes": "good", "no": "bad"}[label]  # only the third window of 64 tokens has it
        words = [w if w not in ("good", "bad") or i == 140 else "day" for i, w in enumerate(words)]
        rows.append((" ".join(words), label))
    whole = finetune(base, "classify", rows, rows, **(FAST | {"epochs": 12}))
    cut = finetune(base, "classify", rows, rows, long="cut", **(FAST | {"epochs": 1}))
    assert whole.metric.mean > 0.9
    assert any("were cut" in note for note in cut.notes) and not any("were cut" in note for note in whole.notes)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_seeds_give_an_interval_and_one_run_says_that_it_is_one(base, tmp_path):
    few = FAST | {"epochs": 1}
    three = finetune(base, "classify", sentiment(0, 32), sentiment(1, 32), tmp_path / "out", seeds=3, **few)
    assert [r.seed for r in sorted(three.runs, key=lambda r: r.seed)] == [0, 1, 2]
    values = [r.scores["accuracy"] for r in three.runs]
    assert three.metric.mean == pytest.approx(np.mean(values)) and three.metric.runs == 3
    assert three.metric.half == pytest.approx(4.302653 * np.std(values, ddof=1) / math.sqrt(3))
    assert [run.network is None for run in three.runs] == [False, True, True]  # only the best is kept in memory
    assert values[0] == max(values)
    assert len(json.loads((tmp_path / "out" / "finetune.json").read_text())["seeds"]) == 3
    one = finetune(base, "classify", sentiment(0, 32), sentiment(1, 32), **few)
    assert "one run" in str(one)


def test_the_seeds_of_an_adapter_keep_one_network(base):
    before = {id(thing) for thing in gc.get_objects() if type(thing) is Network}  # of other tests
    tuned = finetune(base, "classify", sentiment(0, 16), seeds=3, mode="lora", **(FAST | {"epochs": 1}))
    gc.collect()
    (kept,) = (run.network for run in tuned.runs if run.network is not None)
    alive = [thing for thing in gc.get_objects() if type(thing) is Network and id(thing) not in before]
    adapted = [network for network in alive if any("lora" in type(m).__name__.lower() for m in network.modules())]
    assert adapted == [kept]


def test_the_grid_keeps_the_best(base):
    axes = {"lr": (1e-7, 3e-3), "epochs": (1, 4)}
    few = {k: v for k, v in FAST.items() if k not in axes}
    tuned = finetune(base, "classify", sentiment(0), sentiment(1, 32), grid=axes, **few)
    assert len(tuned.grid) == 4
    assert tuned.grid[0]["accuracy"] == max(row["accuracy"] for row in tuned.grid) == tuned.metric.mean
    assert tuned.settings.lr == tuned.grid[0]["lr"]
    with pytest.raises(EverybertError, match="no setting"):
        finetune(base, "classify", sentiment(0), sentiment(1, 32), grid={"lrr": (1,)}, **few)
    for wrong in ({"grid": {"lr": ()}}, {"grid": True, "epochs": 2}):
        with pytest.raises(EverybertError, match="the grid has the values of"):
            finetune(base, "classify", sentiment(0), sentiment(1, 32), **wrong)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"window": 900}, "a window of 900 tokens is longer than the"),
        ({"window": 16, "overlap": 9}, "windows of 16 tokens overlap by at most half"),
        ({"overlap": 4, "long": "cut"}, "texts that are cut by none"),
    ],
)
def test_windows_that_the_model_cannot_read_are_refused(base, how, message):
    with pytest.raises(EverybertError, match=message):
        finetune(base, "classify", sentiment(0, 16), sentiment(1, 8), **(FAST | how))


def test_labels_that_are_held_out_only_are_known(base):
    for rows in ([("good", "a"), ("bad", "b")], [(f"good {i}", str(i // 2)) for i in range(20)]):
        tuned = finetune(base, "classify", rows, seed=1, epochs=1, quiet=True)
        assert tuned.task.labels == tuple(sorted({label for _, label in rows}))
    with pytest.raises(EverybertError, match="the data, row 7: the label is missing"):
        finetune(base, "classify", [(f"good {i}", None if i == 6 else str(i % 2)) for i in range(20)])


def test_without_a_dev_set_a_tenth_is_held_out(base):
    tuned = finetune(base, "classify", sentiment(0, 60), **(FAST | {"epochs": 1}))
    assert any("6 of the training examples are held out" in note for note in tuned.notes)


def test_a_head_for_the_same_labels_is_kept(base, tmp_path):
    first = finetune(base, "classify", sentiment(0), sentiment(1), tmp_path / "out", **FAST)
    still = {**FAST, "lr": 1e-9, "epochs": 1}
    same = finetune(tmp_path / "out", "classify", sentiment(0), sentiment(1), **still)
    assert same.metric.mean == pytest.approx(first.metric.mean)
    renamed = [(text, {"yes": "a", "no": "b"}[label]) for text, label in sentiment(0)]
    other = finetune(tmp_path / "out", "classify", renamed, renamed, **still)
    weights = [t.runs[0].network.heads["classify"].output.weight for t in (first, same, other)]
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=0)
    assert not torch.allclose(weights[0], weights[2], atol=1e-3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"task": "translate"}, "there is no 'translate'"),
        ({"mode": "half"}, "mode is full, top:K"),
        ({"learning_rate": 1e-3}, "no setting 'learning_rate'"),
        ({"seeds": 0}, "seeds must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"train": []}, "0 rows"),
        ({"dev": [("x", "maybe")]}, "model does not know: 'maybe'"),
        ({"task": "embed", "train": [("a", "b")], "dev": [("a", "b")], "mode": "frozen"}, "cannot be frozen"),
        (
            {"options": {"colour": 1}},
            "classify has no option 'colour'; it has calibrate, class_weights",
        ),
        ({"model": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_bad_input_is_one_line(base, arguments, message):
    defaults = {"model": base, "task": "classify", "train": sentiment(0, 16), "dev": sentiment(1, 16)}
    with pytest.raises(EverybertError, match=message) as error:
        finetune(**(defaults | FAST | arguments))
    assert "\n" not in str(error.value)


# ── faults that were fixed ───────────────────────────────────────────────────────────────────────────────────


def test_a_type_error_inside_a_task_is_not_blamed_on_its_options(base, monkeypatch):
    monkeypatch.setattr("everybert.tasks.dataset.order_labels", lambda names: len(3))
    with pytest.raises(TypeError, match="has no len"):
        finetune(base, "classify", sentiment(0, 16), sentiment(1, 16), **FAST)


@pytest.mark.parametrize("task", ["tag", "answer"])
def test_cut_is_done_by_every_task(base, task):
    """The windows of a long text were read although `long` was cut."""
    words = ["john", *["film"] * 150, "paris"]
    rows = {
        "tag": [(words, ["B-PER", *["O"] * 150, "B-LOC"])] * 4,
        "answer": [("who ?", " ".join(words), "john")] * 4,
    }[task]
    tuned = finetune(base, task, rows, rows, long="cut", **(FAST | {"epochs": 1}))
    assert any("lie beyond the window and were cut" in note for note in tuned.notes)
    assert tuned.task.state()["window"]["long"] == "cut"


# ── few rows, ties, and folders that hold a model ────────────────────────────────────────────────────────────


def test_a_model_is_replaced_only_with_overwrite(base, tmp_path):
    few = FAST | {"epochs": 1}
    for mode in ("full", "lora"):
        finetune(base, "classify", sentiment(0, 16), sentiment(1, 8), tmp_path / mode, mode=mode, **few)
        before = (tmp_path / mode / "finetune.json").stat().st_mtime_ns
        with pytest.raises(EverybertError, match=r"holds a model: choose another folder, or give overwrite=True"):
            finetune(base, "classify", sentiment(0, 16), sentiment(1, 8), tmp_path / mode, mode=mode, **few)
        assert (tmp_path / mode / "finetune.json").stat().st_mtime_ns == before
        more = {"mode": mode, "overwrite": True}
        finetune(base, "classify", sentiment(0, 16), sentiment(1, 8), tmp_path / mode, **more, **few)
        assert (tmp_path / mode / "finetune.json").stat().st_mtime_ns > before


def test_a_folder_that_cannot_be_written_is_refused_before_training(base, tmp_path, monkeypatch):
    monkeypatch.setattr("everybert.training.finetune.run_once", lambda *args: pytest.fail("it was trained"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep me")
    for out, why in ((tmp_path / "notes", "mine.txt"), (tmp_path / "notes" / "mine.txt", "is a file")):
        with pytest.raises(EverybertError, match=why):
            finetune(base, "classify", sentiment(0, 16), sentiment(1, 8), out, **FAST)


@pytest.mark.parametrize("rows, epochs", [(100, 30), (3_000, 10), (10_000, 3), (70_000, 3)])
def test_few_rows_are_seen_more_often(rows, epochs, tmp_path):
    data = SimpleNamespace(folder=tmp_path, train_examples=range(rows))
    assert choose_settings(data, {})[0].epochs == epochs
    assert choose_settings(data, {"epochs": 2})[0].epochs == 2
    assert choose_settings(data, {"mode": "frozen"})[0].rounds == 30


def test_the_folder_suggests_settings(base, tmp_path):
    shutil.copytree(base, tmp_path / "m")
    suggested = {"version": 1, "finetune": {"new_pooler": True, "batch_size": 8, "epochs": 2}}
    (tmp_path / "m" / "everybert.json").write_text(json.dumps(suggested))
    more = {"epochs": 1, "mode": "full", "device": "cpu", "quiet": True}
    tuned = finetune(tmp_path / "m", "classify", sentiment(0, 16), sentiment(1, 8), **more)
    assert (tuned.settings.new_pooler, tuned.settings.batch_size, tuned.settings.epochs) == (True, 8, 1)
    assert any("folder suggests new_pooler True, batch_size 8" in note for note in tuned.notes)


def test_one_label_for_everything_is_a_warning(base, monkeypatch, caplog):
    counts = np.array([[3, 0], [5, 0]])
    monkeypatch.setattr(Classify, "confusion", lambda *args: counts)
    few = FAST | {"epochs": 1}
    tuned = finetune(base, "classify", sentiment(0, 16), sentiment(1, 8), **few)
    assert "every dev text is judged 'no'" in caplog.text and tuned.notes[-1] in caplog.text
    counts[1, 1] = 1
    tuned = finetune(base, "classify", sentiment(0, 16), sentiment(1, 8), **few)
    assert not any("every dev text" in note for note in tuned.notes)


PAIRS = [("the film", "a film"), ("the food", "food"), ("a dog", "the dog")] * 4
ABOUT = "config_sentence_transformers.json"


def embedder(base, folder):
    shutil.copytree(base, folder)
    write_pooling(folder, Pooling(("cls",), True, 32), 32)
    (folder / ABOUT).write_text('{"prompts": {"query": "", "document": ""}}')
    return folder


def test_an_embedder_is_trained_further_as_it_pools(base, tmp_path):
    folder = embedder(base, tmp_path / "cls")
    options = {"epochs": 1, "quiet": True, "device": "cpu"}
    assert finetune(folder, "embed", PAIRS, PAIRS, **options).task.pooling == "cls"
    assert finetune(folder, "embed", PAIRS, PAIRS, options={"pooling": "mean"}, **options).task.pooling == "mean"
    assert finetune(base, "embed", PAIRS, PAIRS, **options).task.pooling == "mean"
    (folder / ABOUT).write_text('{"prompts": {"query": "query: "}, "default_prompt_name": "query"}')
    with pytest.raises(EverybertError, match="prompts or modules that training would not keep"):
        finetune(folder, "embed", PAIRS, PAIRS, **options)
    finetune(folder, "embed", PAIRS, PAIRS, options={"pooling": "cls"}, **options)


def test_an_embedder_keeps_length_prompts_and_similarity(base, tmp_path):
    folder = embedder(base, tmp_path / "cls")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": false}')
    said = {"prompts": {"query": "the ", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "dot"}
    (folder / ABOUT).write_text(json.dumps(said))
    options = {"epochs": 1, "quiet": True, "device": "cpu"}
    tuned = finetune(folder, "embed", PAIRS, PAIRS, tmp_path / "out", **options)
    kept = everybert.load(tmp_path / "out").pooling
    assert (kept.modes, kept.size, kept.prompts, kept.similarity) == (("cls",), 24, said["prompts"], "dot")
    assert json.loads((tmp_path / "out" / ABOUT).read_text()) == said
    assert tuned.task.window.size == 24 and any("prompts (query, document) are kept" in note for note in tuned.notes)
    assert finetune(folder, "embed", PAIRS, PAIRS, window=16, **options).task.window.size == 16
    assert finetune(folder, "embed", PAIRS, PAIRS, options={"pooling": "cls"}, **options).task.window.size == 64


def test_an_encoder_in_a_folder_of_its_own_is_found(base, tmp_path):
    """As older sentence-transformers folders have it."""
    folder = embedder(base, tmp_path / "old")
    (folder / "0_Transformer").mkdir()
    for file in ("config.json", "model.safetensors", "vocab.txt"):
        (folder / file).rename(folder / "0_Transformer" / file)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert finetune(folder, "embed", PAIRS, PAIRS, epochs=1, quiet=True, device="cpu").task.pooling == "cls"


def test_a_run_names_its_model(base, tmp_path):
    shutil.copytree(base, tmp_path / "run" / "model")
    with pytest.raises(EverybertError, match=r"has no config.json; did you mean .*model\?"):
        finetune(tmp_path / "run", "classify", sentiment(0), quiet=True)
