"""Progress bars on standard error, for the two long steps of a build."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as rich
from rich.console import Console


@contextmanager
def reading_bar(size: int, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Bytes read of `size`, how fast, tokens made, time left."""
    tokens = rich.TextColumn("{task.fields[tokens]:,} tokens")
    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), tokens)
    with _bar(shown, *columns) as bar:
        task = bar.add_task("read", total=size or None, tokens=0)
        yield lambda read, tokens: bar.update(task, completed=read, tokens=tokens)


@contextmanager
def mining_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """The share of the search for collocations that is done."""
    with _bar(shown, rich.TextColumn("collocations"), rich.BarColumn(), rich.TaskProgressColumn()) as bar:
        task = bar.add_task("mine", total=total)
        yield lambda done: bar.update(task, completed=done)


def _bar(shown: bool, *columns: rich.ProgressColumn) -> rich.Progress:
    left = rich.TimeRemainingColumn()
    return rich.Progress(*columns, left, console=Console(stderr=True), disable=not shown)
