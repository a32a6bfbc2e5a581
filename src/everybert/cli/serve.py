"""`everybert serve`: models over HTTP."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from everybert.cli.common import DEFAULT, Device, Dtype, examples
from everybert.errors import EverybertError

app = typer.Typer()

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@app.command(
    epilog=examples(
        "everybert serve --model ./my-model",
        "everybert serve --model small=./trunk --adapter sentiment=./lora-sentiment --model ner=./tagger",
        "EVERYBERT_API_KEY=secret everybert serve --host 0.0.0.0 --port 80",
    )
)
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="A folder, bundled model or hub id, or NAME=FOLDER; repeat."),
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="An adapter: FOLDER, NAME=FOLDER or MODEL:NAME=FOLDER; repeat.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; this machine alone unless told otherwise.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="EVERYBERT_API_KEY", help="Ask clients for this key.", show_default=False)
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    max_body: Annotated[int, typer.Option(help="Bytes of a request's body.", min=1)] = 2_000_000,
    max_inputs: Annotated[int, typer.Option(help="Texts of a request.", min=1)] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a text.", min=1)] = 65_536,
    queue: Annotated[int, typer.Option(help="Requests taken at a time; more are answered 429.", min=1)] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.", min=0.01)] = 60.0,
    budget: Annotated[int | None, typer.Option(help="Tokens of a batch.", min=1)] = None,
    workers: Annotated[int, typer.Option(help="Processes that share the port, the cores and the weights.", min=1)] = 1,
) -> None:
    """Serve models over HTTP: OpenAI's and TEI's endpoints, our own, and a page to play with."""
    # oneDNN keeps a thousand compiled products, one for each size of batch: memory grows for minutes, no speed is won
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        from everybert.serving.app import Settings, serve_workers
        from everybert.serving.app import serve as serve_app
        from everybert.serving.limits import Limits
    except ModuleNotFoundError as error:
        raise EverybertError(f"serving needs {error.name}: pip install 'everybert[serve]'") from None

    limits = Limits(
        body=max_body,
        inputs=max_inputs,
        text_tokens=max_tokens,
        request_tokens=max(4 * max_tokens, max_inputs),
        queue=queue,
        seconds=timeout,
        budget=budget,
    )
    settings = Settings(model or [DEFAULT], adapter or [], device, dtype, api_key, limits, workers)
    if host not in LOOPBACK and not api_key:
        print(f"note: anyone who reaches {host} can use this server; --api-key asks for a key", file=sys.stderr)

    def started(real: int) -> None:
        names = ", ".join(settings.names)
        print(f"serving {names} on http://{host}:{real} (API reference: /docs; stop with Ctrl-C)", flush=True)

    if workers == 1:
        serve_app(settings.create_app(), host, port, started)
    else:
        serve_workers(settings, host, port, started)
