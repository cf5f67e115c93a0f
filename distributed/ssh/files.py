"""Files to and from another machine, whole or not at all. Needs nothing there but a POSIX shell."""

from __future__ import annotations

import io
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from distributed.ssh.errors import RemoteFileError
from distributed.ssh.process import Completed, RemoteProcess

OUTPUT_LIMIT = 1024 * 1024
_END_PATIENCE = 10.0

PUT = """umask 077; trap '' PIPE HUP
if [ -d "$1" ]; then echo "$1: is a folder" >&2; exit 1; fi
mkdir -p -- "$(dirname -- "$1")" && cat > "$2" &&
if [ "$(wc -c < "$2")" -ne "$3" ]; then echo "the transfer was cut short" >&2; false; fi &&
chmod "$4" "$2" && mv -f -- "$2" "$1" || { rm -f -- "$2"; exit 1; }"""
"""A dropped connection looks like the end of the input to ``cat``, so the size decides before the file takes its name.
Complaining about it must not kill the shell before it has cleaned up: nobody reads its stderr then.
"""


class Runner(Protocol):
    """What of a connection is needed here."""

    machine: str

    def run(
        self, argv: Sequence[str], *, input: bytes | BinaryIO | None, timeout: float | None, limit: int
    ) -> Completed: ...

    def stream(self, argv: Sequence[str]) -> RemoteProcess: ...


def put(there: Runner, source: bytes | Path, remote: str, mode: int, timeout: float | None) -> None:
    """See :meth:`distributed.ssh.connection.SshConnection.put`."""
    with open(source, "rb") if isinstance(source, Path) else io.BytesIO(source) as stream:
        size = os.fstat(stream.fileno()).st_size if isinstance(source, Path) else len(source)
        path = _remote_path(remote)
        words = ["sh", "-c", PUT, "sh", path, f"{path}.part-{secrets.token_hex(4)}", str(size), f"{mode:o}"]
        result = there.run(words, input=stream, timeout=timeout, limit=OUTPUT_LIMIT)
    if not result.ok:
        raise _failure(there.machine, "write", remote, result.stderr)


def get(there: Runner, remote: str, local: Path, timeout: float | None) -> None:
    """See :meth:`distributed.ssh.connection.SshConnection.get`."""
    part = local.with_name(f".{local.name}.part-{secrets.token_hex(4)}")
    end = None if timeout is None else time.monotonic() + timeout
    words = ["sh", "-c", 'cat < "$1"', "sh", _remote_path(remote)]
    try:
        with open(part, "wb") as out, there.stream(words) as process:
            while data := process.read(None if end is None else max(end - time.monotonic(), 0.0)):
                out.write(data)
            if process.wait(_END_PATIENCE) != 0:
                raise _failure(there.machine, "read", remote, process.stderr)
        os.replace(part, local)
    finally:
        part.unlink(missing_ok=True)


def _failure(machine: str, verb: str, remote: str, stderr: bytes) -> RemoteFileError:
    lines = stderr.decode(errors="replace").strip().splitlines()
    reason = next(
        (line for line in lines if "No space" in line or "quota" in line), lines[-1] if lines else "no reason"
    )
    full = "No space" in reason or "quota" in reason
    hint = "free some space there" if full else "check the path and its permissions there"
    return RemoteFileError(machine, f"cannot {verb} {remote}: {reason}", hint)


def _remote_path(path: str) -> str:
    """Relative paths start in the home folder; the words of a command know no ``~``."""
    inside = path[2:] if path.startswith("~/") else path
    return f"./{inside}" if inside.startswith("-") else inside
