"""Faults at every change of the disk: the writer is forked at the moment it begins, once for each fault.

`kill` ends the child before its n-th change of the disk; `ENOSPC` and `EIO` make that change fail; `cut` lets files
grow to n bytes only, so that writes (safetensors' too, which Python does not see) fail in the middle; `cut-kill` ends
the child in the middle of such a write.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from everybert.errors import EverybertError

KINDS = ("kill", "ENOSPC", "EIO", "cut", "cut-kill")
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")
DONE, SURVIVED, SAID, RAISED = 0, 10, 2, 1
"""How a child ends: no fault was met; one was, and did no harm; it was said in one line; something else was raised."""
DEADLINE = 60.0


class Faults:
    """One sweep. `begin` is called where writing begins; `examine(kind, step, code)` sees what each child left."""

    def __init__(self, root: Path, examine: Callable[[str, int, int], None], kinds: tuple[str, ...] = KINDS) -> None:
        self.root, self.examine, self.kinds = str(root), examine, kinds
        self.codes: dict[str, list[int]] = {kind: [] for kind in kinds}
        self.child = self.met = self.begun = False

    def run(self, action: Callable[[], object]) -> None:
        """Do the work; children end here, the parent finishes it undisturbed."""
        try:
            action()
        except BaseException as error:
            if self.child:
                os._exit(SAID if isinstance(error, EverybertError) and "\n" not in str(error) else RAISED)
            raise
        if self.child:
            os._exit(SURVIVED if self.met else DONE)
        assert self.begun, "the writer never began"

    def begin(self) -> None:
        """Fork a child for each fault; returns in each of them, and at last in the parent."""
        if self.child or self.begun:
            return
        self.begun = True
        for kind in self.kinds:
            for step in range(300):
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    self.child = True
                    self._arm(kind, step)
                    return
                code = ended(pid)
                self.codes[kind].append(code)
                self.examine(kind, step, code)
                if code == DONE:
                    break
            assert self.codes[kind][-1] == DONE, f"{kind}: the writer never got through"

    def _arm(self, kind: str, step: int) -> None:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if kind.startswith("cut"):
            if kind == "cut-kill":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            size = 4**step
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return
        left = step

        def change() -> None:
            nonlocal left
            left -= 1
            if left != -1:
                return
            self.met = True
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

        def hook(event: str, args: tuple) -> None:
            opened = event == "open" and (_writes(args[1]) or (isinstance(args[2], int) and args[2] & 3))
            if (opened or event in CHANGES) and not isinstance(args[0], int) and self.root in os.fsdecode(args[0]):
                change()

        os.fsync = lambda handle: change()  # type: ignore[assignment]  # a process dies here, not the machine
        sys.addaudithook(hook)


def _writes(mode: object) -> bool:
    return isinstance(mode, str) and any(letter in mode for letter in "wax+")


def ended(pid: int) -> int:
    """Exit code, or minus the signal; a child that hangs is ended and fails the test."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"a child hung for {DEADLINE} s")
