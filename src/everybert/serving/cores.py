"""Threads that compute side by side keep to a core each.

Whenever the event loop wakes, the kernel may move a thread that computes out of its way, to the core of the other one:
both then take twice as long, for some milliseconds. Where every core has a thread of the server's, there is nothing to
move them to, so each stays where it is while it computes a short text; unless another program is busy on that core.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SHARED = 0.5
"""Of the time, in which a thread that computes did not run: somebody else did, on its core."""
OFTEN = 2
"""Times in a row: now and then the whole machine stands still."""
PAUSE = 60.0
"""Seconds for which the kernel may then choose."""

_of_thread = threading.local()


class Core:
    """The core of a thread, and whether it has it to itself."""

    def __init__(self, number: int) -> None:
        self.own = {sorted(os.sched_getaffinity(0))[number]}
        self.shared = 0  # times in a row
        self.free_until = 0.0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Stay on it."""
        start, ran = time.monotonic(), time.thread_time()
        if start < self.free_until:
            yield
            return
        before = os.sched_getaffinity(0)  # an operator may have changed it, for this thread too
        if self.own <= before:
            self._go(self.own)
        try:
            yield
        finally:
            self._go(before)
            end = time.monotonic()
            self.shared = self.shared + 1 if time.thread_time() - ran < SHARED * (end - start) else 0
            if self.shared >= OFTEN:
                self.shared, self.free_until = 0, end + PAUSE

    def _go(self, cores: set[int]) -> None:
        with suppress(OSError):  # they may be taken away from the process at any time
            os.sched_setaffinity(0, cores)  # of this thread


def take(number: int, threads: int) -> None:
    """Let the calling thread, one of so many, have a core, if each can have one and no core is left over."""
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == threads:  # Linux
        _of_thread.core = Core(number)


@contextmanager
def on_own_core() -> Iterator[None]:
    """While the calling thread computes: on its core, if it has one."""
    core: Core | None = getattr(_of_thread, "core", None)
    if core is None:
        yield
        return
    with core.kept():
        yield
