"""The registry of served models: names, adapters, weights, and tokens that are counted before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import server as own
import tiny_bundle
import torch
from refusals import refuses
from server import TEXTS, post, post_all

import everybert
from everybert.errors import EverybertError
from everybert.files import atomic_folder
from everybert.model.heads import Network
from everybert.model.lora import AdapterSet, LoraConfig
from everybert.serving.limits import HttpError, Limits, RequestContext
from everybert.serving.models import ModelRegistry, count_tokens, open_models, pair_windows
from everybert.store.adapters import save_adapter


def test_names(folders):
    registry = ModelRegistry(Limits())
    open_models(registry, [f"one={folders['words']}", str(folders["qa"])], device="cpu")
    assert list(registry.entries) == ["one", "qa"]
    assert registry.get(None).name == "one" and registry.get("qa").tasks == ["embed", "tokens", "attention", "answer"]
    with pytest.raises(HttpError, match="choose one of one, qa"):
        registry.get("two")
    refuses("a name of its own", registry.add, "one", everybert.load(folders["qa"], device="cpu"))
    with pytest.raises(EverybertError, match="which is not served"):
        open_models(ModelRegistry(Limits()), [str(folders["qa"])], [f"three:four={folders['qa']}"])


@pytest.mark.parametrize("share", [False, True])
def test_weights_are_copied_unless_processes_share_them(folders, share):
    model = everybert.load(folders["words"], device="cpu")
    model.routes = {"query": everybert.load(folders["qa"], device="cpu")}
    weights = [*model.network.parameters(), *model.routes["query"].network.parameters()]
    before = [p.data_ptr() for p in weights]
    ModelRegistry(Limits()).add("words", model, share_weights=share)
    assert all((p.data_ptr() == old) == share for p, old in zip(weights, before))


@pytest.mark.parametrize(
    ("inputs", "tokens"), [(["the cat", "a"], 7), ([("the cat", "a")], 6), ([("a",) * 4], 15), (["a"] * 3, 9), ([], 0)]
)
def test_tokens_are_counted(folders, inputs, tokens):
    """With special tokens; of a text with several others, it is read with each of them."""
    context = RequestContext(Limits())
    count_tokens(everybert.load(folders["words"], device="cpu"), inputs, context)
    assert context.tokens == tokens


def test_short_texts_are_counted_one_at_a_time(folders, monkeypatch):
    """Several at once would wait for the tokenizer's threads, which long texts of other requests keep busy."""
    model, seen = everybert.load(folders["words"], device="cpu"), []
    count = model.tokenizer.ids_batch
    monkeypatch.setattr(
        model.tokenizer, "ids_batch", lambda texts, **how: seen.append(len(texts)) or count(texts, **how)
    )
    count_tokens(model, ["the cat", "a", "the cat"], RequestContext(Limits()))
    assert seen == [1, 1]
    count_tokens(model, ["the cat " * 600, "a"], RequestContext(Limits()))
    assert seen == [1, 1, 2]


def test_windows_of_long_pairs_multiply():
    assert pair_windows(10, 10, 64, 3) == 23
    assert pair_windows(1000, 10, 64, 3) == 64 * 29
    assert pair_windows(1000, 1000, 64, 3) > 64 * 29 * 29


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
            answer = post(url, path, body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        text, pair = "the film was good", ["john lives", "mary works"]
        mixed = ask("/classify", text=[text, pair])["results"]
        wanted = model.classify([text, tuple(pair)])
        assert [r["scores"] for r in mixed] == [pytest.approx(p.scores, abs=1e-5) for p in wanted]
        spans = ask("/tag", text="john lives in paris")["results"][0]
        assert [s["label"] for s in spans] == [s.label for s in model.tag("john lives in paris")]
        vector = ask("/v1/embeddings", input=text)["data"][0]["embedding"]
        assert vector == pytest.approx(model.embed([text], normalize=True)[0].tolist(), abs=1e-5)
        odd = ask("/classify", text=[pair], model="small:odd")["results"][0]
        assert set(odd["scores"]) == {"neg", "pos"}
        blank = ask("/fill", text="the [MASK] was good", top=2)["results"][0][0]
        assert [c["token"] for c in blank] == [c.token for c in model.fill("the [MASK] was good", 2)[0]]


@pytest.fixture(scope="module")
def two_adapters(folders, tmp_path_factory):
    """Folders of two random classifiers on one encoder, by name."""
    found = {}
    for number, name in enumerate(("one", "two")):
        model = everybert.load(folders["words"], device="cpu")
        torch.manual_seed(number)
        fresh, adapters = Network(model.config, {"classify": 2}), AdapterSet(model.network)
        adapters.add(name, LoraConfig(rank=2), {"classify": fresh.heads["classify"]}, fresh.pooler)
        for value in adapters.state(name).values():
            value.normal_(std=0.3)
        found[name] = tmp_path_factory.mktemp("adapters") / name
        task = {"task": "classify", "labels": ["no", "yes"]}
        with atomic_folder(found[name]) as folder:
            save_adapter(adapters, name, folder, base=str(folders["words"]), extras={"task": task})
    return found


def test_adapters_share_an_encoder(folders, two_adapters):
    """Requests for a model and two adapters of it, all at once: each is answered with its own."""
    base = folders["words"]
    alone = {name: everybert.load(folder, device="cpu") for name, folder in two_adapters.items()}
    bare = everybert.load(base, device="cpu")
    with own.running({"words": base}, adapters={"words": two_adapters}) as (url, _):
        requests = []
        for i in range(60):
            body = {"text": TEXTS[i % 5], "model": f"words:{('one', 'two')[i % 2]}"}
            requests += [("/classify", body), ("/v1/embeddings", {"input": TEXTS[i % 5], "model": "words"})]
        for (path, body), answer in zip(requests, post_all(url, requests, clients=32)):
            assert answer.status_code == 200, answer.text
            if path == "/classify":
                expected = alone[body["model"][6:]].classify(body["text"])[0]
                assert answer.json()["results"][0]["scores"] == pytest.approx(expected.scores, abs=1e-5)
            else:
                vector = answer.json()["data"][0]["embedding"]
                np.testing.assert_allclose(vector, bare.embed([body["input"]], normalize=True)[0], atol=1e-5)


def test_an_adapters_folder_is_served_with_other_adapters(two_adapters):
    """Each name is answered by its own adapter, also after another was in use."""
    with own.running({"m": two_adapters["one"]}, adapters={"m": {"other": two_adapters["two"]}}) as (url, _):
        for name, part in (("m", "one"), ("m:other", "two"), ("m", "one")):
            found = post(url, "/classify", {"text": TEXTS[0], "model": name}).json()["results"][0]
            expected = everybert.load(two_adapters[part], device="cpu").classify(TEXTS[0])[0]
            assert found["scores"] == pytest.approx(expected.scores, abs=1e-5), name


def test_an_adapters_folder_is_what_the_page_tells_to_load(two_adapters):
    """Its code would load the base model without the adapter otherwise."""
    registry = ModelRegistry(Limits())
    open_models(registry, [f"m={two_adapters['one']}"], [f"other={two_adapters['two']}"], device="cpu")
    assert {name: entry.folder for name, entry in registry.entries.items()} == {
        "m": two_adapters["one"],
        "m:other": two_adapters["two"],
    }
