"""Recipes: a wrong key is named; what is omitted has a default; every shipped recipe is valid."""

import contextlib
import dataclasses
import math

import pytest

from everybert.corpus.examples import ExampleConfig
from everybert.corpus.masking import MaskingConfig
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.training.recipe import TABLES, Recipe, names, seconds

GOOD = """
steps = 100
[model]
preset = "bert-tiny"
[batch]
tokens = 4096
pack = 2048
length = 128
[schedule]
peak = 1e-3
"""


def parse(text: str, **overrides) -> Recipe:
    return Recipe.parse(text, "mine.toml", **overrides)


def test_reads_a_recipe():
    recipe = parse(GOOD)
    assert (recipe.steps, recipe.config.hidden_size, recipe.batch.pack) == (100, 128, 2048)
    assert recipe.phases[0].tokens == (4096, 4096)
    assert recipe.mask_rate == (0.15, 0.15)


def test_the_windows_of_a_preset_follow_its_layers():
    recipe = parse(GOOD.replace('"bert-tiny"', '"modernbert-base"\nlayers = 6'))
    assert recipe.config.windows == (None, 64, 64, None, 64, 64)
    for given, windows in (("[]", None), ("[0, 32, 32, 0, 32, 32]", (None, 32, 32, None, 32, 32))):
        recipe = parse(GOOD.replace('"bert-tiny"', f'"modernbert-base"\nlayers = 6\nwindows = {given}'))
        assert recipe.config.windows == windows and recipe.config.positions == "rotary"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "peek = 2\n", "[schedule] peek: there is no such key; did you mean peak?"),
        ("stepz = 3\n" + GOOD, "stepz: there is no such key; did you mean steps?"),
        (GOOD + "[shedule]\npeak = 1\n", "shedule"),
        (GOOD.replace("peak = 1e-3", 'peak = "high"'), "[schedule] peak: must be a number, not 'high'"),
        (GOOD.replace("pack = 2048", "pack = 8192"), "[batch] tokens: a step cannot be smaller than a pack"),
        (GOOD.replace("length = 128", "length = 4096"), "[batch] pack: a pack must hold a sequence"),
        ('budget = "20m"\n' + GOOD, "budget: give either steps or budget"),
        (GOOD.replace("steps = 100", 'budget = "soon"'), 'budget: is a time such as "20m"'),
        (GOOD.replace("steps = 100", 'budget = "20m"'), "warmup must be a number of steps"),
        (GOOD.replace("bert-tiny", "bert-tinny"), "did you mean bert-tiny"),
        (GOOD.replace('preset = "bert-tiny"', "vocab_size = 100"), "tokenizer decides"),
        (GOOD.replace('"bert-tiny"', '"bert-tiny"\ninit = "x"'), "contradicts init"),
        (GOOD.replace('preset = "bert-tiny"', 'init = "x"\nlayers = 3'), "contradicts init"),
        (GOOD.replace('"bert-tiny"', '"bert-tiny"\nlongformer = 4096'), "contrib/longformer.py"),
        (GOOD.replace('"bert-tiny"', '"bert-tiny"\nheads = 3'), "not a multiple of heads"),
        (GOOD + "[mask]\nboundary = true\n", 'needs strategy = "span"'),
        (GOOD + "[mask]\nrate = 1.5\n", "rate"),
        (GOOD + '[examples]\nkind = "pears"\n', "must be one of pairs, order, full, document"),
        (GOOD + "[[phase]]\nshare = 0.5\n", "add up to 0.5, not 1"),
        (GOOD + "[[phase]]\nshare = 0.5\n[[phase]]\nshare = 0.5\nlenght = 3\n", "did you mean length"),
        (GOOD + "[[phase]]\nlength = 64\n", "[phase 1] share: give each phase its share"),
        (GOOD + "[[phase]]\nshare = 1.0\ntokens = 5\n", "cannot be smaller than a pack"),
        (GOOD + '[optimizer]\nkind = "adam"\n', "must be one of adamw, muon"),
    ],
)
def test_a_wrong_key_is_named(text, said):
    with pytest.raises(EverybertError) as caught:
        parse(text)
    assert str(caught.value).startswith("mine.toml: "), str(caught.value)
    assert said in str(caught.value)


def test_broken_toml_names_the_line():
    with pytest.raises(EverybertError, match="line 2"):
        parse("steps = 1\n[model\n")


def test_overrides_stand_for_lines():
    recipe = parse(GOOD, steps=7, model__layers=3, run__save_every=2)
    assert (recipe.steps, recipe.config.layers, recipe.run.save_every) == (7, 3, 2)
    assert parse(GOOD, budget="5m", schedule__warmup=10).steps is None
    with pytest.raises(EverybertError, match="layerz"):
        parse(GOOD, model__layerz=3)
    with pytest.raises(EverybertError, match=r"^mask.rate=abc: must be a number or a list of 2, not 'abc'$"):
        parse(GOOD, mask__rate="abc")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"nosuch__key": 1}, "nosuch.key=1: there is no such key"),
        ({"name": 1}, "name=1: there is no such key"),
        ({"phase__0__x": 1}, "phase.0.x=1: there is no such key; did you mean phase?"),
        ({"steps__x": 1}, "steps.x=1: steps is not a table"),
        ({"batch": 3}, "batch=3: is a table"),
        ({"model": [1]}, "model=[1]: is a table"),
        ({"phase": [1]}, "phase=[1]: write [[phase]]"),
    ],
)
def test_an_override_is_blamed_not_the_file(override, said):
    with pytest.raises(EverybertError) as caught:
        parse(GOOD, **override)
    assert str(caught.value).startswith(said)


VALUES = (3, -1, 0.5, math.nan, "x", [], [1, "x"], {"x": 1}, True, "2020-01-01")


def test_any_value_in_any_place_is_read_or_refused():
    """Every key of every table with values of every kind."""
    kinds = {**TABLES, "examples": ExampleConfig, "mask": MaskingConfig, "model": EncoderConfig}
    tables = ["seed", "steps", "budget", *kinds]
    inner = [f"{table}__{field.name}" for table, kind in kinds.items() for field in dataclasses.fields(kind)]
    for key in [*tables, *inner, "phase", "mask__boundary", "model__init", "model__preset"]:
        for value in VALUES:
            with contextlib.suppress(EverybertError):
                parse(GOOD, **{key: value})
                assert value == value, key


def test_differences_name_keys_but_not_how_the_machine_is_used():
    one = parse(GOOD)
    assert parse(GOOD, run__workers=2).differences(one.plain()) == []
    assert parse(GOOD, schedule__peak=2e-3, seed=1).differences(one.plain()) == ["schedule.peak", "seed"]


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("2d", 172800)])
def test_times(text, value):
    assert seconds(text) == value


def test_unknown_recipe_lists_the_known():
    with pytest.raises(EverybertError, match="bert-base"):
        Recipe.load("bert-bass")


@pytest.mark.parametrize("name", names())
def test_shipped_recipes_are_valid(name):
    recipe = Recipe.load(name)
    assert recipe.steps or recipe.budget
    longest = max(phase.length for phase in recipe.phases)
    if recipe.model.init is None:
        assert longest <= recipe.config.max_positions


def test_the_promised_recipes_are_there():
    promised = "bert-base bert-large multilingual-bert roberta-base xlm-r albert-base longformer spanbert distilbert"
    assert {*promised.split(), "academic-24h", "small-20m", "tiny-cpu"} <= set(names())
