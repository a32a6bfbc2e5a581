"""Who is running, by /proc."""

from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Everything a process has started, and so on; nothing where it is gone."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in _children(task)]
    return found + [below for child in found for below in descendants(child)]


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
