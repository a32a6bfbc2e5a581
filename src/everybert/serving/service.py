"""From an endpoint to a thread and back: where the work of a request is done, and what becomes of its errors."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastapi import Request, Response
from pydantic_core import to_json

from everybert.errors import EverybertError
from everybert.serving.limits import CALL, Call, Limits, Refusal
from everybert.serving.metrics import Metrics
from everybert.serving.scheduler import Scheduler
from everybert.serving.shelf import Served, Shelf

log = logging.getLogger("everybert.serving")


class Service:
    """Models, the scheduler before them, and the threads in which requests are worked on."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.scheduler = Scheduler(self.metrics, self.limits.wait)
        self.shelf = Shelf(self.scheduler, self.limits)
        self.pool = ThreadPoolExecutor(self.limits.threads, "everybert-request", initializer=_alone)
        self.ready = False

    def start(self) -> None:
        """Warm every model up, and be ready."""
        sys.setswitchinterval(0.001)  # the scheduler's thread must not wait 5 ms for its turn between operations
        cores = torch.get_num_threads()
        cpu = all(served.model.device.type == "cpu" for served in self.shelf.entries.values())
        self.scheduler.start(cores if cpu else 1)
        for served in self.shelf.entries.values():
            self.pool.submit(served.model.embed, ["warm up"]).result()
        self.ready = True

    def close(self) -> None:
        """Answer what was taken, then stop."""
        self.ready = False
        self.pool.shutdown(wait=True)
        self.scheduler.close()

    def retry_after(self) -> int:
        """Seconds after which a refused client may come again."""
        return self.scheduler.retry_after()

    async def answer(self, request: Request, name: str | None, work: Callable[[Served, Call], Any]) -> Response:
        """What `work` gives for the model of that name, as JSON; it runs in a thread of its own, within its time."""
        call: Call = request.scope["call"]
        served = self.shelf.get(name)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self.pool, self._work, call, served, work)
        try:
            async with asyncio.timeout_at(loop.time() + self.limits.seconds):
                body, headers = await asyncio.shield(future)
        except TimeoutError:
            future.add_done_callback(lambda done: done.exception())  # it ends soon, and nobody asks how
            call.gone = True
            call.check()
            raise AssertionError from None
        return Response(body, media_type="application/json", headers=headers)

    def _work(self, call: Call, served: Served, work: Callable[[Served, Call], Any]) -> tuple[bytes, dict[str, str]]:
        call.check()
        token = CALL.set(call)
        try:
            with self.scheduler.expecting():
                body = to_json(work(served, call), inf_nan_mode="null")
        except (Refusal, EverybertError):
            raise
        except Exception:
            self.metrics.failures.inc()
            log.exception("a request failed")
            raise Refusal(500, "the server failed on this request; its log says why") from None
        finally:
            CALL.reset(token)
        return body, {"x-tokens": str(call.tokens), "x-cut-tokens": str(call.cut)}


def _alone() -> None:
    """A request's thread pools and classifies by itself; torch's other threads belong to the scheduler."""
    torch.set_num_threads(1)  # of the calling thread
