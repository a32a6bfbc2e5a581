"""Tokenizing on a Ray cluster: the same work as `workers.Pool` hands out, done by the cluster's processes.

Plain Ray tasks, not Ray Data: the documents are read, compared and cut in order by one process, which also writes
the shards, so there is a stream of units to encode and no data set. Workers need no shared disk.
"""

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from everybert.cluster import RETRIES, cluster
from everybert.corpus.encode import Encoded, Encoder, Piece
from everybert.errors import EverybertError


class RayPool:
    """Encoders in a cluster's processes, `workers` at a time (all its cores when None); lost work is done again."""

    def __init__(self, tokenizer: Path, min_tokens: int, wrapped: bool, workers: int | None, address: str | None):
        self._make = ({file.name: file.read_bytes() for file in tokenizer.iterdir()}, min_tokens, wrapped)
        self._where = (address, workers)
        self._stack = ExitStack()

    def __enter__(self) -> "RayPool":
        self._ray = self._stack.enter_context(cluster(*self._where))
        self.workers = self._where[1] or int(self._ray.cluster_resources().get("CPU", 1))
        self.depth = 3 * self.workers  # units under way: enough to keep all busy while a shard is written
        self._encoder = self._ray.put(self._make)  # goes to each machine once
        self._task = self._ray.remote(max_retries=RETRIES)(_encode)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def submit(self, pieces: list[Piece]) -> Callable[[], Encoded]:
        """Begin to encode; the result is what the returned function returns."""
        return partial(self._result, self._task.remote([self._encoder], pieces))

    def _result(self, reference: Any) -> Encoded:
        try:
            return copy.deepcopy(self._ray.get(reference))  # out of the memory that all processes share
        except self._ray.exceptions.RayTaskError as error:
            why = f"{type(error.cause).__name__}: {error.cause}".partition("\n")[0]
            raise EverybertError(f"a worker failed ({why}): is the same everybert on every machine?") from error
        except self._ray.exceptions.RayError as error:
            raise EverybertError(
                f"workers were lost {RETRIES} times over one piece of work (out of memory?): "
                "run again with fewer --workers to continue"
            ) from error


def _encode(encoder: list[Any], pieces: list[Piece]) -> Encoded:
    return _encoder(encoder[0])(pieces)


@lru_cache(maxsize=1)
def _encoder(reference: Any) -> Encoder:
    """One in each worker process, made from the tokenizer's files."""
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    files, min_tokens, wrapped = ray.get(reference)
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return Encoder(Path(folder), min_tokens, wrapped)
