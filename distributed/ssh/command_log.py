"""Log of the commands that this process has run on machines, and of its log-ins there, for display.

The process of a run keeps its log in the run's folder (:func:`keep_log`), where those that watch the run read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distributed.ssh.config import OWN_KEY, ResolvedHost, SshTarget
from training.records.run_files import write_atomically

LOG_FILE = "commands.json"
"""Name of the log in the folder of a run."""
_KEPT = 400
_LONGEST_WORD, _LONGEST, _LONGEST_OUTCOME = 100, 300, 200


@dataclass
class CommandRecord:
    """One command that was run on a machine; without a machine, one line about an action."""

    machine: str
    command: str
    """The command in one line; an embedded program is named by its length."""
    outcome: str = ""
    """``ok``, ``ended``, or what went wrong; empty while it runs."""
    at: float = 0.0
    """Unix time of its start; 0: unknown."""
    typed: str = ""
    """The command line that does the same, of an action that is none itself."""

    def end(self, outcome: str) -> None:
        """Record how it ended."""
        self.outcome = outcome
        with _guard:
            _save()


_ran: deque[CommandRecord] = deque(maxlen=_KEPT)
_guard = threading.Lock()
_kept_in: Path | None = None
"""File of the log; ``None``: it is in memory alone."""


def note(machine: str, argv: Sequence[str]) -> CommandRecord:
    """Record a command that starts now; its stdin is not recorded."""
    words = (_program(word) if "\n" in word else word for word in argv)
    cut = (word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}..." for word in words)
    ran = CommandRecord(machine, " ".join(cut)[:_LONGEST], at=time.time())
    with _guard:
        _ran.append(ran)
        _save()
    return ran


def _program(word: str) -> str:
    """Return what stands for a program that a command brings along: what its first line says that it does, or its
    length; nobody reads or pastes it from a list."""
    begin, _, _ = word.partition("\n")
    size = f"{word.count(chr(10)) + 1} lines"
    return f"<a program of Muster's: {begin[2:]}>" if begin.startswith("# ") else f"<a program of Muster's, {size}>"


def keep_log(run_dir: Path) -> None:
    """Keep this process's log in the folder of a run, after what an earlier process of the run has left there."""
    global _kept_in
    with _guard:
        _kept_in = run_dir / LOG_FILE
        _ran.extendleft(reversed(commands_of(run_dir)))


def commands_of(run_dir: Path) -> list[CommandRecord]:
    """Return the commands that the process of a run has left in its folder, oldest first."""
    try:
        records = [CommandRecord(**fields) for fields in json.loads((run_dir / LOG_FILE).read_bytes())]
    except (OSError, ValueError, TypeError):  # there is none, or another version wrote it
        return []
    return records[-_KEPT:]


def _save() -> None:
    if _kept_in is not None:
        with contextlib.suppress(OSError):  # the run goes on where its disk is full
            write_atomically(_kept_in, json.dumps([asdict(record) for record in _ran]).encode(), durable=False)


@contextlib.contextmanager
def noted(machine: str, argv: Sequence[str]) -> Iterator[None]:
    """Record what the block does as ``argv`` would, with its outcome: ``ok``, or the error.

    A failure that was recorded before, like that of a retry, has the new time instead of a second record.
    """
    record = note(machine, argv)
    try:
        yield
    except Exception as error:  # whatever it was, it is recorded, and raised again
        record.outcome = failure_text(error)
        with _guard:
            earlier = [one for one in _ran if one is not record and _is_same(one, record)]
            for repeated in earlier:
                _ran.remove(repeated)
            _save()
        raise
    record.end("ok")


def ssh_command(target: SshTarget, host: ResolvedHost) -> list[str]:
    """Return the command that logs in from a shell as Muster does: with configuration, key and address."""
    keys = (path for path in (host.named_key, Path(OWN_KEY).expanduser()) if path is not None and path.exists())
    key = next(keys, None)
    moved = ("-o", f"HostName={target.found_at}", "-o", f"HostKeyAlias={host.host_key_alias}")
    return [
        "ssh",
        *(("-F", os.path.abspath(os.path.expanduser(target.config_file))) if target.config_file else ()),
        *(("-i", str(key)) if key is not None else ()),
        *(("-p", str(target.port)) if target.port else ()),
        *(moved if target.found_at else ()),
        f"{host.user}@{target.host}",
    ]


def failure_text(error: BaseException) -> str:
    """Return an error as the outcome of a command on a machine, whose name is shown beside it."""
    return str(getattr(error, "problem", error))[:_LONGEST_OUTCOME]


def _is_same(first: CommandRecord, second: CommandRecord) -> bool:
    return (first.machine, first.command, first.outcome) == (second.machine, second.command, second.outcome)


def commands_run() -> list[CommandRecord]:
    """Return the newest commands, oldest first."""
    with _guard:
        return list(_ran)
