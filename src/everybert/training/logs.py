"""What a run tells: a line of JSON every few steps, TensorBoard where it is installed, and a live line for people."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from everybert.errors import EverybertError


class Logs:
    """Writes log.jsonl (and TensorBoard's events) and keeps the progress line; `quiet` shows nothing."""

    def __init__(self, folder: Path | None, resume_at: int = 0, quiet: bool = False, board: bool = False) -> None:
        self.console = Console(stderr=True)
        self.quiet = quiet
        self.file = None
        self.board = None
        self.live: Live | None = None
        self.told = 0.0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "log.jsonl"
            forget_after(path, resume_at)
            self.file = path.open("a", encoding="utf-8")
            self.board = _board(folder / "tensorboard", resume_at) if board else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line of log.jsonl, and the same numbers as curves."""
        if self.file is not None:
            try:
                self.file.write(json.dumps({"step": step, **values}) + "\n")
                self.file.flush()
            except OSError as error:
                raise EverybertError(
                    f"log.jsonl could not be written ({error.strerror}): the last checkpoint is intact, make room and "
                    "run again to resume"
                ) from error
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(name, value, step)

    def show(self, line: str, every: float = 30.0) -> None:
        """The progress line: live in a terminal, else a plain line now and then."""
        if self.quiet:
            return
        if self.console.is_terminal:
            if self.live is None:
                self.live = Live(console=self.console, refresh_per_second=4, transient=True)
                self.live.start()
            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self.told >= every:
            self.told = time.monotonic()
            self.say(line)

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Put everything away."""
        if self.live is not None:
            self.live.stop()
            self.live = None
        if self.file is not None:
            self.file.close()
            self.file = None
        if self.board is not None:
            self.board.close()
            self.board = None

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a killed run did after its last checkpoint: they are about to be done again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the line that was being written when the run was killed
    draft = path.with_name(path.name + ".tmp")
    draft.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    draft.replace(path)


def progress_line(step: int, total: int | None, values: dict[str, Any], left: float | None) -> str:
    """step 1,200/10,000  loss 3.214  1.25M tokens/s  MFU 41 %  data wait 0.3 %  ETA 12:40."""
    parts = [f"step {step:,}" + (f"/{total:,}" if total else "")]
    if "loss" in values:
        parts.append(f"loss {values['loss']:.3f}")
    if "tokens_per_second" in values:
        parts.append(f"{shorten(values['tokens_per_second'])} tokens/s")
    if values.get("mfu") is not None:
        parts.append(f"MFU {values['mfu']:.0%}")
    if "data_wait" in values:
        parts.append(f"data wait {values['data_wait']:.1%}")
    if values.get("skipped"):
        parts.append(f"skipped {values['skipped']}")
    if left is not None:
        parts.append(f"ETA {clock(left)}")
    return "  ".join(parts)


def shorten(value: float) -> str:
    """12,345 → 12.3k; 1,234,567 → 1.23M."""
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def _board(folder: Path, step: int) -> Any:
    """TensorBoard's writer, or None where it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step or None)
