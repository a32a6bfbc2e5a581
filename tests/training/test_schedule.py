"""Learning rate, mask rate, length and batch size are pure functions of the step."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.training.checkpoint import Progress
from everybert.training.recipe import Recipe, ScheduleSettings
from everybert.training.schedule import Planner, learning_rate, moment, plan_steps

kinds = st.sampled_from(["linear", "cosine", "wsd"])


def recipe(text: str) -> Recipe:
    head = "[batch]\npack = 1000\nlength = 100\ntokens = 4000\n[schedule]\nwarmup = 10\n"
    return Recipe.parse(text + head, "r.toml")


@settings(deadline=None)
@given(kind=kinds, total=st.integers(20, 500), warmup=st.integers(0, 15), floor=st.floats(0, 0.5))
def test_rises_then_never_rises_again(kind, total, warmup, floor):
    rule = ScheduleSettings(peak=1.0, kind=kind, warmup=warmup, floor=floor)
    rates = [learning_rate(rule, s, total) for s in range(total)]
    assert all(0 < r <= 1 for r in rates)
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b for a, b in itertools.pairwise(rates[warmup:]))
    assert rates[warmup] == 1
    assert learning_rate(rule, total, total) == pytest.approx(floor)


def test_linear_is_the_papers():
    rule = ScheduleSettings(peak=1e-4, warmup=10_000)
    assert learning_rate(rule, 4_999, 1_000_000) == pytest.approx(0.5e-4)
    assert learning_rate(rule, 505_000, 1_000_000) == pytest.approx(0.5e-4)


def test_wsd_stays_then_falls():
    rule = ScheduleSettings(peak=1.0, kind="wsd", warmup=10, decay=0.5)
    assert {learning_rate(rule, s, 100) for s in range(10, 50)} == {1.0}
    assert learning_rate(rule, 75, 100) == 0.5


def test_phases_and_ramps():
    phases = "[[phase]]\nshare = 0.9\nlength = 50\ntokens = [1000, 4000]\n[[phase]]\nshare = 0.1\nrate = [0.2, 0.1]\n"
    r = recipe("steps = 100\n" + phases)
    first, late, second = (moment(r, s, 100) for s in (0, 89, 90))
    assert (first.phase, first.length, first.packs, first.mask_rate) == (0, 50, 1, 0.15)
    assert (late.packs, second.packs, second.phase, second.length) == (4, 4, 1, 100)
    assert second.mask_rate == pytest.approx(0.2)
    assert moment(r, 99, 100).mask_rate == pytest.approx(0.11)


def test_mask_rate_may_follow_the_run():
    r = recipe("steps = 100\n[mask]\nrate = [0.3, 0.1]\n")
    assert [round(moment(r, s, 100).mask_rate, 3) for s in (0, 50, 99)] == [0.3, 0.2, 0.102]


@settings(deadline=None)
@given(left=st.floats(1, 1000), pace=st.floats(0.01, 1))
def test_plan_fills_the_time(left, pace):
    r = recipe('budget = "20m"\n[[phase]]\nshare = 0.5\ntokens = [1000, 4000]\n[[phase]]\nshare = 0.5\n')
    total = plan_steps(r, 30, left, pace)
    packs = sum(moment(r, s, total).packs for s in range(30, total))
    if total > 31:
        assert packs * pace <= left * 1.1
        assert (packs + 5) * pace >= left * 0.9


def test_planner_freezes_and_corrects():
    r = recipe('budget = "1000s"\n')
    planner, progress = Planner(r), Progress()
    changes = []
    while not progress.finished:
        progress.step += 1
        progress.seconds += 4.0 if progress.step <= 150 else 5.0  # slower from step 150 on
        if planner(progress):
            changes.append((progress.step, progress.total))
    assert changes[0] == (20, 250)  # 4 s a step
    assert progress.plans == 5
    assert progress.seconds == pytest.approx(1000, rel=0.02)


def test_a_late_compilation_does_not_shorten_the_run():
    r = recipe('budget = "200s"\n')
    planner, progress = Planner(r), Progress()
    while not progress.finished:
        progress.step += 1
        progress.seconds += 20.0 if progress.step in (1, 5, 7) else 0.1
        planner(progress)
    assert progress.seconds == pytest.approx(200, rel=0.02)
