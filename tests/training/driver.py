"""Runs tiny trainings in forked children of one warm process, and kills them. Called by test_resume.py.

Usage: driver.py CORPUS OUT, prints one JSON object.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

import torch
import torch._dynamo  # torch's optimizers import it on first use: once here, not in each child
from toy import tiny_recipe

from everybert.training.pretrain import pretrain

MODIFIED = ((os, "fsync"), (pathlib.Path, "rename"), (pathlib.Path, "replace"), (pathlib.Path, "unlink"))


def die_at(count: int) -> None:
    """Have the count-th call that changes the disk end this process, before or (odd counts) after its work."""
    left = count

    def deadly(original):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0 and count % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for owner, name in MODIFIED:
        setattr(owner, name, deadly(getattr(owner, name)))


def child(corpus: str, out: str, die: int = 0, **changes) -> int:
    """Start a training in a fork; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            if die:
                die_at(die)
            pretrain(tiny_recipe(**changes), corpus, out, device="cpu", quiet=True)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def ending(pid: int) -> int:
    """Exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def until_step(step: int, pid: int, out: str) -> None:
    """Wait until a training has logged that step, or ended."""
    log = pathlib.Path(out, "log.jsonl")
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if log.exists() and f'"step": {step}' in log.read_text():
            break
        time.sleep(0.001)


def main(corpus: str, out: str) -> dict:
    rng = random.Random(0)
    began = time.monotonic()
    found: dict = {"straight": ending(child(corpus, f"{out}/straight"))}
    whole = time.monotonic() - began

    # 17 steps, then SIGKILL: the log tells when.
    pid = child(corpus, f"{out}/seventeen", run__log_every=1)
    until_step(17, pid, f"{out}/seventeen")
    os.kill(pid, signal.SIGKILL)
    found["seventeen"] = [ending(pid), ending(child(corpus, f"{out}/seventeen", run__log_every=1))]

    # SIGKILL at random moments, over and over; a run that gets through is followed by another.
    kills = folders = 0
    while kills < 20:
        pid = child(corpus, f"{out}/random-{folders}")
        time.sleep(rng.uniform(0.1, 0.8) * whole)
        os.kill(pid, signal.SIGKILL)
        code = ending(pid)
        kills += code == -signal.SIGKILL
        folders += code == 0
    codes = [ending(child(corpus, f"{out}/random-{i}")) for i in range(folders + 1)]
    found["random"] = [kills, codes]

    # SIGKILL at the n-th change of the disk: inside saves, pruning and the last writing of the model.
    codes = [ending(child(corpus, f"{out}/writes", die=n)) for n in (1, 2, 4, 6, 8, 9, 10, 11, 13, 16, 20, 25)]
    found["writes"] = [codes, ending(child(corpus, f"{out}/writes"))]

    # SIGTERM: saves, leaves with 0, resumes.
    pid = child(corpus, f"{out}/term", run__log_every=1)
    until_step(20, pid, f"{out}/term")
    os.kill(pid, signal.SIGTERM)
    found["term"] = [ending(pid), ending(child(corpus, f"{out}/term", run__log_every=1))]
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
