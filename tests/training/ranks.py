"""Trains on forked ranks of one warm process, and stops, kills or misleads them. Called by test_distributed.py.

Usage: ranks.py CORPUS OUT [rest], prints one JSON object: what every run said, by name.
"""

import copy
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import time
import traceback
import zlib

import torch
import torch._dynamo  # imported once here, not in each child
import torch.distributed.fsdp
from grammar import ADJECTIVES
from toy import tiny_recipe

from everybert.errors import EverybertError
from everybert.model.config import PRESETS, preset
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.training import checkpoint, data, distributed, optim, pretrain
from everybert.training.finetune import finetune
from everybert.training.step import Compute

BASE = {
    "steps": 4,
    "schedule__warmup": 1,
    "batch__tokens": 320,
    "batch__pack": 64,
    "run__save_every": 2,
    "run__log_every": 1,
}
"""Five packs a step, which neither 2 nor 4 ranks share evenly."""
STOP = 1
"""The step in which half-done runs are asked to stop."""
MODES = ("data-1", "data-2", "data-4", "sharded-2", "sharded-4")
ELASTIC = [(mode, mode) for mode in MODES]
ELASTIC += [("data-1", "data-2"), ("data-2", "data-4"), ("data-4", "data-1")]
ELASTIC += [("sharded-4", "sharded-2"), ("sharded-2", "data-1"), ("data-1", "sharded-4")]
"""Who goes on where whom stopped."""
REST = [(a, b) for a in MODES for b in MODES if (a, b) not in ELASTIC]
DEADLINE = 120.0


ALBERT = {"model__family": "albert", "model__layer_groups": 1, "model__embedding_size": 16}


def launch(size: int, work) -> list[int]:
    """Run work(rank) on so many forked ranks; their exit codes, or minus the signal. None outlives the deadline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
    """Note which packs this rank sees, and how its gradients and moments lie; ask to stop in step `stop`."""
    steps, step, run = data.Feed.steps, optim.Optimizer.step, distributed.Sharded.run

    def watched_steps(self, start, total, place):
        for n, share in enumerate(steps(self, start, total, place), start):
            notes["packs"] += [
                (n, item.number, zlib.crc32(item.batch.tokens_T.numpy())) for item in share.items if item.tokens
            ]
            if n == stop and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            yield share

    def watched_step(self, *args, **kwargs):
        norm = step(self, *args, **kwargs)
        notes["norms"].append(float(norm))
        state = self.adam.state.values()
        notes["bytes"] = sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in state)
        notes["weights"] = sum(p.untyped_storage().nbytes() for p in self.held.values())
        return norm

    def watched_run(self, batch, last=True):
        out = run(self, batch, last)
        notes["exchanged"].append((last, any(p.grad is not None for p in self.master.parameters())))
        return out

    data.Feed.steps, optim.Optimizer.step, distributed.Sharded.run = watched_steps, watched_step, watched_run


def train(corpus: str, out: pathlib.Path, size: int, stop=None, before=None, **changes) -> dict:
    """One run; what its ranks noted. `before(rank, settings)` may change a rank's world."""

    def work(rank: int) -> None:
        notes: dict = {"packs": [], "norms": [], "exchanged": []}
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


def tune(base: pathlib.Path, out: pathlib.Path, size: int, task: str = "classify", **settings) -> dict:
    """Fine-tune on so many ranks; what each of them scored."""
    nouns = [("dog", "animal"), ("farmer", "person"), ("cat", "animal"), ("judge", "person"), ("fox", "animal")]
    rows = [(f"the {ADJECTIVES[i % 7]} {nouns[i % 5][0]}", nouns[i % 5][1]) for i in range(45)]
    if task == "embed":
        rows = [(text, f"{text} {label}") for text, label in rows]

    def work(rank: int) -> None:
        notes: dict = {}
        try:
            found = finetune(base, task, rows, rows[:15], out, epochs=8, lr=3e-3, batch_size=8, quiet=True, **settings)
            run = found.runs[0]
            total = sum(float(p.detach().double().abs().sum()) for p in run.network.parameters())
            notes = {"scores": run.scores, "epoch": run.epoch, "seed": run.seed, "total": total}
        except EverybertError as error:
            notes["refused"] = str(error)
            raise
        finally:
            out.with_name(f"{out.name}-{rank}.json").write_text(json.dumps(notes))

    codes = launch(size, work)
    ranks = [json.loads(out.with_name(f"{out.name}-{rank}.json").read_text()) for rank in range(size)]
    return {"codes": codes, "ranks": ranks}


def families(out: pathlib.Path) -> dict:
    """For each family and precision: gradients of two sharded ranks beside those of two that hold everything."""
    small = {"vocab_size": 64, "hidden_size": 16, "layers": 2, "heads": 2, "intermediate_size": 32}
    chosen = {preset(name).family: preset(name) for name in reversed(PRESETS)}

    def loss(network, batch):
        x_TH = network.encoder(batch)
        total = network.mlm_logits(x_TH).float().square().mean()
        total = total + network.sequence_logits(x_TH, batch, "nsp").float().square().mean()
        return total, total.detach()[None]

    def compare(config, dtype, world) -> tuple[int, float]:
        torch.manual_seed(0)
        networks = [Network(config, {"mlm": None, "nsp": None}).eval()]
        networks.append(copy.deepcopy(networks[0]))
        whole = Compute(networks[0], loss, "cpu", dtype)
        cut = distributed.Sharded(networks[1], loss, torch.device("cpu"), dtype, False, world)
        batch = Ragged.flat((torch.arange(24) + world.rank) % 60 + 2, [8, 6, 10])
        for last in (False, True):
            whole.run(batch)
            cut.run(batch, last)
        whole.reduce(world)
        seen, worst = 0, 0.0
        for one, two in zip(networks[0].parameters(), networks[1].parameters()):
            assert (one.grad is None) == (two.grad is None)
            if one.grad is not None:
                seen += bool(one.grad.any())
                apart = (one.grad - two.grad.full_tensor()).abs().max() / one.grad.abs().max().clamp(min=1e-12)
                worst = max(worst, float(apart))
        return seen, worst

    def work(rank: int) -> None:
        world = distributed.World.join()
        found = {}
        for family, config in chosen.items():
            own = small | ({"embedding_size": 8} if config.embedding_size else {})
            own |= {"windows": config.windows[:2]} if config.windows else {}
            for dtype in (torch.float32, torch.bfloat16):
                found[f"{family} {dtype}"] = compare(config.replace(**own), dtype, world)
        (out / f"families-{rank}.json").write_text(json.dumps(found))

    codes = launch(2, work)
    return {"codes": codes, "ranks": [json.loads((out / f"families-{rank}.json").read_text()) for rank in range(2)]}


def mode(name: str) -> tuple[int, dict]:
    """ "data-2" → two ranks, data parallel."""
    kind, size = name.split("-")
    return int(size), {"run__parallel": kind}


def another_recipe(rank: int, settings: dict) -> None:
    if rank == 1:
        settings["recipe"] |= {"run__save_every": 3}


def another_disk(rank: int, settings: dict) -> None:
    distributed.World.see = functools.partialmethod(distributed.World.see, patience=0.3)
    settings["out"] += f"/host-{rank}"


def full_disk(rank: int, settings: dict) -> None:
    def refuse(path):
        raise EverybertError("the disk is full")

    checkpoint.atomic_folder = refuse


def main(corpus: str, folder: str, part: str = "first") -> dict:
    out, found = pathlib.Path(folder), {}

    def run(name: str, size: int, **options) -> None:
        found[name] = train(corpus, out / name, size, **options)

    def resume(first: str, then: str) -> None:
        shutil.copytree(out / f"{first}-half", out / f"{first}>{then}")
        size, how = mode(then)
        run(f"{first}>{then}", size, **how)

    for name in MODES:
        size, how = mode(name)
        run(name, size, **how)
        run(f"{name}-half", size, stop=STOP, **how)
    if part == "rest":
        for pair in REST:
            resume(*pair)
        for name in MODES:
            size, how = mode(name)
            for time_ in range(3):
                run(f"{name}-again-{time_}", size, **how)
        return found
    for pair in ELASTIC:
        resume(*pair)
    for name in ("data-1", "data-4", "sharded-4"):
        size, how = mode(name)
        run(f"few-{name}", size, batch__tokens=128, **how)  # two packs a step
    for name in ("data-1", "sharded-2"):
        size, how = mode(name)
        run(f"bf16-{name}", size, run__dtype="bfloat16", **how)
        run(f"albert-{name}", size, **ALBERT, **how)
    run("recompute-sharded-2", 2, run__checkpointing=True, run__parallel="sharded")
    for size in (1, 2):
        run(f"muon-data-{size}", size, optimizer__kind="muon")
    found["families"] = families(out)
    base = out / "data-1" / "model"
    found["tuned-1"] = tune(base, out / "tuned-1", 1, accumulate=2, seeds=2)
    found["tuned-2"] = tune(base, out / "tuned-2", 2, seeds=2)
    found["tuned-embed"] = tune(base, out / "tuned-embed", 2, "embed")
    run("another-recipe", 2, before=another_recipe)
    run("another-disk", 2, before=another_disk)
    run("full-disk", 2, before=full_disk)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
