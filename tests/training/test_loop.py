"""What the loop measures of itself."""

from __future__ import annotations

import pytest
import torch

from everybert.errors import EverybertError
from everybert.training.loop import Guard, Meter


class Device:
    """An event of a device: when it is asked, whether it has come to pass."""

    def __init__(self) -> None:
        self.idle = True

    def query(self) -> bool:
        return self.idle

    def record(self) -> None:
        self.idle = False


def test_waiting_counts_only_while_the_device_has_nothing_to_do():
    meter = Meter(1, torch.device("cpu"))
    meter.waited(0.25)
    assert meter.wait == 0.25  # without a device of its own, the loop waits itself
    device = Device()
    meter.done = device  # type: ignore[assignment]
    meter.add(torch.ones(1), 10)
    meter.waited(5.0)  # the device still computes: nothing is lost
    assert meter.wait == 0.25
    device.idle = True
    meter.waited(0.5)
    assert meter.wait == 0.75


def test_the_guard_gives_the_advice_of_the_job():
    guard = Guard((1.0, 0.0, 0.0), 3.0, torch.device("cpu"))
    for _ in range(5):
        loss = torch.tensor(float("nan"))
        guard.note(loss, guard.judge(loss))
    values: dict = {}
    guard.check(6, 5, values, hint="lower lr")
    assert values == {"skipped": 5}
    with pytest.raises(EverybertError, match=r"the last 5 steps were skipped.*: lower lr$"):
        guard.check(5, 5, {}, hint="lower lr")
