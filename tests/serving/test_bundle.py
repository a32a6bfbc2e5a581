"""A served trunk with adapters of its own: a request that names none gets the right one."""

import httpx
import pytest
import server as own
import tiny_bundle

import everybert


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("bundle")
    return tiny_bundle.box(tiny_bundle.parts(out), out / "small")


def test_each_endpoint_takes_its_adapter(folder):
    model = everybert.load(folder)
    with own.running({"small": folder}) as (url, service):
        assert set(service.registry.entries) == {"small", *(f"small:{name}" for name in tiny_bundle.TASKS)}
        assert {"classify", "tag", "embed", "fill", "next"} <= set(service.registry.get("small").tasks)

        def ask(path: str, **body: object) -> dict:
            answer = httpx.post(url + path, json=body, timeout=30)
            assert answer.status_code == 200, answer.text
            return answer.json()

        text, pair = "the film was good", ["john lives", "mary works"]
        mixed = ask("/classify", text=[text, pair])["results"]
        wanted = model.classify([text, tuple(pair)])
        assert [r["scores"] for r in mixed] == [pytest.approx(p.scores, abs=1e-5) for p in wanted]
        spans = ask("/tag", text="john lives in paris")["results"][0]
        assert [s["label"] for s in spans] == [s.label for s in model.tag("john lives in paris")]
        vector = ask("/v1/embeddings", input=text)["data"][0]["embedding"]
        assert vector == pytest.approx(model.embed([text])[0].tolist(), abs=1e-5)
        odd = ask("/classify", text=[pair], model="small:odd")["results"][0]
        assert set(odd["scores"]) == {"neg", "pos"}
        blank = ask("/fill", text="the [MASK] was good", top=2)["results"][0][0]
        assert [c["token"] for c in blank] == [c.token for c in model.fill("the [MASK] was good", 2)[0]]
