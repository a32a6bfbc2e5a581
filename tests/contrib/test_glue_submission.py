"""The submission files of GLUE: labels by their names, numbers within 0 … 5, three files for MNLI."""

import tiny_model
from glue_submission import write_submissions

ROWS = ["the film was good", "the food was bad", "a great song"]


def tsv(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")


def test_the_files_of_every_model(tmp_path):
    glue, out = tmp_path / "glue", tmp_path / "out"
    pairs = [(i, text, text) for i, text in enumerate(ROWS)]
    test = [("index", "sentence1", "sentence2"), *pairs]
    for name in ("RTE", "STS-B", "MNLI", "QNLI"):
        column = "score" if name == "STS-B" else "label"
        tsv(glue / name / "train.tsv", (*test[0], column), *((*row, row[0] % 2) for row in pairs))
    for name in ("RTE/test", "STS-B/test", "MNLI/test_matched", "MNLI/test_mismatched", "MNLI/diagnostic"):
        tsv(glue / f"{name}.tsv", *test)
    tiny_model.save(out / "RTE", {"classify": 2}, ["0", "1"])
    tiny_model.save(out / "STS-B", {"classify": 1}, extras={"version": 1, "task": {"task": "regress"}})
    tiny_model.save(out / "MNLI", {"classify": 3}, ["0", "1", "2"])
    names = {path.name for path in write_submissions(glue, out)}
    assert names == {"RTE.tsv", "STS-B.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"}  # QNLI has no model
    lines = (out / "submission" / "RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 1 + len(ROWS)
    assert {line.split("\t")[1] for line in lines[1:]} <= {"entailment", "not_entailment"}
    numbers = [float(line.split("\t")[1]) for line in (out / "submission" / "STS-B.tsv").read_text().splitlines()[1:]]
    assert all(0 <= n <= 5 for n in numbers)
