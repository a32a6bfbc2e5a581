"""A recipe for a toy that trains in a second."""

from everybert.training.recipe import Recipe

TINY = """
seed = 3
steps = 40
[model]
layers = 2
hidden_size = 32
heads = 2
intermediate_size = 64
max_positions = 64
[examples]
kind = "pairs"
[batch]
tokens = 512
pack = 256
length = 32
[schedule]
peak = 5e-3
warmup = 4
[run]
log_every = 5
evaluate_every = 0
save_every = 7
evaluate_packs = 2
tensorboard = false
"""


def tiny_recipe(**changes):
    return Recipe.parse(TINY, "tiny.toml", **changes)
