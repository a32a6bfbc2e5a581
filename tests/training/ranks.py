"""Trains on forked ranks of one warm process, and stops, kills or misleads them. Called by test_distributed.py.

Usage: ranks.py CORPUS OUT [rest], prints one JSON object: what every run said, by name.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import sys
import time
import traceback
import zlib

import torch
import torch._dynamo  # imported once here, not in each child
from toy import tiny_recipe

from everybert.errors import EverybertError
from everybert.training import checkpoint, data, optim, pretrain
from everybert.training.finetune import finetune

BASE = {
    "steps": 4,
    "schedule__warmup": 1,
    "batch__tokens": 320,
    "batch__pack": 64,
    "run__save_every": 2,
    "run__log_every": 1,
}
"""Five packs a step, which neither 2 nor 4 ranks share evenly."""
RTD = {
    "examples__kind": "full",
    "model__family": "electra",
    "model__embedding_size": 16,
    "rtd__width": 0.5,
    "rtd__sharing": "disentangled",
}
"""Replaced-token detection: two networks."""
PHASES = [{"share": 0.5, "kind": "full"}, {"share": 0.5}]
"""Running text, then pairs."""
STOP = 1
"""The step in which half-done runs are asked to stop."""
SIZES = (1, 2, 4)
ELASTIC = [(size, size) for size in SIZES] + [(1, 2), (2, 4), (4, 1)]
"""How many ranks resume what how many saved."""
REST = [(a, b) for a in SIZES for b in SIZES if (a, b) not in ELASTIC]
DEADLINE = 120.0


def free_port() -> int:
    """A port that no connection of this busy machine is given by chance: below those that Linux hands out."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def launch(size: int, work) -> list[int]:
    """Run work(rank) on so many forked ranks; their exit codes, or minus the signal. None outlives the deadline."""
    port = free_port()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            torch.set_num_threads(1)
            code = 1
            try:
                work(rank)
                code = 0
            except EverybertError as error:
                print(error, file=sys.stderr)
                code = 2
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    codes, deadline = {}, time.monotonic() + DEADLINE
    while len(codes) < size:
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def watch(rank: int, stop: int | None, notes: dict) -> None:
    """Note which packs this rank sees, and the norms of its gradients; ask to stop in step `stop`."""
    steps, step = data.RunContext.steps, optim.Optimizer.step

    def watched_steps(self, start, total, place):
        for n, share in enumerate(steps(self, start, total, place), start):
            notes["packs"] += [(n, item.place.number, zlib.crc32(item.batch.tokens_T.numpy())) for item in share.items]
            if n == stop and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            yield share

    def watched_step(self, *args, **kwargs):
        norm = step(self, *args, **kwargs)
        notes["norms"].append(float(norm))
        return norm

    data.RunContext.steps, optim.Optimizer.step = watched_steps, watched_step


def train(corpus: str, out: pathlib.Path, size: int, stop=None, before=None, **changes) -> dict:
    """One run; what its ranks noted. `before(rank, settings)` may change a rank's world."""

    def work(rank: int) -> None:
        notes: dict = {"packs": [], "norms": []}
        settings = {"recipe": BASE | changes, "out": str(out)}
        watch(rank, stop, notes)
        if before:
            before(rank, settings)
        try:
            pretrain.pretrain(tiny_recipe(**settings["recipe"]), corpus, settings["out"], device="cpu", quiet=True)
        except EverybertError as error:
            notes["refused"] = str(error)
            raise
        finally:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"rank-{rank}.json").write_text(json.dumps(notes))

    codes = launch(size, work)
    return {"codes": codes, "ranks": [json.loads((out / f"rank-{r}.json").read_text()) for r in range(size)]}


def tune(base: pathlib.Path, out: pathlib.Path) -> dict:
    """Two ranks try to fine-tune."""

    def work(rank: int) -> None:
        try:
            finetune(base, "classify", [("a", "b")], out=out)
        except EverybertError as error:
            out.with_name(f"{out.name}-{rank}.json").write_text(json.dumps({"refused": str(error)}))
            raise

    codes = launch(2, work)
    return {"codes": codes, "ranks": [json.loads(out.with_name(f"{out.name}-{r}.json").read_text()) for r in (0, 1)]}


def another_recipe(rank: int, settings: dict) -> None:
    if rank == 1:
        settings["recipe"] |= {"run__save_every": 3}


def full_disk(rank: int, settings: dict) -> None:
    def refuse(path):
        raise EverybertError("the disk is full")

    checkpoint.atomic_folder = refuse


def main(corpus: str, folder: str, part: str = "first") -> dict:
    out, found = pathlib.Path(folder), {}

    def run(name: str, size: int, **options) -> None:
        found[name] = train(corpus, out / name, size, **options)

    def resume(first: int, then: int) -> None:
        shutil.copytree(out / f"{first}-half", out / f"{first}>{then}")
        run(f"{first}>{then}", then)

    for size in SIZES:
        run(f"{size}", size)
        run(f"{size}-half", size, stop=STOP)
    if part == "rest":
        for pair in REST:
            resume(*pair)
        for size in SIZES:
            for time_ in range(3):
                run(f"{size}-again-{time_}", size)
        return found
    for pair in ELASTIC:
        resume(*pair)
    for size in (1, 4):
        run(f"few-{size}", size, batch__tokens=128)  # two packs a step
    for size in (1, 2):
        run(f"bf16-{size}", size, run__dtype="bfloat16")
        run(f"muon-{size}", size, optimizer__kind="muon")
        run(f"rtd-{size}", size, **RTD)
        run(f"phases-{size}", size, optimizer__weight_decay=0.1, phase=PHASES)
    run("recompute-2", 2, run__checkpointing=True)
    base = out / "1" / "model"
    found["tuned"] = tune(base, out / "tuned")
    run("another-recipe", 2, before=another_recipe)
    run("full-disk", 2, before=full_disk)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
