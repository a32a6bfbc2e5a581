"""`everybert info`, `export`, `quantize`, `push`, `serve`, `quickstart`: what is done with a model's folder."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from everybert.cli.common import DEFAULT, Count, Device, Name, Source, report, steps
from everybert.cli.options import Fields, Group, Output, command
from everybert.errors import EverybertError

app = typer.Typer()
export = typer.Typer(cls=Group, help="Export a model to ONNX, or to a transformers folder.", no_args_is_help=True)
app.add_typer(export, name="export")
LIMITS = "body=max_body inputs=max_inputs text_tokens=max_tokens queue seconds=timeout budget"
Preset = Annotated[str | None, {"metavar": "MODEL"}]
Names = Annotated[list[str] | None, {"metavar": "NAME"}]
Merged = Annotated[Name, "Merge this adapter: the name of one that comes with the model, or a folder."]
Limited = Annotated[dict[str, Any], Fields(LIMITS, "Limits", "everybert.serving.limits:Limits")]


@command(app)
def info(
    model: Annotated[Preset, "The name of a preset, a folder, or a hub id (org/name)."] = None,
    *,
    compare: Annotated[bool, "Print the architectures side by side."] = False,
) -> Output:
    """Print layers, heads and parameters by part, and what each task head would add. No weights are loaded.

    Examples:
        everybert info bert-base-uncased
        everybert info ./my-model --json
        everybert info --compare
    """
    from everybert.inference import describe
    from everybert.model.config import PRESETS
    from everybert.store.hub import resolve

    if compare == (model is not None):
        raise EverybertError("give a model, or --compare for the family side by side")
    if model is not None:
        preset = PRESETS.get(model)
        return Output(describe.describe_preset(model, preset) if preset else describe.describe_folder(resolve(model)))
    rows = describe.compare()
    keys = ["name", "total", "layers", "hidden", "heads_per_layer", "positions", "objective"]
    return Output(rows, report([{key: row[key] for key in keys} for row in rows]))


@command(export)
def onnx(
    model: Source,
    out: Annotated[Path, "The folder to write. It must not exist.", {"metavar": "OUT"}],
    *,
    task: Annotated[Name, "hidden, embed, fill, next, classify …, choose. If not given: the model's own."] = None,
    adapter: Merged = None,
    int8: Annotated[bool, "Quantize weights and activations to int8: smaller and faster."] = False,
    opset: Annotated[int, "The version of the ONNX operators.", {"min": 18, "max": 22}] = 18,
    check: Annotated[Path | None, "Labelled data: score the model and the export on it."] = None,
) -> Output:
    """Write a folder with model.onnx, compared with torch on random sequences of different lengths.

    Examples:
        everybert export onnx ./my-model ./my-model-onnx
        everybert export onnx everybert-small ./fill-onnx --task fill
        everybert export onnx ./sentiment ./sentiment-int8 --int8 --check dev.tsv
    """
    from everybert.data import documents
    from everybert.evaluation.evaluate import evaluate_export
    from everybert.inference.export import export_onnx

    if check is not None and not check.is_file():
        raise EverybertError(f"{check} is not a file; --check takes labelled data")
    with steps() as say:
        texts = documents(200) if int8 else ()
        sentences = [text if i % 2 else text.partition(". ")[0] for i, text in enumerate(texts)]
        done = export_onnx(model, out, task=task, adapter=adapter, int8=int8, opset=opset, sentences=sentences, say=say)
        if check is not None:
            say("scoring")
        scores = evaluate_export(model, done, check, adapter) if check is not None else None

    return Output(asdict(done) | ({"scores": scores} if scores else {}))


@command(export)
def hf(
    model: Source,
    out: Annotated[Path, "The folder to write. It must not exist.", {"metavar": "OUT"}],
    *,
    adapter: Merged = None,
    dtype: Annotated[Name, "float32, bfloat16 or float16. If not given: as it is."] = None,
) -> Output:
    """Write a folder that transformers reads: adapters merged, int8 converted, every tensor read back and compared.

    Examples:
        everybert export hf ./my-lora ./my-model
        everybert export hf ./my-model-int8 ./my-model --dtype bfloat16
    """
    from everybert.inference.export import export_hf

    with steps() as say:
        say("writing")
        done = export_hf(model, out, adapter=adapter, dtype=dtype)
    return Output(asdict(done), [f"{done.folder} is written, read back and the same", *report(asdict(done))])


@command(app)
def quantize(
    model: Source,
    out: Annotated[Path, "The folder to write.", {"metavar": "OUT"}],
) -> Output:
    """Store a model in int8, with one scale per row: a quarter of the size of fp32. Compares it with the original.

    everybert loads the folder in any dtype; `--dtype int8` computes in int8 too, on the CPU. For transformers,
    `everybert export hf` converts it to fp32.

    Examples:
        everybert quantize ./my-model ./my-model-int8
        everybert embed "A dog barks." --model ./my-model-int8 --dtype int8
    """
    from everybert.data import documents
    from everybert.inference.export import quantise
    from everybert.text.sentences import split_sentences

    sentences = [split_sentences(text)[0] for text in documents(32)]
    with steps() as say:
        return Output(asdict(quantise(model, out, sentences, lambda step: say(f"{step} {model}"))))


@command(app)
def push(
    folder: Annotated[Path, "A model folder, as everybert wrote it, with a README.md."],
    repository: Annotated[str, "The repository. It is made if it does not exist.", {"metavar": "ORG/NAME"}],
    *,
    private: Annotated[bool, "Make the repository private."] = False,
    dry_run: Annotated[bool, "Print what would be sent, and stop."] = False,
) -> Output:
    """Upload a model to the Hugging Face hub in one commit. The token is that of `hf auth login`, or HF_TOKEN.

    Only the files that everybert wrote and the model card are sent.

    Examples:
        everybert push reviews my-org/reviews --dry-run
        everybert push reviews me/reviews --private
    """
    from everybert.store import hub

    upload = hub.prepare_push(folder)
    address = None if dry_run else hub.push(upload, repository, private)
    about = {"repository": repository, "files": upload.files, "left_out": list(upload.left_out)}
    lines = [*report(upload.files), *(f"left out: {name} (everybert did not write it)" for name in upload.left_out)]
    lines.append("nothing was sent (--dry-run)" if dry_run else f"pushed to {address}")
    return Output({**about, "pushed": not dry_run, "address": address}, lines)


@command(app)
def serve(
    *,
    model: Annotated[Names, "A folder, bundled model or hub id, or NAME=FOLDER; repeat."] = None,
    adapter: Annotated[Names, "An adapter: FOLDER, NAME=FOLDER or MODEL:NAME=FOLDER; repeat."] = None,
    host: Annotated[str, "The address to listen on. The default is this machine alone."] = "127.0.0.1",
    port: Annotated[int, "The port. 0 takes a free one.", {"min": 0, "max": 65535}] = 8000,
    api_key: Annotated[
        str | None, "The key that clients must send. Also read from EVERYBERT_API_KEY.", {"envvar": "EVERYBERT_API_KEY"}
    ] = None,
    device: Device = None,
    dtype: Annotated[Name, "float32, bfloat16, float16, or int8. If not given: as the model was saved."] = None,
    workers: Annotated[Count, "Processes that share the port, the cores and the weights."] = 1,
    limits: Limited,
) -> None:
    """Serve models over HTTP: the endpoints of OpenAI and TEI, our own, and a page to try them.

    Examples:
        everybert serve --model ./my-model
        everybert serve --model small=./encoder --adapter sentiment=./lora-sentiment
        EVERYBERT_API_KEY=secret everybert serve --host 0.0.0.0 --port 80
    """
    # oneDNN caches a thousand compiled products, one per batch size: memory grows for minutes, speed does not
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        from everybert.serving.app import Settings, serve_workers
        from everybert.serving.app import serve as serve_app
        from everybert.serving.limits import Limits
    except ModuleNotFoundError as error:
        raise EverybertError(f"serving needs {error.name}: pip install 'everybert[serve]'") from None

    chosen = Limits(**limits)
    chosen = replace(chosen, request_tokens=max(4 * chosen.text_tokens, chosen.inputs))
    settings = Settings(model or [DEFAULT], adapter or [], device, dtype, api_key, chosen, workers)
    if host not in ("127.0.0.1", "::1", "localhost") and not api_key:
        print(f"note: anyone who reaches {host} can use this server; --api-key asks for a key", file=sys.stderr)

    def started(real: int) -> None:
        names = ", ".join(settings.names)
        print(f"serving {names} on http://{host}:{real} (API reference: /docs; stop with Ctrl-C)", flush=True)

    if workers == 1:
        serve_app(settings.create_app(), host, port, started)
    else:
        serve_workers(settings, host, port, started)


@command(app)
def quickstart(
    *,
    out: Annotated[Path, "The folder for everything that it makes; run again to resume."] = Path("quickstart"),
    json_: Annotated[bool, "Print the result as JSON."] = False,
) -> None:
    """Train a tokenizer, pre-train a tiny BERT, fill masks, fine-tune, score, classify: in about two minutes.

    Examples:
        everybert quickstart
        everybert quickstart --out story
    """
    # Threads that spin while they wait slow down others on shared cores; sleeping costs nothing here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rich.console import Console

    from everybert.quickstart import Stopped
    from everybert.quickstart import quickstart as run

    try:
        Output(asdict(run(out, console=Console(stderr=json_))), ()).show(json_)
    except (Stopped, KeyboardInterrupt):
        print(f"stopped: run the same command again to resume from {out}", file=sys.stderr)
        raise typer.Exit(130) from None
