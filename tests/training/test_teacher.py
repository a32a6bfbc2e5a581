"""A task learnt from a teacher: its answers count beside the labels, and a teacher that cannot teach says why."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiny_bert as tiny
import torch
from torch.nn import functional as F

import everybert
from everybert.errors import EverybertError
from everybert.model.losses import label_loss
from everybert.store.huggingface import load_network
from everybert.tasks.classify import TEACHER_TEMPERATURE, TEACHER_WEIGHT, teacher_loss
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import finetune, prepare_data, teach

FAST = {"lr": 3e-3, "epochs": 4, "batch_size": 16, "device": "cpu", "quiet": True}


def rows(seed, size, label):
    draw = random.Random(seed)
    texts = [" ".join([*draw.choices(tiny.WORDS[20:40], k=4), draw.choice(["good", "bad"])]) for _ in range(size)]
    return [(text, label(text)) for text in texts]


def mood(text):
    return "yes" if "good" in text else "no"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def teacher(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("teacher") / "model"
    finetune(base, "classify", rows(0, 128, mood), rows(1, 32, mood), out, **(FAST | {"epochs": 8}))
    return str(out)


def test_the_loss_is_what_the_papers_write():
    torch.manual_seed(0)
    mine, theirs, labels = torch.randn(5, 3), torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    plain, t, a = label_loss(mine, labels, "single"), TEACHER_TEMPERATURE, TEACHER_WEIGHT
    assert teacher_loss(mine, None, labels, plain, "single") is plain
    p, q = (mine / t).softmax(-1), (theirs / t).softmax(-1)
    each = t**2 * (q * (q / p).log()).sum(-1)
    weight = torch.tensor([1.0, 3.0, 0.5])
    several = -(theirs.sigmoid() * F.logsigmoid(mine) + (1 - theirs.sigmoid()) * F.logsigmoid(-mine)).mean()
    for near, problem, weight_C, size in [
        (each.mean(), "single", None, 3),
        ((weight[labels] * each).sum() / weight[labels].sum(), "single", weight, 3),
        (several, "multi", None, 3),
        (F.mse_loss(mine[:, :1], theirs[:, :1]), "regression", None, 1),
    ]:
        found = teacher_loss(mine[:, :size], theirs[:, :size], labels, plain, problem, weight_C)
        torch.testing.assert_close(found, (1 - a) * plain + a * near)


def test_a_student_follows_its_teacher_where_labels_are_noise(base, teacher):
    noise = random.Random(7)
    train = [(text, noise.choice(["yes", "no"])) for text, _ in rows(2, 160, mood)]
    settings = FAST | {"epochs": 10}
    alone = finetune(base, "classify", train, rows(3, 64, mood), **settings)
    taught = finetune(base, "classify", train, rows(3, 64, mood), teacher=teacher, **settings)
    assert taught.metric.mean > 0.95 > alone.metric.mean


def test_the_teachers_words_are_its_own_logits_and_computed_once(base, teacher, monkeypatch):
    data = prepare_data("classify", base, Tokenizer.load(base), rows(4, 20, mood), rows(5, 8, mood))
    features = teach(data, teacher)
    network = load_network(teacher, heads={"classify": 2}).network.eval()
    expected = data.task.example_logits(network, data.train)
    np.testing.assert_allclose(features.targets["teacher_E"], expected, atol=1e-5)
    monkeypatch.setattr("everybert.training.finetune.load_network", lambda *a: pytest.fail("it was asked before"))
    assert teach(data, teacher) is features


def test_frozen_features_of_one_teacher_are_not_anothers(base, teacher, tmp_path):
    noise = random.Random(7)
    train = [(text, noise.choice(["yes", "no"])) for text, _ in rows(2, 160, mood)]
    grid = {"teacher": [None, teacher]}
    tuned = finetune(base, "classify", train, rows(3, 64, mood), mode="frozen", grid=grid, **(FAST | {"epochs": 6}))
    assert {row["teacher"] for row in tuned.grid} == {None, teacher}
    assert tuned.grid[0]["accuracy"] != tuned.grid[1]["accuracy"]


def test_a_path_teaches_as_its_name_does(base, teacher, tmp_path):
    few = FAST | {"epochs": 1}
    finetune(base, "classify", rows(0, 16, mood), rows(1, 8, mood), tmp_path / "out", teacher=Path(teacher), **few)
    assert json.loads((tmp_path / "out" / "finetune.json").read_text())["settings"]["teacher"] == teacher


def test_a_teacher_reads_pairs_in_its_own_way(base, tmp_path):
    """A student without token types does not take them from its teacher."""
    pairs = [(text, "good", mood(text)) for text, _ in rows(0, 32, mood)]
    finetune(base, "classify", pairs, pairs[:8], tmp_path / "t", **(FAST | {"epochs": 1}))
    config = json.loads((base / "config.json").read_text())
    plain = tiny.save(tmp_path / "plain", **{**config, "type_vocab_size": 1})
    data = prepare_data("classify", plain, Tokenizer.load(plain), pairs, pairs[:8])
    own = prepare_data("classify", base, Tokenizer.load(base), pairs, pairs[:8])
    assert data.train.segments is None
    said, wanted = (teach(d, str(tmp_path / "t")).targets["teacher_E"] for d in (data, own))
    np.testing.assert_allclose(said, wanted, atol=1e-6)


def test_a_head_on_frozen_features_can_teach(base, tmp_path):
    finetune(base, "classify", rows(0, 64, mood), rows(1, 16, mood), tmp_path / "t", mode="frozen", **FAST)
    data = prepare_data("classify", base, Tokenizer.load(base), rows(4, 20, mood), rows(5, 8, mood))
    said = teach(data, str(tmp_path / "t")).targets["teacher_E"].argmax(1)
    model = everybert.load(str(tmp_path / "t"))
    assert [data.task.labels[i] for i in said] == [p.label for p in model.classify([t for t, _ in rows(4, 20, mood)])]


def test_a_regression_is_taught_in_the_units_of_training(base, tmp_path):
    def stars(text):
        return 40.0 + 10.0 * ("good" in text)

    train = rows(0, 128, stars)
    tuned = finetune(base, "regress", train, rows(1, 32, stars), tmp_path / "t", **(FAST | {"epochs": 8}))
    data = prepare_data("regress", base, Tokenizer.load(base), train, rows(1, 32, stars))
    said = teach(data, str(tuned.folder)).targets["teacher_E"][:, 0]
    in_units = (said - data.task.shift) / data.task.scale
    assert np.corrcoef(said, data.train.targets["label_E"])[0, 1] > 0.9
    assert abs(in_units.mean() - data.train.targets["label_E"].mean()) < 0.2


def test_teachers_that_cannot_teach(base, teacher, tmp_path):
    train, dev = rows(0, 32, mood), rows(1, 8, mood)
    with pytest.raises(EverybertError, match="same labels to teach them; it knows no, yes"):
        other = [(text, {"yes": "up", "no": "down"}[label]) for text, label in train]
        finetune(base, "classify", other, teacher=teacher, **FAST)
    with pytest.raises(EverybertError, match="same labels"):
        finetune(base, "classify", train, dev, teacher=str(base), **FAST)
    with pytest.raises(EverybertError, match="tag does not learn from a teacher"):
        tags = [(text.split(), ["B-X", "O"] + ["O"] * (len(text.split()) - 2)) for text, _ in train]
        finetune(base, "tag", tags, teacher=teacher, **FAST)
    several = [(text, [mood(text), "any"]) for text, _ in train]
    with pytest.raises(EverybertError, match="same labels"):
        options = {"multi": True, "labels": ["no", "yes", "any"]}
        finetune(base, "classify", several, teacher=teacher, options=options, **FAST)
    with pytest.raises(EverybertError, match="cannot teach regress: this model predicts labels"):
        finetune(base, "regress", [(text, float("good" in text)) for text, _ in train], teacher=teacher, **FAST)
    with pytest.raises(EverybertError, match="it knows none"):
        stars = [(text, 2.0 + ("good" in text)) for text, _ in train]
        finetune(base, "regress", stars, teacher=str(base), **FAST)
    finetune(base, "classify", train, dev, tmp_path / "lora", mode="lora", **(FAST | {"epochs": 1}))
    with pytest.raises(EverybertError, match="is an adapter"):
        finetune(base, "classify", train, dev, teacher=str(tmp_path / "lora"), **FAST)
