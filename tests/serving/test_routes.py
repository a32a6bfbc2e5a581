"""Every endpoint answers what the model answers in Python; alone, and among many others."""

from __future__ import annotations

import base64
from dataclasses import asdict

import numpy as np
import pytest
from server import CLIENT, LABELS, TEXTS, post, post_all

import everybert


@pytest.fixture(scope="module")
def models(folders):
    return {name: everybert.load(folder, device="cpu") for name, folder in folders.items()}


def close(found, expected, tolerance=1e-5):
    """Equal but for numbers, which may differ by the tolerance."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            close(found[key], value, tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            close(one, other, tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=tolerance)
    else:
        assert found == expected


def test_embeddings_are_the_models_in_both_encodings(url, models):
    expected = models["words"].embed(TEXTS)
    answer = post(url, "/v1/embeddings", {"input": TEXTS, "model": "words"}).json()
    assert [row["index"] for row in answer["data"]] == list(range(len(TEXTS)))
    np.testing.assert_allclose([row["embedding"] for row in answer["data"]], expected, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(len(models["words"].tokenizer.encode(t)) for t in TEXTS)
    packed = post(url, "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}).json()
    rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in packed["data"]]
    np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_embeddings_take_ids_of_the_models_own_tokenizer(url, models):
    ids = models["words"].tokenizer.encode(TEXTS[0]).ids
    one = post(url, "/v1/embeddings", {"input": ids}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(one, models["words"].embed(TEXTS[:1])[0], atol=1e-5)
    assert post(url, "/v1/embeddings", {"input": [[10**9]]}).status_code == 422


def test_the_openai_client_works(url, models):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
    found = client.embeddings.create(model="words", input=TEXTS[:3])
    np.testing.assert_allclose([row.embedding for row in found.data], models["words"].embed(TEXTS[:3]), atol=1e-5)
    assert "words" in [model.id for model in client.models.list()]
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="gpt", input="a")


def test_tei_embed_normalizes_and_says_what_was_cut(url, models):
    answer = post(url, "/embed", {"inputs": TEXTS[:2]})
    np.testing.assert_allclose(answer.json(), models["words"].embed(TEXTS[:2], normalize=True), atol=1e-5)
    long = "cat " * 100
    assert post(url, "/embed", {"inputs": long}).headers["x-cut-tokens"] == "0"
    cut = post(url, "/embed", {"inputs": long, "truncate": True})
    assert cut.headers["x-cut-tokens"] == "38"
    with pytest.warns(UserWarning, match="38 tokens"):
        expected = models["words"].embed([long], normalize=True, long="cut")
    np.testing.assert_allclose(cut.json(), expected, atol=1e-5)
    rows = post(url, "/v1/embeddings", {"input": ["a", long], "long": "cut"}).json()["data"]
    assert [row["cut"] for row in rows] == [0, 38]


def test_tei_predict_has_three_forms(url, models):
    one = post(url, "/predict", {"inputs": TEXTS[0], "model": "labels"}).json()
    expected = models["labels"].classify(TEXTS[0])[0]
    assert [row["score"] for row in one] == sorted((row["score"] for row in one), reverse=True)
    close({row["label"]: row["score"] for row in one}, expected.scores)
    pair = post(url, "/predict", {"inputs": TEXTS[:2], "model": "labels"}).json()
    close({row["label"]: row["score"] for row in pair}, models["labels"].classify((TEXTS[0], TEXTS[1]))[0].scores)
    many = post(url, "/predict", {"inputs": [[TEXTS[0]], TEXTS[:2]], "model": "labels"}).json()
    close(many, [one, pair])


def test_rerank_by_cross_encoder_and_by_vectors(url, models):
    query, texts = TEXTS[0], TEXTS[1:5]
    found = post(url, "/rerank", {"query": query, "texts": texts, "model": "ranker", "raw_scores": True}).json()
    raw = models["ranker"].regress([(query, text) for text in texts])
    assert [row["index"] for row in found] == np.argsort(-np.asarray(raw)).tolist()
    close([row["score"] for row in found], sorted(raw, reverse=True))
    squashed = post(url, "/rerank", {"query": query, "texts": texts, "model": "ranker", "return_text": True}).json()
    close([row["score"] for row in squashed], [1 / (1 + np.exp(-x)) for x in sorted(raw, reverse=True)])
    assert squashed[0]["text"] == texts[squashed[0]["index"]]
    near = post(url, "/rerank", {"query": TEXTS[0], "texts": [TEXTS[3], TEXTS[0]]}).json()
    assert near[0]["index"] == 1 and near[0]["score"] == pytest.approx(1.0, abs=1e-5)


def test_our_endpoints_answer_what_python_answers(url, models):
    fill = post(url, "/fill", {"text": "the [MASK] eats [MASK]", "top": 3}).json()["results"]
    close(fill, [[[asdict(c) for c in blank] for blank in models["words"].fill("the [MASK] eats [MASK]", top=3)]])
    several = ["a [MASK]", "[MASK] sees the [MASK] .", "the cat [MASK] " + "a dog " * 90 + "[MASK]"]
    fill = post(url, "/fill", {"text": several, "top": 2}).json()["results"]
    close(fill, [[[asdict(c) for c in blank] for blank in models["words"].fill(text, top=2)] for text in several])
    found = post(url, "/classify", {"text": [TEXTS[0], TEXTS[1:3]], "model": "labels"}).json()["results"]
    expected = models["labels"].classify([TEXTS[0], (TEXTS[1], TEXTS[2])])
    close(found, [asdict(p) | {"labels": []} for p in expected])
    assert set(found[0]["scores"]) == set(LABELS)
    value = post(url, "/classify", {"text": TEXTS[0], "model": "ranker"}).json()["results"]
    close(value, [{"value": models["ranker"].regress(TEXTS[0])[0]}])
    tags = post(url, "/tag", {"text": TEXTS[:2], "model": "ner"}).json()["results"]
    close(tags, [[asdict(span) for span in spans] for spans in models["ner"].tag(TEXTS[:2])])
    body = {"question": "where does john lives ?", "context": TEXTS[1], "top": 2, "model": "qa"}
    close(
        post(url, "/answer", body).json()["results"],
        [[asdict(a) for a in models["qa"].answer("where does john lives ?", TEXTS[1], top=2)]],
    )
    near = post(url, "/next", {"first": TEXTS[0], "second": TEXTS[1]}).json()["probability"]
    assert near == pytest.approx(models["words"].next_sentence(TEXTS[0], TEXTS[1]), abs=1e-5)
    chosen = post(url, "/choose", {"prompt": TEXTS[0], "endings": TEXTS[1:4], "model": "choice"}).json()
    close(chosen["scores"], list(models["choice"].choose(TEXTS[0], TEXTS[1:4]).scores))


def test_tokens_and_attention_look_inside(url, models):
    found = post(url, "/tokens", {"text": TEXTS[1], "layer": 0, "vectors": True}).json()
    expected = models["words"].tokens(TEXTS[1], layer=0)
    assert [t["token"] for t in found["results"]] == expected.tokens and found["layer"] == 0
    np.testing.assert_allclose([t["vector"] for t in found["results"]], expected.vectors, atol=1e-5)
    weights = post(url, "/attention", {"text": TEXTS[1], "pair": TEXTS[3]}).json()["weights"]
    np.testing.assert_allclose(weights, models["words"].attention(TEXTS[1], TEXTS[3]).weights, atol=1e-5)
    one = post(url, "/attention", {"text": TEXTS[1], "layer": 1}).json()
    np.testing.assert_allclose(one["weights"], models["words"].attention(TEXTS[1]).weights[1:], atol=1e-5)
    assert post(url, "/attention", {"text": "a", "layer": 2}).status_code == 422


def test_batched_answers_equal_single_answers(served, models):
    """A storm of mixed requests: every answer is the one it would have been alone."""
    url, service = served
    before = service.metrics.batch_tokens._sum.get()
    requests, expected = [], []
    for i in range(120):
        text = f"{TEXTS[i % 5]} {' cat' * (i * 7 % 150)}"
        kind = i % 4
        if kind == 0:
            requests.append(("/v1/embeddings", {"input": text, "model": "words"}))
            expected.append(models["words"].embed([text])[0].tolist())
        elif kind == 1:
            requests.append(("/classify", {"text": text, "model": "labels"}))
            expected.append(asdict(models["labels"].classify(text)[0]) | {"labels": []})
        elif kind == 2:
            requests.append(("/tag", {"text": text, "model": "ner"}))
            expected.append([asdict(span) for span in models["ner"].tag(text)])
        else:
            requests.append(("/fill", {"text": text + " [MASK]", "top": 1}))
            expected.append([asdict(c) for c in models["words"].fill(text + " [MASK]", top=1)[0]])
    answers = post_all(url, requests, clients=32)
    assert {answer.status_code for answer in answers} == {200}
    for (path, _), answer, other in zip(requests, answers, expected):
        found = answer.json()
        if path == "/v1/embeddings":
            np.testing.assert_allclose(found["data"][0]["embedding"], other, atol=1e-5)
        else:
            close(found["results"][0][0] if path == "/fill" else found["results"][0], other)
    assert service.metrics.batch_tokens._sum.get() > before


def test_what_a_model_has_no_head_for_is_one_line(url):
    answer = post(url, "/tag", {"text": "a", "model": "words"})
    assert answer.status_code == 422
    assert "no tag head" in answer.json()["error"]


def test_the_document_has_examples_and_every_path(url):
    document = CLIENT.get(f"{url}/openapi.json").json()
    paths = {"/v1/embeddings", "/embed", "/predict", "/rerank", "/fill", "/classify", "/tag", "/answer", "/next"}
    assert paths | {"/tokens", "/attention", "/health", "/ready", "/metrics"} <= document["paths"].keys()
    for path, methods in document["paths"].items():
        if "post" in methods:
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            named = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            answer = post(url, path, named["examples"][0] | {"model": _able(path)})
            assert answer.status_code == 200, (path, answer.text)


def _able(path: str) -> str:
    return {"/predict": "labels", "/classify": "labels", "/tag": "ner", "/answer": "qa", "/choose": "choice"}.get(
        path, "words"
    )


def test_copies_of_a_long_context_are_counted_before_anything_is_computed(served, models):
    url, service = served
    before = service.metrics.batch_tokens._sum.get()
    body = {"question": ["where ?"] * 64, "context": "the cat eats " * 20_000, "model": "qa"}
    answer = post(url, "/answer", body)
    assert answer.status_code == 413 and "windows of long pairs" in answer.json()["error"]
    assert service.metrics.batch_tokens._sum.get() == before
