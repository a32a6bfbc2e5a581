"""The processes that tokenize, so arranged that none outlives the build and Ctrl-C stops it cleanly."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from everybert.corpus.encode import Encoded, Encoder, Piece
from everybert.errors import EverybertError

_encoder: Encoder | None = None  # one in each worker process


class Pool:
    """Encoders in `workers` processes (all cores when None; this process alone when 1)."""

    def __init__(self, tokenizer: Path, min_tokens: int, wrapped: bool, workers: int | None):
        self.workers = workers or cores()
        self.depth = 3 * self.workers  # units under way: enough to keep all busy while a shard is written
        self._make = (tokenizer, min_tokens, wrapped)
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        if self.workers == 1:
            self._encoder = Encoder(*self._make)
            return self
        # Forked workers need no import guard in the caller's script; elsewhere Python starts them afresh.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._executor = ProcessPoolExecutor(self.workers, context, _start, (os.getpid(), *self._make))
        self._executor.submit(_ready).result()  # fork now, before a progress bar has threads
        return self

    def __exit__(self, *error: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, pieces: list[Piece]) -> Callable[[], Encoded]:
        """Begin to encode; the result is what the returned function returns."""
        if self._executor is None:
            return partial(self._encoder, pieces)
        return partial(_result, self._executor.submit(_encode, pieces))


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _result(future) -> Encoded:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise EverybertError(
            "a worker process was killed (out of memory?): run again with fewer --workers to continue"
        ) from error


def _start(parent: int, tokenizer: Path, min_tokens: int, wrapped: bool) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    _encoder = Encoder(tokenizer, min_tokens, wrapped)


def _leave_with(parent: int) -> None:
    """A parent killed outright cannot stop its workers."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _ready() -> None:
    """Nothing: its return says that the workers have started."""


def _encode(pieces: list[Piece]) -> Encoded:
    assert _encoder is not None
    return _encoder(pieces)
