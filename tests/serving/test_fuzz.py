"""Generated bodies: whatever is sent, the answer is 2xx or 4xx, says why, and fits the OpenAPI document."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server import CLIENT, TEXTS

FIELDS = ["input", "inputs", "text", "texts", "query", "question", "context", "first", "second", "prompt", "endings"]
FIELDS += ["parameters", "source_sentence", "sentences", "add_special_tokens", "top_k", "task", "word", "originals"]
FIELDS += ["model", "top", "layer", "vectors", "pair", "normalize", "truncate", "encoding_format", "dimensions", "long"]
MODELS = ["words", "labels", "ner", "qa", "ranker", "choice", "nobody", "words:nobody", ""]

texts = st.one_of(st.sampled_from([*TEXTS, "a [MASK] b", "[MASK][MASK]", "[CLS] [SEP]", "\x00", "😀" * 40]), st.text())
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from(MODELS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=3),
    max_leaves=8,
)
likely = st.fixed_dictionaries(
    {},
    optional={name: texts | st.lists(texts, max_size=3) | values for name in FIELDS}
    | {"model": st.sampled_from(MODELS)},
)
bodies = st.one_of(
    likely.map(lambda x: json.dumps(x).encode()), values.map(lambda x: json.dumps(x).encode()), st.binary(max_size=200)
)


def fuzz(url: str, examples: int) -> None:
    document = CLIENT.get(f"{url}/openapi.json").json()
    paths = [*(path for path, verbs in document["paths"].items() if "post" in verbs), "/models/labels"]

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(path=st.sampled_from(paths), body=bodies)
    def run(path: str, body: bytes) -> None:
        answer = CLIENT.post(url + path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (path, body, answer.text)
        found = answer.json()
        assert answer.status_code < 400 or found["error"]

    run()


def conform(url: str, examples: int) -> None:
    """schemathesis: bodies made from the document, valid and not; answers must be those the document promises."""
    document = schemathesis.openapi.from_dict(CLIENT.get(f"{url}/openapi.json").json())
    document.config.update(base_url=url)
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.status_code_conformance,
        schemathesis.checks.content_type_conformance,
        schemathesis.checks.response_schema_conformance,
    ]
    for found in document.get_all_operations():
        operation = found.ok()
        if operation.method.upper() != "POST":
            continue
        strategy = st.one_of(operation.as_strategy(generation_mode=mode) for mode in list(schemathesis.GenerationMode))

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=strategy)
        def run(case: schemathesis.Case) -> None:
            case.validate_response(case.call(timeout=30), checks=checks)

        run()


def test_no_body_breaks_the_server(url):
    fuzz(url, 200)


def test_answers_fit_the_document(url):
    conform(url, 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_bodies(url):
    fuzz(url, 12_000)
    conform(url, 500)  # for each of the sixteen endpoints
    assert CLIENT.get(f"{url}/health").status_code == 200
