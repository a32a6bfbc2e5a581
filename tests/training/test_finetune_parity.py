"""From one checkpoint and data order, our fine-tuning and a plain `transformers` loop lose the same, step by step."""

import random

import pytest
import tiny_bert as tiny
import torch
import transformers

from everybert.corpus.masking import make_key, permutation
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import prepare_data, run_once
from everybert.training.tuning import FinetuneSettings

STEPS, BATCH, LR = 50, 8, 5e-4
SIZE = 200  # 25 steps an epoch


def reference(folder, suffix, features, labels):
    """A plain loop: padded batches, AdamW, linear schedule with warm-up, clipping at 1."""
    model = getattr(transformers, f"Bert{suffix}").from_pretrained(folder).train()
    plain = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(plain)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n.endswith(plain)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, round(0.1 * STEPS), STEPS)
    losses = []
    for epoch in range(2):
        order = permutation(make_key(7, epoch), len(features))
        for first in range(0, len(features), BATCH):
            rows = [features[i] for i in order[first : first + BATCH]]
            longest = max(len(ids) for ids, _ in rows)

            def pad(lists, value):
                return torch.tensor([x + [value] * (longest - len(x)) for x in lists])  # noqa: B023

            inputs = {
                "input_ids": pad([ids for ids, _ in rows], 0),
                "token_type_ids": pad([segments for _, segments in rows], 0),
                "attention_mask": pad([[1] * len(ids) for ids, _ in rows], 0),
            }
            target = labels([int(i) for i in order[first : first + BATCH]], pad)
            loss = model(**inputs, **target).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def ours(folder, task, rows, accumulate=1):
    data = prepare_data(task, folder, Tokenizer.load(folder), rows, rows[:8])
    settings = FinetuneSettings(epochs=2, batch_size=BATCH, lr=LR, log_every=1, device="cpu", accumulate=accumulate)
    run = run_once(data, settings, seed=7, quiet=True)
    pieces = [(a.tolist(), b.tolist()) for a, b in zip(data.train.ids, data.train.segments)]
    return data, pieces, [row["loss"] for row in run.history if "loss" in row]


def words(draw, low, high):
    return [draw.choice(tiny.WORDS) for _ in range(draw.randint(low, high))]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_classify(tmp_path, accumulate):
    draw = random.Random(0)
    folder = tiny.save(tmp_path / "m", "ForSequenceClassification", labels=["bad", "good", "so"], num_labels=3)
    names = ["bad", "good", "so"]
    rows = [(" ".join(words(draw, 3, 12)), " ".join(words(draw, 3, 12)), draw.choice(names)) for _ in range(SIZE)]
    data, pieces, losses = ours(folder, "classify", rows, accumulate)
    gold = data.train.targets["label_E"]
    expected = reference(
        folder, "ForSequenceClassification", pieces, lambda at, pad: {"labels": torch.tensor(gold[at])}
    )
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=1e-4)
    assert max(losses) - min(losses) > 0.05  # something was learnt, so that agreement means something


def test_tag(tmp_path):
    draw = random.Random(1)
    labels = ["O", "B-X", "I-X", "B-Y", "I-Y"]
    folder = tiny.save(tmp_path / "m", "ForTokenClassification", labels=labels, num_labels=5)
    rows = []
    for _ in range(SIZE):
        sentence = [draw.choice([*tiny.WORDS, "unseen", "john's"]) for _ in range(draw.randint(2, 9))]
        rows.append((sentence, [draw.choice(labels) for _ in sentence]))
    data, pieces, losses = ours(folder, "tag", rows)
    tags = data.train.targets["tag_T"]

    def target(at, pad):
        return {"labels": pad([tags[i].tolist() for i in at], -100)}

    assert any((row == -100).sum() > 2 for row in tags)  # words of several pieces
    assert losses == pytest.approx(reference(folder, "ForTokenClassification", pieces, target), abs=1e-4)
    assert max(losses) - min(losses) > 0.05


def test_answer(tmp_path):
    """All windows are equally long: `transformers` lets padding take part in the softmax, which we have not."""
    draw = random.Random(2)
    folder = tiny.save(tmp_path / "m", "ForQuestionAnswering")
    rows = []
    for _ in range(SIZE):
        asked = " ".join(draw.choice(tiny.WORDS[:40]) for _ in range(5))
        context = [draw.choice(tiny.WORDS[:40]) for _ in range(30)]
        start = draw.randint(0, 26)
        at = len(" ".join(context[:start])) + (start > 0)
        answer = " ".join(context[start : start + 3])
        rows.append((asked, " ".join(context), {"text": [answer], "answer_start": [at]}))
    data, pieces, losses = ours(folder, "answer", rows)
    ids = {len(p) for p, _ in pieces}
    start, end = data.train.targets["start_B"], data.train.targets["end_B"]

    def target(at, pad):
        return {"start_positions": torch.tensor(start[at]), "end_positions": torch.tensor(end[at])}

    assert len(ids) == 1 and (start > 0).all()
    assert losses == pytest.approx(reference(folder, "ForQuestionAnswering", pieces, target), abs=1e-4)
    assert max(losses) - min(losses) > 0.05
