"""One rank under torchrun: a run in which the second rank is killed once, in mid-step.

Called by test_distributed.py. Usage: rank.py CORPUS OUT
"""

import os
import signal
import sys

import torch
from ranks import BASE
from toy import tiny_recipe

from everybert.training import loop, pretrain


def die_in(step: int) -> None:
    """Have this process end in the backward pass of a step's second pack, as by a failing machine."""
    make_key, packs = loop.make_key, []

    def counted(seed, now, number):
        packs.extend([number] if now == step else [])
        if len(packs) == 2:
            torch.Tensor.backward = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        return make_key(seed, now, number)

    loop.make_key = counted


def main(corpus: str, out: str) -> None:
    torch.set_num_threads(1)
    second, attempt = os.environ["RANK"] == "1", int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if second and attempt == 0:
        die_in(BASE["run__save_every"] + 1)
    pretrain.pretrain(tiny_recipe(**BASE), corpus, out, device="cpu", quiet=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
