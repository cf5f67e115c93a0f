"""``python -m distributed.joining.guard TOKEN``: ends what others started here once the process that joined is gone.

A program that was started over a connection outlives it, so that a run goes on when its connection breaks. It must not
outlive the permission, which lasts while ``join`` runs: that process holds the other end of this one's stdin, which the
system closes however it ends, also by SIGKILL or where memory is short.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from profiles.installation import TOP

if TYPE_CHECKING:
    from psutil import Process

MARK = "MUSTER_JOINED"
"""Environment variable of the programs that pools have started here: ``POOL/TOKEN``."""
_GRACE = 10.0
"""Seconds that programs have to end by themselves."""


class ProgramGuard:
    """A process that ends all programs with its token in their mark once this process is gone."""

    def __init__(self) -> None:
        from training.run.processes import environment  # 0.2 s, which the guard does without

        self.token = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distributed.joining.guard", self.token],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment(0, TOP), cwd=os.sep, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """Let it end the programs, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def mark_of(pool: str, token: str) -> str:
    """Return the value of :data:`MARK` for what a pool starts.

    Args:
        pool: its identity.
        token: of the guard.
    """
    return f"{pool}/{token}"


def end_programs(part: str, grace: float = _GRACE) -> None:
    """End the programs that were started here for others and that do not hide: asked first, killed after some seconds.

    Args:
        part: the pool or the token in their mark.
    """
    import psutil  # the guard waits without it, in 10 MB

    marked = [process for process in psutil.process_iter() if is_marked(process, part)]
    for process in marked:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(marked, grace)
    for process in psutil.process_iter():  # those included that were started meanwhile
        if is_marked(process, part):
            with contextlib.suppress(psutil.Error):
                process.kill()


def is_marked(process: Process, part: str) -> bool:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        return process.pid != os.getpid() and part in process.environ().get(MARK, "").split("/")
    return False


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends the process that joined must not end this one first
    sys.stdin.buffer.read()
    end_programs(sys.argv[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
