"""One object that other libraries accept as their embedding model; none of them is imported before it is asked for.

| library | what it is given, if `embedder = Embedder("everybert-small")` |
|---|---|
| LangChain, Chroma | `embedder` |
| KeyBERT, BERTopic, LlamaIndex, Haystack, mteb | `embedder.to("keybert")` …: an object of the library's own class |
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import everybert
from everybert.errors import EverybertError

PROMPTS = {"query": ("query",), "document": ("document", "passage")}
"""The names that folders give to the prompts of queries and of documents."""
CLASSES = {
    "keybert": "keybert.backend.BaseEmbedder",
    "bertopic": "bertopic.backend.BaseEmbedder",
    "llama-index": "llama_index.core.embeddings.BaseEmbedding",
    "haystack": "haystack.component",
    "mteb": "mteb.models.ModelMeta",
}
"""What an embedding model must derive from, or be decorated with, or described by."""


class Embedder:
    """A model as an embedding function. Queries and documents get the folder's prompts for them, if it has any.

    `model` is a Model, a folder, a bundled name or a hub id; `options` are those of `Model.embed` (pooling, long …).
    """

    def __init__(
        self, model: "everybert.Model | str | Path" = "everybert-small", device: str | None = None, **options: Any
    ):
        self.model = everybert.load(model, device) if isinstance(model, str | Path) else model
        self.options = options

    def encode(self, sentences: Any, prompt_name: str | None = None, prompt_type: Any = None, **ignored: Any) -> Any:
        """float32 (N, H), or (H) for one text: the method of sentence-transformers and mteb.

        `sentences` may be the batches of a DataLoader, {"text": [...]}, as mteb gives them; `prompt_type` is query or
        document. Batch sizes and progress bars have no meaning here and are ignored.
        """
        if isinstance(sentences, str):
            return self.encode([sentences], prompt_name, prompt_type)[0]
        texts = [text for x in sentences for text in (x["text"] if isinstance(x, dict) else [x])]
        if prompt_name is None and prompt_type is not None:
            named = PROMPTS.get(getattr(prompt_type, "value", prompt_type), PROMPTS["document"])
            prompt_name = next((name for name in named if name in self.model.pooling.prompts), None)
        return self.model.embed(texts, prompt=prompt_name, **self.options)

    def similarity(self, one: Any, other: Any) -> np.ndarray:
        """(N, M) cosine similarities (mteb)."""
        one, other = (np.atleast_2d(x) / np.linalg.norm(x, axis=-1, keepdims=True) for x in (one, other))
        return one @ other.T

    def similarity_pairwise(self, one: Any, other: Any) -> np.ndarray:
        """(N): the cosine similarity of each pair (mteb)."""
        return np.array([self.similarity(*pair)[0, 0] for pair in zip(one, other)])

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        """The vectors of documents (LangChain)."""
        return self.encode(texts, prompt_type="document").tolist()

    def embed_query(self, input: str | Sequence[str]) -> Any:
        """The vector of a query (LangChain), or those of several (Chroma)."""
        return self.encode(input, prompt_type="query").tolist()

    async def aembed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        """As `embed_documents`, in a thread (LangChain)."""
        return await asyncio.to_thread(self.embed_documents, texts)

    async def aembed_query(self, input: str) -> list[float]:
        """As `embed_query`, in a thread (LangChain)."""
        return await asyncio.to_thread(self.embed_query, input)

    @staticmethod
    def name() -> str:
        """What Chroma calls the embedding function. It stores no model: collections are opened with the function."""
        return "everybert"

    def __call__(self, input: str | Sequence[str]) -> Any:
        """The vectors of documents, a list of arrays (Chroma); of one text, an array."""
        vectors = self.encode(input, prompt_type="document")
        return vectors if isinstance(input, str) else list(vectors)

    def to(self, library: str) -> Any:
        """This embedder as an object of a library's own class: keybert, bertopic, llama-index, haystack or mteb."""
        if library not in CLASSES:
            raise EverybertError(f"there is no class for {library!r}; choose one of {', '.join(CLASSES)}")
        module, _, name = CLASSES[library].rpartition(".")
        try:
            base = getattr(import_module(module), name)
        except ImportError:
            raise EverybertError(f"{module} is not installed: pip install {library}") from None
        if library == "mteb":
            from everybert.store.adapters import encoder_digest

            name, digest = getattr(self.model.folder, "name", "model"), encoder_digest(self.model.network)
            about = {"name": f"everybert/{name}", "revision": digest, "experiment_kwargs": self.options or None}
            self.mteb_model_meta = base.create_empty(about)  # by which mteb keeps results
            return self
        if library == "haystack":
            return _haystack(base, import_module(module).Document, self)
        methods: dict[str, Any] = {
            "embed": lambda _, documents, verbose=False: self.encode(list(documents)),
            "_get_query_embedding": lambda _, query: self.embed_query(query),
            "_aget_query_embedding": lambda _, query: self.aembed_query(query),
            "_get_text_embedding": lambda _, text: self.embed_documents([text])[0],
            "_get_text_embeddings": lambda _, texts: self.embed_documents(texts),
        }
        return type("EverybertEmbedder", (base,), methods)()


def _haystack(component: Any, document: Any, embedder: Embedder) -> Any:
    """A component with the vector of a query, and documents with theirs."""

    @component.output_types(embedding=list[float], documents=list[document])  # type: ignore[valid-type]
    def run(self, text=None, documents=()):  # type: ignore[no-untyped-def]
        vectors = embedder.embed_documents([document.content or "" for document in documents])
        embedded = [replace(document, embedding=vector) for document, vector in zip(documents, vectors)]
        return {"documents": embedded} | ({} if text is None else {"embedding": embedder.embed_query(text)})

    return component(type("EverybertEmbedder", (), {"run": run}))()
