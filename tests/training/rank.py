"""One rank of a run under torchrun: trains, and saves the gradient of the first step. Called by test_distributed.py.

Usage: rank.py CORPUS OUT
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from toy import tiny_recipe

from everybert.training import optim
from everybert.training.pretrain import pretrain


def main(corpus: str, out: str) -> None:
    torch.set_num_threads(1)
    taken = optim.Optimizer.step
    seen = []

    def step(self, *args, **kwargs):
        if not seen:
            seen.append({self.names[p]: p.grad.clone() for p in self.parameters if p.grad is not None})
        return taken(self, *args, **kwargs)

    optim.Optimizer.step = step
    recipe = tiny_recipe(steps=6, batch__tokens=1280, run__save_every=3)
    pretrain(recipe, corpus, out, device="cpu", quiet=True)
    if not Path(out, "gradient.safetensors").exists():
        save_file(seen[0], Path(out, "gradient.safetensors"))


if __name__ == "__main__":
    main(*sys.argv[1:])
