"""The embedder follows the protocols of other libraries; their base classes are played by small stand-ins."""

import asyncio
import inspect
import subprocess
import sys
from dataclasses import dataclass, replace
from enum import Enum
from types import ModuleType

import numpy as np
import pytest
import tiny_model
from refusals import refuses

from everybert.inference.model import load
from everybert.integrations import Embedder

TEXTS = ["the film was good", "a great song"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    model = load(tiny_model.save(tmp_path_factory.mktemp("base") / "base", {"mlm": None}), device="cpu")
    prompts = {"query": "the day ", "passage": "a song "}
    model.pooling = replace(model.pooling, prompts=prompts)
    return Embedder(model, normalize=True)


def same(found, texts, embedder, **options):
    np.testing.assert_allclose(found, embedder.model.embed(texts, normalize=True, **options), atol=1e-6)


def test_nothing_is_imported_at_load():
    code = "import sys, everybert.integrations; print({'torch', 'langchain_core', 'chromadb'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_langchain(embedder):
    documents = embedder.embed_documents(TEXTS)
    assert isinstance(documents, list) and isinstance(documents[0][0], float)
    same(documents, TEXTS, embedder, prompt="passage")
    same([embedder.embed_query(TEXTS[0])], TEXTS[:1], embedder, prompt="query")
    assert asyncio.run(embedder.aembed_documents(TEXTS)) == documents
    assert asyncio.run(embedder.aembed_query(TEXTS[0])) == embedder.embed_query(TEXTS[0])


def test_chroma(embedder):
    assert list(inspect.signature(type(embedder).__call__).parameters) == ["self", "input"]  # as Chroma demands
    found = embedder(input=TEXTS)
    assert isinstance(found, list) and found[0].dtype == np.float32
    same(found, TEXTS, embedder, prompt="passage")
    same(embedder.embed_query(input=TEXTS), TEXTS, embedder, prompt="query")
    assert Embedder.name() == "everybert"  # without it no collection can be opened again


def test_mteb(embedder, monkeypatch):
    class PromptType(Enum):
        query = "query"
        document = "document"

    batches = [{"text": TEXTS[:1]}, {"text": TEXTS[1:]}]
    how = {"task_metadata": None, "hf_split": "test", "hf_subset": "en", "batch_size": 32}
    same(embedder.encode(batches, prompt_type=PromptType.query, **how), TEXTS, embedder, prompt="query")
    same(embedder.encode(TEXTS, prompt_type=PromptType.document, **how), TEXTS, embedder, prompt="passage")
    same(embedder.encode(TEXTS, show_progress_bar=False), TEXTS, embedder)
    same([embedder.encode(TEXTS[0])], TEXTS[:1], embedder)
    vectors = embedder.encode(TEXTS)
    np.testing.assert_allclose(embedder.similarity(3 * vectors, vectors), vectors @ vectors.T, atol=1e-6)
    swapped = embedder.similarity_pairwise(3 * vectors, vectors[::-1])
    np.testing.assert_allclose(swapped, (vectors * vectors[::-1]).sum(1), atol=1e-6)

    class ModelMeta:
        create_empty = staticmethod(dict)

    module(monkeypatch, "mteb.models", ModelMeta=ModelMeta)
    made = embedder.to("mteb")
    found = made.mteb_model_meta  # results of other weights and options have other places
    assert found["name"] == "everybert/base" and len(found["revision"]) == 64
    assert found["experiment_kwargs"] == {"normalize": True}
    same(made.encode(TEXTS), TEXTS, embedder)


def module(monkeypatch, name, **members):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(members)


@pytest.mark.parametrize("library", ["keybert", "bertopic"])
def test_topics_and_keywords(embedder, monkeypatch, library):
    class BaseEmbedder:
        def __init__(self, embedding_model=None, word_embedding_model=None):
            pass

        def embed_documents(self, document, verbose=False):
            return self.embed(document, verbose)

    module(monkeypatch, f"{library}.backend", BaseEmbedder=BaseEmbedder)
    backend = embedder.to(library)
    assert isinstance(backend, BaseEmbedder)
    same(backend.embed_documents(np.array(TEXTS), verbose=True), TEXTS, embedder)


def test_llama_index(embedder, monkeypatch):
    class BaseEmbedding:
        pass

    module(monkeypatch, "llama_index.core.embeddings", BaseEmbedding=BaseEmbedding)
    made = embedder.to("llama-index")
    assert isinstance(made, BaseEmbedding)
    same([made._get_text_embedding(TEXTS[0])], TEXTS[:1], embedder, prompt="passage")
    same(made._get_text_embeddings(TEXTS), TEXTS, embedder, prompt="passage")
    assert made._get_query_embedding("a song") == asyncio.run(made._aget_query_embedding("a song"))


def test_haystack(embedder, monkeypatch):
    @dataclass
    class Document:
        content: str
        embedding: list | None = None

    def component(kind):
        kind.is_component = True
        return kind

    types = {}
    component.output_types = lambda **given: types.update(given) or (lambda run: run)
    module(monkeypatch, "haystack", component=component, Document=Document)
    made = embedder.to("haystack")
    assert types == {"embedding": list[float], "documents": list[Document]}  # others cannot be connected
    same([made.run(text="a song")["embedding"]], ["a song"], embedder, prompt="query")
    documents = made.run(documents=[Document(text) for text in TEXTS])["documents"]
    same([d.embedding for d in documents], TEXTS, embedder, prompt="passage")
    assert made.is_component


def test_mistakes_are_one_line(embedder, monkeypatch):
    refuses("choose one of keybert", embedder.to, "faiss")
    monkeypatch.setitem(sys.modules, "keybert", None)
    refuses("pip install keybert", embedder.to, "keybert")
