"""The bodies of requests and answers, with an example each: what the OpenAPI document shows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Texts = str | list[str]
Pair = Annotated[list[str], Field(min_length=2, max_length=2, description="A pair of texts.")]
ModelName = Annotated[
    str | None, Field(description="A served model, or model:adapter; the first one where it is left out.")
]
Long = Annotated[
    Literal["window", "cut"],
    Field(
        description="Texts longer than the model reads at once: covered by windows, or cut; see `cut` in the answer."
    ),
]
Top = Annotated[int, Field(ge=1, le=1000)]


def example(value: dict[str, Any]) -> ConfigDict:
    """A model's example, for the document."""
    return ConfigDict(json_schema_extra={"examples": [value]}, protected_namespaces=())


class Asked(BaseModel):
    """What every request may name."""

    model: ModelName = None


class Own(Asked):
    """What our own endpoints may be asked: a word they do not know is refused rather than passed over."""

    model_config = ConfigDict(extra="forbid")


# ── our own ──────────────────────────────────────────────────────────────────────────────────────────────────


class FillIn(Own):
    """Texts with [MASK] where words are missing."""

    text: Texts
    top: Top = 5
    model_config = example({"text": "Istanbul is a great [MASK] to visit", "top": 3})


class Candidate(BaseModel):
    """A token that may stand in a blank."""

    token: str
    score: float
    id: int


class Filled(BaseModel):
    """For each text, for each blank, its candidates."""

    model: str
    results: list[list[list[Candidate]]]
    tokens: int
    model_config = example(
        {"model": "small", "results": [[[{"token": "city", "score": 0.41, "id": 2103}]]], "tokens": 11}
    )


class ClassifyIn(Own):
    """Texts, or pairs of texts."""

    text: str | list[str | Pair]
    model_config = example({"text": ["What a film!", ["A man sleeps.", "Someone is awake."]]})


class Classified(BaseModel):
    """What the model says of each text."""

    model: str
    results: list[dict[str, Any]]
    tokens: int
    model_config = example(
        {
            "model": "sentiment",
            "results": [
                {"label": "good", "score": 0.98, "scores": {"bad": 0.02, "good": 0.98}, "labels": [], "cut": 0}
            ],
            "tokens": 6,
        }
    )


class TagIn(Own):
    """Texts whose spans are to be labelled."""

    text: Texts
    model_config = example({"text": "John Smith lives in New York"})


class Span(BaseModel):
    """A labelled piece of a text; start and end count characters."""

    text: str
    label: str
    start: int
    end: int
    score: float


class Tagged(BaseModel):
    """The spans of each text."""

    model: str
    results: list[list[Span]]
    tokens: int
    model_config = example(
        {
            "model": "ner",
            "results": [[{"text": "John Smith", "label": "PER", "start": 0, "end": 10, "score": 0.99}]],
            "tokens": 8,
        }
    )


class AnswerIn(Own):
    """Questions, each with the text that may hold the answer (or one text for all)."""

    question: Texts
    context: Texts
    top: Top = 1
    model_config = example({"question": "Where does Matt live?", "context": "Matt lives in Canada, near a lake."})


class Answer(BaseModel):
    """A piece of the context; empty text means that it holds no answer."""

    text: str
    start: int
    end: int
    score: float


class Answered(BaseModel):
    """The best answers to each question."""

    model: str
    results: list[list[Answer]]
    tokens: int
    model_config = example(
        {"model": "qa", "results": [[{"text": "Canada", "start": 14, "end": 20, "score": 0.9}]], "tokens": 17}
    )


class NextIn(Own):
    """Two texts."""

    first: str
    second: str
    model_config = example({"first": "The man went to the store.", "second": "He bought a gallon of milk."})


class Next(BaseModel):
    """P(the second follows the first)."""

    model: str
    probability: float
    tokens: int
    model_config = example({"model": "small", "probability": 0.97, "tokens": 18})


class ChooseIn(Own):
    """A prompt and what may follow it."""

    prompt: str
    endings: Annotated[list[str], Field(min_length=1)]
    model_config = example({"prompt": "She opened the door and", "endings": ["walked in.", "a green seven."]})


class Chosen(BaseModel):
    """The best ending, and the probability of each."""

    model: str
    index: int
    text: str
    score: float
    scores: list[float]
    cut: int
    tokens: int
    model_config = example(
        {"model": "swag", "index": 0, "text": "walked in.", "score": 0.9, "scores": [0.9, 0.1], "cut": 0, "tokens": 22}
    )


class TokensIn(Own):
    """A text, or a pair, to be shown token by token."""

    text: str
    pair: str | None = None
    layer: int | None = Field(None, ge=-1000, le=1000, description="0 is the embeddings; the last where left out.")
    vectors: bool = Field(False, description="Whether to send each token's vector.")
    model_config = example({"text": "I love my pet Python", "vectors": False})


class Token(BaseModel):
    """A token and where it stands in its text."""

    token: str
    id: int
    start: int
    end: int
    segment: int
    vector: list[float] | None = None


class Tokens(BaseModel):
    """The tokens of a text."""

    model: str
    layer: int
    results: list[Token]
    tokens: int
    model_config = example(
        {
            "model": "small",
            "layer": 6,
            "results": [{"token": "i", "id": 1045, "start": 0, "end": 1, "segment": 0, "vector": None}],
            "tokens": 7,
        }
    )


class AttentionIn(Own):
    """A text, or a pair, short enough to be shown."""

    text: str
    pair: str | None = None
    layer: int | None = Field(None, ge=0, le=1000, description="One layer, or all.")
    model_config = example({"text": "The cat sat because it was tired.", "layer": 1})


class AttentionOut(BaseModel):
    """What every token of every head attends to: weights[layer][head][from][to]."""

    model: str
    token: list[str]
    layers: list[int]
    weights: list[list[list[list[float]]]]
    tokens: int
    model_config = example(
        {
            "model": "small",
            "token": ["[CLS]", "[SEP]"],
            "layers": [3],
            "weights": [[[[0.5, 0.5], [0.2, 0.8]]]],
            "tokens": 2,
        }
    )


# ── OpenAI's and TEI's ───────────────────────────────────────────────────────────────────────────────────────


class EmbeddingsIn(BaseModel):
    """OpenAI's request: texts, or lists of token ids."""

    input: str | list[str] | list[int] | list[list[int]]
    model: ModelName = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=65536, description="The model's own width, or left out.")
    user: str | None = None
    long: Long = "window"
    model_config = example({"input": ["A dog barks.", "A cat sleeps."], "model": "small"})


class EmbeddingRow(BaseModel):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    cut: int


class Embeddings(BaseModel):
    """OpenAI's answer."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingRow]
    usage: dict[str, int]
    model_config = example(
        {
            "object": "list",
            "model": "small",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.1, -0.2], "cut": 0}],
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
        }
    )


class EmbedIn(Asked):
    """TEI's request."""

    inputs: Texts
    normalize: bool = True
    truncate: bool | None = Field(False, description="Cut long texts; else they are read in windows.")
    model_config = example({"inputs": ["A dog barks.", "A cat sleeps."]})


class PredictIn(Asked):
    """TEI's request: a text, a pair, or a list of [text] and [text, text]."""

    inputs: str | list[str] | list[Annotated[list[str], Field(min_length=1, max_length=2)]]
    raw_scores: bool = False
    truncate: bool | None = False
    model_config = example({"inputs": [["What a film!"], ["Never again."]]})


class LabelScore(BaseModel):
    """A label and its score."""

    score: float
    label: str


class RerankIn(Asked):
    """TEI's request: texts to be ordered by how well they fit the query."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = False
    model_config = example({"query": "What is deep learning?", "texts": ["It is not…", "A kind of machine learning."]})


class Rank(BaseModel):
    """A text's place and score."""

    index: int
    score: float
    text: str | None = None


class Failure(BaseModel):
    """Why there is no answer."""

    error: str | dict[str, Any]
    error_type: str | None = None
    model_config = example({"error": "too many requests at a time; try again later", "error_type": "overloaded"})
