"""Request and response bodies of the HTTP API; the examples appear in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from everybert.inference.model import Candidate
from everybert.tasks.answer import Answer
from everybert.tasks.tag import Span

Texts = str | list[str]
Pair = Annotated[list[str], Field(min_length=2, max_length=2, description="A pair of texts.")]
ModelName = Annotated[str | None, Field(description="A served model, or model:adapter. Default: the first model.")]
Long = Annotated[
    Literal["window", "cut"],
    Field(description="Read texts longer than the window in windows, or cut them; `cut` counts the tokens left out."),
]
Top = Annotated[int, Field(ge=1, le=1000)]
Result = TypeVar("Result")


def example(**value: Any) -> ConfigDict:
    """A configuration with an example."""
    return ConfigDict(json_schema_extra={"examples": [value]}, protected_namespaces=())


class BaseRequest(BaseModel):
    """Fields of every request. Unknown fields are ignored, as clients of OpenAI and TEI expect."""

    model: ModelName = None


class StrictRequest(BaseRequest):
    """A request of everybert's own endpoints, which refuse unknown fields."""

    model_config = ConfigDict(extra="forbid")


class Results(BaseModel, Generic[Result]):
    """One result per input."""

    model: str
    results: list[Result]
    tokens: int


# ── everybert's own endpoints ────────────────────────────────────────────────────────────────────────────────


class FillRequest(StrictRequest):
    """Texts with [MASK] tokens."""

    text: Texts
    top: Top = 5
    model_config = example(text="Istanbul is a great [MASK] to visit", top=3)


class FillResponse(Results[list[list[Candidate]]]):
    """For each text and each of its masked tokens, the candidates."""

    model_config = example(model="small", results=[[[{"token": "city", "score": 0.41, "id": 2103}]]], tokens=11)


class ClassifyRequest(StrictRequest):
    """Texts, or pairs of texts."""

    text: str | list[str | Pair]
    model_config = example(text=["What a film!", ["A man sleeps.", "Someone is awake."]])


class ClassifyResponse(Results[dict[str, Any]]):
    """A prediction per text; `value` where the model predicts a number."""

    model_config = example(
        model="sentiment",
        results=[{"label": "good", "score": 0.98, "scores": {"bad": 0.02, "good": 0.98}, "labels": [], "cut": 0}],
        tokens=6,
    )


class TagRequest(StrictRequest):
    """Texts to tag."""

    text: Texts
    model_config = example(text="John Smith lives in New York")


class TagResponse(Results[list[Span]]):
    """The spans of each text."""

    model_config = example(
        model="ner",
        results=[[{"text": "John Smith", "label": "PER", "start": 0, "end": 10, "score": 0.99}]],
        tokens=8,
    )


class AnswerRequest(StrictRequest):
    """Questions, with a context for each or one for all."""

    question: Texts
    context: Texts
    top: Top = 1
    model_config = example(question="Where does Matt live?", context="Matt lives in Canada, near a lake.")


class AnswerResponse(Results[list[Answer]]):
    """The best answers to each question."""

    model_config = example(model="qa", results=[[{"text": "Canada", "start": 14, "end": 20, "score": 0.9}]], tokens=17)


class NextRequest(StrictRequest):
    """Two texts."""

    first: str
    second: str
    model_config = example(first="The man went to the store.", second="He bought a gallon of milk.")


class NextResponse(BaseModel):
    """The probability that the second text follows the first."""

    model: str
    probability: float
    tokens: int
    model_config = example(model="small", probability=0.97, tokens=18)


class ChooseRequest(StrictRequest):
    """A prompt and its possible endings."""

    prompt: str
    endings: Annotated[list[str], Field(min_length=1)]
    model_config = example(prompt="She opened the door and", endings=["walked in.", "a green seven."])


class ChooseResponse(BaseModel):
    """The best ending, and the probability of each."""

    model: str
    index: int
    text: str
    score: float
    scores: list[float]
    cut: int
    tokens: int
    model_config = example(model="swag", index=0, text="walked in.", score=0.9, scores=[0.9, 0.1], cut=0, tokens=22)


class TextRequest(StrictRequest):
    """A text or a pair."""

    text: str
    pair: str | None = None


class TokensRequest(TextRequest):
    """A text or a pair."""

    layer: int | None = Field(None, ge=-1000, le=1000, description="0: the embeddings. Default: the last layer.")
    vectors: bool = Field(False, description="Whether to return the vector of each token.")
    model_config = example(text="I love my pet Python", vectors=False)


class Token(BaseModel):
    """A token and its position in the text."""

    token: str
    id: int
    start: int
    end: int
    segment: int
    vector: list[float] | None = None


class TokensResponse(Results[Token]):
    """The tokens of a text."""

    layer: int
    model_config = example(
        model="small",
        results=[{"token": "i", "id": 1045, "start": 0, "end": 1, "segment": 0, "vector": None}],
        tokens=7,
        layer=6,
    )


class AttentionRequest(TextRequest):
    """A short text or pair."""

    layer: int | None = Field(None, ge=0, le=1000, description="One layer. Default: all layers.")
    model_config = example(text="The cat sat because it was tired.", layer=1)


class AttentionResponse(BaseModel):
    """The attention weights: weights[layer][head][from][to]."""

    model: str
    token: list[str]
    layers: list[int]
    weights: list[list[list[list[float]]]]
    tokens: int
    model_config = example(
        model="small", token=["[CLS]", "[SEP]"], layers=[3], weights=[[[[0.5, 0.5], [0.2, 0.8]]]], tokens=2
    )


# ── OpenAI and TEI ───────────────────────────────────────────────────────────────────────────────────────────


class EmbeddingsRequest(BaseRequest):
    """OpenAI's request: texts, or lists of token ids."""

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=65536, description="The width of the model's vectors.")
    user: str | None = None
    long: Long = "window"
    model_config = example(input=["A dog barks.", "A cat sleeps."], model="small")


class EmbeddingRow(BaseModel):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    cut: int


class EmbeddingsResponse(BaseModel):
    """OpenAI's response."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingRow]
    usage: dict[str, int]
    model_config = example(
        object="list",
        model="small",
        data=[{"object": "embedding", "index": 0, "embedding": [0.1, -0.2], "cut": 0}],
        usage={"prompt_tokens": 6, "total_tokens": 6},
    )


class EmbedRequest(BaseRequest):
    """TEI's request."""

    inputs: Texts
    normalize: bool = True
    truncate: bool | None = Field(False, description="Cut long texts. Default: read them in windows.")
    model_config = example(inputs=["A dog barks.", "A cat sleeps."])


class PredictRequest(BaseRequest):
    """TEI's request: a text, a pair, or a list of [text] and [text, text]."""

    inputs: str | list[str] | list[Annotated[list[str], Field(min_length=1, max_length=2)]]
    raw_scores: bool = False
    truncate: bool | None = False
    model_config = example(inputs=[["What a film!"], ["Never again."]])


class LabelScore(BaseModel):
    """A label and its score."""

    score: float
    label: str


class RerankRequest(BaseRequest):
    """TEI's request: texts to sort by relevance to a query."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = False
    model_config = example(query="What is deep learning?", texts=["It is not…", "A kind of machine learning."])


class Rank(BaseModel):
    """A text's index and score."""

    index: int
    score: float
    text: str | None = None


class Failure(BaseModel):
    """An error response."""

    error: str | dict[str, Any]
    error_type: str | None = None
    model_config = example(error="too many requests at a time; try again later", error_type="overloaded")
