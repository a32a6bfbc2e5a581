"""A student begins as every k-th layer of its teacher and comes to agree with it."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from toy import tiny_recipe

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.losses import IGNORE, PretrainTargets
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network
from everybert.training import distil as module
from everybert.training.distil import copy_layers, distil, distil_loss, read_student, source_layers
from everybert.training.pretrain import pretrain
from everybert.training.recipe import DistilSettings, Recipe, names


def network(layers=4, hidden=32, family="bert", segments=2, seed=0, heads=("mlm",)):
    torch.manual_seed(seed)
    shape = {"hidden_size": hidden, "heads": 2, "intermediate_size": 64, "vocab_size": 50, "max_positions": 32}
    config = EncoderConfig(family=family, layers=layers, segments=segments, **shape)
    return Network(config, dict.fromkeys(heads)).eval()


def batch(lengths=(7, 5, 7), real=None):
    torch.manual_seed(1)
    flat = Ragged.flat(torch.randint(5, 50, (sum(lengths),)), lengths)
    size = sum(lengths) if real is None else real
    targets = PretrainTargets(
        torch.tensor([1, 3, 9]), torch.tensor([6, 7, 8]), torch.tensor([1, -100, 0]), real=torch.tensor(size)
    )
    return replace(flat, targets=targets.of_step(torch.tensor([3.0, 2.0, float(size)])))


def test_divergence_is_scaled_by_the_temperature_and_ignores_labels():
    s, t, label = torch.randn(3, 5), torch.randn(3, 5), torch.tensor([0, IGNORE, 2])
    p, q = (t / 2).softmax(-1), (s / 2).softmax(-1)
    each = 4 * (p * (p.log() - q.log())).sum(-1)
    assert float(module.divergence(s, t, label, 2.0)) == pytest.approx(float(each[0] + each[2]), rel=1e-4)


def test_hidden_states_are_compared_layer_by_layer_without_filler():
    ones, zeros = [torch.ones(2, 32)] * 2, [torch.zeros(2, 32)] * 2
    assert float(module.hidden_error(network(), ones, zeros, torch.tensor([True, False]))) == 1


@pytest.mark.parametrize("real", (10, 7))
def test_relations_are_within_sequences(real):
    torch.manual_seed(0)
    lengths = (3, 4, 3)
    targets = PretrainTargets(torch.tensor([0]), torch.tensor([0]), real=torch.tensor(real))
    batch = replace(Ragged.flat(torch.arange(10), lengths), targets=targets)
    x, y = torch.randn(10, 3, 8), torch.randn(10, 3, 12)
    total = 0.0
    for start, stop in ((0, 3), (3, 7), (7, 10)):
        for k in range(3):
            for r in range(4):
                a, b = x[start:stop, k].chunk(4, -1)[r], y[start:stop, k].chunk(4, -1)[r]
                mine, theirs = (a @ a.T / 2**0.5).log_softmax(-1), (b @ b.T / 3**0.5).log_softmax(-1)
                total += float((theirs.exp() * (theirs - mine)).sum()) if stop <= real else 0.0
    assert float(module.relation_divergence(x, y, batch, 4)) == pytest.approx(total / 12, rel=1e-4)
    assert module.relations(x[:3][None], 4).shape == (1, 3, 4, 3, 3)


def test_layers_are_spread_as_distilbert_took_them():
    assert source_layers(6, 12) == [0, 2, 4, 7, 9, 11]
    assert source_layers(3, 3) == [0, 1, 2]
    assert source_layers(1, 12) == [11]


def test_a_student_of_all_layers_is_the_teacher_even_without_token_types():
    teacher = network(layers=3)
    student = network(layers=3, family="distilbert", segments=0, seed=9)
    copy_layers(teacher, student)
    assert torch.allclose(student.encoder(batch()), teacher.encoder(batch()), atol=1e-5)
    parts = distil_loss(teacher, DistilSettings(hidden=1.0, relation=1.0, relation_heads=4), student, batch())[1]
    ce, mlm, *rest = parts.tolist()
    assert ce == pytest.approx(0, abs=1e-5) and rest == pytest.approx([0, 0, 0, 0], abs=1e-5)
    assert mlm > 1


def test_every_other_layer():
    teacher, student = network(layers=4), network(layers=2, seed=9)
    copy_layers(teacher, student)
    for mine, theirs in ((0, 0), (1, 3)):
        a, b = student.encoder.layers[mine].state_dict(), teacher.encoder.layers[theirs].state_dict()
        assert all(torch.equal(a[k], b[k]) for k in a)


@torch.no_grad()
def test_the_parts_are_their_formulas():
    teacher, student = network(layers=4), network(layers=2, seed=9)
    data = batch()
    targets = data.targets
    loss, parts = distil_loss(teacher, DistilSettings(hidden=3.0), student, data)
    x, y = student.encoder(data), teacher.encoder(data)
    s, t = (n.mlm_logits(h, targets.mask_index_M) for n, h in ((student, x), (teacher, y)))
    p, q = (t / 2).softmax(-1), (s / 2).softmax(-1)
    assert parts[0] == pytest.approx(float(5 * 4 * (p * (p.log() - q.log())).sum(-1).mean()), rel=1e-4)
    assert parts[1] == pytest.approx(float(2 * F.cross_entropy(s, targets.mask_label_M)), rel=1e-5)
    assert parts[2] == 0  # no pairs
    assert parts[3] == pytest.approx(float((1 - F.cosine_similarity(x, y)).mean()), rel=1e-4)
    states: tuple[list, list] = ([], [])
    student.encoder(data, states=states[0]), teacher.encoder(data, states=states[1])
    errors = [F.mse_loss(states[0][i], states[1][2 * i]) for i in range(3)]
    assert parts[4] == pytest.approx(float(3 * sum(errors) / 3), rel=1e-4)
    assert float(loss) == pytest.approx(float(parts.sum()), rel=1e-5)


def test_pairs_are_judged_as_the_teacher_and_the_text_do():
    teacher, student = network(layers=4, heads=("mlm", "nsp")), network(layers=2, seed=9, heads=("mlm", "nsp"))
    data = batch()
    parts = distil_loss(teacher, DistilSettings(pair=3.0), student, data)[1]
    s, t = (n.sequence_logits(n.encoder(data), data, "nsp")[[0, 2]] for n in (student, teacher))
    p, q = (t / 2).softmax(-1), (s / 2).softmax(-1)
    wanted = F.cross_entropy(s, torch.tensor([1, 0])) + 4 * (p * (p.log() - q.log())).sum(-1).mean()
    assert parts[2] == pytest.approx(3 * wanted.item(), rel=1e-4)


def test_filling_counts_for_nothing():
    teacher, student = network(), network(layers=2, seed=9)
    settings = DistilSettings(hidden=1.0, relation=1.0, relation_heads=2)
    whole = distil_loss(teacher, settings, student, batch((7, 5)))[1]
    filled = distil_loss(teacher, settings, student, batch((7, 5, 4), real=12))[1]
    assert torch.allclose(whole, filled, atol=1e-5)


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory):
    recipe = tiny_recipe(steps=60, examples__kind="full", model__dropout=0.0)
    return pretrain(recipe, corpus, tmp_path_factory.mktemp("t") / "teacher", device="cpu", quiet=True).model


@pytest.fixture(scope="module")
def judge(corpus, tmp_path_factory):
    recipe = tiny_recipe(steps=60, examples__kind="pairs", model__dropout=0.0)
    return pretrain(recipe, corpus, tmp_path_factory.mktemp("t") / "judge", device="cpu", quiet=True).model


def lesson(**settings):
    return tiny_recipe(
        steps=30, examples__kind="full", distil={"ce": 5.0, **settings}, schedule__peak=2e-3, run__log_every=5
    )


def test_a_distilled_student_is_a_distilbert_that_transformers_reads(teacher, corpus, tmp_path):
    from transformers import AutoModelForMaskedLM

    student = tmp_path / "student.toml"
    student.write_text(
        '[model]\nfamily = "distilbert"\nsegments = 0\nlayers = 1\nhidden_size = 32\nheads = 2\n'
        "intermediate_size = 64\nmax_positions = 64\n"
    )
    out = tmp_path / "run"
    result = distil(teacher, corpus, out, student=student, recipe=lesson(copy=False), device="cpu", quiet=True)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    ce = [line["ce"] for line in lines if "ce" in line]
    assert ce[-1] < 0.7 * ce[0]
    assert type(AutoModelForMaskedLM.from_pretrained(result.model)).__name__ == "DistilBertForMaskedLM"
    assert load_network(result.model).config.segments == 0
    with pytest.raises(EverybertError, match="another teacher"):
        distil(result.model, corpus, out, student=student, recipe=lesson(copy=False), device="cpu", quiet=True)


def test_a_student_of_pairs_keeps_both_heads(teacher, judge, corpus, tmp_path):
    taught = tiny_recipe(steps=6, examples__kind="pairs", model__layers=1, distil={"ce": 5.0}, run__log_every=2)
    result = distil(judge, corpus, tmp_path / "run", recipe=taught, device="cpu", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert all(line["pair"] > 0 for line in lines if "lr" in line) and "pair_accuracy" in result.figures
    found = load_network(result.model, heads={"mlm": None, "nsp": None})
    assert not found.report.missing and found.config.layers == 1
    with pytest.raises(EverybertError, match="judges no pairs"):
        distil(teacher, corpus, tmp_path / "other", recipe=taught, device="cpu", quiet=True)


@pytest.mark.parametrize("name", [n for n in names() if Recipe.load(n).distil])
def test_every_recipe_teaches_scaled_down(teacher, judge, corpus, tmp_path, name):
    shape = {"layers": 1, "hidden_size": 32, "heads": 2, "intermediate_size": 64, "max_positions": 64}
    changes = {f"model__{key}": value for key, value in shape.items()}
    changes |= {"batch__tokens": 512, "batch__pack": 512, "batch__length": 64, "run__workers": 0, "schedule__warmup": 1}
    master = judge if Recipe.load(name).examples.paired else teacher
    result = distil(master, corpus, tmp_path / "run", recipe=name, device="cpu", quiet=True, steps=4, **changes)
    assert result.finished and 3 < result.figures["heldout_loss"] < 6


def test_a_narrower_student_learns_states_and_relations(teacher, corpus, tmp_path):
    student = tmp_path / "student.toml"
    student.write_text("[model]\nlayers = 1\nhidden_size = 16\nheads = 2\nintermediate_size = 32\nmax_positions = 64\n")
    settings = {"ce": 0.0, "mlm": 0.0, "cosine": 0.0, "hidden": 1.0, "relation": 1.0, "relation_heads": 4}
    out = tmp_path / "run"
    result = distil(teacher, corpus, out, student=student, recipe=lesson(**settings), device="cpu", quiet=True)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines() if "lr" in line]
    for part in ("hidden", "relation"):
        assert lines[-1][part] < 0.8 * lines[0][part], part
    assert load_network(result.model).config.hidden_size == 16  # and the projection stayed behind


@pytest.mark.parametrize(("who", "length", "positions"), [("teacher", 65, 128), ("student", 32, 16)])
def test_texts_longer_than_either_reads_are_refused(teacher, corpus, tmp_path, who, length, positions):
    assert load_network(teacher).config.max_positions == 64
    student = tmp_path / "student.toml"
    shape = "layers = 1\nhidden_size = 32\nheads = 2\nintermediate_size = 64"
    student.write_text(f"[model]\n{shape}\nmax_positions = {positions}\n")
    recipe = tiny_recipe(examples__kind="full", distil={"ce": 1.0}, batch__length=length)
    most = min(64, positions)
    with pytest.raises(EverybertError, match=rf"more than the {who}'s {most} positions.*batch.length={most}"):
        distil(teacher, corpus, tmp_path / "run", student=student, recipe=recipe, device="cpu", quiet=True)


def test_a_student_of_running_text_and_then_of_pairs(judge, corpus, tmp_path):
    phases = [{"share": 0.5}, {"share": 0.5, "kind": "pairs"}]
    recipe = tiny_recipe(steps=4, examples__kind="full", distil={"ce": 1.0}, phase=phases, run__log_every=1)
    distil(judge, corpus, tmp_path / "run", recipe=recipe, device="cpu", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["pair"] > 0 for row in rows if "pair" in row] == [False, False, True, True]


def test_widths_that_cannot_be_compared_are_refused(teacher, corpus, tmp_path):
    with pytest.raises(EverybertError, match=r"set \[distil\] cosine = 0"):
        distil(teacher, corpus, tmp_path / "a", student="bert-tiny", recipe=lesson(), device="cpu", quiet=True)
    with pytest.raises(EverybertError, match="give a preset"):
        read_student("bert-teeny")
    with pytest.raises(EverybertError, match="no \\[distil\\] table"):
        distil(teacher, corpus, tmp_path / "b", recipe=tiny_recipe(), device="cpu")


def test_a_teacher_may_be_named_and_a_wrong_one_leaves_nothing(corpus, tmp_path):
    with pytest.raises(EverybertError, match="does not belong to the corpus"):
        distil("everybert-small", corpus, tmp_path / "run", recipe=lesson(), device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()
