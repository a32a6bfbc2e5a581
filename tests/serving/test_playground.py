"""The playground's endpoints give what the model gives; its files are few, small and ask for nothing outside."""

import base64
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import server as own
import torch

import everybert
from everybert.corpus.show import text_examples
from everybert.inference.model import load
from everybert.inside.attention import without_heads
from everybert.serving import playground
from everybert.serving.playground import CHARACTERS

TEXT = "the cat sees a red dog ."


@pytest.fixture(scope="module")
def models(folders):
    return {name: load(folder, device="cpu") for name, folder in folders.items()}


def assets():
    """The files of the page and of the attention viewer, by name."""
    folders = [Path(everybert.__file__).parent / room / "web" for room in ("serving", "inside")]
    return {file.name: file.read_bytes() for folder in folders for file in folder.iterdir()}


def ask(url, path, **body):
    reply = own.post(url, f"/playground/{path}", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def numbers(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


# ── the page ──


def test_first_paint_is_small():
    files = assets()
    shell = ["index.html", "mark.svg", "colours.css", "style.css", "app.js", "kit.js"]
    viewer = [name for name in files if name.startswith("attention-")]
    for panel in (name for name in files if name.startswith("panel-")):
        needed = [*shell, panel, *(viewer if panel == "panel-attention.js" else [])]
        assert sum(len(files[name]) for name in needed) < 100_000, panel


def test_files_name_no_other_place():
    for name, data in assets().items():
        text = data.decode()
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", text))
        assert found <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"\binnerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name


def test_page_headers_and_caching(url):
    page = httpx.get(url + "/")
    policy = page.headers["content-security-policy"]
    assert page.status_code == 200 and "<main" in page.text
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    script = httpx.get(url + "/playground/web/app.js")
    assert script.headers["content-encoding"] == "gzip"
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["cache-control"] == "no-cache"
    again = httpx.get(url + "/playground/web/app.js", headers={"if-none-match": script.headers["etag"]})
    assert again.status_code == 304 and not again.content
    linked = re.findall(r'(?:href|src)="(playground/web/[^"]+)"', page.text)
    assert len(linked) >= 4
    for path in linked:
        assert httpx.get(f"{url}/{path}").status_code == 200, path


@pytest.mark.parametrize("name", ["../app.py", "..%2fplayground.py", "nothing.js", "__init__.py"])
def test_only_its_own_files_are_sent(url, name):
    assert httpx.get(f"{url}/playground/web/{name}").status_code == 404


def test_models_for_the_picker(url, folders):
    found = {m["id"]: m for m in httpx.get(url + "/v1/models").json()["data"]}
    assert list(found) == list(folders)
    assert found["words"]["folder"] == str(folders["words"]) and "fill" in found["words"]["tasks"]
    assert found["words"]["layers"] == 2 and found["words"]["window"] == 64
    assert "fill" not in found["qa"]["tasks"] and found["ranker"]["regression"]


def test_adapters_for_the_picker(folders, tmp_path):
    from everybert.files import atomic_folder
    from everybert.model.lora import AdapterSet, LoraConfig
    from everybert.store.adapters import save_adapter

    base = load(folders["labels"], device="cpu")
    adapters = AdapterSet(base.network)
    adapters.add("mine", LoraConfig(rank=2), {"classify": base.network.heads["classify"]}, base.network.pooler)
    with atomic_folder(tmp_path / "mine") as draft:
        task = {"task": "classify", "labels": own.LABELS}
        save_adapter(adapters, "mine", draft, base=str(folders["labels"]), extras={"task": task})
    with own.running({"labels": folders["labels"]}, adapters={"labels": {"mine": tmp_path / "mine"}}) as (url, _):
        plain, adapted = httpx.get(url + "/v1/models").json()["data"]
        assert (plain["adapter"], adapted["adapter"], adapted["model"]) == (None, "mine", "labels")
        assert adapted["folder"] == str(tmp_path / "mine"), "what everybert.load takes"
        found = ask(url, "attribution", model="labels:mine", text="good food")
    expected = load(tmp_path / "mine", device="cpu").attribution("good food")
    assert np.abs(np.array(found["scores"]) - expected.scores).max() < 1e-4


# ── the answers ──


def test_fill_equals_the_model(url, models):
    text = "the cat sees a [MASK] dog"
    (blank,) = ask(url, "fill", model="words", text=text, originals=["red"], top=5)["blanks"]
    expected = models["words"].fill(text, top=5)[0]
    assert [g["token"] for g in blank["both"]] == [c.token for c in expected]
    assert blank["both"][0]["score"] == pytest.approx(expected[0].score, abs=1e-6)
    assert blank["left"][0]["token"] == models["words"].fill("the cat sees a [MASK]")[0][0].token
    assert blank["original"]["word"] == "red" and blank["original"]["rank"] >= 1
    trace = models["words"].trace(text.replace("[MASK]", "red"))
    seen = trace["mlm.probabilities"][trace.tokens.index("red"), models["words"].tokenizer.id("red")]
    assert blank["original"]["seen"] == pytest.approx(seen, abs=1e-6), "where it is not hidden"
    two = ask(url, "fill", model="words", text="the [MASK]", pair="a [MASK] eats")["blanks"]
    assert len(two) == 2


def test_tokens_compare_vocabularies(url, models):
    found = ask(url, "tokens", model="words", text="The Zebra 🐍", pair="a cat")
    encoding = models["words"].tokenizer.encode("The Zebra 🐍", "a cat")
    assert found["tokens"] == encoding.tokens and found["ids"] == encoding.ids
    assert found["unknown"][found["tokens"].index("[UNK]")] is True
    assert found["texts"][-2] == 1 and found["special"][0] is True
    assert found["lowered"]["tokens"] == found["tokens"], "an uncased vocabulary"
    assert found["others"] == [], "all these models share one"
    assert (found["kind"], found["lowercase"]) == ("wordpiece", True)


def test_examples_equal_those_of_the_library(url, models):
    text, settings = "The cat sees. A dog eats.\n\nMary sings. John lives in paris.", {"rate": 0.3, "seed": 2}
    for kind, strategy in (("pairs", "token"), ("order", "word"), ("full", "span"), ("document", "pmi")):
        body = {"text": text, "kind": kind, "strategy": strategy, "collocations": ["a dog"], **settings}
        expected = text_examples(text, models["words"].tokenizer, kind, strategy, collocations=["a dog"], **settings)
        found = ask(url, "examples", model="words", **body)["examples"]
        assert found == json.loads(json.dumps(expected)) and len(found) > 1
    for text, told in (
        ("  ", "the text has no words to make examples of; give some sentences"),
        ("A cat.", "put a document's sentences into one document"),
        ("A cat. A dog.", "pairs need sentences of other documents"),
        ("a" * (CHARACTERS + 1), "characters"),
    ):
        reply = own.post(url, "/playground/examples", {"model": "words", "text": text})
        assert reply.status_code in (413, 422) and told in reply.json()["error"] and "/" not in reply.json()["error"]


def test_attention_equals_the_model(url, models):
    whole = models["words"].attention(TEXT, "a cat").weights
    found = ask(url, "attention", model="words", text=TEXT, pair="a cat")
    small = numbers(found["thumbnails"], np.uint8).reshape(2, 2, found["size"], found["size"])
    n = len(found["tokens"])
    assert found["size"] == n and (found["layers"], found["heads"]) == (2, 2)
    assert np.abs(small / 255 - whole).max() < 0.003
    head = ask(url, "attention/head", model="words", text=TEXT, pair="a cat", layer=1, head=0)
    assert np.abs(numbers(head["weights"], "<u2").reshape(n, n) / 65535 - whole[1, 0]).max() < 1e-5
    link = ask(url, "attention/link", model="words", text=TEXT, pair="a cat", source=2, target=5)["weights"]
    assert np.abs(np.array(link).reshape(2, 2) - whole[:, :, 2, 5]).max() < 2e-5
    missing = own.post(url, "/playground/attention/head", {"model": "words", "text": TEXT, "layer": 7, "head": 0})
    assert missing.status_code == 422 and "no layer 7" in missing.json()["error"]


def test_context_equals_the_model(url, models):
    texts = ["the red cat", "a red song"]
    found = ask(url, "context", model="words", word="red", texts=texts, top=3)
    expected = models["words"].neighbours("red", texts, 3)
    assert np.abs(np.array(found["similarity"]) - expected.similarity).max() < 1e-4
    assert [n["word"] for n in found["nearest"][3][1]] == [n.word for n in expected.nearest[3][1]]


def test_answers_with_their_ends(url, models):
    question, context = "where does john lives ?", "john lives in paris and mary eats " * 20
    found = ask(url, "answer", model="qa", question=question, context=context)
    best = models["qa"].answer(question, context, top=3)
    assert [a["text"] for a in found["answers"]] == [a.text for a in best]
    assert len(found["tokens"]) == len(found["start"]) == 20 * 7, "a long passage, in windows: every token once"
    assert 0.3 < sum(found["start"]) <= 1.0001 and 0.3 < sum(found["end"]) <= 1.0001


def test_attribution_under_the_scheduler(url, models):
    """Gradients through the shared encoder, while other requests use it."""
    text = "good food , bad song"
    alone = models["labels"].attribution(text)

    body = {"model": "labels", "text": [TEXT]}
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(own.post, url, "/classify", body) for _ in range(6)]
        for _ in range(6):
            found = ask(url, "attribution", model="labels", text=text)
            assert np.abs(np.array(found["scores"]) - alone.scores).max() < 1e-4
            assert abs(found["gap"]) < 1e-3 and found["target"] == alone.target
    expected = models["labels"].classify([TEXT])[0].score
    for other in others:
        assert other.result().json()["results"][0]["score"] == pytest.approx(expected, abs=1e-5)


def test_a_client_has_one_attribution_at_a_time(folders):
    """Gradients take much memory: more are refused at once, and none of them waits in the queue."""
    body = {"text": "good food"}
    with own.running({"labels": folders["labels"]}) as (url, service), ThreadPoolExecutor(1) as pool:
        with own.held(service, "labels"):
            first = pool.submit(own.post, url, "/playground/attribution", body)
            own.until(lambda: service.registry.entries["labels"].loaded.running)
            second = own.post(url, "/playground/attribution", body)
            assert second.status_code == 429 and second.headers["retry-after"] == "1"
        assert first.result().status_code == 200
        assert own.post(url, "/playground/attribution", body).status_code == 200


def test_long_texts_are_not_explained(url):
    """A model computes with one adapter at a time: gradients for a long text would hold up the requests for others."""
    refused = own.post(url, "/playground/attribution", {"model": "labels", "text": "good food " * 100})
    assert refused.status_code in (413, 422) and "tokens" in refused.json()["error"]


def test_steps_carry_the_numbers(url, models):
    trace = models["words"].trace(TEXT)
    first = ask(url, "step", model="words", text=TEXT, layer=1, head=1, step=0)
    names = [title for _, title in first["titles"]]
    scores = ask(url, "step", model="words", text=TEXT, layer=1, head=1, step=names.index("Scores"))
    (part,) = scores["parts"]
    value = numbers(part["data"], "<f4").reshape(part["shape"])
    assert np.abs(value - trace["layers.1.attention.scores"][1]).max() < 1e-4
    last = ask(url, "step", model="words", text=TEXT, layer=1, head=1, step=names.index("The vocabulary"))
    assert last["parts"][0]["top"][3][0][0] == trace.vocabulary(models["words"].tokenizer)[3][0][0]
    assert first["gap"] < 1e-5


def test_heads_are_switched_off(url, models):
    text = "the dog [MASK] ."
    found = ask(url, "attention/off", model="words", text=text, heads=[[0, 1], [1, 0]])
    model = models["words"]
    encoding = model.one_window(text)
    both = [without_heads(model.network, encoding, heads) for heads in ([], [(0, 1), (1, 0)])]
    assert found["cosine"] == pytest.approx(torch.cosine_similarity(*both, dim=-1).tolist(), abs=1e-4)
    assert found["masks"] == [encoding.ids.index(model.tokenizer.mask_id)]
    assert [token for token, _ in found["whole"][0]] == [c.token for c in model.fill(text, top=5)[0]]
    assert found["without"] != found["whole"]
    refused = own.post(url, "/playground/attention/off", {"model": "words", "text": text, "heads": [[7, 0]]})
    assert refused.status_code == 422 and "no layer 7" in refused.json()["error"]


# ── bad input ──


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("fill", {"text": "x" * 100_000}),
        ("tokens", {"text": "a", "pair": "x" * 100_000}),
        ("context", {"word": "x", "texts": ["x", "x" * 100_000]}),
        ("answer", {"question": "x", "context": "x" * 100_000}),
    ],
)
def test_too_long_is_said_with_the_count(url, path, body):
    reply = own.post(url, f"/playground/{path}", {"model": "words", **body})
    assert reply.status_code == 413
    assert re.match(rf"100,00\d characters where the limit is {CHARACTERS:,}", reply.json()["error"])


def test_mistakes_are_sentences(url):
    cases = {
        ("fill", "the cat"): "no [MASK]",
        ("fill", "[MASK]"): None,
        ("attention", "cat " * 100): "102 tokens, the model reads 64",
        ("step", "cat " * 100): "102 tokens, the model reads 64",
    }
    for (path, text), words in cases.items():
        reply = own.post(url, f"/playground/{path}", {"model": "words", "text": text})
        assert (reply.status_code == 200) == (words is None)
        if words:
            assert words in reply.json()["error"] and "\n" not in reply.json()["error"]
    lacking = own.post(url, "/playground/fill", {"model": "qa", "text": "a [MASK]"})
    assert lacking.status_code == 422 and "no mlm head" in lacking.json()["error"]
    empty = ask(url, "attention", model="words", text="")
    assert empty["tokens"] == ["[CLS]", "[SEP]"]


def test_more_weights_than_the_page_can_draw_are_refused(url, monkeypatch):
    monkeypatch.setattr(playground, "MOST_WEIGHTS", 100)
    reply = own.post(url, "/playground/attention", {"text": "more than ten tokens are too many here"})
    assert reply.status_code == 413 and "attention weights" in reply.json()["error"]


def test_a_second_head_costs_no_second_pass(url, served, monkeypatch):
    calls = []
    real = playground.quantised
    monkeypatch.setattr(playground, "quantised", lambda w: (calls.append(1), real(w))[1])
    for head in (0, 1, 0):
        ask(url, "attention/head", model="words", text="mary eats one two three", layer=0, head=head)
    assert len(calls) == 1


def test_the_document_shows_only_the_api(url):
    paths = json.loads(httpx.get(url + "/openapi.json").text)["paths"]
    assert "/fill" in paths and not any(path.startswith("/playground") for path in paths)
