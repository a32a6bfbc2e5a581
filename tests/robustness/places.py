"""A path that is written over and over while faults strike, and what must always be found there."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from faults import DONE, SAID, SURVIVED, Faults

from everybert.files import recover, verify_folder
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.store.huggingface import load_network
from everybert.text.tokenizer import Tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *["the", "dog", "cat", "plays", "sleeps", "runs", "."]]
CONFIG = EncoderConfig(vocab_size=12, hidden_size=8, layers=1, heads=2, intermediate_size=16, max_positions=16)


def leftovers(parent: Path) -> list[str]:
    return [p.name for p in parent.iterdir() if p.name.startswith(".")]


class Place:
    """A path written over and over; `read` is its fingerprint or raises. Every version is whole, and one we know.

    `again` writes over what a fault left: it must work, and clear it up.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], object],
        put_back: Callable[[], object] | None,
        again: Callable[[], object] | None = None,
    ) -> None:
        self.path, self.read, self.put_back, self.again = path, read, put_back, again
        path.parent.mkdir(exist_ok=True)
        self.old = self.reset()
        self.seen: set[object] = set()

    def reset(self) -> object:
        """As it was before the write."""
        shutil.rmtree(self.path.parent)
        self.path.parent.mkdir()
        if self.put_back is None:
            return None
        self.put_back()
        return self.read(self.path)

    def examine(self, kind: str, step: int, code: int) -> None:
        """What a child left behind."""
        where = f"{kind} at {step}, which ended with {code}"
        killed = {"kill": -signal.SIGKILL, "cut-kill": -signal.SIGXFSZ}.get(kind)
        assert code in (DONE, SURVIVED, SAID if killed is None else killed), where
        found = self.read(self.path) if recover(self.path).exists() else None
        if code in (DONE, SURVIVED):
            assert found is not None and (step > 0 or found != self.old), where
        else:
            assert found == self.old or killed is not None or code == SAID, where
        if code in (DONE, SAID):
            assert leftovers(self.path.parent) == [], where  # whoever lives on clears up
        self.seen.add(found)
        if self.again is not None:
            self.again()
            assert leftovers(self.path.parent) == [], where
        self.reset()

    def judge(self, faults: Faults) -> None:
        """After a sweep: only two versions were ever seen, and each kind of fault was met."""
        new = self.read(self.path)
        assert self.seen == {self.old, new}
        assert leftovers(self.path.parent) == []
        for kind, codes in faults.codes.items():
            assert len(codes) >= (3 if kind.startswith("cut") else 8), (kind, codes)


def sweep(place: Place, action: Callable[[], object], at: Callable[[Faults], Iterator[None]], *kinds: str) -> None:
    faults = Faults(place.path.parent, place.examine, kinds)
    with contextmanager(at)(faults):
        faults.run(action)
    place.judge(faults)


def beginning(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Faults], Iterator[None]]:
    """Writing begins when `owner.name` is called."""

    def at(faults: Faults) -> Iterator[None]:
        real = getattr(owner, name)

        def call(*args, **kwargs):
            faults.begin()
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, call)
            yield

    return at


def network(seed: int, **heads: int | None) -> Network:
    torch.manual_seed(seed)
    return Network(CONFIG, heads or {"mlm": None})


def weights(folder: Path) -> str:
    """A model's fingerprint, through the loader and its hashes."""
    verify_folder(folder)
    state = load_network(folder).network.state_dict()
    Tokenizer.load(folder)
    return f"{sum(float(v.double().abs().sum()) for v in state.values()):.9f}"
