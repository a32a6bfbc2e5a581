"""`everybert fill`, `embed`, `tokens`, `next`: use a model on texts from the command line or a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from everybert.cli.common import (
    DEFAULT,
    Device,
    Dtype,
    File,
    Json,
    ModelName,
    Texts,
    examples,
    load,
    print_json,
    read_texts,
)
from everybert.cli.parts import Address, EngineName, PartRows, Workers, only_parquet, parquet_files, run_parts
from everybert.errors import EverybertError

app = typer.Typer()


@app.command(
    epilog=examples(
        'everybert fill "Istanbul is a great [MASK] to visit"',
        'everybert fill "[MASK] loves [MASK]" --top 3 --json',
        "everybert fill --file questions.txt --model ./my-model",
    )
)
def fill(
    texts: Texts = None,
    top: Annotated[int, typer.Option(help="Candidates for each blank.")] = 5,
    pair: Annotated[str | None, typer.Option(help="A second text, which may have blanks too.")] = None,
    model: ModelName = DEFAULT,
    file: File = None,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Guess the words behind [MASK], each with its probability."""
    given = read_texts(texts, file)
    loaded = load(model, device, dtype)
    found = []
    for text in given:
        blanks = loaded.fill(text, top=top, pair=pair)
        if as_json:
            found.append({"text": text, "masks": [[asdict(candidate) for candidate in blank] for blank in blanks]})
            continue
        print(text)
        for number, blank in enumerate(blanks, 1):
            if len(blanks) > 1:
                print(f"  blank {number}")
            for candidate in blank:
                print(f"  {candidate.score:7.4f}  {candidate.token}")
    if as_json:
        print_json(found)


@app.command(
    epilog=examples(
        'everybert embed "A dog barks." "A cat sleeps." --model ./all-MiniLM-L6-v2',
        "everybert embed --file sentences.txt --out vectors.npy",
        "everybert embed --file long.txt --long cut --json",
        "everybert embed rows-*.parquet --text-column body --out vectors --engine ray --address auto",
    )
)
def embed(
    texts: Texts = None,
    pooling: Annotated[
        str | None, typer.Option(help="mean, cls or max; by default as the model's folder says.")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Scale to length 1; by default as the folder says."),
    ] = None,
    long: Annotated[
        Literal["window", "cut"], typer.Option(help="Texts longer than the window: read in windows, or cut.")
    ] = "window",
    out: Annotated[
        Path | None, typer.Option(help="Write the vectors to a .npy file; of parquet files: to a folder.")
    ] = None,
    model: ModelName = DEFAULT,
    file: File = None,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
    text_column: Annotated[str | None, typer.Option(help="Parquet: the text column; guessed when not given.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Parquet: leave rows without text out.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Parquet: start the output over.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    part_rows: PartRows = 4096,
) -> None:
    """Turn texts into vectors, one each; or the rows of parquet files, into a folder of them with a vector each."""
    if files := parquet_files(texts, file):
        run_parts(
            "embed",
            model,
            files,
            out,
            as_json,
            device=device,
            dtype=dtype,
            columns={"text": text_column} if text_column is not None else {},
            options={"pooling": pooling, "normalize": normalize, "long": long},
            skip_bad=skip_bad,
            fresh=fresh,
            engine=engine,
            address=address,
            workers=workers,
            part_rows=part_rows,
        )
        return
    only_parquet(engine, address, workers)
    given = read_texts(texts, file)
    vectors = load(model, device, dtype).embed(given, pooling=pooling, normalize=normalize, long=long)
    if out is not None:
        import numpy as np

        from everybert.files import atomic_file

        with atomic_file(out) as draft, draft.open("wb") as stream:
            np.save(stream, vectors)
    if as_json:
        print_json([{"text": text, "vector": vector.tolist()} for text, vector in zip(given, vectors)])
    elif out is not None:
        print(f"{out}: {vectors.shape[0]} vectors of {vectors.shape[1]} numbers")
    else:
        for text, vector in zip(given, vectors):
            start = " ".join(f"{x:+.3f}" for x in vector[:6])
            print(f"{start} … ({len(vector)} numbers)  {_short(text)}")


@app.command(
    epilog=examples(
        'everybert tokens "I love my pet Python"',
        'everybert tokens "I love my pet Python" --layer 0 --json',
    )
)
def tokens(
    texts: Texts = None,
    layer: Annotated[
        int | None, typer.Option(help="0 is the embeddings, the last is the default, -2 counts back.")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="A second text.")] = None,
    model: ModelName = DEFAULT,
    file: File = None,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Show a text's tokens, where they stand in it, and their vectors after a layer."""
    given = read_texts(texts, file)
    loaded = load(model, device, dtype)
    found = []
    for text in given:
        result = loaded.tokens(text, layer=layer, pair=pair)
        rows = list(zip(result.tokens, result.ids, result.offsets, result.vectors))
        if as_json:
            entries = [
                {"token": token, "id": number, "start": start, "end": end, "vector": vector.tolist()}
                for token, number, (start, end), vector in rows
            ]
            found.append({"text": text, "layer": result.layer, "tokens": entries})
            continue
        print(f"{_short(text)}  (layer {result.layer}, {result.vectors.shape[1]} numbers a token)")
        for i, (token, number, (start, end), vector) in enumerate(rows):
            begin = " ".join(f"{x:+.3f}" for x in vector[:4])
            print(f"  {i:4}  {token:16} id {number:<7} {start:5}-{end:<5} {begin} …")
    if as_json:
        print_json(found)


@app.command(
    epilog=examples(
        'everybert next "The man went to the store." "He bought a gallon of milk."',
        "everybert next --file pairs.tsv --json",
    )
)
def next(
    first: Annotated[str | None, typer.Argument(help="A text.")] = None,
    second: Annotated[str | None, typer.Argument(help="What may follow it.")] = None,
    model: ModelName = DEFAULT,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A pair a line, with a tab between; - is stdin.")
    ] = None,
    as_json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """How likely the second text follows the first: P(B follows A)."""
    pairs = _pairs(first, second, file)
    loaded = load(model, device, dtype)
    found = [(a, b, loaded.next_sentence(a, b)) for a, b in pairs]
    if as_json:
        print_json([{"first": a, "second": b, "probability": p} for a, b, p in found])
        return
    for a, b, p in found:
        print(f"{p:.4f}  {_short(a)} → {_short(b)}")


def _pairs(first: str | None, second: str | None, file: Path | None) -> list[tuple[str, str]]:
    if file is None:
        if first is None or second is None:
            raise EverybertError("next compares two texts; give both in quotes, or --file F with a tab between them")
        return [(first, second)]
    pairs = []
    for number, line in enumerate(read_texts([first] if first is not None else None, file), 1):
        a, tab, b = line.partition("\t")
        if not tab:
            raise EverybertError(f"{file}:{number} has no tab; give two texts a line with a tab between them")
        pairs.append((a, b))
    return pairs


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
