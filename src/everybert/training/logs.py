"""What a long job reports: log.jsonl and TensorBoard curves for later, a progress line or bar for now."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from everybert.files import disk_errors, write_text


@contextlib.contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error, if that is a terminal. Yields `update(completed, total=None)`."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda completed, total=None: bar.update(task, completed=completed, total=total)


class Logs:
    """The log of a training run: a row every few steps, and a progress line; `quiet` shows no lines."""

    def __init__(
        self, folder: Path | None = None, resume_at: int = 0, quiet: bool = False, board: bool = False
    ) -> None:
        """Write log.jsonl (and TensorBoard events with `board`) to the folder; with None keep `rows` in memory."""
        self.rows: list[dict[str, Any]] = []
        self.console = Console(stderr=True)
        self.quiet = quiet
        self.file = self.board = None
        self.live: Live | None = None
        self.shown = 0.0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "log.jsonl"
            forget_after(path, resume_at)
            self.file = path.open("a", encoding="utf-8")
            if board:
                os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
                with contextlib.suppress(ImportError):  # it need not be installed
                    from torch.utils.tensorboard import SummaryWriter

                    self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_at or None)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log the values of a step."""
        if self.file is None:
            self.rows.append({"step": step, **values})
            return
        with disk_errors(self.file.name, "the last checkpoint is intact"):
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(name, value, step)

    def show(self, line: str, every: float = 30.0) -> None:
        """Update the progress line: live in a terminal, else printed at most once per `every` seconds."""
        if self.quiet:
            return
        if self.console.is_terminal:
            if self.live is None:
                self.live = Live(console=self.console, refresh_per_second=4, transient=True)
                self.live.start()
            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif time.monotonic() - self.shown >= every:
            self.shown = time.monotonic()
            self.print(line)

    def print(self, line: str) -> None:
        """Print a line above the progress line."""
        if not self.quiet:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files and end the progress line."""
        if self.live is not None:
            self.live.stop()
        for file in (self.file, self.board):
            if file is not None:
                file.close()
        self.live = None


def forget_after(path: Path, step: int) -> None:
    """Drop the lines after the last checkpoint of a killed run: those steps are about to be repeated."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text("utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that was cut off when the run was killed
            if json.loads(line)["step"] <= step:
                lines.append(line)
    write_text(path, "".join(line + "\n" for line in lines))


def progress_line(step: int, total: int | None, values: dict[str, Any], left: float | None) -> str:
    """step 1,200/10,000  loss 3.214  1,250,000 tokens/s  MFU 41%  data wait 0.3%  ETA 0:12:40."""
    shown = {
        "loss": "loss {:.3f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.0%}",
        "data_wait": "data wait {:.1%}",
        "skipped": "skipped {}",
    }
    line = [f"step {step:,}" + (f"/{total:,}" if total else "")]
    line += [text.format(values[name]) for name, text in shown.items() if values.get(name) is not None]
    return "  ".join(line if left is None else [*line, f"ETA {timedelta(seconds=round(left))}"])
