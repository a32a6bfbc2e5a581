"""64 clients for five minutes: no error, and memory stays where it was."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from server import TEXTS

SECONDS = 300


def resident(process: subprocess.Popen) -> float:
    """Megabytes of a process's memory."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def storm(url: str, seconds: float, process: subprocess.Popen) -> tuple[list[int], list[float]]:
    statuses: list[int] = []
    memory: list[float] = []
    end = time.monotonic() + seconds

    async def client(http: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            texts = [chance.choice(TEXTS) * chance.randint(1, 6) for _ in range(chance.randint(1, 8))]
            path, body = chance.choice((("/embed", {"inputs": texts}), ("/fill", {"text": texts[0] + " [MASK]"})))
            statuses.append((await http.post(path, json=body)).status_code)

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(resident(process))
            await asyncio.sleep(1)

    bounds = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=bounds, verify=False) as http:
        await asyncio.gather(watch(), *(client(http, i) for i in range(64)))
    return statuses, memory


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sixty_four_clients_for_five_minutes(folders):
    process = subprocess.Popen(
        [sys.executable, "-m", "everybert", "serve", "--model", f"m={folders['words']}", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().split()[3]
        asyncio.run(storm(url, 20, process))  # every thread and pool has come to life
        statuses, memory = asyncio.run(storm(url, SECONDS, process))
    finally:
        process.terminate()
        process.wait(20)
    assert set(statuses) == {200} and len(statuses) > 1000
    tenth = len(memory) // 10
    early, late = sum(memory[:tenth]) / tenth, sum(memory[-tenth:]) / tenth
    assert abs(late / early - 1) < 0.05, (early, late)
