"""How an attempt of a run ends: its figures, and what is left in the run folder."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profiles.errors import ExitCode, MusterError, RunFailed, counted
from training.attempts import Attempts, attempts_after, counted_attempts, seconds_in
from training.events import ErrorEvent, EvaluationEvent, Event, MemberEvent, RunEvent, SnapshotEvent, StepEvent
from training.plan import FINAL, FinalStatus
from training.run_files import explain
from training.run_folder import RunFolder, remove_unused

_ROOM = 1_000_000
"""Bytes without which the end of a run cannot be written down."""
NOT_THIS_RUN = "start a new run instead"
"""Said in the hint of an error after which the run itself cannot go on, whatever its events tell of snapshots."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    status: str
    """``completed``, ``failed`` or ``cancelled``."""
    run_dir: Path
    metrics: Mapping[str, Any]
    exit_code: ExitCode
    message: str = ""
    hint: str = ""


class Tally:
    """The figures of a run over all its attempts, from its events in the order in which they were written.

    Steps that are made again after a resume count as work.
    """

    def __init__(self) -> None:
        self._attempts: Attempts = ()
        self._steps = 0
        self.given_up = 0
        """Steps after the snapshot that the newest attempt goes on from, which it makes again."""
        self._simulated: dict[str, float] = {}
        """Sums over the members' steps, where the time of other machines is simulated."""
        self._away: dict[int | None, str] = {}
        """Names of the members that were lost and did not come back."""
        self._before: dict[str, dict[str, float]] = {}
        self._after: dict[str, dict[str, float]] = {}

    def note(self, event: Event) -> None:
        """Take one event in."""
        self._attempts = attempts_after(self._attempts, event)
        if isinstance(event, StepEvent):
            self._steps = max(self._steps, event.step)
            if event.clock is not None:
                told = {"seconds": event.seconds, "wait": event.wait, "bytes": event.bytes_sent}
                self._simulated = {name: self._simulated.get(name, 0.0) + told[name] for name in told}
                self._simulated["clock"] = event.clock
        elif isinstance(event, EvaluationEvent):
            known = self._after if event.step else self._before
            known[event.split] = dict(event.metrics)
        elif isinstance(event, MemberEvent) and event.status in ("lost", "failed"):
            self._away[event.member] = event.name or f"worker {event.member}"
        elif isinstance(event, MemberEvent) and event.status in ("joined", "done"):
            self._away.pop(event.member, None)
        elif isinstance(event, RunEvent) and event.status == "starting":
            self._away.clear()
        elif isinstance(event, RunEvent) and isinstance(step := event.details.get("step"), int):
            # Steps after the snapshot that is resumed from are of a course that was given up.
            self.given_up = max(0, self._steps - step)
            self._steps = min(self._steps, step)

    def figures(self) -> dict[str, Any]:
        """Return the metrics of a run that has ended; times in seconds."""
        counted, seconds = counted_attempts(self._attempts), seconds_in(self._attempts)
        samples = sum(attempt.samples for attempt in counted)
        return {
            "before": self._before,
            "after": self._after,
            "steps": self._steps,
            "samples": samples,
            "seconds": seconds,
            "samples_per_second": samples / seconds if seconds else 0.0,
            "attempts": sum(bool(attempt.first_steps) for attempt in counted),
            **({"lost": sorted(set(self._away.values()))} if self._away else {}),
            **({"simulated": self._in_time()} if self._simulated else {}),
        }

    def _in_time(self) -> dict[str, float]:
        """Return what the run would take on the machines whose time is simulated."""
        found, seconds = self._simulated, self._simulated["clock"]
        return {
            "seconds": seconds,
            "step_seconds": seconds / self._steps if self._steps else 0.0,
            "waiting": found["wait"] / found["seconds"] if found["seconds"] else 0.0,
            "bytes_sent": found["bytes"],
        }


def figures_of(folder: RunFolder) -> dict[str, Any]:
    """Return the figures of a run from what its folder holds."""
    tally = Tally()
    for event in folder.events():
        tally.note(event)
    return tally.figures()


def write_end(
    folder: RunFolder,
    record: Callable[[Event], object],
    status: FinalStatus,
    code: ExitCode,
    message: str,
    metrics: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write how an attempt ended into the folder of its run, which the caller holds; return the run's figures.

    The events tell of the attempt. Where it never began to train, the metadata of a resumed run say again what they
    said before; the folder of a new one, whose input cannot be used, is closed and removed.

    Args:
        record: writes an event of the run's end.
        metrics: asked for the figures after that; default: from the folder's events.

    Raises:
        RunFailed: one of the files cannot be written.
    """
    begun = folder.metadata.status != "starting"
    is_new = folder.metadata.earlier is None
    if code == ExitCode.BAD_INPUT and is_new and not begun:
        folder.close()
        remove_unused(folder.path)
        return {}
    record(RunEvent(status=status, message=message))
    if begun or is_new:
        folder.finish(status, metrics() if metrics is not None else figures_of(folder), message)
    else:
        folder.put_back()
    return folder.metadata.metrics


@contextlib.contextmanager
def noted_failure(folder: RunFolder) -> Iterator[None]:
    """Write the reason into the run folder when the run fails in this process (a full disk, a bug)."""
    try:
        yield
    except Exception as error:  # whatever it is, the folder must say so; it is raised again
        told = error if isinstance(error, MusterError) else RunFailed(str(error))
        with contextlib.suppress(MusterError):
            folder.append(ErrorEvent.of(told))
            write_end(folder, folder.append, "failed", told.exit_code, told.message)
        raise


@dataclass
class NewestAttempt:
    """What the events tell of the newest attempt of a run; a resume that does not begin leaves the metadata alone."""

    error: ErrorEvent | None = None
    """The first one."""
    end: RunEvent | None = None
    began: bool = False

    def note(self, event: Event) -> None:
        """Take one event in."""
        if isinstance(event, RunEvent):
            if event.status == "starting":
                self.error, self.began = None, False
            self.began |= event.status == "running"
            self.end = event if event.status in FINAL else None
        elif isinstance(event, ErrorEvent) and self.error is None:
            self.error = event

    def outcome(self, path: Path) -> RunOutcome:
        """Return how the run of this folder ended; the folder is gone where its input could not be used."""
        try:
            metadata = RunFolder.open(path).metadata
        except MusterError:
            return self._outcome(path, "failed", self.error.message if self.error else "", {})
        status, message = metadata.status, metadata.error_message
        if self.end is not None and (self.end.status != status or self.end.message):
            status, message = self.end.status, self.end.message
        if status in FINAL:
            return self._outcome(path, status, message, metadata.metrics)
        message, hint = self._interruption(path)
        return replace(self._outcome(path, "failed", message, metadata.metrics), hint=hint)

    def _outcome(self, path: Path, status: str, message: str, metrics: Mapping[str, Any]) -> RunOutcome:
        hint = self.error.hint if self.error else ""
        return RunOutcome(status, path, metrics, self._exit_code(status), message, hint)

    def _interruption(self, path: Path) -> tuple[str, str]:
        """Return message and hint where nobody wrote the end down: its supervisor was killed, or could not write."""
        if self.error is not None:
            return self.error.message, self.error.hint
        if shutil.disk_usage(path).free < _ROOM:
            return explain(OSError(errno.ENOSPC, ""), path)
        return "interrupted: the process that ran it is gone", ""

    def _exit_code(self, status: str) -> ExitCode:
        """Return the exit code of an attempt that ended with ``status``."""
        if status == "completed":
            return ExitCode.DONE
        if status == "cancelled":
            return ExitCode.STOPPED
        said = self.error.exit_code if self.error else ExitCode.RUN_FAILED
        early = said in (ExitCode.BAD_INPUT, ExitCode.NOT_READY) and not self.began
        return ExitCode(said) if early else ExitCode.RUN_FAILED


def newest_snapshots(events: Iterable[Event]) -> dict[int, tuple[int, Collection[int]]]:
    """Return the step of every member's newest snapshot, and who trained then, by rank."""
    return {e.member: (e.step, e.live) for e in events if isinstance(e, SnapshotEvent) and e.member is not None}


def kept_step(newest: Mapping[int, tuple[int, Collection[int]]]) -> int | None:
    """Return the newest step of which all who trained then have a snapshot; ``None``: there is none.

    Args:
        newest: step of the newest snapshot of every member, and who trained then.
    """
    for step, live in sorted(newest.values(), key=lambda one: -one[0]):
        if all(rank in newest and newest[rank][0] >= step for rank in live):
            return step
    return None


def kept_text(kept: int | None, newest: int) -> str:
    """Say what is kept of a run whose last step was ``newest``."""
    if kept is None and not newest:
        return "no step was taken, so there is nothing to keep"
    lost = max(0, newest - (kept or 0))
    what = "no snapshot is kept" if kept is None else f"the snapshot of step {kept} is kept"
    return f"{what}, {counted(lost, 'step')} lost"
