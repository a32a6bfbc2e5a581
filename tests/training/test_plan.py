"""The calculator: speeds agree with what was measured, counts with what torch holds."""

import json

import pytest
import torch
from typer.testing import CliRunner

from everybert.cli.main import app
from everybert.errors import EverybertError
from everybert.model.config import preset
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.training.plan import GPUS, MFU, Machine, activation_bytes, flops_per_token, peak_flops, plan
from everybert.training.recipe import Recipe, names

BASE = preset("bert-base-uncased").replace(vocab_size=30528)
SMALL = preset("prenorm-bert-base").replace(
    layers=6, hidden_size=512, heads=8, intermediate_size=2048, vocab_size=30016
)
ROTARY = Recipe.load("everybert-small").config.replace(vocab_size=30016)
MEASURED = [  # docs/LOG.md, one H200: configuration, length (Σn² / Σn), masked share, tokens per second
    *((BASE, length, 0.15, speed) for length, speed in ((128, 860e3), (512, 760e3), (232, 807e3))),
    *((BASE, length, 0.15, speed) for length, speed in ((128, 751e3), (512, 655e3), (128, 809e3))),  # dropout, Muon
    (SMALL, 128, 0.25, 2.69e6),
    *((ROTARY, length, rate, speed) for length, rate, speed in ((128, 0.275, 1.50e6), (480, 0.225, 1.37e6))),
]


@pytest.mark.parametrize(("config", "length", "masked", "speed"), MEASURED)
def test_measured_speeds_are_predicted_within_15_percent(config, length, masked, speed):
    mfu = MFU.get(config.positions, MFU["others"])
    assert mfu * GPUS["h200"]["flops"] / flops_per_token(config, length, masked) == pytest.approx(speed, rel=0.15)


def test_operations_of_bert_base():
    config = preset("bert-base-uncased").replace(vocab_size=30528)
    layers = 12 * (4 * 768**2 + 2 * 768 * 3072)
    head = 0.15 * (768**2 + 768 * 30528)
    assert flops_per_token(config, 128) == pytest.approx(6 * (layers + head) + 12 * 12 * 128 * 768)
    assert 860e3 * flops_per_token(config, 128) / peak_flops("NVIDIA H200") == pytest.approx(
        0.474, abs=0.001
    )  # the log
    assert peak_flops("some other card") is None
    albert, long = preset("albert-base-v2"), preset("longformer-base-4096")
    assert flops_per_token(albert, 128) > 0.9 * flops_per_token(config, 128) * 0.9  # shared weights still work
    assert flops_per_token(long, 4096) == flops_per_token(long, 513)  # a window bounds what is seen


@pytest.mark.parametrize("name", ["bert-base-uncased", "prenorm-bert-base", "modernbert-base"])
def test_activations_agree_with_what_autograd_keeps(name: str):
    small = {"layers": 3, "hidden_size": 256, "heads": 4, "intermediate_size": 1024, "vocab_size": 256}
    windows = {"windows": (None, 64, 64), "pad_id": 0} if "modern" in name else {}
    config = preset(name).replace(**small, **windows, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(0)
    network = Network(config, {"mlm": None})
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids_T = torch.randint(5, 250, (512,))
    batch = Ragged.flat(ids_T, [128] * 4, ids_T * 0 if config.segments == 2 else None, max_length=128)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network.encoder(batch)
    held = sum(t.untyped_storage().nbytes() for t in kept.values()) / 512
    counted = 2 * activation_bytes(config) * 3 / 4  # fp32 here; without the layer that stands for gradients
    assert counted == pytest.approx(held, rel=0.12)


def test_memory_by_part():
    found = plan(Recipe.load("bert-base"), Machine())
    parts, millions = found["memory_gb"], found["parameters"]
    assert millions == 110_111_042  # with the vocabulary that is rounded up
    assert parts["weights"] == pytest.approx(6e-9 * millions)
    assert parts["optimizer"] == pytest.approx(8e-9 * millions)
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"))
    assert plan(Recipe.load("bert-base"), Machine(gpus=8))["memory_gb"] == parts
    slim = plan(Recipe.load("bert-base", run__checkpointing=True), Machine())["memory_gb"]
    assert slim["activations"] < parts["activations"] / 5
    small = plan(Recipe.load("bert-base", optimizer__kind="muon"), Machine())["memory_gb"]
    assert 0.5 < small["optimizer"] / parts["optimizer"] < 0.8  # one moment for the layers' matrices


def test_gpus_share_packs():
    recipe = Recipe.load("bert-base", batch__pack=16000)
    one, eight, nine = (plan(recipe, Machine(gpus=n)) for n in (1, 8, 9))
    assert 6 < one["days"] / eight["days"] < 8
    assert eight["notes"] == [] and "share out evenly" in nine["notes"][0]
    assert eight["dollars"] == pytest.approx(eight["gpu_hours"] * 3.5)
    assert nine["phases"][0]["network_share"] > 3 * eight["phases"][0]["network_share"]  # between machines


def test_a_budget_decides_the_steps():
    found = plan(Recipe.load("small-20m"), Machine())
    assert found["days"] * 1440 == pytest.approx(20, rel=0.01)
    twice = plan(Recipe.load("small-20m", batch__pack=49152), Machine(gpus=2))
    assert 1.5 < twice["phases"][0]["steps"] / found["phases"][0]["steps"] < 2


def test_notes_say_what_will_not_work():
    assert "would not fit" in plan(Recipe.load("bert-large", batch__pack=128_000), Machine("4090"))["notes"][0]
    assert any("teacher" in note for note in plan(Recipe.load("distilbert"), Machine())["notes"])
    assert any("H200" in note for note in plan(Recipe.load("bert-base"), Machine("a100"))["notes"])


def test_every_shipped_recipe_has_a_plan_or_a_reason():
    for name in names():
        recipe = Recipe.load(name)
        if recipe.model.init is not None:
            with pytest.raises(EverybertError, match="starts from a folder"):
                plan(recipe, Machine())
        else:
            assert 0 < plan(recipe, Machine())["days"] < 10_000, name


def run(*arguments: object):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_command():
    shown = run("bert-base", "--gpus", 9)
    assert shown.exit_code == 0 and "110,111,042" in shown.output and "note: " in shown.output
    found = json.loads(run("bert-base", "--gpus", 8, "--json").stdout)
    assert found["recipe"] == "bert-base" and "8 V100 × 12 days" in found["published"]["hardware"]
    assert "published" not in json.loads(run("everybert-classic", "--json").stdout), "BERT-base's name, another size"


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["bert-base", "--gpu", "tpu"], "there is no GPU 'tpu'"),
        (["no-such"], "there is no recipe"),
        (["bert-base", "--set", "batch.pck=3"], "pck"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], cause: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert cause in result.output and len(result.output.strip().splitlines()) == 1


def test_machines_of_the_past_stand_beside():
    found = plan(Recipe.load("bert-base"), Machine("v100", 8))
    beside = found["days_beside"]
    assert beside["1 × h200"] == pytest.approx(plan(Recipe.load("bert-base"), Machine())["days"])
    assert beside["8 × v100"] / beside["8 × h100"] == pytest.approx(989 / 125)
    assert 0.4 * found["days"] < beside["8 × v100"] < found["days"]  # four packs do not share out over eight
