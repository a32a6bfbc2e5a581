"""The training loop: fetch, forward, backward, step; then log, evaluate, save.

Pre-training, distillation and fine-tuning describe what they train in a `TrainingJob`. Dropout is drawn from (seed,
step, pack), so that a run that is killed and resumed continues bit for bit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from everybert.corpus.masking import make_key
from everybert.errors import EverybertError
from everybert.training.checkpoint import Progress
from everybert.training.data import Step
from everybert.training.distributed import World
from everybert.training.logs import Logs, progress_line
from everybert.training.optim import Optimizer
from everybert.training.recipe import RunSettings
from everybert.training.step import Compute

Figures = dict[str, float]


@dataclass
class TrainingJob:
    """Everything that the loop needs to train something."""

    compute: Compute
    optimizer: Optimizer
    steps: Callable[[Progress], Iterator[Step]]
    """The batches of all steps from the current one on."""
    lr: Callable[[Progress], float]
    """The learning rate of the next step."""
    names: tuple[str, ...]
    """The names of the loss function's figures, which add up to the loss."""
    run: RunSettings
    save: Callable[[Progress], object] = lambda progress: None
    """Write a checkpoint (called on every rank; rank 0 writes)."""
    evaluate: Callable[[Progress], Figures] | None = None
    """Figures on held-out data; called on rank 0."""
    plan: Callable[[Progress], bool] | None = None
    """Sets `progress.total` if time is limited; returns whether it changed."""
    flops: Callable[[Progress], float] | None = None
    """The share of the peak FLOP/s that one token per second uses, for MFU."""
    seed: int = 0
    memory_hint: str = "use smaller batches"
    """What to do if memory runs out."""
    guard_hint: str = "lower [schedule] peak, or lengthen its warmup, in a new folder; the last checkpoint is intact"
    """What to do if too many steps are skipped."""
    world: World = field(default_factory=World)


def train(job: TrainingJob, progress: Progress, logs: Logs) -> bool:
    """Train until all planned steps are done (True) or the process is asked to stop (False), and save."""
    run, world, compute = job.run, job.world, job.compute
    guard = Guard(progress.guard, run.spike, compute.device)
    meter = Meter(len(job.names), compute.device)
    steps = job.steps(progress)
    began = time.perf_counter() - progress.seconds
    compute.network.train()
    compute.master.train()

    def save() -> None:
        progress.guard = tuple(guard.state.tolist())
        job.save(progress)

    with stop_signals() as stop, explain_memory(job.memory_hint):
        while not progress.finished:
            # Fetch this rank's packs, and sum over the ranks: counts of the step, stop requests, lost workers.
            try:
                packs = next(steps)
            except RuntimeError:  # a stop signal ends the worker processes too
                if not stop.is_set():
                    raise
                packs = None
            counts = torch.zeros(3, dtype=torch.float64) if packs is None else packs.counts
            seconds = time.perf_counter() - began if world.first else 0.0
            state = torch.tensor([stop.is_set(), packs is None, seconds], dtype=torch.float64)
            totals = world.sum(torch.cat((counts, state)))
            tokens, stopping, lost, progress.seconds = totals[2:].tolist()
            if lost or packs is None:
                save()
                break
            meter.waited(packs.wait)

            # Forward and backward, pack by pack. The losses are divided by the counts of the step, so they add up.
            figures = torch.zeros(len(job.names), device=compute.device)
            for number, batch in packs.batches(totals[:3]):
                key = int(make_key(job.seed, progress.step, number)[0])
                torch.default_generator.manual_seed(key)  # torch.manual_seed would seed every device, which is slow
                if compute.device.type == "cuda":
                    torch.cuda.manual_seed(key)
                figures += compute.run(batch)[: len(job.names)]
            world.sum_gradients(job.optimizer.parameters)
            world.sum(figures)

            # Step, unless the loss spiked or the gradient is not finite.
            lr = job.lr(progress)
            loss = figures.sum()
            skip = guard.judge(loss)
            norm = job.optimizer.step(lr, skip)
            guard.note(loss, skip | ~torch.isfinite(norm))
            for parameter in job.optimizer.parameters:  # zero_grad would look through all modules
                parameter.grad = None
            compute.refresh()
            progress.step += 1
            progress.tokens += int(tokens)
            progress.place = packs.place
            meter.add(figures, tokens)
            step, last = progress.step, progress.finished

            if step % run.log_every == 0 or last:
                values = meter.read(job.names, lr, norm, job.flops(progress) if job.flops else None)
                guard.check(run.patience, step, values, job.guard_hint)
                left = progress.seconds / step * (progress.total - step) if progress.total else None
                if world.first:
                    logs.write(step, {**values, "tokens": progress.tokens, "seconds": round(progress.seconds, 3)})
                    logs.show(progress_line(step, progress.total, values, left))
                meter.reset()
            if job.evaluate and world.first and ((run.evaluate_every and step % run.evaluate_every == 0) or last):
                compute.network.eval()
                progress.figures = job.evaluate(progress)
                compute.network.train()
                logs.write(step, progress.figures)
                logs.print(f"step {step:,}: " + "  ".join(f"{k} {v:.4g}" for k, v in progress.figures.items()))
                meter.reset()
            if step % run.save_every == 0 or stopping or last:
                save()
            if stopping:
                break
            if job.plan and not last and job.plan(progress):
                save()  # a run that is killed from here on resumes with the same plan
                steps = job.steps(progress)
    return progress.finished


class Guard:
    """Decides on the device, without a synchronisation, which steps to skip."""

    WARM = 20.0
    """Steps before the running mean of the loss is used."""

    def __init__(self, state: tuple[float, ...], spike: float, device: torch.device) -> None:
        self.spike = spike
        self.state = torch.tensor((*state, 0.0)[:4], device=device)  # older checkpoints lack the last
        """Mean loss; number of steps skipped in a row, skipped in total, and taken."""

    def judge(self, loss: Tensor) -> Tensor:
        """Whether to skip the step (0-d bool): the loss is not finite, or far above its running mean."""
        mean, _, _, taken = self.state.unbind()
        bad = ~torch.isfinite(loss)
        return bad | ((taken >= self.WARM) & (loss > self.spike * mean)) if self.spike else bad

    def note(self, loss: Tensor, bad: Tensor) -> None:
        """Add a step to the running mean, or count it as skipped."""
        mean, streak, skipped, taken = self.state.unbind()
        weight = torch.clamp(1.0 / (taken + 1.0), min=0.02)
        mean = torch.lerp(mean, torch.where(bad, mean, loss), weight)
        self.state = torch.stack((mean, torch.where(bad, streak + 1.0, 0.0), skipped + bad, taken + ~bad))

    def check(self, patience: int, step: int, values: dict[str, Any], hint: str) -> None:
        """Report the skipped steps, and give up if there are too many in a row."""
        _, streak, skipped, _ = self.state.tolist()
        if skipped:
            values["skipped"] = int(skipped)
        if streak >= patience:
            raise EverybertError(
                f"step {step}: the last {int(streak)} steps were skipped, as their loss or gradient was not finite or "
                f"spiked: {hint}"
            )


class Meter:
    """Sums between two lines of the log; reads the device only when a line is due."""

    def __init__(self, figures: int, device: torch.device) -> None:
        self.total = torch.zeros(figures, device=device)
        self.done = torch.cuda.Event() if device.type == "cuda" else None
        """Recorded after the last step that the device was given."""
        self.reset()

    def reset(self) -> None:
        """Start again, so that evaluating and saving do not count as training time."""
        self.total.zero_()
        self.steps, self.tokens, self.wait, self.began = 0, 0.0, 0.0, time.perf_counter()

    def waited(self, seconds: float) -> None:
        """Count the time that the host waited for a batch, unless the device still had work to do."""
        if self.done is None or self.done.query():
            self.wait += seconds

    def add(self, figures: Tensor, tokens: float) -> None:
        """Count a step."""
        self.total += figures
        self.steps += 1
        self.tokens += tokens
        if self.done is not None:
            self.done.record()

    def read(self, names: tuple[str, ...], lr: float, norm: Tensor, share: float | None) -> dict[str, Any]:
        """Mean losses since the last line, and the speed."""
        means = (self.total / max(1, self.steps)).tolist()
        seconds = max(time.perf_counter() - self.began, 1e-9)
        values: dict[str, Any] = {"loss": sum(means)}
        if len(names) > 1:
            values |= dict(zip(names, means))
        values |= {"lr": lr, "gradient_norm": float(norm), "tokens_per_second": self.tokens / seconds}
        if share is not None:
            values["mfu"] = share * self.tokens / seconds
        return values | {"data_wait": self.wait / seconds}


@contextlib.contextmanager
def stop_signals() -> Iterator[Event]:
    """SIGTERM and the first Ctrl-C set a flag instead of ending the process; a second Ctrl-C ends it."""
    flag, owner = Event(), os.getpid()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if flag.is_set() and number == signal.SIGINT and os.getpid() == owner:
            raise KeyboardInterrupt
        flag.set()

    try:
        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # only the main thread may handle signals
        before = {}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def explain_memory(hint: str) -> Iterator[None]:
    """Turn "out of memory" into advice."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise EverybertError(f"out of memory: {hint}") from error
        raise
