"""Write the files that gluebenchmark.com takes: the predictions of models on GLUE's test sets.

    everybert glue glue_data --model everybert-small --out glue
    python contrib/glue_submission.py glue_data glue

Reads the models that `everybert glue` wrote to its --out folder, and writes a tsv file (index, prediction) per test
set to its subfolder `submission`, to zip and submit. MNLI has three test sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from everybert.evaluation.glue import TASKS, GlueTask, find_file, find_tasks, label_order
from everybert.files import atomic_file, is_complete
from everybert.inference.model import Model, load
from everybert.tasks import task_class
from everybert.tasks.dataset import read_table


def write_submissions(glue: Path, out: Path) -> list[Path]:
    """Predict the test sets of the tasks that have a model; returns the files."""
    written = []
    for name, folder in find_tasks(glue).items():
        train = find_file(folder, "train")
        if train is None or not is_complete(out / name):
            continue
        task, model = TASKS[name], load(out / name)
        tests = {name: find_file(folder, "test")}
        if name == "MNLI":
            tests = {
                "MNLI-m": find_file(folder, "test", "matched"),
                "MNLI-mm": find_file(folder, "test", "mismatched"),
                "AX": next(iter(sorted(folder.rglob("diagnostic*.tsv"))), None),
            }
        for test, file in tests.items():
            if file is not None:
                path = out / "submission" / f"{test}.tsv"
                path.parent.mkdir(parents=True, exist_ok=True)
                found = predictions(model, task, file, label_order(task, train))
                lines = ["index\tprediction", *(f"{i}\t{text}" for i, text in enumerate(found))]
                with atomic_file(path) as draft:
                    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
                written.append(path)
    return written


def predictions(model: Model, task: GlueTask, file: Path, order: Sequence[str] | None = None) -> list[str]:
    """A test file's predictions as GLUE writes them: labels by its names, STS-B within 0 … 5."""
    table = read_table(file, None, ("text", "label"), ())
    pick = task_class(task.task).input_reader(table)
    found = model.predict(task.task, [pick(row) for row in table.rows])
    if task.task == "regress":
        return [f"{min(max(value, 0.0), 5.0):.3f}" for value in found]
    theirs = dict(zip(order, task.labels[0])) if order else {}
    return [theirs.get(result.label, result.label) for result in found]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("glue", type=Path, help="the folder of the GLUE tasks")
    parser.add_argument("out", type=Path, help="the --out folder of everybert glue")
    arguments = parser.parse_args()
    for path in write_submissions(arguments.glue, arguments.out):
        print(path)
