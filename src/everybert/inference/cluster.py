"""Parts made on a Ray cluster: Ray Data hands them to a pool of actors, each of which holds the model once.

The data set is that of the parts, not of their rows: what a part is does not hang on how Ray cuts its blocks, every
actor reads and writes parquet by itself, and parts of an earlier run are known by their files. An actor that is lost
is started again, here or elsewhere, and so is what it was at.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import asdict, replace
from typing import Any

from everybert.cluster import map_on_actors
from everybert.inference.parquet import Part
from everybert.inference.parts import Job, Predictor, Record


class Actor:
    """A `Predictor` as Ray Data calls it: a row that says which part, to a row that says what became of it."""

    def __init__(self, job: Job) -> None:
        self.predict = Predictor(job)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Make the part of a row."""
        return {"record": json.dumps(self.predict(Part(**row)))}


def on_cluster(job: Job, parts: list[Part], address: str | None, workers: int | None) -> Generator[Record, None, None]:
    """The record of each part, as `Predictor` returns it, in the order in which they finish."""
    rows = [asdict(part) for part in parts]
    for row in map_on_actors(Actor, lambda device: (replace(job, device=device),), rows, job.device, address, workers):
        yield json.loads(row["record"])
