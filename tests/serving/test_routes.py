"""Every endpoint answers what the model answers in Python; alone, and among many others."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict

import numpy as np
import pytest
import tiny_bert
from server import CLIENT, LABELS, TEXTS, post, post_all, running

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
    expected = models["words"].embed(TEXTS, normalize=True)
    answer = post(url, "/v1/embeddings", {"input": TEXTS, "model": "words"}).json()
    assert [row["index"] for row in answer["data"]] == list(range(len(TEXTS)))
    np.testing.assert_allclose([row["embedding"] for row in answer["data"]], expected, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(len(models["words"].tokenizer.encode(t)) for t in TEXTS)
    packed = post(url, "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}).json()
    rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in packed["data"]]
    np.testing.assert_allclose(rows, expected, atol=1e-5)


@pytest.mark.parametrize("ids", [[5, 6], [[5, 6], [7]]])
def test_token_ids_are_refused_since_they_may_be_another_tokenizers(url, ids):
    """LangChain sends those of cl100k by default."""
    answer = post(url, "/v1/embeddings", {"input": ids})
    assert answer.status_code == 400 and "send texts, not token ids" in answer.json()["error"]["message"]


def test_the_openai_client_works(url, models):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
    found = client.embeddings.create(model="words", input=TEXTS[:3])
    unit = models["words"].embed(TEXTS[:3], normalize=True)
    np.testing.assert_allclose([row.embedding for row in found.data], unit, atol=1e-5)
    short = client.embeddings.create(model="words", input=TEXTS[:3], dimensions=8, encoding_format="float")
    first = unit[:, :8] / np.linalg.norm(unit[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose([row.embedding for row in short.data], first, atol=1e-5)
    assert len(client.embeddings.create(model="words", input=["a"] * 2048).data) == 2048
    assert "words" in [model.id for model in client.models.list()]
    assert client.models.retrieve("ranker").owned_by == "everybert"
    for call in (lambda: client.embeddings.create(model="gpt", input="a"), lambda: client.models.retrieve("gpt")):
        with pytest.raises(openai.NotFoundError) as missing:
            call()
        assert missing.value.code == "model_not_found" and missing.value.type == "invalid_request_error"
    for wrong in ({"input": 5}, {"input": []}, {"input": "a", "dimensions": 999}, {"input": "a", "dimensions": 0}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="words", **wrong)
        assert refused.value.type == "invalid_request_error"


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
    assert [(row["index"], pytest.approx(row["score"], abs=1e-5)) for row in squashed] == [
        (one.index, one.score) for one in models["ranker"].rank(query, texts)
    ]
    for bad in ({"query": " ", "texts": texts}, {"query": query, "texts": []}):
        refused = post(url, "/rerank", bad | {"model": "ranker"})
        assert refused.status_code == 422 and "nothing to rank" in refused.text
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


def test_hugging_faces_client_works(url, models):
    hub = pytest.importorskip("huggingface_hub")

    def client(name):
        return hub.InferenceClient(base_url=f"{url}/models/{name}")

    words = hub.InferenceClient(base_url=url)  # the first model
    np.testing.assert_allclose(words.feature_extraction(TEXTS[0]), models["words"].embed(TEXTS[:1]), atol=1e-5)
    unit = words.feature_extraction(TEXTS[0], normalize=True, dimensions=8)
    assert unit.shape == (1, 8) and np.linalg.norm(unit) == pytest.approx(1, abs=1e-5)
    vectors = models["words"].embed(TEXTS[:3], normalize=True)
    similar = words.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:3])
    np.testing.assert_allclose(similar, vectors[1:] @ vectors[0], atol=1e-5)
    guesses = words.fill_mask("the [MASK] eats", top_k=3)
    expected = models["words"].fill("the [MASK] eats", top=3)[0]
    assert [(g.token, g.token_str) for g in guesses] == [(c.id, c.token) for c in expected]
    assert guesses[0].sequence == f"the {expected[0].token} eats"
    labels = client("labels").text_classification(TEXTS[0], top_k=2)
    assert len(labels) == 2 and labels[0].label == models["labels"].classify(TEXTS[0])[0].label
    spans = client("ner").token_classification(TEXTS[1], aggregation_strategy="simple")
    assert [(t.entity_group, t.word) for t in spans] == [(x.label, x.text) for x in models["ner"].tag(TEXTS[1])]
    best = client("qa").question_answering(question="where ?", context=TEXTS[1])
    assert best.answer == models["qa"].answer("where ?", TEXTS[1])[0].text
    with pytest.raises(hub.errors.HfHubHTTPError):  # refused, not ignored
        words.fill_mask("the [MASK] eats", targets=["cat"])


def test_teis_other_endpoints(url, models):
    info = CLIENT.get(f"{url}/info").json()
    assert info["model_id"] == "words" and info["max_client_batch_size"] == 2048 and "embedding" in info["model_type"]
    (found,) = post(url, "/tokenize", {"inputs": TEXTS[0]}).json()
    encoding = models["words"].tokenizer.encode(TEXTS[0])
    assert [(t["id"], t["text"], t["special"], t["start"], t["stop"]) for t in found] == [
        (i, t, s, *o) for i, t, s, o in zip(encoding.ids, encoding.tokens, encoding.special, encoding.offsets)
    ]
    plain = post(url, "/tokenize", {"inputs": TEXTS[:2], "add_special_tokens": False}).json()
    assert [len(x) for x in plain] == [len(models["words"].tokenizer.encode(t, specials=False)) for t in TEXTS[:2]]
    vectors = post(url, "/embed_all", {"inputs": TEXTS[:2]}).json()
    np.testing.assert_allclose(vectors[1], models["words"].tokens(TEXTS[1]).vectors, atol=1e-5)
    assert post(url, "/embed", {"inputs": "a", "prompt_name": "query"}).status_code == 422  # no such prompt
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": [TEXTS[0], TEXTS[1]]}}
    assert post(url, "/similarity", body).json()[0] == pytest.approx(1, abs=1e-5)


def test_sparse_vectors_as_tei_gives_them(url, models):
    found = post(url, "/embed_sparse", {"inputs": TEXTS[:2]}).json()
    for row, one in zip(found, models["words"].sparse(TEXTS[:2])):
        assert [entry["index"] for entry in row] == one.indices.tolist()
        np.testing.assert_allclose([entry["value"] for entry in row], one.weights, atol=1e-6)
    (few,) = post(url, "/embed_sparse", {"inputs": TEXTS[0], "top": 3}).json()
    assert sorted(e["value"] for e in few) == sorted(e["value"] for e in found[0])[-3:]
    for body in ({"inputs": "a", "prompt_name": "query"}, {"inputs": "a", "model": "ner"}, {"inputs": "a", "top": 0}):
        assert post(url, "/embed_sparse", body).status_code in (422, 424), body


def test_colbert_reranks(tmp_path):
    folder = tiny_bert.save(tmp_path / "colbert", "Model")
    about = {"model_type": "ColBERT", "query_length": 9, "document_length": 30}
    kinds = ["sentence_transformers.models.Transformer"]
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": k} for k in kinds]))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    with running({"colbert": folder}) as (url, service):
        found = post(url, "/rerank", {"query": TEXTS[0], "texts": TEXTS[:3], "return_text": True}).json()
        expected = service.registry.get(None).model.rank(TEXTS[0], TEXTS[:3])
        assert [one["index"] for one in found] == [one.index for one in expected]
        np.testing.assert_allclose([one["score"] for one in found], [one.score for one in expected], atol=1e-6)
        assert found[0]["text"] == TEXTS[found[0]["index"]]
        assert "rerank" in service.registry.get(None).tasks and "embed" not in service.registry.get(None).tasks
        refused = post(url, "/embed", {"inputs": "a"})
        assert refused.status_code < 500 and "use multi()" in refused.text


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/ready", "/v1/models", "/playground/web/app.js"])
def test_head_is_get_without_a_body(url, path):
    answer = CLIENT.head(url + path)
    assert answer.status_code == 200 and not answer.content
    assert answer.headers["content-type"] == CLIENT.get(url + path).headers["content-type"]


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
            expected.append(models["words"].embed([text], normalize=True)[0].tolist())
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


def test_the_document_has_examples_and_every_path(url):
    document = CLIENT.get(f"{url}/openapi.json").json()
    paths = {"/v1/embeddings", "/embed", "/predict", "/rerank", "/fill", "/classify", "/tag", "/answer", "/next"}
    assert paths | {"/tokens", "/attention", "/health", "/ready", "/metrics"} <= document["paths"].keys()
    for path, methods in document["paths"].items():
        if "post" in methods:
            about = methods["post"]
            parts = (about["requestBody"], about["responses"]["200"])
            shown, said = (part["content"]["application/json"] for part in parts)
            answer = post(url, path, shown["example"] | {"model": _able(path)})
            assert answer.status_code == 200, (path, answer.text)
            assert type(answer.json()) is type(said["example"]) and "schema" in shown and "schema" in said
            if isinstance(said["example"], dict):
                assert answer.json().keys() == said["example"].keys()


def _able(path: str) -> str:
    other = {"/tag": "ner", "/answer": "qa", "/choose": "choice"}
    return other.get(path, "labels" if path in ("/predict", "/classify", "/") else "words")


def test_copies_of_a_long_context_are_counted_before_anything_is_computed(served, models):
    url, service = served
    before = service.metrics.batch_tokens._sum.get()
    body = {"question": ["where ?"] * 64, "context": "the cat eats " * 20_000, "model": "qa"}
    answer = post(url, "/answer", body)
    assert answer.status_code == 413 and "windows of long pairs" in answer.json()["error"]
    assert service.metrics.batch_tokens._sum.get() == before


def test_requests_that_read_are_counted_by_their_path(served):
    url, service = served
    for method, path, status in (("GET", "/health", 200), ("GET", "/v1/models/nothing", 404), ("GET", "/embed", 405)):
        CLIENT.request(method, f"{url}{path}")
        named = path.replace("nothing", "{model}")
        labels = {"path": named, "status": str(status)}
        assert service.metrics.registry.get_sample_value("everybert_requests_total", labels)


def test_texts_are_cut_at_their_end_and_another_side_is_refused(url):
    asked = {"inputs": "good film " * 200, "truncate": True}
    cut = post(url, "/embed", asked | {"truncation_direction": "Right"})
    assert cut.json() == post(url, "/embed", asked).json()
    for path in ("/embed", "/embed_sparse"):
        answer = post(url, path, asked | {"truncation_direction": "Left"})
        assert answer.status_code == 422 and "truncation_direction" in answer.json()["error"]


def test_own_endpoints_refuse_unknown_fields_and_others_ignore_them(url):
    answer = post(url, "/fill", {"text": "a [MASK]", "colour": "red"})
    assert answer.status_code == 422 and "colour: this endpoint has no such field" in answer.json()["error"]
    assert post(url, "/embed", {"inputs": "a", "colour": "red"}).status_code == 200
    assert post(url, "/v1/embeddings", {"input": "a", "user": "me"}).status_code == 200
