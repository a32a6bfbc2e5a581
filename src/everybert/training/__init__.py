"""The one training loop, its optimizers, state and plans."""
