"""Work on a Ray cluster (the extra `scale`): how to connect to one, or start one on this machine."""

from __future__ import annotations

import copy
import logging
import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, Literal

from everybert.errors import EverybertError

Engine = Literal["local", "ray"]
RETRIES = 20
"""Times that a task is given to another worker after its worker was lost."""
OBJECT_STORE = 256 << 20
"""Bytes of shared memory of a cluster that is started here."""
MAX_BLOCKS = 4096
"""Most blocks of a Ray data set. Above that, a block has several rows."""


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


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────


class RayPool:
    """Runs `function(shared, item)` in the processes of a cluster; tasks of lost workers are repeated.

    `shared` is sent to each machine once. `workers` is the number of tasks at a time (default: the cluster's cores).
    """

    def __init__(
        self, function: Callable[[Any, Any], Any], shared: Any, workers: int | None = None, address: str | None = None
    ):
        self.function, self.shared, self.workers, self.address = function, shared, workers, address
        self._stack = ExitStack()

    def __enter__(self) -> RayPool:
        self._ray = self._stack.enter_context(cluster(self.address, self.workers))
        self.workers = self.workers or int(self._ray.cluster_resources().get("CPU", 1))
        self.depth = 3 * self.workers  # tasks in flight that keep all workers busy
        self._reference = self._ray.put(self.shared)
        self._task = self._ray.remote(max_retries=RETRIES)(_call)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def submit(self, item: Any) -> Callable[[], Any]:
        """Begin a task. The returned function waits for its result."""
        return partial(self._result, self._task.remote(self.function, [self._reference], item))

    def _result(self, reference: Any) -> Any:
        try:
            return copy.deepcopy(self._ray.get(reference))  # a copy outside the shared memory
        except self._ray.exceptions.RayTaskError as error:
            reason = f"{type(error.cause).__name__}: {error.cause}".partition("\n")[0]
            raise EverybertError(f"a worker failed ({reason}): is the same everybert on every machine?") from error
        except self._ray.exceptions.RayError as error:
            raise EverybertError(
                f"the workers of one task were lost {RETRIES} times (out of memory?): "
                "run again with fewer --workers to continue"
            ) from error


def _call(function: Callable[[Any, Any], Any], shared: list[Any], item: Any) -> Any:
    return function(_fetch(shared[0]), item)


@lru_cache(maxsize=1)
def _fetch(reference: Any) -> Any:
    """The shared object, one copy per worker process."""
    import ray

    return ray.get(reference)


# ── actors ──────────────────────────────────────────────────────────────────────────────────────────────────


def map_on_actors(
    actor: type,
    arguments: Callable[[str], tuple[Any, ...]],
    rows: Sequence[dict[str, Any]],
    device: str | None = None,
    address: str | None = None,
    workers: int | None = None,
) -> Generator[dict[str, Any], None, None]:
    """Map rows through a pool of Ray Data actors, in the order in which they finish; lost actors are restarted.

    `arguments(device)` are the constructor's, for "cuda" or "cpu". Each actor has one GPU, if the cluster has any
    and `device` does not say otherwise, or one core. `workers` is the largest number of actors.
    """
    with cluster(address, workers) as ray:
        data = _ray_data()
        resources = ray.cluster_resources()
        device = device or ("cuda" if resources.get("GPU") else "cpu")
        on_gpu = device.startswith("cuda")
        most = max(1, workers or int(resources.get("GPU" if on_gpu else "CPU", 1)))
        mapped = data.from_items(list(rows), override_num_blocks=min(len(rows), MAX_BLOCKS)).map(
            actor,
            fn_constructor_args=arguments("cuda" if on_gpu else "cpu"),
            compute=data.ActorPoolStrategy(min_size=1, max_size=min(most, len(rows))),
            num_gpus=1 if on_gpu else None,
        )
        try:
            yield from mapped.iter_rows()
        except ray.exceptions.RayError as error:
            reason = str(error).strip().rpartition("\n")[2]
            raise EverybertError(f"the cluster failed ({reason}): run again to continue") from error


def _ray_data() -> Any:
    """Ray Data without its own output."""
    try:
        import ray.data as data
    except ImportError as error:
        raise EverybertError(f"--engine ray needs Ray Data ({error}): pip install 'everybert[scale]'") from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return data
