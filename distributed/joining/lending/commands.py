"""Carries out the commands of a pool: in its box, and in class ``tasks`` only requests to this computer's Muster."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

from distributed.agent.requests import frame
from distributed.joining.lending.admission import Admission, Refused
from distributed.joining.lending.box import Program, ProgramBox, box_for
from distributed.joining.lending.box_check import require_box
from distributed.joining.lending.terms import LendingTerms
from distributed.machine.link import CACHE, OWN_PROGRAM
from distributed.preparation.code_sync import muster_code
from distributed.ssh.process import command_words
from profiles.installation import training_code, user_folder

_CHUNK = 64 * 1024
_OUTPUT_PATIENCE = 5.0
"""Seconds for the rest of a command's output after its end: what it left running may hold it open."""
_INPUT_PATIENCE = 1.0
_REFUSED, _NOT_STARTED = 126, 127


class PoolCommands:
    """What runs of a pool's commands here.

    Args:
        admission: decides on the requests of class ``tasks``; ``None``: programs of others may run in the box.
    """

    def __init__(self, box: ProgramBox, admission: Admission | None) -> None:
        self.box, self._admission = box, admission

    def execute(self, channel: Any, command: bytes) -> None:
        """Carry out a command in the home folder, as sshd does: it is not ended with the connection."""
        try:
            process = self._started(channel, command)
        except Refused as refusal:
            return _refuse(channel, f"this machine is lent for tasks alone: {refusal}\n", _REFUSED)
        except (OSError, ValueError, EOFError) as error:
            return _refuse(channel, f"{error}\n", _NOT_STARTED)
        _serve(channel, process)

    def _started(self, channel: Any, command: bytes) -> Program:
        """Start what a command asks for.

        Raises:
            Refused: it may not run here.
            OSError, ValueError, EOFError: it cannot be started, or its request did not arrive.
        """
        if self._admission is None:
            return self.box.popen(["/bin/sh", "-c", os.fsdecode(command)])
        marker, words = command_words(command) or ("", [])
        if marker:
            channel.sendall(f"{marker}\n".encode())
        if words == ["uname", "-snm"]:
            return self.box.popen(words)
        if words[:1] != [OWN_PROGRAM]:
            raise Refused("it runs no commands of others")
        request = self._admission.admit(channel.recv)
        root, environment = str(self._admission.root), self._admission.environment
        argv = [self.box.python, "-m", "distributed.agent.program", root, *request.title]
        process = self.box.popen(argv, environment)
        assert process.stdin is not None
        process.stdin.write(frame(request))
        process.stdin.flush()
        return process


def commands_for(terms: LendingTerms, pool: str, mark: str) -> PoolCommands:
    """Return what carries out the commands of a pool.

    Args:
        pool: its identity.
        mark: value of :data:`distributed.joining.guard.MARK` for what it runs.

    Raises:
        NoBox: its class needs a box, and that of this computer is missing, or lets something through.
    """
    require_box(terms)
    folder = box_folder(pool)
    if terms.lend != "own":
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    box = box_for(terms, folder, mark, pool)
    if terms.lend != "tasks":
        return PoolCommands(box, None)
    _claim_own_code(folder / "home" / CACHE[2:] / "trees")
    return PoolCommands(box, Admission(PurePosixPath(box.home, CACHE[2:]), str(training_code())))


def box_folder(pool: str) -> Path:
    """Return the folder of all that a pool has here, apart from class ``own``."""
    return user_folder("cache") / "lent" / pool


def remove_box(pool: str) -> None:
    """Remove all that a pool has left here in its box. Idempotent."""
    shutil.rmtree(box_folder(pool), ignore_errors=True)


def _claim_own_code(trees: Path) -> None:
    """Let the code of this very Muster count as sent: it is not taken from others."""
    trees.mkdir(mode=0o700, parents=True, exist_ok=True)
    for tree in trees.iterdir():
        with contextlib.suppress(OSError):
            tree.rmdir()  # an empty one: that of an earlier version
    (trees / muster_code(training_code()).name).mkdir()


def _refuse(channel: Any, problem: str, code: int) -> None:
    """End a command that does not start, once its sender has heard that it was taken, and has sent its input."""
    with contextlib.suppress(OSError, EOFError):
        channel.sendall_stderr(problem.encode())
        end = time.monotonic() + _INPUT_PATIENCE
        while (left := end - time.monotonic()) > 0:
            channel.settimeout(left)
            if not channel.recv(_CHUNK):
                break
    _end(channel, code)


def _end(channel: Any, code: int) -> None:
    with contextlib.suppress(OSError, EOFError):
        channel.send_exit_status(code)
        channel.shutdown_write()
    with contextlib.suppress(OSError, EOFError):
        channel.close()


def _serve(channel: Any, process: Program) -> None:
    """Carry a program's streams, and its exit code."""
    outputs = ((process.stdout, channel.sendall), (process.stderr, channel.sendall_stderr))
    threading.Thread(target=_feed, args=(channel, process.stdin), daemon=True).start()
    threads = [threading.Thread(target=_drain, args=output, daemon=True) for output in outputs]
    for thread in threads:
        thread.start()
    code = process.wait()
    for thread in threads:
        thread.join(_OUTPUT_PATIENCE)
    _end(channel, code if code >= 0 else 128 - code)


def _feed(channel: Any, stream: Any) -> None:
    with contextlib.suppress(OSError, EOFError, ValueError):
        while data := channel.recv(_CHUNK):
            stream.write(data)
            stream.flush()
    with contextlib.suppress(OSError, ValueError):
        stream.close()


def _drain(stream: Any, send: Any) -> None:
    """Send a command's output; once nobody takes it, close it, so that the command does not wait for ever."""
    with contextlib.suppress(OSError, EOFError, ValueError), stream:
        while data := os.read(stream.fileno(), _CHUNK):
            send(data)
