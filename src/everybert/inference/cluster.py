"""Parts made on a Ray cluster: Ray Data hands them to a pool of actors, each of which holds the model once.

The data set is that of the parts, not of their rows: what a part is does not hang on how Ray cuts its blocks, every
actor reads and writes parquet by itself, and parts of an earlier run are known by their files. An actor that is lost
is started again, here or elsewhere, and so is what it was at.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from dataclasses import asdict, replace
from typing import Any

from everybert.cluster import cluster
from everybert.errors import EverybertError
from everybert.inference.parquet import Part
from everybert.inference.parts import Job, Predictor, Record

BLOCKS = 4096
"""The most blocks that Ray keeps books of; beyond that a block has several parts."""


class Actor:
    """A `Predictor` as Ray Data calls it: a row that says which part, to a row that says what became of it."""

    def __init__(self, job: Job) -> None:
        self.predict = Predictor(job)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Make the part of a row."""
        return {"record": json.dumps(self.predict(Part(**row)))}


def on_cluster(job: Job, parts: list[Part], address: str | None, workers: int | None) -> Generator[Record, None, None]:
    """What `Predictor` says of each part, as they are made; a GPU, where the cluster has them, or a core for each."""
    with cluster(address, workers) as ray:
        data = _ray_data()
        have = ray.cluster_resources()
        on_gpu = (job.device or ("cuda" if have.get("GPU") else "cpu")).startswith("cuda")
        most = max(1, workers or int(have.get("GPU" if on_gpu else "CPU", 1)))
        rows = data.from_items([asdict(part) for part in parts], override_num_blocks=min(len(parts), BLOCKS))
        made = rows.map(
            Actor,
            fn_constructor_args=(replace(job, device="cuda" if on_gpu else "cpu"),),
            compute=data.ActorPoolStrategy(min_size=1, max_size=min(most, len(parts))),
            num_gpus=1 if on_gpu else None,
        )
        try:
            for row in made.iter_rows():
                yield json.loads(row["record"])
        except ray.exceptions.RayError as error:
            why = str(error).strip().rpartition("\n")[2]
            raise EverybertError(f"the cluster failed ({why}): run again to go on") from error


def _ray_data() -> Any:
    """Ray Data, which says nothing: there is a progress bar."""
    try:
        import ray.data as data
    except ImportError as error:
        raise EverybertError(f"--engine ray needs Ray Data ({error}): pip install 'everybert[scale]'") from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return data
