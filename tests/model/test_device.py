"""A device that is not there is an answer in words, before anything is loaded."""

import pytest
import torch

from everybert.errors import EverybertError
from everybert.model.device import pick_device


@pytest.mark.parametrize("asked", ["gpu", "cuda:99", "meta", "cuda:"])
def test_what_is_not_there_is_refused(asked):
    with pytest.raises(EverybertError, match=f"device '{asked}' cannot be used here .*: give cpu"):
        pick_device(asked)


def test_what_is_there_is_taken(monkeypatch):
    assert pick_device("cpu") == pick_device(torch.device("cpu")) == torch.device("cpu")
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: int(there))
        assert pick_device(None).type == ("cuda" if there else "cpu")
        assert pick_device(None, gpu=False).type == "cpu"
    assert pick_device("cuda").type == "cuda"
    with pytest.raises(EverybertError, match="torch sees 1 GPUs"):
        pick_device("cuda:1")
