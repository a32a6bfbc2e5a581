"""Work on a Ray cluster (the extra `scale`): how to connect to one, or start one on this machine."""

import copy
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any, Literal

from everybert.errors import EverybertError

Engine = Literal["local", "ray"]
RETRIES = 20
"""Times that a lost worker is started again."""
OBJECT_STORE = 256 << 20
"""Bytes of shared memory of a cluster that is started here."""


@contextmanager
def cluster(address: str | None = None, workers: int | None = None) -> Iterator[Any]:
    """Ray, connected to the cluster at `address` ("auto": the one that this machine belongs to).

    Without an address, a cluster of `workers` processes runs on this machine during the block. If the caller has
    connected already, that connection is used and left open.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports unless the user enables them
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the future default: avoids a warning
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors are raised
    try:
        import ray
    except ImportError:
        raise EverybertError("the engine ray needs Ray: pip install 'everybert[scale]'") from None
    if ray.is_initialized():
        yield ray
        return
    own: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        host, colon, port = (address or "").rpartition(":")
        if colon and port.isdigit() and "/" not in host:  # connect once: Ray itself would retry for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else own))
    except Exception as error:  # Ray raises many types, including plain Exception
        ray.shutdown()
        reason = str(error).partition("\n")[0]
        what = "a Ray cluster could not be started" if address is None else f"there is no Ray cluster at {address}"
        raise EverybertError(f"{what} ({reason}): docs/CLUSTER.md says how to start one") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def check_engine(engine: str, address: str | None) -> None:
    """Raise an error for an unknown engine, or an address without the engine ray."""
    if engine not in ("local", "ray"):
        raise EverybertError(f"there is no engine {engine!r}: choose local or ray")
    if engine == "local" and address is not None:
        raise EverybertError("the address is a cluster's: give engine ray")


@contextmanager
def ray_pool(
    function: Callable[[Any, Any], Any],
    shared: Any,
    workers: int | None = None,
    address: str | None = None,
    device: str | None = "cpu",
) -> Iterator["RayPool"]:
    """Processes of a cluster that run `function(shared, item)`. Lost ones are started again, with their work.

    `shared` is sent to each process once. `workers` is the number of processes: by default one per core, or one per GPU
    if the cluster has any and `device` does not exclude them.
    """
    with cluster(address, workers) as ray:
        resources = ray.cluster_resources()
        gpu = bool(resources.get("GPU")) and (device or "cuda").startswith("cuda")
        most = int(resources.get("GPU" if gpu else "CPU", 1))
        options = {"max_restarts": RETRIES, "max_task_retries": RETRIES, "num_cpus": 0 if gpu else 1}
        actor = ray.remote(**options, num_gpus=int(gpu))(_Worker)
        reference = ray.put(shared)  # for workers that are started again
        pool = RayPool(ray, [actor.remote(function, reference) for _ in range(min(workers or most, most))])
        try:
            yield pool
        finally:
            pool.next = cycle(())  # ends the processes


class RayPool:
    """Gives items to processes of a cluster in turn."""

    def __init__(self, ray: Any, processes: list[Any]) -> None:
        self.ray, self.next = ray, cycle(processes)
        self.depth = 3 * len(processes)  # items in flight that keep all workers busy

    def submit(self, item: Any) -> Callable[[], Any]:
        """Begin with an item. The returned function waits for its result."""
        return partial(self._result, next(self.next).call.remote(item))

    def _result(self, reference: Any) -> Any:
        try:
            return copy.deepcopy(self.ray.get(reference))  # a copy outside the shared memory
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EverybertError):
                raise error.cause from None
            reason = f"{type(error.cause).__name__}: {error.cause}".partition("\n")[0]
            raise EverybertError(f"a worker failed ({reason}): is the same everybert on every machine?") from error
        except self.ray.exceptions.RayError as error:
            raise EverybertError(f"a worker was lost {RETRIES} times (out of memory?): give fewer workers") from error


class _Worker:
    """A process of a pool."""

    def __init__(self, function: Callable[[Any, Any], Any], shared: Any) -> None:
        self.function, self.shared = function, shared

    def call(self, item: Any) -> Any:
        return self.function(self.shared, item)
