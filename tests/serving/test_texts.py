"""Requests that share a call of the model: each gets what it would have got alone, and keeps its own limits."""

from __future__ import annotations

import numpy as np
import pytest
import server as own
from server import TEXTS, post_all

import everybert
from everybert.serving.limits import Call, Limits, Refusal
from everybert.serving.metrics import Metrics
from everybert.serving.scheduler import Scheduler
from everybert.serving.shelf import Shelf
from everybert.serving.texts import Texts, guess


@pytest.fixture(scope="module")
def direct(folders):
    shelf = Shelf(Scheduler(Metrics()), Limits())
    shelf.add("words", everybert.load(folders["words"], device="cpu"))
    direct = shelf.get("words").direct
    direct.model.embed(["warm up"])  # as the service does: a tokenizer's first text has others before it
    return direct


def ticket(direct, texts, limits=None, **how):
    return Texts(direct.trunk, direct.adapter, Call(limits or Limits()), direct.model, texts, how, lambda found: found)


def test_together_as_alone(direct, folders):
    groups = [TEXTS[:3], TEXTS[3:4], TEXTS[4:]]
    tickets = [ticket(direct, texts, normalize=True) for texts in groups]
    model = everybert.load(folders["words"], device="cpu")
    for one, texts, found in zip(tickets, groups, tickets[0].run(tickets)):
        alone = model.embedded(texts, normalize=True)
        np.testing.assert_allclose(found.vectors, alone.vectors, atol=1e-6)
        assert (found.tokens, found.cut) == (alone.tokens, alone.cut)
        assert one.call.tokens == sum(alone.tokens)


def test_who_fits_with_whom(direct):
    plain, other, same = (ticket(direct, ["a"], long=long) for long in ("window", "cut", "window"))
    assert plain.fits(same) and not plain.fits(other)
    assert direct.takes(["a word"] * 10) and not direct.takes(["a word " * 10_000])
    assert guess(["fives", ""]) == 5


def test_one_request_over_its_limit_is_refused_and_its_neighbours_are_served(direct):
    scheduler = Scheduler(Metrics())
    long = "the cat eats " * 4
    tickets = [ticket(direct, [text], Limits(text_tokens=8)) for text in ("a", long, "mary eats")]
    for one in tickets:
        scheduler.put(one)
    scheduler.start(1)
    assert [len(tickets[i].future.result(30).vectors) for i in (0, 2)] == [1, 1]
    with pytest.raises(Refusal, match="tokens in a text"):
        tickets[1].future.result(30)
    scheduler.close()
    assert [one.call.tokens for one in (tickets[0], tickets[2])] == [3, 4]


def test_many_requests_at_once_as_one_by_one(folders):
    """Of 64 clients, and while the model is slow: their texts share calls, and nobody gets another's vector."""
    texts = [" ".join(TEXTS[i % 4].split()[: 1 + i % 5]) for i in range(64)]
    expected = everybert.load(folders["words"], device="cpu").embed(texts, normalize=True)
    with own.running({"words": folders["words"]}) as (url, service):
        own.slow_down(service, "words", 0.02)
        before = service.metrics.batch_tokens._sum.get()
        answers = post_all(url, [("/embed", {"inputs": text}) for text in texts], clients=64)
        np.testing.assert_allclose([a.json()[0] for a in answers], expected, atol=1e-5)
        read = service.metrics.batch_tokens._sum.get() - before
        assert read == sum(int(answer.headers["x-tokens"]) for answer in answers)
        assert sum(bucket.get() for bucket in service.metrics.batch_tokens._buckets) < 40
