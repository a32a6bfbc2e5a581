"""`everybert info`, `export`, `quantize`, `serve`, `quickstart`: what is done with a model's folder."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from everybert.cli.common import DEFAULT, LECTURE, Name, OptionalCount, Pickle, Source, cell, report
from everybert.cli.options import Fields, Group, Output, command
from everybert.errors import EverybertError
from everybert.files import accept_folder
from everybert.training.logs import progress_bar

app = typer.Typer()
export = typer.Typer(cls=Group, help="Export a model to ONNX, or to a transformers folder.", no_args_is_help=True)
app.add_typer(export, name="export")
LIMITS = "body=max_body inputs=max_inputs text_tokens=max_tokens queue rate connections seconds=timeout budget"
SERVER = "everybert.serving.app:ServerSettings"
Preset = Annotated[str | None, {"metavar": "MODEL"}]
Names = Annotated[list[str] | None, {"metavar": "NAME"}]
Merged = Annotated[Name, "Merge this adapter: the name of one that comes with the model, or a folder."]


@command(app)
def info(
    model: Annotated[Preset, "The name of a preset, a folder, or a hub id (org/name)."] = None,
    *,
    compare: Annotated[bool, "Print the architectures side by side."] = False,
    task: Annotated[Name, "Print how many new parameters this task needs, and an adapter for it."] = None,
    labels: Annotated[OptionalCount, "Labels of --task; without --task, of every task."] = None,
    accept: Annotated[bool, "Accept the files of a folder that changed since everybert wrote it."] = False,
    allow_pickle: Pickle = False,
) -> Output:
    """Print layers, heads and parameters by part, and what each task head would add. No weights are loaded."""
    from everybert.inference import describe

    model = model or (DEFAULT if task or labels else None)
    if compare == (model is not None):
        raise EverybertError("give a model, or --compare for the family side by side")
    if accept and model is not None:
        return Output({"folder": model, "accepted": accept_folder(model)})
    if model is not None and (task or labels):
        return Output(describe.new_parameters(model, task, labels))
    if model is not None:
        return Output(describe.describe(model, allow_pickle))
    rows = describe.compare()
    keys = ("name", "total", "share", "layers", "hidden", "tokens", "chip_days", "glue", "squad", "objective")
    shown = [{k: f"{row[k]:#.3g}" if isinstance(row[k], float) else cell(row[k]) for k in keys} for row in rows]
    notes = ["", "share: of BERT-base; glue: the mean (BERT: test sets, others: dev); squad: F1 on 1.1, dev"]
    notes += [f"{r['name']}: {r['data']}; {cell(r['hardware'])} ({r['source']})" for r in rows if r["source"]]
    return Output(rows, [*report(shown), *notes])


@command(export)
def onnx(
    model: Source,
    out: Annotated[Path, "The folder to write. It must not exist.", {"metavar": "OUT"}],
    *,
    task: Annotated[Name, "hidden, embed, fill, next, classify … If not given: the model's own."] = None,
    adapter: Merged = None,
    allow_pickle: Pickle = False,
) -> Output:
    """Write a folder with onnx/model.onnx, compared with torch on random sequences of different lengths."""
    from everybert.inference.export import export_onnx

    with progress_bar("exporting"):
        return Output(export_onnx(model, out, task=task, adapter=adapter, allow_pickle=allow_pickle))


@command(export)
def hf(
    model: Source,
    out: Annotated[Path, "The folder to write. It must not exist.", {"metavar": "OUT"}],
    *,
    adapter: Merged = None,
    dtype: Annotated[Name, "float32, bfloat16 or float16. If not given: as it is."] = None,
    allow_pickle: Pickle = False,
) -> Output:
    """Write a folder that transformers reads: adapters merged, int8 and .bin weights converted."""
    from everybert.inference.export import export_hf

    with progress_bar("writing"):
        return Output(export_hf(model, out, adapter=adapter, dtype=dtype, allow_pickle=allow_pickle))


@command(app)
def quantize(
    model: Source, out: Annotated[Path, "The folder to write.", {"metavar": "OUT"}], *, allow_pickle: Pickle = False
) -> Output:
    """Store a model in int8, with one scale per row: a quarter of the size of fp32. Compares it with the original.

    everybert loads the folder in any dtype; `--dtype int8` computes in int8 too, on the CPU. For transformers,
    `everybert export hf` converts it to fp32.
    """
    from everybert.data import documents
    from everybert.inference.export import quantise
    from everybert.text.sentences import split_sentences

    sentences = [split_sentences(text)[0] for text in documents(32)]
    with progress_bar("quantizing"):
        return Output(quantise(model, out, sentences, allow_pickle))


@command(app)
def serve(
    *,
    model: Annotated[Names, "A folder, hub id or NAME=FOLDER; repeat. If not given: both bundled models."] = None,
    adapter: Annotated[Names, "An adapter: FOLDER, NAME=FOLDER or MODEL:NAME=FOLDER; repeat."] = None,
    host: Annotated[str, "The address to listen on. The default is this machine alone."] = "127.0.0.1",
    port: Annotated[int, "The port. 0 takes a free one.", {"min": 0, "max": 65535}] = 8000,
    api_key: Annotated[
        Names,
        "A key that clients may send; repeat. In the variable they are divided by spaces.",
        {"envvar": "EVERYBERT_API_KEY"},
    ] = None,
    api_keys: Annotated[Path | None, "A file with one such key per line."] = None,
    allowed_hosts: Annotated[
        Names, "A name by which clients may call this server (or *); repeat. Addresses and localhost are allowed."
    ] = None,
    no_playground: Annotated[bool, "Serve the API alone, without the page and its endpoints."] = False,
    more: Annotated[dict[str, Any], Fields("workers access_log revision", "Server", SERVER)],
    use: Annotated[dict[str, Any], Fields("device dtype allow_pickle", "Model", "everybert.cli.common:Use")],
    limits: Annotated[dict[str, Any], Fields(LIMITS, "Limits", "everybert.serving.limits:Limits")],
) -> None:
    """Serve models over HTTP: the endpoints of OpenAI and TEI, our own, and a page to try them."""
    # oneDNN keeps 1,024 compiled products, five for each batch size; a quarter is as fast, and memory is soon constant
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    try:
        from everybert.serving.app import ServerSettings
        from everybert.serving.app import serve as start
        from everybert.serving.limits import Limits
    except ModuleNotFoundError as error:
        raise EverybertError(f"serving needs {error.name}: pip install 'everybert[serve]'") from None

    chosen = Limits(**limits)
    chosen = replace(chosen, request_tokens=max(4 * chosen.text_tokens, chosen.inputs))
    keys = [*(api_key or []), *(api_keys.read_text("utf-8").split() if api_keys else [])]
    hosts = [host, *(allowed_hosts or [])]
    asked: dict[str, Any] = {"keys": keys, "hosts": hosts, "playground": not no_playground, **more, **use}
    settings = ServerSettings(model or [DEFAULT, LECTURE], adapter or [], limits=chosen, **asked)
    if api_keys and not keys:
        raise EverybertError(f"{api_keys} has no key; write one per line")
    if host not in ("127.0.0.1", "::1", "localhost") and not keys:
        print(f"note: anyone who reaches {host} can use this server; --api-key asks for a key", file=sys.stderr)

    def started(real: int, service: Any) -> None:
        entries = [entry for entry in service.registry.entries.values() if ":" not in entry.name]
        names, where = ", ".join(entry.name for entry in entries), f"http://{host}:{real}"
        page = "" if no_playground else f"page: {where}/, "
        print(f"serving {names} on {where} ({page}API reference: /docs; stop with Ctrl-C)", flush=True)
        for entry in entries:
            config, adapters = entry.model.config, ", ".join(entry.model.bundle.folders)
            shape = f"{config.family}, {len(config.layer_order)} layers of width {config.hidden_size}"
            print(f"  {entry.name}: {shape}" + (f"; adapters {adapters}" if adapters else ""), flush=True)

    start(settings, host, port, started)


@command(app)
def quickstart(
    *,
    out: Annotated[Path, "The folder for everything that it makes; run again to resume."] = Path("quickstart"),
    json_: Annotated[bool, "Print the result as JSON."] = False,
) -> None:
    """Train a tokenizer, pre-train a tiny BERT, fill masks, fine-tune, score, classify: in about two minutes."""
    # Threads that spin while they wait slow down others on shared cores; sleeping costs nothing here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from everybert import quickstart as story

    try:
        Output(story.quickstart(out, console=Console(stderr=json_)), ()).show(json_)
    except KeyboardInterrupt:
        print(f"stopped: run the same command again to resume from {out}", file=sys.stderr)
        raise typer.Exit(130) from None
