"""Where a model computes."""

from __future__ import annotations

import torch

from everybert.errors import EverybertError


def pick_device(asked: torch.device | str | None, gpu: bool = True) -> torch.device:
    """The device asked for, if it is there; else a GPU where there is one (and `gpu`), else the CPU."""
    if asked is None:
        return torch.device("cuda" if gpu and torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(f"torch sees {torch.cuda.device_count()} GPUs")
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        if device.type != "cuda":  # there a rank takes a GPU of its own, later
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # what torch says where a device is not there
        why = str(error).strip().split("\n")[0][:80]
        raise EverybertError(
            f"device {str(asked)!r} cannot be used here ({why}): give cpu, or none, to take a GPU where there is one"
        ) from None
    return device
