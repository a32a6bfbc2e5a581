"""Learning rate, mask rate, sequence length and number of packs: pure functions of the step.

A run with a time budget has no number of steps until its speed is measured: `total` is None during the warm-up. From
then on the planned number is saved with the run, so that a resumed run agrees with an uninterrupted one.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median_low
from typing import TYPE_CHECKING

from everybert.training.recipe import Pair, Recipe, ScheduleSettings, seconds

if TYPE_CHECKING:
    from everybert.training.checkpoint import Progress

MEASURED_STEPS = 20
"""Steps timed before the first plan."""
COMPILING_STEPS = 3
"""The first steps of a process compile and warm up, and are not timed."""
REPLAN_AT = (0.25, 0.5, 0.75, 0.95)
"""Shares of the budget after which the run is planned again: later phases may be slower than the first."""
CHUNKS = 9
"""Groups of timed steps; the speed of the median group counts, so that single stalls do not matter."""


@dataclass(frozen=True)
class Moment:
    """The settings of one step."""

    phase: int
    length: int
    """Longest sequence."""
    packs: int
    """Number of packs, over all ranks."""
    mask_rate: float


def moment(recipe: Recipe, step: int, total: int | None) -> Moment:
    """The settings of a step in a run of `total` steps."""
    number, through, done = 0, 0.0, 0.0
    if total is not None:
        ends = [round(total * share) for share in accumulate(phase.share for phase in recipe.phases)]
        number = min(bisect_right(ends, step), len(ends) - 1)
        begin = ends[number - 1] if number else 0
        through, done = (step - begin) / max(1, ends[number] - begin), step / total
    phase = recipe.phases[number]
    packs = max(1, round(_between(phase.tokens, through) / recipe.batch.pack))
    rate = _between(phase.rate, through) if phase.rate is not None else _between(recipe.mask_rate, done)
    return Moment(number, phase.length, packs, rate)


def learning_rate(schedule: ScheduleSettings, step: int, total: int | None) -> float:
    """Linear warm-up to the peak, then decay to the floor, by the kind of schedule; `step` counts from 0."""
    warm = schedule.warmup if isinstance(schedule.warmup, int) else round(schedule.warmup * (total or 0))
    if step < warm:
        return schedule.peak * (step + 1) / warm
    if total is None:
        return schedule.peak
    begin = max(warm, round(total * (1 - schedule.decay))) if schedule.kind == "wsd" else warm
    if step < begin:
        return schedule.peak
    left = max(0.0, (total - step) / max(1, total - begin))
    if schedule.kind == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return schedule.peak * (schedule.floor + (1 - schedule.floor) * left)


class Planner:
    """Fits the number of steps to the time budget: when the speed is known, and again as later phases show theirs."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.budget is not None
        self.recipe, self.budget = recipe, seconds(recipe.budget)
        self.times: list[tuple[float, int]] = []  # at the beginning of each step since the last plan: seconds, packs
        self.packs = self.calls = 0

    def __call__(self, progress: "Progress") -> bool:
        """Call after each step; returns whether `progress.total` has changed."""
        self.calls += 1
        if self.calls >= COMPILING_STEPS:
            self.times.append((progress.seconds, self.packs))
        self.packs += moment(self.recipe, progress.step - 1, progress.total).packs
        if not self._due(progress):
            return False
        progress.total = plan_steps(self.recipe, progress.step, self.budget - progress.seconds, self._per_pack())
        progress.plans += 1
        self.times = self.times[-1:]
        return True

    def _per_pack(self) -> float:
        """Seconds per pack in the median group: compilations, saves and evaluations slow down single groups only."""
        steps = len(self.times) - 1
        parts = min(steps, CHUNKS)
        edges = [self.times[round(i * steps / parts)] for i in range(parts + 1)]
        return median_low((end[0] - start[0]) / (end[1] - start[1]) for start, end in pairwise(edges))

    def _due(self, progress: "Progress") -> bool:
        steps = len(self.times) - 1
        if steps < 2:
            return False
        if progress.plans:
            return progress.plans <= len(REPLAN_AT) and progress.seconds >= REPLAN_AT[progress.plans - 1] * self.budget
        if progress.step >= max(MEASURED_STEPS, self.recipe.schedule.warmup):
            return True
        share = (progress.seconds - self.times[0][0]) / self.budget
        return share >= (0.1 if steps >= MEASURED_STEPS else 0.3)


def plan_steps(recipe: Recipe, step: int, left: float, seconds_per_pack: float) -> int:
    """The number of steps of a run whose remaining packs take `left` seconds; at least one more step."""
    packs = max(0.0, left) / seconds_per_pack
    more = range(step + 2, step + 2 + math.ceil(packs))
    # The packs still to do grow with the number of steps.
    return step + 1 + bisect_right(more, packs, key=lambda total: _packs_between(recipe, step, total))


def _packs_between(recipe: Recipe, step: int, total: int) -> float:
    """Number of packs in the steps `step` … `total`, estimated from a hundred samples."""
    count = total - step
    samples = min(count, 100)
    at = (step + (i + 0.5) * count / samples for i in range(samples))
    return sum(moment(recipe, int(s), total).packs for s in at) * count / samples


def _between(ends: Pair | tuple[int, int], share: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * min(1.0, share)
