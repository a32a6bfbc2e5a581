"""`everybert classify`, `regress`, `tag`, `answer`, `choose`: a fine-tuned model on texts, or on whole files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everybert.cli.common import DEFAULT, Device, Dtype, Json, ModelName, examples, load, print_json
from everybert.cli.parts import Address, EngineName, PartRows, Workers, only_parquet, parquet_files, run_parts
from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.inference.model import Model

app = typer.Typer()

RECORDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".txt")
Given = Annotated[list[str] | None, typer.Argument(metavar="TEXT|FILE", help="Texts in quotes, or one file of them.")]
File = Annotated[Path | None, typer.Option("--file", "-f", help="A file: csv, tsv, jsonl, parquet, or a text a line.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the rows with predictions: csv, tsv or jsonl.")]
TextColumn = Annotated[str | None, typer.Option(help="The file's text column; guessed when not given.")]
PairColumn = Annotated[str | None, typer.Option(help="The column of a pair's second text.")]
Adapter = Annotated[
    str | None, typer.Option(help="An adapter: one that comes with the model, by its name, or a folder.")
]
Scores = Annotated[bool, typer.Option("--scores", help="The probability of every label.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave broken lines out, and count them.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start the output over instead of going on with it.")]


@app.command(
    epilog=examples(
        'everybert classify "What a film!" "Never again." --model ./sentiment',
        'everybert classify "A man sleeps." --pair "Someone is awake." --model ./nli --scores',
        "everybert classify data.csv --text-column body --out scored.csv --model ./sentiment",
        "everybert classify rows-*.parquet --out scored --model ./sentiment --engine ray --address auto",
    )
)
def classify(
    given: Given = None,
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    file: File = None,
    out: Out = None,
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    scores: Scores = False,
    adapter: Adapter = None,
    skip_bad: SkipBad = False,
    fresh: Fresh = False,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    part_rows: PartRows = 4096,
) -> None:
    """Label texts or pairs. With a file and --out: run again to go on where the output ends.

    Parquet files and a folder as --out: rows in and out as parquet, on this machine or a cluster.
    """
    columns = _named(text=text_column, pair=pair_column)
    if (files := parquet_files(given, file)) and (out is None or not out.suffix):
        run_parts(
            "classify",
            model,
            files,
            out,
            as_json,
            device=device,
            dtype=dtype,
            adapter=adapter,
            columns=columns,
            options={"scores": scores},
            skip_bad=skip_bad,
            fresh=fresh,
            engine=engine,
            address=address,
            workers=workers,
            part_rows=part_rows,
        )
        return
    only_parquet(engine, address, workers)
    source = _source(given, file)
    loaded = _load(model, device, dtype, adapter)
    if source is not None:
        _file(loaded, "classify", source, out, columns, scores, skip_bad, fresh, as_json)
        return
    texts: list[Any] = _texts(given)
    found = loaded.classify(texts if pair is None else [(text, pair) for text in texts])
    if as_json:
        print_json([{"text": text, **asdict(result)} for text, result in zip(texts, found)])
        return
    for text, result in zip(texts, found):
        named = ", ".join(result.labels) or result.label
        print(f"{named}  {result.score:.4f}  {_short(text)}")
        if scores:
            for label, score in sorted(result.scores.items(), key=lambda item: -item[1]):
                print(f"    {score:.4f}  {label}")


@app.command(
    epilog=examples(
        'everybert regress "A man sleeps." --pair "A person is asleep." --model ./similarity',
        "everybert regress pairs.tsv --out scored.tsv --model ./similarity",
    )
)
def regress(
    given: Given = None,
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    file: File = None,
    out: Out = None,
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    adapter: Adapter = None,
    skip_bad: SkipBad = False,
    fresh: Fresh = False,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Predict a number for texts or pairs."""
    source = _source(given, file)
    loaded = _load(model, device, dtype, adapter)
    if source is not None:
        columns = _named(text=text_column, pair=pair_column)
        _file(loaded, "regress", source, out, columns, False, skip_bad, fresh, as_json)
        return
    texts: list[Any] = _texts(given)
    found = loaded.regress(texts if pair is None else [(text, pair) for text in texts])
    if as_json:
        print_json([{"text": text, "value": value} for text, value in zip(texts, found)])
        return
    for text, value in zip(texts, found):
        print(f"{value:.4f}  {_short(text)}")


@app.command(
    epilog=examples(
        'everybert tag "John Smith lives in New York." --model ./ner',
        "everybert tag articles.jsonl --text-column body --out tagged.jsonl --model ./ner",
    )
)
def tag(
    given: Given = None,
    file: File = None,
    out: Out = None,
    text_column: TextColumn = None,
    adapter: Adapter = None,
    skip_bad: SkipBad = False,
    fresh: Fresh = False,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Find the labelled spans of texts: names, places, parts of speech."""
    source = _source(given, file)
    loaded = _load(model, device, dtype, adapter)
    if source is not None:
        _file(loaded, "tag", source, out, _named(text=text_column), False, skip_bad, fresh, as_json)
        return
    texts = _texts(given)
    found = loaded.tag(texts)
    if as_json:
        print_json([{"text": t, "spans": [asdict(span) for span in spans]} for t, spans in zip(texts, found)])
        return
    for text, spans in zip(texts, found):
        print(_short(text))
        for span in spans:
            print(f"    {span.label:8} {span.score:.4f}  {span.start:5}-{span.end:<5} {span.text}")


@app.command(
    epilog=examples(
        'everybert answer "Where does Matt live?" "Matt lives in Canada and Sinan lives in California"',
        'everybert answer "Who wrote it?" --context-file book.txt --top 3 --model ./squad',
        "everybert answer questions.jsonl --out answers.jsonl --model ./squad",
    )
)
def answer(
    given: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION… CONTEXT|FILE", help="Questions, then their text; or a file of both."),
    ] = None,
    context: Annotated[str | None, typer.Option("--context", "-c", help="The text that holds the answer.")] = None,
    context_file: Annotated[Path | None, typer.Option(help="A file that holds the answer.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many answers to print for each question.")] = 1,
    file: File = None,
    out: Out = None,
    adapter: Adapter = None,
    skip_bad: SkipBad = False,
    fresh: Fresh = False,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Answer questions from a text of any length; an empty answer says that it has none."""
    source = _source(given, file) if context is None and context_file is None else file
    if source is not None:
        _file(_load(model, device, dtype, adapter), "answer", source, out, {}, False, skip_bad, fresh, as_json)
        return
    questions = _texts(given)
    if context_file is not None:
        from everybert.text.readers import lines

        context = "\n".join(line for _, line in lines(context_file))
    elif context is None and len(questions) > 1:
        *questions, context = questions
    if not context:
        raise EverybertError("there is no context; give it after the question, or as --context-file F")
    found = _load(model, device, dtype, adapter).answer(questions, context, top=top)
    if as_json:
        print_json([{"question": q, "answers": [asdict(a) for a in answers]} for q, answers in zip(questions, found)])
        return
    for question, answers in zip(questions, found):
        print(question)
        for one in answers:
            print(f"    {one.score:.4f}  {one.start:5}-{one.end:<5} {one.text or '(no answer)'}")


@app.command(
    epilog=examples(
        'everybert choose "She opened the door and" "walked in." "ate the piano." --model ./swag',
        "everybert choose swag.csv --out chosen.csv --model ./swag",
    )
)
def choose(
    given: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT ENDING…|FILE", help="A prompt and its endings, or a file.")
    ] = None,
    file: File = None,
    out: Out = None,
    scores: Scores = False,
    adapter: Adapter = None,
    skip_bad: SkipBad = False,
    fresh: Fresh = False,
    model: ModelName = DEFAULT,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Choose the ending that fits a prompt best."""
    source = _source(given, file)
    if source is not None:
        _file(_load(model, device, dtype, adapter), "choose", source, out, {}, scores, skip_bad, fresh, as_json)
        return
    prompt, *endings = _texts(given)
    if len(endings) < 2:
        raise EverybertError("give a prompt and two endings or more, each in quotes")
    found = _load(model, device, dtype, adapter).choose(prompt, endings)
    if as_json:
        print_json({"prompt": prompt, **asdict(found)})
        return
    for number, (ending, score) in enumerate(zip(endings, found.scores)):
        print(f"{'→' if number == found.index else ' '} {score:.4f}  {ending}")


# ── shared ───────────────────────────────────────────────────────────────────────────────────────────────────


def _load(name: str, device: str | None, dtype: str | None, adapter: str | None) -> Model:
    loaded = load(name, device, dtype)
    if adapter is not None:
        loaded.use(adapter if adapter in loaded.bundle.folders else loaded.add_adapter(adapter))
    return loaded


def _named(**columns: str | None) -> dict[str, str]:
    return {role: name for role, name in columns.items() if name is not None}


def _source(given: list[str] | None, file: Path | None) -> Path | None:
    """The file to read, given by --file or as the only argument; None where texts were given."""
    if file is not None:
        if given:
            raise EverybertError("give texts or --file, not both")
        return file
    if given and len(given) == 1 and Path(given[0]).suffix.lower() in RECORDS and " " not in given[0]:
        return Path(given[0])
    return None


def _texts(given: list[str] | None) -> list[str]:
    if not given:
        raise EverybertError("there is no text; give one in quotes, or a file")
    return given


def _file(
    model: Model,
    task: str,
    source: Path,
    out: Path | None,
    columns: dict[str, str],
    scores: bool,
    skip_bad: bool,
    fresh: bool,
    as_json: bool,
) -> None:
    """Predict a file's rows under a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from everybert.inference.files import predict_file

    if out is None:
        raise EverybertError(f"{source} is a file: say where its predictions go, for example --out scored.csv")
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        shown = bar.add_task(task, total=_rows(source))
        done = predict_file(
            model,
            task,
            source,
            out,
            columns=columns,
            scores=scores,
            skip_bad=skip_bad,
            fresh=fresh,
            progress=lambda rows: bar.update(shown, completed=rows),
        )
    for line in done.bad:
        print_error(f"left out: {line}")
    if as_json:
        print_json({"out": str(out), **asdict(done)})
    elif done.before and done.rows == done.before:
        print(f"{out}: all {done.rows:,} rows were there already")
    else:
        print(f"{out}: {done.rows:,} rows" + (f", {done.before:,} of them from before" if done.before else ""))
    if done.stopped:
        print_error("stopped: run the same command again to go on")
        raise typer.Exit(130)


def _rows(source: Path) -> int | None:
    """About how many rows there are, for the bar; None where only reading would tell."""
    if source.suffix.lower() not in (".csv", ".tsv", ".jsonl", ".ndjson", ".txt") or not source.is_file():
        return None
    with source.open("rb") as file:
        count = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return count - (source.suffix.lower() in (".csv", ".tsv"))


def print_error(line: str) -> None:
    """A line beside the results."""
    typer.echo(line, err=True)


def _short(text: str, width: int = 70) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
