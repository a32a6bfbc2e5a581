"""Embedders: losses and vectors are sentence-transformers', and the folder opens there."""

import numpy as np
import pytest
import tiny_bert as tiny
import torch
from refusals import refuses

import everybert
from everybert.inference.model import Model
from everybert.store.huggingface import save_network
from everybert.store.sentence_transformers import Pooling, write_pooling
from everybert.tasks import Embed, embed
from everybert.tasks.features import make_batch
from everybert.text.windows import WindowConfig

HEAD = ("Model",)


def unit(seed, *shape):
    return torch.nn.functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_losses_are_those_of_sentence_transformers():
    from sentence_transformers import losses

    a, p, n = unit(0, 6, 8), unit(1, 6, 8), unit(2, 6, 8)
    ranking = losses.MultipleNegativesRankingLoss(model=None, scale=20.0)
    for passages in ([p], [p, n]):
        expected = ranking.compute_loss_from_embeddings([a, *passages], None)
        assert float(embed.ranking_loss(a, torch.cat(passages), 20.0)) == pytest.approx(float(expected), abs=1e-5)
    scores = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0])
    cosent = losses.CoSENTLoss(model=None, scale=20.0)
    expected = cosent.compute_loss_from_embeddings([a, p], scores)
    assert float(embed.cosent_loss((a * p).sum(-1), scores, 20.0)) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fill", [None, 64])
def test_the_batch_loss_uses_every_other_text_as_a_negative(bert, size, fill):
    loaded, tokenizer, _ = bert
    draw = np.random.default_rng(size)
    rows = [tuple(" ".join(draw.choice(tiny.WORDS[:40], draw.integers(2, 9))) for _ in range(size)) for _ in range(5)]
    examples = Embed.read(rows)
    task = Embed.from_examples(examples, loaded.config)
    features = task.features(tokenizer, loaded.config, examples)
    with torch.no_grad():
        loss = task.loss(loaded.network, make_batch(features, np.arange(5), fill=fill))
    embedder = Model(loaded.network, tokenizer)
    vectors = [torch.tensor(embedder.embed(list(c), "mean", True)) for c in zip(*rows)]
    assert float(loss) == pytest.approx(float(embed.ranking_loss(vectors[0], torch.cat(vectors[1:]), 20.0)), abs=1e-4)


def test_scored_pairs(bert):
    loaded, tokenizer, _ = bert
    rows = [("good cat", "a cat", 0.9), ("bad dog", "john", 0.1), ("red food", "blue food", 0.6)]
    examples = Embed.read(rows)
    task = Embed.from_examples(examples, loaded.config)
    assert task.scored and task.metric == "spearman"
    features = task.features(tokenizer, loaded.config, examples)
    a, b = (Model(loaded.network, tokenizer).embed([r[i] for r in rows], "mean", True) for i in (0, 1))
    cosine = (a * b).sum(1)
    with torch.no_grad():
        loss = task.loss(loaded.network, make_batch(features, np.arange(3)))
    expected = embed.cosent_loss(torch.tensor(cosine), torch.tensor([0.9, 0.1, 0.6]), 20.0)
    assert float(loss) == pytest.approx(float(expected), abs=1e-4)
    scores = task.score(loaded.network, features, examples)
    assert scores["pearson"] == pytest.approx(np.corrcoef(cosine, [0.9, 0.1, 0.6])[0, 1], abs=1e-5)


def test_recall_counts_the_pairs_that_find_each_other(bert):
    loaded, tokenizer, _ = bert
    rows = [("good cat", "good cat"), ("bad dog", "bad dog"), ("john", "mary")]
    examples = Embed.read(rows)
    task = Embed.from_examples(examples, loaded.config)
    scores = task.score(loaded.network, task.features(tokenizer, loaded.config, examples), examples)
    assert scores["recall@1"] >= 2 / 3 and scores["mrr"] >= scores["recall@1"]


@pytest.mark.parametrize("pooling, normalize", [("mean", True), ("cls", False)])
def test_the_folder_opens_in_sentence_transformers(bert, tmp_path, pooling, normalize):
    from sentence_transformers import SentenceTransformer

    loaded, tokenizer, _ = bert
    task = Embed(window=WindowConfig(64, 16), pooling=pooling, normalize=normalize)
    save_network(loaded.network, tmp_path, tokenizer=tokenizer)
    write_pooling(tmp_path, Pooling((pooling,), normalize, 64), loaded.config.hidden_size)
    assert (task.state()["pooling"], task.state()["normalize"]) == (pooling, normalize)
    texts = ["the cat is good", "mary sees a film in london , they eat"]
    ours = np.stack(list(everybert.load(tmp_path).predict("embed", texts)))
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_task_predicts_nothing_itself(bert):
    loaded, tokenizer, _ = bert
    refuses("Model.embed", list, Embed(window=WindowConfig(64, 16)).predict(loaded.network, tokenizer, ["a cat"]))


def test_no_negative_is_left_out_however_many_there_are(bert):
    loaded, tokenizer, _ = bert
    examples = Embed.read([("good cat", "a cat", *(f"bad dog {i}" for i in range(28))), ("john", "mary")])
    features = Embed.from_examples(examples, loaded.config).features(tokenizer, loaded.config, examples)
    assert make_batch(features, np.arange(2)).targets.counts == (2, 30)
