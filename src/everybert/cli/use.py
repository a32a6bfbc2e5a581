"""`everybert fill`, `embed`, `tokens`, `next`, and one command per task: a model on texts or files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.cli.common import Count, Long, Name, Use, grouped, read_texts, report, shorten
from everybert.cli.options import Fields, Output, command
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.inference.files import Scored
    from everybert.inference.model import Model

app = typer.Typer()
RECORDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".txt")
Texts = Annotated[list[str] | None, "One or more texts, each in quotes.", {"metavar": "TEXT"}]
Lines = Annotated[Path | None, "Read one text per line from a file; - is standard input."]
Second = Annotated[str | None, "A second text."]
Given = Annotated[list[str] | None, "Texts in quotes, or one file.", {"metavar": "TEXT|FILE"}]


@dataclass(frozen=True)
class TaskOptions:
    """Options of the task commands. Each command has those that its task can use."""

    file: Path | None = None
    """A file: csv, tsv, jsonl, parquet, or txt with one text per line."""
    out: Path | None = None
    """Write the rows of the file with their predictions: csv, tsv or jsonl. Run again to resume."""
    text_column: Name = None
    """The text column of the file. Guessed if not given."""
    pair_column: Name = None
    """The column of the second text."""
    pair: str | None = None
    """The second text of a pair."""
    context: str | None = None
    """The text that holds the answer."""
    context_file: Path | None = None
    """A file that holds the answer."""
    top: Count = 1
    """Answers per question."""
    scores: bool = False
    """The probability of every label."""
    adapter: Name = None
    """An adapter: the name of one that comes with the model, or a folder."""
    skip_bad: bool = False
    """Leave out rows that cannot be read, and count them."""
    fresh: bool = False
    """Start the output again instead of continuing it."""

    def inputs(self, texts: list[str]) -> list[Any]:
        """Texts, or pairs."""
        return list(texts) if self.pair is None else [(text, self.pair) for text in texts]

    def reading(self) -> dict[str, Any]:
        """How the rows of files are read and written."""
        columns = {"text": self.text_column, "pair": self.pair_column}
        named = {role: name for role, name in columns.items() if name is not None}
        return {"columns": named, "skip_bad": self.skip_bad, "fresh": self.fresh}


SHARED = " adapter skip_bad fresh"
RowOptions = Annotated[TaskOptions, Fields("text_column skip_bad fresh", "Parquet files")]
TagOptions = Annotated[TaskOptions, Fields("file out text_column" + SHARED)]
RegressOptions = Annotated[TaskOptions, Fields("file out text_column pair_column pair" + SHARED)]
ClassifyOptions = Annotated[TaskOptions, Fields("file out text_column pair_column pair scores" + SHARED)]
AnswerOptions = Annotated[TaskOptions, Fields("context context_file top file out" + SHARED)]
ChooseOptions = Annotated[TaskOptions, Fields("file out scores" + SHARED)]
PARTS = Fields("part_rows engine address workers", "Parquet files", "everybert.inference.parts:PartOptions")
Parts = Annotated[dict[str, Any], PARTS]


# ── pre-trained models ───────────────────────────────────────────────────────────────────────────────────────


@command(app)
def fill(
    texts: Texts = None,
    *,
    top: Annotated[int, "Candidates per masked token."] = 5,
    pair: Annotated[str | None, "A second text, which may have masked tokens too."] = None,
    file: Lines = None,
    use: Use,
) -> Output:
    """Predict the words behind [MASK], each with its probability.

    Examples:
        everybert fill "Istanbul is a great [MASK] to visit"
        everybert fill "[MASK] loves [MASK]" --top 3 --json
        everybert fill --file questions.txt --model ./my-model
    """
    given, model = read_texts(texts, file), use.load()
    found = ((text, [list(map(asdict, mask)) for mask in model.fill(text, top=top, pair=pair)]) for text in given)
    shown = ((text, [{"mask": i, **one} for i, mask in enumerate(masks, 1) for one in mask]) for text, masks in found)
    return Output(({"text": text, "masks": masks} for text, masks in found), grouped(shown))


@command(app)
def embed(
    texts: Annotated[Texts, "One or more texts, each in quotes; or parquet files."] = None,
    *,
    pooling: Annotated[Name, "mean, cls or max. If not given: as the model's folder says."] = None,
    normalize: Annotated[bool | None, "Scale vectors to length 1. If not given: as the model's folder says."] = None,
    long: Annotated[Long, "Read texts longer than the window in windows, or cut them."] = "window",
    file: Lines = None,
    out: Annotated[Path | None, "Write the vectors to a .npy file; for parquet files, to a folder."] = None,
    rows: RowOptions,
    parts: Parts,
    use: Use,
) -> Output:
    """Compute one vector per text, or one per row of parquet files.

    Examples:
        everybert embed "A dog barks." "A cat sleeps." --model ./all-MiniLM-L6-v2
        everybert embed --file sentences.txt --out vectors.npy
        everybert embed rows-*.parquet --text-column body --out vectors
    """
    options: dict[str, Any] = {"pooling": pooling, "normalize": normalize, "long": long}
    if files := parquet_files(texts, file):
        return on_parts("embed", files, out, use, options=options, **rows.reading(), **parts)
    only_parquet(parts)
    given = read_texts(texts, file)
    vectors = use.load().embed(given, **options)
    found = [{"text": text, "vector": vector.tolist()} for text, vector in zip(given, vectors)]
    if out is not None:
        import numpy as np

        from everybert.files import atomic_file

        with atomic_file(out) as draft, draft.open("wb") as stream:
            np.save(stream, vectors)
        return Output(found, [f"{out}: {vectors.shape[0]} vectors of {vectors.shape[1]} numbers"])
    return Output(found, report([{**row, "text": shorten(row["text"])} for row in found]))


@command(app)
def tokens(
    texts: Texts = None,
    *,
    layer: Annotated[int | None, "0 is the embeddings, -2 the last layer but one. If not given: the last."] = None,
    pair: Second = None,
    file: Lines = None,
    use: Use,
) -> Output:
    """Print the tokens of a text, their offsets, and their vectors after a layer.

    Examples:
        everybert tokens "I love my pet Python"
        everybert tokens "I love my pet Python" --layer 0 --json
    """
    given, model = read_texts(texts, file), use.load()
    found = ((text, model.tokens(text, layer=layer, pair=pair)) for text in given)

    def rows(result: Any) -> Iterator[dict[str, Any]]:
        for token, number, (start, end), vector in zip(result.tokens, result.ids, result.offsets, result.vectors):
            yield {"token": token, "id": number, "start": start, "end": end, "vector": vector.tolist()}

    shown = ((f"{shorten(text)}  (layer {one.layer})", list(rows(one))) for text, one in found)
    return Output(
        ({"text": text, "layer": one.layer, "tokens": list(rows(one))} for text, one in found), grouped(shown)
    )


@command(app)
def next(
    first: Annotated[str | None, "A text."] = None,
    second: Annotated[str | None, "The text that may follow it."] = None,
    *,
    file: Annotated[Lines, "Read one pair per line, with a tab between the texts; - is standard input."] = None,
    use: Use,
) -> Output:
    """Probability that the second text follows the first.

    Examples:
        everybert next "The man went to the store." "He bought a gallon of milk."
        everybert next --file pairs.tsv --json
    """
    pairs = [(first or "", second or "")]
    if file is not None:
        rows = [line.partition("\t") for line in read_texts([first] if first is not None else None, file)]
        if bad := [number for number, (_, tab, _) in enumerate(rows, 1) if not tab]:
            raise EverybertError(f"{file}:{bad[0]} has no tab; give two texts per line with a tab between them")
        pairs = [(a, b) for a, _, b in rows]
    elif first is None or second is None:
        raise EverybertError("next compares two texts; give both in quotes, or --file F with a tab between them")
    model = use.load()
    found = [(a, b, model.next_sentence(a, b)) for a, b in pairs]
    lines = (f"{p:.4f}  {shorten(a)} → {shorten(b)}" for a, b, p in found)
    return Output([{"first": a, "second": b, "probability": p} for a, b, p in found], lines)


# ── fine-tuned models ────────────────────────────────────────────────────────────────────────────────────────


@command(app)
def classify(given: Given = None, *, options: ClassifyOptions, parts: Parts, use: Use) -> Output:
    """Predict the label of each text or pair.

    Give a file and --out to predict its rows; run again to resume. Parquet files with a folder as --out are read and
    written in parts, on this machine or on a Ray cluster.

    Examples:
        everybert classify "What a film!" "Never again." --model ./sentiment
        everybert classify "A man sleeps." --pair "Someone is awake." --scores
        everybert classify data.csv --text-column body --out scored.csv
        everybert classify rows-*.parquet --out scored --engine ray --address auto
    """
    if (files := parquet_files(given, options.file)) and (options.out is None or not options.out.suffix):
        more = {"adapter": options.adapter, "options": {"scores": options.scores}}
        return on_parts("classify", files, options.out, use, **more, **options.reading(), **parts)
    only_parquet(parts)

    def predict(model: Model, texts: list[str]) -> Output:
        found = list(zip(texts, model.classify(options.inputs(texts))))
        shown = [
            {"label": ", ".join(one.labels) or one.label, "score": one.score, **(one.scores if options.scores else {})}
            | {"text": shorten(text)}
            for text, one in found
        ]
        return Output([{"text": text, **asdict(one)} for text, one in found], report(shown))

    return predicted("classify", given, options, use, predict)


@command(app)
def regress(given: Given = None, *, options: RegressOptions, use: Use) -> Output:
    """Predict a number for each text or pair.

    Examples:
        everybert regress "A man sleeps." --pair "A person is asleep." --model ./sts
        everybert regress pairs.tsv --out scored.tsv --model ./sts
    """

    def predict(model: Model, texts: list[str]) -> Output:
        found = list(zip(texts, model.regress(options.inputs(texts))))
        lines = (f"{value:.4f}  {shorten(text)}" for text, value in found)
        return Output([{"text": text, "value": value} for text, value in found], lines)

    return predicted("regress", given, options, use, predict)


@command(app)
def tag(given: Given = None, *, options: TagOptions, use: Use) -> Output:
    """Find the labelled spans of each text: names, places, parts of speech.

    Examples:
        everybert tag "John Smith lives in New York." --model ./ner
        everybert tag articles.jsonl --text-column body --out tagged.jsonl -m ./ner
    """

    def predict(model: Model, texts: list[str]) -> Output:
        tagged: Any = model.tag(texts)
        found = [(text, list(map(asdict, spans))) for text, spans in zip(texts, tagged)]
        return Output([{"text": text, "spans": spans} for text, spans in found], grouped(found))

    return predicted("tag", given, options, use, predict)


@command(app)
def answer(
    given: Annotated[
        Given, "Questions, then the text that answers them; or one file.", {"metavar": "QUESTION… TEXT"}
    ] = None,
    *,
    options: AnswerOptions,
    use: Use,
) -> Output:
    """Answer questions from a text of any length. An empty answer means that the text has none.

    Examples:
        everybert answer "Where does Matt live?" "Matt lives in Canada."
        everybert answer "Who wrote it?" --context-file book.txt --top 3 -m ./squad
        everybert answer questions.jsonl --out answers.jsonl --model ./squad
    """
    questions, context = given or [], options.context or ""
    if options.context_file is not None:
        context = "\n".join(read_texts(None, options.context_file))
    elif not context and len(questions) > 1:
        *questions, context = questions
    if questions and not context and named_file(questions) is None:
        raise EverybertError("there is no context; give it after the question, or as --context-file F")

    def predict(model: Model, texts: list[str]) -> Output:
        answers: Any = model.answer(texts, context, top=options.top)
        found = [(question, list(map(asdict, some))) for question, some in zip(texts, answers)]
        return Output([{"question": question, "answers": some} for question, some in found], grouped(found))

    return predicted("answer", questions, options, use, predict, may_be_file=not context)


@command(app)
def choose(
    given: Annotated[Given, "A prompt and its endings, or one file.", {"metavar": "PROMPT ENDING…"}] = None,
    *,
    options: ChooseOptions,
    use: Use,
) -> Output:
    """Choose the ending that fits a prompt best.

    Examples:
        everybert choose "She opened the door and" "walked in." "ate the piano."
        everybert choose swag.csv --out chosen.csv --model ./swag
    """
    if given and len(given) < 3 and named_file(given) is None:
        raise EverybertError("give a prompt and two endings or more, each in quotes")

    def predict(model: Model, texts: list[str]) -> Output:
        prompt, *endings = texts
        found = model.choose(prompt, endings)
        marks = ["→" if i == found.index else "" for i in range(len(endings))]
        rows = ({"": mark, "score": s, "ending": ending} for mark, s, ending in zip(marks, found.scores, endings))
        return Output({"prompt": prompt, **asdict(found)}, report(rows))

    return predicted("choose", given, options, use, predict)


def predicted(
    task: str,
    given: list[str] | None,
    options: TaskOptions,
    use: Use,
    predict: Callable[[Model, list[str]], Output],
    may_be_file: bool = True,
) -> Output:
    """Predict the texts that were given, or the rows of a file."""
    if options.file is not None and given:
        raise EverybertError("give texts or --file, not both")
    file = options.file or (named_file(given) if may_be_file else None)
    if file is None and not given:
        raise EverybertError("there is no text; give one in quotes, or a file")
    if file is not None and options.out is None:
        raise EverybertError(f"{file} is a file: say where its predictions go, for example --out scored.csv")
    model = use.load()
    if (adapter := options.adapter) is not None:
        model.use(adapter if adapter in model.bundle.folders else model.add_adapter(adapter))
    if file is None or options.out is None:
        return predict(model, given or [])
    from everybert.inference.files import predict_file
    from everybert.training.logs import progress_bar

    with progress_bar(task, _rows(file)) as tell:
        more = options.reading() | {"scores": options.scores, "progress": tell}
        return summary(options.out, predict_file(model, task, file, options.out, **more))


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


def on_parts(task: str, files: list[Path], out: Path | None, use: Use, **options: Any) -> Output:
    """Predict the rows of parquet files."""
    from everybert.inference.parts import predict_parts
    from everybert.training.logs import progress_bar

    if out is None:
        raise EverybertError(f"{files[0]} is a file: give a folder for the rows with their results, as --out rows-done")
    options |= {"device": use.device, "dtype": use.dtype}
    with progress_bar(task) as tell:
        return summary(out, predict_parts(task, use.model, files, out, progress=tell, **options))


def summary(out: Path, done: Scored) -> Output:
    """What was done. Bad rows and an interruption are printed on standard error."""
    for line in done.bad:
        print(f"left out: {line}", file=sys.stderr)
    if done.stopped:
        print(f"stopped after {done.rows:,} rows: run the same command again to resume", file=sys.stderr)
    line = f"{out}: {done.rows:,} rows" + (f", {done.before:,} of them from before" if done.before else "")
    if done.before and done.rows == done.before:
        line = f"{out}: all {done.rows:,} rows were there already"
    return Output({"out": str(out), **asdict(done)}, [line], 130 if done.stopped else 0)


def named_file(given: list[str] | None) -> Path | None:
    """The file that is given in place of a text."""
    only = Path(given[0]) if given and len(given) == 1 and " " not in given[0] else None
    return only if only is not None and only.suffix.lower() in RECORDS else None


def parquet_files(given: list[str] | None, file: Path | None) -> list[Path]:
    """The parquet files that were named; none where texts or other files were."""
    files = [Path(name) for name in given or []] + ([file] if file is not None else [])
    return files if all(path.suffix.lower() == ".parquet" for path in files) else []


def only_parquet(parts: dict[str, Any]) -> None:
    """Refuse options that other inputs cannot use."""
    if set(parts) - {"part_rows"}:
        raise EverybertError(
            "--engine, --address and --workers are for parquet files: give FILE.parquet … and a folder as --out"
        )


def _rows(source: Path) -> int | None:
    """About how many rows a file has, for the progress bar; None where counting means parsing."""
    kind = source.suffix.lower()
    if kind not in (".csv", ".tsv", ".jsonl", ".ndjson", ".txt") or not source.is_file():
        return None
    with source.open("rb") as file:
        count = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return count - (kind in (".csv", ".tsv"))
