"""Work on a Ray cluster (the extra `scale`): how to connect to one, or start one on this machine."""

import copy
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from typing import Any, Literal

from everybert.errors import EverybertError

Engine = Literal["local", "ray"]
RETRIES = 20
"""Times that a lost worker is started again."""
OBJECT_STORE = 256 << 20
"""Bytes of shared memory of a cluster that is started here."""


def import_ray() -> Any:
    """The ray package, without its usage reports unless the user enables them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the future default: avoids a warning
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors are raised
    try:
        import ray
    except ImportError:
        raise EverybertError("--engine ray needs Ray: pip install 'everybert[scale]'") from None
    return ray


@contextmanager
def cluster(address: str | None = None, workers: int | None = None) -> Iterator[Any]:
    """Ray, connected to the cluster at `address` ("auto": the one that this machine belongs to).

    Without an address, a cluster of `workers` processes runs on this machine during the block. If the caller has
    connected already, that connection is used and left open.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    own: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        _check_address(address)
        ray.init(
            address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **(own if address is None else {}),
        )
    except Exception as error:  # Ray raises many types, including plain Exception
        ray.shutdown()
        reason = str(error).partition("\n")[0]
        what = "a Ray cluster could not be started" if address is None else f"there is no Ray cluster at {address}"
        raise EverybertError(f"{what} ({reason}): docs/CLUSTER.md says how to start one") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_address(address: str | None) -> None:
    """Connect to HOST:PORT once: Ray itself would retry for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def check_engine(engine: str, address: str | None) -> None:
    """Raise an error for an unknown engine, or an address without the engine ray."""
    if engine not in ("local", "ray"):
        raise EverybertError(f"there is no engine {engine!r}: choose local or ray")
    if engine == "local" and address is not None:
        raise EverybertError("--address is a cluster's: add --engine ray")


class RayPool:
    """Runs `function(shared, item)` in the processes of a cluster. Lost ones are started again, with their work.

    `shared` is sent to each process once. `workers` is the number of processes: by default one per core, or one per GPU
    if the cluster has any and `device` does not exclude them.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        shared: Any,
        workers: int | None = None,
        address: str | None = None,
        device: str | None = "cpu",
    ) -> None:
        self.function, self.shared, self.address, self.device = function, shared, address, device
        self.workers = workers
        self._stack = ExitStack()

    def __enter__(self) -> "RayPool":
        self._ray = self._stack.enter_context(cluster(self.address, self.workers))
        resources = self._ray.cluster_resources()
        gpu = bool(resources.get("GPU")) and (self.device or "cuda").startswith("cuda")
        most = int(resources.get("GPU" if gpu else "CPU", 1))
        self.workers = min(self.workers or most, most)
        self.depth = 3 * self.workers  # items in flight that keep all workers busy
        options = {"max_restarts": RETRIES, "max_task_retries": RETRIES, "num_cpus": 0 if gpu else 1}
        actor = self._ray.remote(**options, num_gpus=int(gpu))(_Worker)
        self._shared = self._ray.put(self.shared)  # kept for workers that are started again
        self._next = cycle([actor.remote(self.function, self._shared) for _ in range(self.workers)])
        return self

    def __exit__(self, *error: object) -> None:
        self._next = cycle(())  # ends the processes
        self._stack.close()

    def submit(self, item: Any) -> Callable[[], Any]:
        """Begin with an item. The returned function waits for its result."""
        return partial(self._result, next(self._next).call.remote(item))

    def _result(self, reference: Any) -> Any:
        try:
            return copy.deepcopy(self._ray.get(reference))  # a copy outside the shared memory
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EverybertError):
                raise error.cause from None
            reason = f"{type(error.cause).__name__}: {error.cause}".partition("\n")[0]
            raise EverybertError(f"a worker failed ({reason}): is the same everybert on every machine?") from error
        except self._ray.exceptions.RayError as error:
            raise EverybertError(
                f"a worker was lost {RETRIES} times (out of memory?): run again with fewer --workers to continue"
            ) from error


class _Worker:
    """A process of a pool."""

    def __init__(self, function: Callable[[Any, Any], Any], shared: Any) -> None:
        self.function, self.shared = function, shared

    def call(self, item: Any) -> Any:
        return self.function(self.shared, item)
