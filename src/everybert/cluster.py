"""Work shared by many machines, through Ray (the extra `scale`): how to reach a cluster, or have one for a while."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from everybert.errors import EverybertError

Engine = Literal["local", "ray"]
RETRIES = 20
"""How often work is given to another worker after one was lost; work that kills every worker must end."""
OBJECT_STORE = 256 << 20
"""Bytes of shared memory of a cluster of our own: what is under way is small."""


def import_ray() -> Any:
    """The ray package, which reports nothing to its makers unless the user wants that."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what it will be by default: a warning says so
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what matters is raised as an error
    try:
        import ray
    except ImportError:
        raise EverybertError("--engine ray needs Ray: pip install 'everybert[scale]'") from None
    return ray


@contextmanager
def cluster(address: str | None = None, workers: int | None = None) -> Iterator[Any]:
    """Ray, connected to the cluster at `address` ("auto": the one that this machine belongs to).

    Without an address a cluster of `workers` processes runs on this machine while the block does; where the caller
    has connected already, that connection is used and left open.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    own: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        _knock(address)
        ray.init(
            address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **(own if address is None else {}),
        )
    except Exception as error:  # Ray raises many kinds, a bare Exception among them
        ray.shutdown()
        why = str(error).partition("\n")[0]
        what = "a Ray cluster could not be started" if address is None else f"there is no Ray cluster at {address}"
        raise EverybertError(f"{what} ({why}): docs/CLUSTER.md says how to start one") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str | None) -> None:
    """See whether anybody is at HOST:PORT: Ray itself would wait for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def check_engine(engine: str, address: str | None) -> None:
    """Refuse engines there are none of, and an address where no cluster is asked for."""
    if engine not in ("local", "ray"):
        raise EverybertError(f"there is no engine {engine!r}: choose local or ray")
    if engine == "local" and address is not None:
        raise EverybertError("--address is a cluster's: add --engine ray")
