"""`everybert fill`, `embed`, `tokens`, `next`, and one command per task: a model on texts or files."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from everybert.cli.common import Count, Long, Name, OptionalCount, Use, read_texts, refuse_files, report
from everybert.cli.options import Fields, Output, command
from everybert.errors import EverybertError
from everybert.files import atomic_file
from everybert.text.readers import RECORD_KINDS, expand, kind
from everybert.training.logs import progress_bar

app = typer.Typer()
Record = dict[str, Any]
Texts = Annotated[list[str] | None, "One or more texts, each in quotes.", {"metavar": "TEXT"}]
Lines = Annotated[Path | None, "Read one text per line from a file; - is standard input."]
Adapter = Annotated[Name, "An adapter: the name of one that comes with the model, or a folder."]
Given = Annotated[list[str] | None, "Texts in quotes, or one file.", {"metavar": "TEXT|FILE"}]


@dataclass(frozen=True)
class TaskOptions:
    """Options of the task commands. Each command has those that its task can use."""

    file: Annotated[Path | None, "A file: csv, tsv, jsonl, parquet, or txt with one text per line."] = None
    out: Annotated[Path | None, "Write rows and predictions: csv, tsv or jsonl. Run again to resume."] = None
    text_column: Annotated[Name, "The text column of the file. Guessed if not given."] = None
    pair_column: Annotated[Name, "The column of the second text."] = None
    pair: Annotated[str | None, "The second text of a pair."] = None
    context: Annotated[str | None, "The text that holds the answer."] = None
    context_file: Annotated[Path | None, "A file that holds the answer."] = None
    top: Annotated[Count, "Answers per question."] = 1
    scores: Annotated[bool, "The probability of every label."] = False
    labels: Annotated[Name, "Any labels, for an entailment model: sport,politics,art."] = None
    adapter: Adapter = None

    def zero_shot(self) -> dict[str, Any]:
        """The labels that were given for an entailment model."""
        if self.labels is None:
            return {}
        if self.pair is not None:
            raise EverybertError("--labels are for single texts; leave --pair out")
        return {"labels": [name.strip() for name in self.labels.split(",")]}

    def columns(self) -> dict[str, str]:
        """The columns that were named."""
        named = {"text": self.text_column, "pair": self.pair_column}
        return {role: name for role, name in named.items() if name is not None}


TagOptions = Annotated[TaskOptions, Fields("file out text_column adapter")]
RegressOptions = Annotated[TaskOptions, Fields("file out text_column pair_column pair adapter")]
ClassifyOptions = Annotated[TaskOptions, Fields("file out text_column pair_column pair scores labels adapter")]
AnswerOptions = Annotated[TaskOptions, Fields("context context_file top file out adapter")]
ChooseOptions = Annotated[TaskOptions, Fields("file out scores adapter")]
FILES = "everybert.inference.files:FileOptions"
Rows = Annotated[dict[str, Any], Fields("skip_bad fresh", "Files", FILES)]
Parts = Annotated[dict[str, Any], Fields("skip_bad fresh part_rows engine address workers", "Files", FILES)]


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
    """Predict the words behind [MASK], each with its probability."""
    texts, model = read_texts(texts, file), use.load()
    predictions = ((text, model.fill(text, top=top, pair=pair)) for text in texts)
    return Output({"text": text, "masks": [list(map(asdict, mask)) for mask in masks]} for text, masks in predictions)


@command(app)
def embed(
    texts: Annotated[Texts, "One or more texts, each in quotes; or files of rows: csv, tsv, jsonl, parquet."] = None,
    *,
    pooling: Annotated[Name, "mean, cls or max. If not given: as the model's folder says."] = None,
    normalize: Annotated[bool | None, "Scale vectors to length 1. If not given: as the model's folder says."] = None,
    long: Annotated[Long, "Read texts longer than the window in windows, or cut them."] = "window",
    prompt: Annotated[Name, "The name of one of the model's prompts, to put before each text."] = None,
    dimensions: Annotated[OptionalCount, "Keep the first numbers of each vector (Matryoshka embeddings)."] = None,
    file: Lines = None,
    out: Annotated[Path | None, "Write vectors to a .npy file, or rows with vectors to .jsonl or a folder."] = None,
    column: Annotated[TaskOptions, Fields("text_column", "Files")],
    rows: Parts,
    use: Use,
) -> Output:
    """Compute one vector per text, or one per row of files; of a SPLADE model, the words of each and their weights."""
    options: dict[str, Any] = {"pooling": pooling, "normalize": normalize, "long": long}
    options |= {"prompt": prompt, "dimensions": dimensions}
    files = named_files([*(texts or []), *([str(file)] if file is not None else [])])
    if out is not None and out.suffix != ".npy":
        if not files:
            raise EverybertError(f"{out}: the vectors of texts are written as .npy; give --out such a name")
        return on_files("embed", files, out, use, options=options, columns=column.columns(), **rows)
    if files:
        from everybert.inference.files import FileOptions, read_inputs

        how = FileOptions(columns=column.columns(), skip_bad=rows.pop("skip_bad", False))
        only_files(rows)
        bad: list[str] = []
        texts = [text for _, text in read_inputs("embed", files, how, bad)]
        print(*(f"left out: {line}\n" for line in bad), sep="", end="", file=sys.stderr)
    else:
        only_files(rows, column)
        texts = read_texts(texts, file)
    model = use.load()
    if model.pooling.vectors == "sparse" and pooling is None:
        if out is not None or (normalize, dimensions) != (None, None):
            raise EverybertError("sparse vectors are printed, whole: leave --out, --normalize and --dimensions out")
        each = [(x.indices.tolist(), x.weights.tolist()) for x in model.sparse(texts, long=long, prompt=prompt)]
        return Output(
            {"text": text, "tokens": [*map(model.tokenizer.text, ids)], "indices": ids, "weights": weights}
            for text, (ids, weights) in zip(texts, each)
        )
    vectors = model.embed(texts, **options)
    records = [{"text": text, "vector": vector.tolist()} for text, vector in zip(texts, vectors)]
    if out is None:
        return Output(records)
    import numpy as np

    with atomic_file(out) as draft, draft.open("wb") as stream:
        np.save(stream, vectors)
    return Output(records, [f"{out}: {vectors.shape[0]} vectors of {vectors.shape[1]} numbers"])


@command(app)
def tokens(
    texts: Texts = None,
    *,
    layer: Annotated[int | None, "0 is the embeddings, -2 the last layer but one. If not given: the last."] = None,
    pair: Annotated[str | None, "A second text."] = None,
    file: Lines = None,
    use: Use,
) -> Output:
    """Print the tokens of a text, their offsets, and their vectors after a layer."""

    def rows(vectors: Any) -> list[dict[str, Any]]:
        parts = vectors.rows(vectors.vectors.tolist())
        return [{k: v for k, v in part.items() if k != "segment" or pair is not None} for part in parts]

    texts, model = read_texts(texts, file), use.load()
    results = ((text, model.tokens(text, layer=layer, pair=pair)) for text in texts)
    return Output({"text": text, "layer": vectors.layer, "tokens": rows(vectors)} for text, vectors in results)


@command(app)
def next(
    first: Annotated[str | None, "A text."] = None,
    second: Annotated[str | None, "The text that may follow it."] = None,
    *,
    file: Annotated[Lines, "Read one pair per line, with a tab between the texts; - is standard input."] = None,
    use: Use,
) -> Output:
    """Probability that the second text follows the first."""
    if file is None and (first is None or second is None):
        raise EverybertError("next compares two texts; give both in quotes, or --file F with a tab between them")
    texts = read_texts([text for text in (first, second) if text is not None], file, tabs=True)
    pairs, model = [texts] if file is None else [line.split("\t", 1) for line in texts], use.load()
    if bad := [number for number, pair in enumerate(pairs, 1) if len(pair) < 2]:
        raise EverybertError(f"{file}:{bad[0]} has no tab; give two texts per line with a tab between them")
    return Output([{"first": a, "second": b, "probability": model.next_sentence(a, b)} for a, b in pairs])


# ── fine-tuned models ────────────────────────────────────────────────────────────────────────────────────────


@command(app)
def classify(given: Given = None, *, options: ClassifyOptions, rows: Parts, use: Use) -> Output:
    """Predict the label of each text or pair.

    Give a file and --out to predict its rows; run again to resume. Parquet files with a folder as --out are read and
    written in parts, on this machine or on a Ray cluster.
    """

    def show(found: Record) -> Record:
        best = {"label": ", ".join(found["labels"]) or found["label"], "score": found["score"]}
        return best | (found["scores"] if options.scores else {}) | {"text": found["text"]}

    return predicted("classify", given, options, rows, use, show=show)


@command(app)
def regress(given: Given = None, *, options: RegressOptions, rows: Rows, use: Use) -> Output:
    """Predict a number for each text or pair."""
    return predicted("regress", given, options, rows, use, names=("text", "value"))


@command(app)
def tag(given: Given = None, *, options: TagOptions, rows: Rows, use: Use) -> Output:
    """Find the labelled spans of each text: names, places, parts of speech."""
    return predicted("tag", given, options, rows, use, names=("text", "spans"))


@command(app)
def answer(
    given: Annotated[
        Given, "Questions, then the text that answers them; or one file.", {"metavar": "QUESTION… TEXT"}
    ] = None,
    *,
    options: AnswerOptions,
    rows: Rows,
    use: Use,
) -> Output:
    """Answer questions from a text of any length. An empty answer means that the text has none."""
    questions, context, names = given or [], options.context or "", ("question", "answers")
    if options.context_file is not None:
        if context:
            raise EverybertError("give --context or --context-file, not both")
        context = "\n".join(read_texts(None, options.context_file))
    elif not context and len(questions) > 1:
        *questions, context = questions
    if questions and not context and not named_files(questions):
        raise EverybertError("there is no context; give it after the question, or as --context-file F")
    return predicted("answer", questions, replace(options, context=context or None), rows, use, names)


@command(app)
def choose(
    given: Annotated[Given, "A prompt and its endings, or one file.", {"metavar": "PROMPT ENDING…"}] = None,
    *,
    options: ChooseOptions,
    rows: Rows,
    use: Use,
) -> Output:
    """Choose the ending that fits a prompt best."""
    if given and len(given) < 3 and not named_files(given):
        raise EverybertError("give a prompt and two endings or more, each in quotes")
    inputs = [(given[0], given[1:])] if given else None
    return predicted("choose", given, options, rows, use, ("prompt", ""), inputs=inputs)


@command(app)
def rank(
    query: Annotated[str, "What is searched for, in quotes."],
    texts: Texts = None,
    *,
    file: Lines = None,
    top: Annotated[OptionalCount, "Texts to print. If not given: all."] = None,
    adapter: Adapter = None,
    use: Use,
) -> Output:
    """Sort texts by relevance to a query, best first, with a cross-encoder."""
    texts = read_texts(texts, file)
    ranked = use.load().rank(query, texts, top, adapter)
    return Output([{"score": result.score, "index": result.index, "text": texts[result.index]} for result in ranked])


def predicted(
    task: str,
    given: list[str] | None,
    options: TaskOptions,
    rows: Record,
    use: Use,
    names: tuple[str, str] = ("text", ""),
    show: Callable[[Record], Record] = lambda record: record,
    inputs: list[Any] | None = None,
) -> Output:
    """Predict texts, or the rows of files.

    `names` are the keys of an input and, unless it is a record itself, of its prediction in the JSON. `inputs` are
    what the model predicts, if not each text.
    """
    if options.file is not None and given:
        raise EverybertError("give texts or --file, not both")
    named = named_files(given, (*RECORD_KINDS, ".txt")) if options.context is None else []
    if files := [options.file] if options.file is not None else named:
        if options.pair is not None or options.context is not None or options.top != 1:
            raise EverybertError("--pair, --context and --top are for texts; a row has its columns and one answer")
        more = {"adapter": options.adapter, "options": {"scores": options.scores, **options.zero_shot()}}
        return on_files(task, files, options.out, use, columns=options.columns(), **more, **rows)
    if not given:
        raise EverybertError("there is no text; give one in quotes, or a file")
    only_files(rows, options)
    second = options.pair if options.context is None else options.context
    refuse_files([*given, *filter(None, [second])])
    how: Record = options.zero_shot() if options.context is None else {"top": options.top}
    examples: list[Any] = inputs or (given if second is None else [(text, second) for text in given])
    name, value = names
    records: list[Record] = []
    for text, prediction in zip(given, use.load().predict(task, examples, options.adapter, **how)):
        plain: Any = [asdict(part) for part in prediction] if isinstance(prediction, list) else prediction
        records.append({name: text} | ({value: plain} if value else asdict(prediction)))
    return Output(records if inputs is None else records[0], report(map(show, records)))


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


def on_files(task: str, files: list[Path], out: Path | None, use: Use, **options: Any) -> Output:
    """Predict the rows of files. Bad rows and an interruption are printed on standard error."""
    from everybert.inference.files import predict_files

    expand(files)
    if out is None:
        raise EverybertError(f"{files[0]} is a file: say where its predictions go, for example --out scored.csv")
    options |= {"device": use.device, "dtype": use.dtype, "allow_pickle": use.allow_pickle}
    with progress_bar(task) as tell:
        done = predict_files(task, use.model, files, out, progress=tell, **options)
    print(*(f"left out: {line}\n" for line in done.bad), sep="", end="", file=sys.stderr)
    if done.stopped:
        print(f"stopped after {done.rows:,} rows: run the same command again to resume", file=sys.stderr)
    before = f", {done.before:,} of them from before" if done.before else ""
    return Output({"out": str(out), **asdict(done)}, [f"{out}: {done.rows:,} rows{before}"], 130 * done.stopped)


def named_files(given: list[str] | None, kinds: tuple[str, ...] = RECORD_KINDS) -> list[Path]:
    """The files that are given in place of texts."""
    files = [Path(name) for name in given or []]
    named = (" " not in path.name and kind(path) in kinds for path in files)
    return files if files and all(named) else []


def only_files(rows: Record, options: TaskOptions | None = None) -> None:
    """Refuse options that texts cannot use."""
    named = [name for name in ("out", "text_column", "pair_column") if getattr(options, name, None)]
    if given := [*rows, *named]:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise EverybertError(f"{shown}: this is for the rows of files; give FILE.csv or FILE.parquet, and --out")
