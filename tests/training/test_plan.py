"""The calculator: speeds agree with what was measured, counts with what torch holds."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from everybert.cli.main import app
from everybert.cli.pretrain import duration, human, read_size
from everybert.errors import EverybertError
from everybert.model.config import preset
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.training.plan import (
    FACTORS,
    GPUS,
    Machine,
    Work,
    activation_bytes,
    count_parameters,
    flops_per_token,
    peak_flops,
    plan,
    step_seconds,
    traffic_bytes,
)
from everybert.training.recipe import Recipe, names

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fit_rates

LOG = Path(__file__).parents[2] / "docs" / "LOG.md"


@pytest.mark.parametrize("point", fit_rates.POINTS, ids=lambda p: p.name)
def test_measured_speeds_are_predicted_within_15_percent(point):
    seconds = point.work.tokens / point.tokens_per_second
    others = fit_rates.fit([p for p in fit_rates.POINTS if p is not point])
    assert sum(step_seconds(point.work)) == pytest.approx(seconds, rel=0.05)
    assert sum(step_seconds(point.work, factors=others)) == pytest.approx(seconds, rel=0.15)  # leave one out
    assert point.text in LOG.read_text("utf-8"), "the log no longer has this figure"
    assert float(re.findall(r"[\d.]+", point.text)[0]) == pytest.approx(point.tokens_per_second / 1e3, rel=0.02) or (
        "M" in point.text
    )


def test_the_shipped_factors_are_the_fit_and_physical():
    assert pytest.approx(fit_rates.fit()) == FACTORS
    assert min(FACTORS.values()) >= 1  # nothing is faster than the data sheet


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


def test_more_of_everything_takes_longer():
    config = preset("bert-base-uncased")
    base = step_seconds(Work(config, 128, 32768))
    assert step_seconds(Work(config, 512, 32768))[0] > base[0]
    assert step_seconds(Work(config, 128, 32768, masked=0.3))[0] > base[0]
    assert step_seconds(Work(config, 128, 32768, muon=True))[1] > base[1]
    assert step_seconds(Work(config, 128, 65536))[0] == pytest.approx(2 * base[0])
    assert step_seconds(Work(config, 128, 32768), GPUS["a100"])[0] > 2 * base[0]


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


def test_parameters_are_the_networks():
    assert count_parameters(preset("bert-base-uncased"), {"mlm": None, "nsp": None}) == 110_106_428
    assert count_parameters(preset("albert-base-v2"), {"mlm": None}) < 13e6


def test_traffic():
    assert traffic_bytes(100, 1, sharded=False) == traffic_bytes(100, 1, sharded=True) == 0
    assert traffic_bytes(100, 8, sharded=False) == pytest.approx(2 * 7 / 8 * 400)
    assert traffic_bytes(100, 8, sharded=True) == pytest.approx(7 / 8 * (200 + 200 + 400))
    assert traffic_bytes(100, 8, sharded=True, packs=3) == pytest.approx(7 / 8 * (3 * 400 + 400))


def test_memory_by_part():
    recipe = Recipe.load("bert-base")
    one, many = (plan(recipe, Machine(gpus=n))["memory"] for n in (1, 8))
    millions = 110.1e6
    parts = one["data parallel"]
    assert parts["fp32 weights"] == pytest.approx(4 * millions, rel=0.01)
    assert parts["optimizer"] == pytest.approx(8 * millions, rel=0.01)
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"))
    assert many["data parallel"] == parts
    assert many["sharded"]["optimizer"] == pytest.approx(parts["optimizer"] / 8)
    slim = plan(Recipe.load("bert-base", run__checkpointing=True), Machine())["memory"]["data parallel"]
    assert slim["activations"] < parts["activations"] / 5
    small = plan(Recipe.load("bert-base", optimizer__kind="muon"), Machine())["memory"]["data parallel"]
    assert 0.5 < small["optimizer"] / parts["optimizer"] < 0.8  # one moment for the layers' matrices


def test_gpus_share_packs():
    recipe = Recipe.load("bert-base", batch__pack=16000)
    one, eight, nine = (plan(recipe, Machine(gpus=n)) for n in (1, 8, 9))
    assert eight["phases"][0]["a_gpu"] == 1 and one["phases"][0]["a_gpu"] == 8
    assert 6 < one["days"] / eight["days"] < 8
    assert eight["notes"] == [] and "share out evenly" in nine["notes"][0]
    assert eight["dollars"] == pytest.approx(eight["gpu_hours"] * 3.5)
    assert nine["phases"][0]["network"] > 5 * eight["phases"][0]["network"]  # between machines
    slow = plan(recipe, Machine(gpus=8, sharded=True))
    assert slow["phases"][0]["step"] != eight["phases"][0]["step"]


def test_a_budget_decides_the_steps():
    found = plan(Recipe.load("small-20m"), Machine())
    assert found["days"] * 1440 == pytest.approx(20, rel=0.01)
    twice = plan(Recipe.load("small-20m", batch__pack=49152), Machine(gpus=2))
    assert 1.5 < twice["phases"][0]["steps"] / found["phases"][0]["steps"] < 2


def test_notes_say_what_will_not_work():
    assert "would not fit" in plan(Recipe.load("bert-large", batch__pack=128_000), Machine("4090"))["notes"][0]
    muon = plan(Recipe.load("small-20m"), Machine(sharded=True))["notes"]
    assert any("Muon" in note for note in muon)
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
    shown = run("bert-base", "--words", "3.3B", "--gpus", 8, "--set", "batch.pack=16000")
    assert shown.exit_code == 0 and "4.29B" in shown.output and "…" not in shown.output
    found = json.loads(run("bert-base", "--tokens", "4.29B", "--gpus", 8, "--set", "batch.pack=16000", "--json").stdout)
    assert found["recipe"] == "bert-base" and found["storage"]["tokens"] == 4.29e9
    assert [row["gpus"] for row in found["network"]] == [8, 64, 512]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["bert-base", "--gpu", "tpu"], "there is no GPU 'tpu'"),
        (["bert-base", "--words", "many"], "'many' is not a size"),
        (["bert-base", "--words", "1.2.3B"], "is not a size"),
        (["bert-base", "--words", "1B", "--tokens", "1B"], "not both"),
        (["no-such"], "there is no recipe"),
        (["bert-base", "--set", "batch.pck=3"], "pck"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], cause: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert cause in result.output and len(result.output.strip().splitlines()) == 1


def test_figures_are_short():
    assert [human(n) for n in (12, 999.9e3, 1.5e6, 128e9)] == ["12", "1M", "1.5M", "128B"]
    assert [human(n, "B") for n in (12, 8.58e9)] == ["12 B", "8.58 GB"]
    assert [duration(d) for d in (0.01, 0.5, 12)] == ["14 minutes", "12.0 hours", "12.0 days"]
    assert [read_size(t) for t in ("300B", "3.3b", "1e9", "1_000", "2,000")] == [300e9, 3.3e9, 1e9, 1e3, 2e3]
