"""GLUE: its layouts and those of copies are found; a task runs end to end; a finished one is not run again."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny_model
from refusals import refuses

from everybert.evaluation import glue as module
from everybert.evaluation.glue import PUBLISHED, TASKS, GlueResult, find_file, find_tasks, glue, label_order, table

FAST = {"epochs": 1, "lr": 1e-3, "batch_size": 8, "quiet": True, "device": "cpu"}
SENTENCES = ["the film was good", "the food was bad", "a great song", "an awful day", "the dog eats", "he sees it"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model.save(tmp_path_factory.mktemp("base") / "base")


def tsv(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"]
LAYOUTS = {
    "CoLA": (None, lambda i, s: ("gj04", i % 2, "*" if i % 2 == 0 else "", s)),
    "SST-2": (("sentence", "label"), lambda i, s: (s, i % 2)),
    "RTE": (
        ("index", "sentence1", "sentence2", "label"),
        lambda i, s: (i, s, SENTENCES[0], ("entailment", "not_entailment")[i % 2]),
    ),
    "STS-B": (STSB, lambda i, s: (i, "g", "f", 2012, i, "n", "n", s, SENTENCES[1], i / 2)),
    "MRPC": (("\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"), lambda i, s: (i % 2, i, i, s, f'"{s}')),
    "MNLI": (
        ("index", "promptID", "sentence1", "sentence2", "label1", "gold_label"),
        lambda i, s: (i, i, s, SENTENCES[2], "x", ("contradiction", "entailment", "neutral")[i % 3]),
    ),
}
"""Task → its header, and a row of a sentence."""


@pytest.fixture
def folder(tmp_path):
    """GLUE's own layouts, in miniature."""
    root = tmp_path / "glue_data"
    for task, (header, row) in LAYOUTS.items():
        rows = [*([header] if header else []), *(row(i, s) for i, s in enumerate(SENTENCES))]
        for name in ("train", "dev_matched", "dev_mismatched") if task == "MNLI" else ("train", "dev"):
            tsv(root / task / f"{name}.tsv", *rows)
    tsv(root / "QNLI" / "dev.tsv", ("index", "question", "sentence", "label"), (0, "who?", "he", "entailment"))
    return root


def test_tasks_and_files_are_found_under_many_names(folder, tmp_path):
    assert list(find_tasks(folder)) == ["CoLA", "SST-2", "MRPC", "STS-B", "MNLI", "QNLI", "RTE"]
    copy = tmp_path / "copy" / "sst2"
    for name in ("train-00000-of-00001.jsonl", "validation-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        copy.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text('{"sentence": "a", "label": 0, "idx": 0}\n')
    assert list(find_tasks(tmp_path / "copy")) == ["SST-2"] == list(find_tasks(copy))
    assert find_file(copy, "dev").name.startswith("validation") and find_file(copy, "train").name.startswith("train")
    assert find_file(folder / "MNLI", "dev", "matched").name == "dev_matched.tsv"
    assert find_file(folder / "MNLI", "dev", "mismatched").name == "dev_mismatched.tsv"
    assert find_file(folder / "CoLA", "test") is None
    refuses("none of GLUE's tasks", find_tasks, tmp_path)
    refuses("not a folder", find_tasks, tmp_path / "nowhere")


def test_labels_are_put_in_glues_order_however_they_are_written(folder):
    def order(name):
        return label_order(TASKS[name], find_file(folder / name, "train"))

    assert order("CoLA") == ["0", "1"] and order("MRPC") == ["0", "1"]
    assert order("RTE") == ["entailment", "not_entailment"]
    assert order("MNLI") == ["entailment", "neutral", "contradiction"]
    assert order("STS-B") is None


def test_a_run_scores_and_is_not_repeated(folder, base, tmp_path, monkeypatch):
    out = tmp_path / "out"
    results, skipped = glue(folder, base, out, ["sst2", "RTE", "STS-B"], seeds=2, **FAST)
    assert not skipped and [r.task for r in results] == ["SST-2", "RTE", "STS-B"]
    assert all(r.runs == 2 and r.half is not None for r in results)
    assert results[0].score == pytest.approx(100 * results[0].scores["accuracy"])
    monkeypatch.setattr(module, "finetune", lambda *a, **k: pytest.fail("it was finished"))
    again, _ = glue(folder, base, out, ["sst2", "RTE", "STS-B"], seeds=2, **FAST)
    assert again == results


def test_a_folder_may_suggest_settings_for_each_task(folder, base, tmp_path, monkeypatch):
    own = tmp_path / "own"
    shutil.copytree(base, own)
    said = {"version": 1, "glue": {"RTE": {"lr": 0.0007, "epochs": 2, "reinit": 1}}}
    (own / "everybert.json").write_text(json.dumps(said))
    seen = []
    real = module.finetune

    def spy(*args, **settings):
        seen.append({k: settings.get(k) for k in ("lr", "epochs", "reinit")})
        return real(*args, **settings)

    monkeypatch.setattr(module, "finetune", spy)
    (result,), _ = glue(folder, own, tmp_path / "a", ["RTE"], device="cpu", quiet=True)
    assert seen == [{"lr": 0.0007, "epochs": 2, "reinit": 1}] and result.settings["reinit"] == 1
    glue(folder, own, tmp_path / "b", ["RTE"], epochs=1, quiet=True)
    glue(folder, own, tmp_path / "c", ["SST-2"], epochs=1, quiet=True)
    (own / "everybert.json").write_text(json.dumps({"version": 1, "glue": {"RTE": {"seeds": 3}}}))
    refuses("suggests 'seeds' for RTE, which is no setting", glue, folder, own, tmp_path / "d", ["RTE"], quiet=True)
    assert seen[1:] == [{"lr": None, "epochs": 1, "reinit": None}] * 2  # what is given counts, or nothing is suggested


def test_control_c_ends_all_tasks(folder, base, tmp_path, monkeypatch):
    """The task that was interrupted has no score: it is run again."""
    real = module.finetune
    monkeypatch.setattr(module, "finetune", lambda *args, **settings: replace(real(*args, **settings), finished=False))
    with pytest.raises(KeyboardInterrupt):
        glue(folder, base, tmp_path / "out", ["SST-2", "RTE"], **FAST)
    assert not list((tmp_path / "out").glob("*.json")) and not (tmp_path / "out" / "RTE").exists()


def test_mnli_has_two_dev_sets(folder, base, tmp_path):
    (result,), _ = glue(folder, base, tmp_path / "out", ["MNLI"], **FAST)
    assert result.half is None and "mismatched_accuracy" in result.scores


def test_tasks_without_training_data_are_left_out_unless_asked_for(folder, base, tmp_path, monkeypatch):
    ran = []

    def run(name, *_, **__):
        ran.append(name)
        return GlueResult(name, TASKS[name].metric, 50.0, None, 1)

    monkeypatch.setattr(module, "run_task", run)
    _, skipped = glue(folder, base, tmp_path)
    assert "QNLI" not in ran and len(ran) == 6 and "QNLI" in skipped[0]
    refuses("has no QQP", glue, folder, base, tmp_path, ["QQP"])


def test_the_table_has_the_published_rows(tmp_path):
    rows = table([GlueResult("SST-2", "accuracy", 91.24, 0.31, 3), GlueResult("RTE", "accuracy", 60.0, None, 1)])
    assert [row[""] for row in rows[1:]] == [f"{name}, test" for name in PUBLISHED["models"]]
    values = [[*row.values()][1:] for row in rows]
    assert list(rows[0]) == ["", "SST-2 (accuracy)", "RTE (accuracy)", "mean"]
    assert values[0] == ["91.2 ± 0.3", "60.0", "75.6"]
    assert values[1] == ["83.2", "57.2", "70.2"] and values[-1] == ["93.5", "66.4", "80.0"]
