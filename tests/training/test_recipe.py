"""Recipes: a wrong key is named with its line; what is omitted has a default; every shipped recipe is valid."""

import pytest

from everybert.errors import EverybertError
from everybert.training.recipe import Recipe, Source, names, seconds

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
    return Recipe.parse(Source(text, "mine.toml"), **overrides)


def test_reads_a_recipe():
    recipe = parse(GOOD)
    assert (recipe.steps, recipe.config.hidden_size, recipe.batch.pack) == (100, 128, 2048)
    assert recipe.phases[0].tokens == (4096, 4096)
    assert recipe.mask_rate == (0.15, 0.15)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (GOOD + "peek = 2\n", 11, "[schedule] peek: there is no such key; did you mean peak?"),
        ("stepz = 3\n" + GOOD, 1, "stepz: there is no such key; did you mean steps?"),
        (GOOD + "[shedule]\npeak = 1\n", 11, "shedule"),
        (GOOD.replace("peak = 1e-3", 'peak = "high"'), 10, "[schedule] peak: must be a number, not 'high'"),
        (GOOD.replace("pack = 2048", "pack = 8192"), 6, "[batch] tokens: a step cannot be smaller than a pack"),
        (GOOD.replace("length = 128", "length = 4096"), 7, "[batch] pack: a pack must hold a sequence"),
        ('budget = "20m"\n' + GOOD, 1, "budget: give either steps or budget"),
        (GOOD.replace("steps = 100", 'budget = "soon"'), 2, 'budget: is a time such as "20m"'),
        (GOOD.replace("steps = 100", 'budget = "20m"'), 2, "warmup must be a number of steps"),
        (GOOD.replace("bert-tiny", "bert-tinny"), 4, "did you mean bert-tiny"),
        (GOOD.replace('preset = "bert-tiny"', "vocab_size = 100"), 4, "tokenizer decides"),
        (GOOD.replace('"bert-tiny"', '"bert-tiny"\ninit = "x"'), 4, "contradicts init"),
        (GOOD.replace('preset = "bert-tiny"', 'init = "x"\nlayers = 3'), 5, "contradicts init"),
        (GOOD.replace('"bert-tiny"', '"bert-tiny"\nlongformer = 4096'), 5, "needs init"),
        (GOOD.replace('"bert-tiny"', '"bert-tiny"\nheads = 3'), 5, "not a multiple of heads"),
        (GOOD + "[mask]\nboundary = true\n", 12, 'needs strategy = "span"'),
        (GOOD + "[mask]\nrate = 1.5\n", 12, "rate"),
        (GOOD + '[examples]\nkind = "pears"\n', 12, "must be one of pairs, order, full, document"),
        (GOOD + "[[phase]]\nshare = 0.5\n", 12, "add up to 0.5, not 1"),
        (GOOD + "[[phase]]\nshare = 0.5\n[[phase]]\nshare = 0.5\nlenght = 3\n", 15, "did you mean length"),
        (GOOD + "[[phase]]\nsteps = 60\n[[phase]]\nsteps = 60\n", 2, "is 100, but the phases have 120 together"),
        (GOOD + "[[phase]]\nsteps = 0\n", 12, "must be at least 1"),
        (GOOD + "[[phase]]\nlength = 64\n", 11, "either its share of the run or its steps"),
        (GOOD + "[[phase]]\nshare = 1.0\ntokens = 5\n", 13, "cannot be smaller than a pack"),
        (GOOD + '[optimizer]\nkind = "adam"\n', 12, "must be one of adamw, muon"),
    ],
)
def test_a_wrong_key_is_named_with_its_line(text, line, said):
    with pytest.raises(EverybertError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"mine.toml, line {line}:"), str(caught.value)
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


def test_differences_name_keys_but_not_how_the_machine_is_used():
    one = parse(GOOD)
    assert parse(GOOD, run__workers=2).differences(one.plain()) == []
    assert parse(GOOD, schedule__peak=2e-3, seed=1).differences(one.plain()) == ["schedule.peak", "seed"]


def test_phases_by_steps_give_the_total():
    recipe = parse(GOOD.replace("steps = 100\n", "") + "[[phase]]\nsteps = 30\nlength = 64\n[[phase]]\nsteps = 10\n")
    assert recipe.steps == 40
    assert [(p.share, p.length) for p in recipe.phases] == [(0.75, 64), (0.25, 128)]


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
