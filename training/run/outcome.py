"""The end of an attempt of a run: its figures, and what remains in the run folder."""

from __future__ import annotations

import contextlib
import errno
import shutil
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profiles.errors import ExitCode, MusterError, RunFailed, counted
from profiles.installation import way_to_add
from training.records.attempts import Attempts, attempts_after, counted_attempts, seconds_in
from training.records.events import (
    ErrorEvent,
    EvaluationEvent,
    Event,
    MemberEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    WarningEvent,
)
from training.records.plan import FINAL, FinalStatus
from training.records.run_files import explain
from training.records.run_folder import RunFolder
from training.script.script_start import is_peer_loss

_ROOM = 1_000_000
"""Free bytes that are needed to record the end of a run."""


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
    resumable: bool = True
    """Whether it may go on from a snapshot, if it has one."""


class RunTotals:
    """The figures of a run over all its attempts, from its events in the order in which they were written.

    Steps that are repeated after a resume count as work.
    """

    def __init__(self) -> None:
        self._attempts: Attempts = ()
        self._steps = 0
        self.given_up = 0
        """Steps after the snapshot that the newest attempt resumed from, which it repeats."""
        self._simulated: dict[str, float] = {}
        """Sums over the members' steps, if the time of other machines is simulated."""
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
                sums = {"seconds": event.seconds, "wait": event.wait, "bytes": event.bytes_sent}
                self._simulated = {name: self._simulated.get(name, 0.0) + sums[name] for name in sums}
                self._simulated["clock"] = event.clock
        elif isinstance(event, EvaluationEvent):
            metrics = self._after if event.step else self._before
            metrics[event.split] = dict(event.metrics)
        elif isinstance(event, MemberEvent) and event.status in ("lost", "failed"):
            self._away[event.member] = event.name or f"worker {event.member}"
        elif isinstance(event, MemberEvent) and event.status in ("joined", "done"):
            self._away.pop(event.member, None)
        elif isinstance(event, RunEvent) and event.status == "starting":
            self._away.clear()
        elif isinstance(event, RunEvent) and isinstance(step := event.details.get("step"), int):
            # Steps after the snapshot that is resumed from belong to an abandoned attempt.
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
        """Return the duration of the run on the machines whose time is simulated."""
        sums, seconds = self._simulated, self._simulated["clock"]
        return {
            "seconds": seconds,
            "step_seconds": seconds / self._steps if self._steps else 0.0,
            "waiting": sums["wait"] / sums["seconds"] if sums["seconds"] else 0.0,
            "bytes_sent": sums["bytes"],
        }


def figures_of(folder: RunFolder) -> dict[str, Any]:
    """Return the figures of a run from its folder."""
    totals = RunTotals()
    for event in folder.events():
        totals.note(event)
    return totals.figures()


def write_end(
    folder: RunFolder,
    record: Callable[[Event], object],
    status: FinalStatus,
    code: ExitCode,
    message: str,
    metrics: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Write how an attempt ended into the folder of its run, which the caller holds; return the run's figures.

    If the attempt never began to train, the metadata of a resumed run are restored. The folder of a new one stays:
    whoever looks for the run finds the cause there.

    Args:
        record: records the event of the run's end.
        metrics: called after that for the figures; default: from the folder's events.

    Raises:
        RunFailed: one of the files cannot be written.
    """
    begun = folder.metadata.status != "starting"
    is_new = folder.metadata.earlier is None
    record(RunEvent(status=status, message=message))
    if begun or is_new:
        folder.finish(status, metrics() if metrics is not None else figures_of(folder), message)
    else:
        folder.put_back()
    return folder.metadata.metrics


def blaming(event: ErrorEvent, ended: Sequence[str]) -> ErrorEvent:
    """Return the error of a script's rank; one that only lost another names those that had ended before."""
    if not ended or not is_peer_loss(event.traceback):
        return event
    message = f"{', '.join(ended)} ended with exit code 0 while others still needed it; {event.message}"
    hint = f"all ranks must end together; {event.hint}"
    return event.model_copy(update={"message": message, "hint": hint, "machine": event.machine and ended[0]})


@contextlib.contextmanager
def noted_failure(folder: RunFolder) -> Iterator[None]:
    """Write the reason into the run folder when the run fails in this process (a full disk, a bug)."""
    try:
        yield
    except Exception as error:  # whatever it is, the folder must say so; it is raised again
        failure = error if isinstance(error, MusterError) else RunFailed(str(error))
        with contextlib.suppress(MusterError):
            folder.append(ErrorEvent.of(failure))
            write_end(folder, folder.append, "failed", failure.exit_code, failure.message)
        raise


@dataclass
class NewestAttempt:
    """The newest attempt of a run according to its events; a resume that does not begin leaves the metadata
    unchanged."""

    error: ErrorEvent | None = None
    """The first error."""
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
        """Return how the run of this folder ended, also if somebody has removed it."""
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
        error = self.error if status == "failed" else None
        hint, resumable = (error.hint, error.resumable) if error else ("", True)
        return RunOutcome(status, path, metrics, self._exit_code(status), message, hint, resumable)

    def _interruption(self, path: Path) -> tuple[str, str]:
        """Return message and hint if the end was not recorded: the supervisor was killed, or could not write."""
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
        code = self.error.exit_code if self.error else ExitCode.RUN_FAILED
        early = code in (ExitCode.BAD_INPUT, ExitCode.NOT_READY) and not self.began
        return ExitCode(code) if early else ExitCode.RUN_FAILED


def early_end(rank: int, name: str, cause: str, code: int, logs: Path) -> ErrorEvent:
    """Return the error of a member whose process ended with ``code`` before its work was done."""
    hint = f"see {logs / (name + '.log')}"
    if code == -signal.SIGKILL:
        hint = f"a smaller batch_size or fewer workers need less memory; {hint}"
    return ErrorEvent(member=rank, message=f"{name} ended before its work was done ({cause})", hint=hint, machine=name)


def ending_of(rank: int, name: str, cause: str, run_dir: Path) -> WarningEvent:
    """Return the warning of a lost member whose processes have ended, and which must be added to the run again."""
    command = way_to_add(run_dir, name)
    message = f"{name} does not come back by itself: {cause}; when it can train again: {command}"
    return WarningEvent(member=rank, message=message, ended_by=cause)


def newest_snapshots(events: Iterable[Event]) -> dict[int, tuple[int, Collection[int]]]:
    """Return the step of every member's newest snapshot, and the ranks that trained then, by rank."""
    return {e.member: (e.step, e.live) for e in events if isinstance(e, SnapshotEvent) and e.member is not None}


def newest_complete_step(newest: Mapping[int, tuple[int, Collection[int]]], lost: Collection[int] = ()) -> int | None:
    """Return the newest step of which all members that trained then have a snapshot; ``None``: there is none.

    Args:
        newest: step of the newest snapshot of every member, and the ranks that trained then, as far as the member knew:
            it learns of a loss at the next synchronisation.
        lost: ranks that are lost; a run is resumed without what they had in hand.
    """
    for step, live in sorted(newest.values(), key=lambda snapshot: -snapshot[0]):
        if all(rank in newest and newest[rank][0] >= step for rank in set(live) - set(lost) or live):
            return step
    return None


def progress_text(snapshot_step: int | None, newest: int, unmerged: Mapping[str, int] | None = None) -> str:
    """Return a sentence on the snapshot and the lost steps of a run whose last step was ``newest``.

    Args:
        unmerged: steps of lost machines that no synchronisation holds, by name.
    """
    if snapshot_step is None and not newest:
        return "no step was taken, so there is nothing to keep"
    lost = max(0, newest - (snapshot_step or 0))
    saved = "no snapshot is kept" if snapshot_step is None else f"the snapshot of step {snapshot_step} is kept"
    of_machines = f" of the run, and {text}" if (text := unmerged_text(unmerged or {})) else ""
    return f"{saved}, {counted(lost, 'step')} lost{of_machines}"


def unmerged_text(unmerged: Mapping[str, int]) -> str:
    """Return the steps of lost machines that no synchronisation holds: ``c's last 12 steps``; empty: there are none.

    The samples of these steps go back into their epoch, to the others.
    """
    return ", ".join(f"{name}'s last {counted(steps, 'step')}" for name, steps in unmerged.items() if steps > 0)


def merged_step(event: StepEvent | SyncEvent, before: int) -> int:
    """Return the newest step of a member that the others have a share of, after one of its events: a step in which it
    sends something, or one that ends with a synchronisation."""
    return event.step if isinstance(event, SyncEvent) or event.bytes_sent else before
