"""Multiple choice: scores are `transformers`', questions may have different numbers of endings."""

import numpy as np
import pytest
import torch
import transformers
from refusals import refuses

from everybert.tasks import Choose, load_task
from everybert.tasks.features import make_batch
from everybert.text.windows import WindowConfig

HEAD = ("ForMultipleChoice",)


ROWS = [
    ("john sees the cat", ["it is good .", "bad food", "they"], 1),
    ("where is mary", ["london", "a red dog , blue", "one two"], 2),
]


def test_scores_and_loss_are_those_of_transformers(bert):
    loaded, tokenizer, folder = bert
    model = transformers.BertForMultipleChoice.from_pretrained(folder).eval()
    task = load_task("choose", loaded.network)
    expected_losses = []
    for (prompt, endings, label), found in zip(
        ROWS, task.predict(loaded.network, tokenizer, [(p, e) for p, e, _ in ROWS])
    ):
        rows = [tokenizer.encode(prompt, ending) for ending in endings]
        longest = max(len(r.ids) for r in rows)
        inputs = {
            name: torch.tensor([[x + [0] * (longest - len(x)) for x in lists]])
            for name, lists in [
                ("input_ids", [r.ids for r in rows]),
                ("token_type_ids", [r.segments for r in rows]),
                ("attention_mask", [[1] * len(r.ids) for r in rows]),
            ]
        }
        with torch.no_grad():
            out = model(**inputs, labels=torch.tensor([label]))
        expected_losses.append(float(out.loss))
        assert list(found.scores) == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=1e-5)
        assert found.text == endings[found.index]
    examples = Choose.read(ROWS)
    features = task.features(tokenizer, loaded.config, examples)
    with torch.no_grad():
        for fill in (None, 64):
            loss = task.loss(loaded.network, make_batch(features, np.arange(2), fill=fill))
            assert float(loss) == pytest.approx(np.mean(expected_losses), abs=1e-5)
    accuracy = task.score(loaded.network, features, examples)["accuracy"]
    assert accuracy in (0.0, 0.5, 1.0)


def test_questions_with_different_numbers_of_endings(bert):
    loaded, tokenizer, _ = bert
    rows = [("who", ["a", "b"], 1), ("what", ["one", "two", "three", "four"], 3)]
    task = load_task("choose", loaded.network)
    features = task.features(tokenizer, loaded.config, Choose.read(rows))
    with torch.no_grad():
        both = task.loss(loaded.network, make_batch(features, np.array([0, 1])))
        each = [float(task.loss(loaded.network, make_batch(features, np.array([i])))) for i in (0, 1)]
    assert float(both) == pytest.approx(np.mean(each), abs=1e-5)


def test_what_does_not_fit_is_cut_and_counted(bert):
    loaded, tokenizer, _ = bert
    task = Choose(window=WindowConfig(32, 8))
    (found,) = task.predict(loaded.network, tokenizer, [("good " * 40, ["bad", "fine " * 40])])
    assert found.cut == (40 + 1 - 29) + (80 - 29)
    refuses("a list of one ending", list, task.predict(loaded.network, tokenizer, [("who", "ab")]))
