"""`everybert export`: a model for other runtimes and libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from everybert.cli.common import examples, print_json, print_table
from everybert.errors import EverybertError

app = typer.Typer(no_args_is_help=True, help="Export a model: to ONNX, or to a folder of transformers.")

Source = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a bundled model, or a hub id (org/name).")]
Adapter = Annotated[
    str | None, typer.Option(help="Merge this adapter: one that the model comes with, or an adapter's folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")]


@app.command(
    epilog=examples(
        "everybert export onnx ./my-model ./my-model-onnx",
        "everybert export onnx everybert-small ./fill-onnx --task fill",
        "everybert export onnx ./sentiment ./sentiment-int8 --int8 --check dev.tsv",
    )
)
def onnx(
    model: Source,
    out: Out,
    task: Annotated[
        str | None,
        typer.Option(
            help="hidden, embed, fill, next, classify, regress, tag, answer or choose; what the model is for, if not "
            "given."
        ),
    ] = None,
    adapter: Adapter = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Round weights to int8, and activations as it runs: smaller and faster.")
    ] = False,
    opset: Annotated[int, typer.Option(min=18, max=22, help="The version of ONNX's operators.")] = 18,
    check: Annotated[
        Path | None, typer.Option(help="Labelled data: score model and export on it, with the model's own task.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a folder with model.onnx, checked against torch on random sequences of unequal length."""
    from everybert.evaluation.exported import bundled_sentences, scores
    from everybert.inference.export import export_onnx

    if check is not None and not check.is_file():
        raise EverybertError(f"{check} is not a file; --check takes labelled data")
    with _steps() as say:
        done = export_onnx(
            model,
            out,
            task=task,
            adapter=adapter,
            int8=int8,
            opset=opset,
            sentences=bundled_sentences() if int8 else (),
            say=say,
        )
        if check is not None:
            say("scoring")
        found = scores(model, done, check, adapter) if check is not None else None
    if as_json:
        print_json(asdict(done) | ({"scores": asdict(found)} if found else {}))
        return
    print(f"{done.folder}: {done.task}, opset {done.opset}, {done.bytes / 1e6:,.1f} MB{', int8' if int8 else ''}")
    print(f"in:  {', '.join(done.inputs)}")
    print(f"out: {', '.join(done.outputs)}")
    print(f"largest difference from torch: {done.difference:.1e} (values up to {done.values:.3g})")
    if done.int8 is not None:
        like = done.int8
        print(f"int8: cosine to the model mean {like.mean:.4f}, least {like.least:.4f} ({like.texts} texts)")
        if like.agree is not None:
            print(f"      the largest logit is the same in {like.agree:.1%}")
    if found is not None:
        print(f"\n{check}: {found.examples:,} examples")
        rows = [[name, f"{found.model[name]:.4f}", f"{found.export[name]:.4f}"] for name in found.model]
        print_table([["", "model", "export"], *rows], right=(1, 2))
    for note in done.notes:
        print(note)


@app.command(
    epilog=examples(
        "everybert export hf ./my-lora ./my-model",
        "everybert export hf ./my-model-int8 ./my-model --dtype bfloat16",
    )
)
def hf(
    model: Source,
    out: Out,
    adapter: Adapter = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as it was, if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Write a folder that transformers reads: adapters merged, int8 widened, every tensor read back and compared."""
    from everybert.inference.export import export_hf

    with _steps() as say:
        say("writing")
        done = export_hf(model, out, adapter=adapter, dtype=dtype)
    if as_json:
        print_json(asdict(done))
        return
    print(f"{done.folder}: {done.architecture}, {done.parameters:,} parameters in {done.dtype}, read back and the same")
    for note in done.notes:
        print(note)


@contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda step: status.update(f"{step} …")
