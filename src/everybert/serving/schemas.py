"""Types of the HTTP API's fields, and bodies within bodies; examples.json has an example of each request."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def no_ids(value: Any) -> Any:
    """Refuse token ids: they are those of the client's tokenizer, and would be other words here."""
    if isinstance(value, list) and value and isinstance(value[0], int | list):
        raise ValueError("send texts, not token ids (LangChain: check_embedding_ctx_length=False)")
    return value


Texts = str | list[str]
TextsNotIds = Annotated[Texts, BeforeValidator(no_ids)]
SomeTexts = Annotated[list[str], Field(min_length=1)]
Pair = Annotated[list[str], Field(min_length=2, max_length=2, description="A pair of texts.")]
TextOrPair = Annotated[list[str], Field(min_length=1, max_length=2)]
Second = Annotated[str | None, AfterValidator(lambda text: text or None), Field(description="The pair's second text.")]
Long = Annotated[
    Literal["window", "cut"],
    Field(description="Read texts longer than the window in windows, or cut them; `cut` counts the tokens left out."),
]
Top = Annotated[int, Field(ge=1, le=1000)]
Truncate = Annotated[bool | None, Field(description="Cut long texts. Default: read them in windows.")]
Side = Annotated[Literal["right", "Right"], Field(description="Where `truncate` cuts a text: its end.")]
Dimensions = Annotated[
    int | None, Field(ge=1, le=65536, description="The first numbers of each vector (Matryoshka embeddings).")
]
ModelName = Annotated[str | None, Field(description="A served model, or model:adapter. Default: the first model.")]
PromptName = Annotated[str | None, Field(max_length=1000, description="A prompt of the model, for each text.")]
HiddenLayer = Annotated[int | None, Field(ge=-1000, le=1000, description="0: the embeddings. Default: the last layer.")]
AttentionLayer = Annotated[int | None, Field(ge=0, le=1000, description="One layer. Default: all layers.")]
Result = TypeVar("Result")


class SimilarityInputs(BaseModel):
    """A text, and those to compare it with."""

    source_sentence: str
    sentences: SomeTexts


class QuestionInputs(BaseModel):
    """A question about a context."""

    question: str
    context: str


class PipelineParameters(BaseModel):
    """What Hugging Face's tasks may be asked for; other parameters are refused."""

    top_k: Top | None = None
    aggregation_strategy: Literal["simple"] | None = None
    model_config = ConfigDict(extra="forbid")


class Results(BaseModel, Generic[Result]):
    """One result per input."""

    model: str
    results: list[Result]
    tokens: int


class Failure(BaseModel):
    """An error response."""

    error: str | dict[str, Any]
    error_type: str | None = None
