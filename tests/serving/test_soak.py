"""64 clients for half an hour, a third of which misbehave: every other answer is right, and memory stays where it was.

EVERYBERT_SOAK is the number of seconds, 1800 by default; memory is compared with that after the first sixth.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter

import httpx
import numpy as np
import pytest
from server import TEXTS, raw, until
from test_attacks import Server

import everybert

SECONDS = float(os.environ.get("EVERYBERT_SOAK", "1800"))
CLIENTS = 64
LARGE = raw("/v1/embeddings", {"input": ["a"] * 500})


async def honest(url: str, end: float, chance: random.Random, expected: dict, found: Counter) -> None:
    """Asks for vectors and masked tokens; what comes must be right."""
    async with httpx.AsyncClient(base_url=url, timeout=90, verify=False) as http:
        while time.monotonic() < end:
            texts = chance.choices(TEXTS, k=chance.randint(1, 8))
            answer = await http.post("/embed", json={"inputs": texts})
            found[answer.status_code] += 1
            if answer.status_code == 200:
                wanted = [expected[text] for text in texts]
                found["wrong"] += not np.allclose(answer.json(), wanted, atol=1e-5)


async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends a byte at a time."""
    for byte in raw("/embed", {"inputs": "a"})[:-9]:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.2)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Asks for much, and never reads."""
    writer.transport.pause_reading()
    writer.write(LARGE)
    await asyncio.sleep(15)


async def gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Asks, and leaves."""
    writer.write(LARGE)
    await writer.drain()
    await asyncio.sleep(0.5)


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends a body, or a head, without end."""
    writer.write(b"POST /embed HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(5000):
        writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        await writer.drain()
    await asyncio.sleep(0.5)


async def misbehaving(port: int, end: float, how: object) -> None:
    while time.monotonic() < end:
        try:
            pair = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            await how(*pair)
            pair[1].transport.abort()
        except OSError:
            pass
        await asyncio.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixty_four_clients_a_third_of_which_misbehave(folders):
    model = everybert.load(folders["words"], device="cpu")
    expected = dict(zip(TEXTS, model.embed(TEXTS, normalize=True)))
    found: Counter = Counter()
    memory: list[float] = []
    server = Server({"m": folders["words"]})

    async def storm(seconds: float) -> None:
        end = time.monotonic() + seconds

        async def watch() -> None:
            while time.monotonic() < end:
                memory.append(server.memory())
                await asyncio.sleep(1)

        bad = [misbehaving(server.port, end, (slow, silent, gone, endless)[i % 4]) for i in range(CLIENTS // 3)]
        good = [honest(server.url, end, random.Random(i), expected, found) for i in range(CLIENTS - len(bad))]
        await asyncio.gather(watch(), *bad, *good)

    with server:
        asyncio.run(storm(SECONDS))
        sixth = len(memory) // 6
        early, late = np.median(memory[sixth : sixth + 60]), np.median(memory[-60:])
        print(f"{dict(found)} {early:.0f} → {late:.0f} MB, at most {server.peak():.0f}")
        assert found["wrong"] == 0 and set(found) <= {200, "wrong"} and found[200] > SECONDS
        assert abs(late / early - 1) < 0.05, (early, late)
        metrics = lambda: httpx.get(f"{server.url}/metrics").text  # noqa: E731
        until(lambda: "everybert_in_flight 0.0" in metrics())

        async def stopped() -> None:
            running = asyncio.create_task(storm(20))
            await asyncio.sleep(5)
            await asyncio.to_thread(server.stop)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        asyncio.run(stopped())
