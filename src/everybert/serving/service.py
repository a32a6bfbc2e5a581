"""From an endpoint to a thread and back: where the work of a request is done, and what becomes of its errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from fastapi import Request, Response
from pydantic_core import to_json

from everybert.errors import EverybertError
from everybert.serving.limits import CALL, Call, Limits, Refusal
from everybert.serving.metrics import Metrics
from everybert.serving.scheduler import Scheduler
from everybert.serving.shelf import Served, Shelf
from everybert.serving.texts import Texts

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
        cores = torch.get_num_threads()
        cpu = all(served.model.device.type == "cpu" for served in self.shelf.entries.values())
        self.scheduler.start(cores if cpu else 1, self.limits.inline if cpu else 0)
        for served in self.shelf.entries.values():
            self.pool.submit(served.model.embed, ["warm up"]).result()
            if (direct := served.direct) is not None and ":" not in served.name:
                call = Call(Limits())
                ticket = Texts(direct.trunk, direct.adapter, call, direct.model, ["warm up"], {}, lambda found: b"")
                self.scheduler.run(ticket)
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
        return await self._sent(call, self.pool.submit(self._work, call, served, work))

    async def embedded(
        self, request: Request, name: str | None, texts: list[str], how: dict[str, Any], form: Callable[..., Any]
    ) -> Response:
        """What `form(served, call, found)` makes of the texts' vectors, as JSON; `how` is for Model.embedded."""
        call: Call = request.scope["call"]
        served = self.shelf.get(name)
        if served.direct is None or not served.direct.takes(texts):
            return await self.answer(request, name, lambda s, c: form(s, c, s.model.embedded(texts, **how)))
        direct = served.direct
        ticket = Texts(
            direct.trunk, direct.adapter, call, direct.model, texts, how, lambda found: _json(form(served, call, found))
        )
        self.scheduler.offer(ticket)
        return await self._sent(call, ticket.future)

    async def _sent(self, call: Call, future: Future[bytes]) -> Response:
        """The answer that is being made in another thread."""
        try:
            body = await _landed(future)
        except (Refusal, EverybertError):
            raise
        except Exception as error:
            self.metrics.failures.inc()
            log.exception("a request failed", exc_info=error)
            raise Refusal(500, "the server failed on this request; its log says why") from None
        headers = {"x-tokens": str(call.tokens), "x-cut-tokens": str(call.cut)}
        return Response(body, media_type="application/json", headers=headers)

    def _work(self, call: Call, served: Served, work: Callable[[Served, Call], Any]) -> bytes:
        call.check()
        token = CALL.set(call)
        try:
            with self.scheduler.expecting(call):
                return _json(work(served, call))
        finally:
            CALL.reset(token)


def _landed(future: Future[bytes]) -> asyncio.Future[bytes]:
    """Another thread's result, for the event loop. As asyncio.wrap_future, in fewer steps; and the work
    goes on where nobody waits for it any more: it may share its batch with others'."""
    loop = asyncio.get_running_loop()
    landed = loop.create_future()

    def settle() -> None:
        if landed.done():
            return
        if error := future.exception():
            landed.set_exception(error)
        else:
            landed.set_result(future.result())

    future.add_done_callback(lambda done: loop.call_soon_threadsafe(settle))
    return landed


def _json(answer: Any) -> bytes:
    return to_json(answer, inf_nan_mode="null")


def _alone() -> None:
    """A request's thread pools and classifies by itself; torch's other threads belong to the scheduler."""
    torch.set_num_threads(1)  # of the calling thread
