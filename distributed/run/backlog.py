"""What the workers of a run have told nobody since its supervisor was gone: read from their machines before the run is
resumed, whose first step there removes it."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from distributed.agent.daemon import NO_MORE_COMMANDS
from distributed.agent.requests import Attach
from distributed.machine.link import MachineLink
from distributed.workers.agent_records import AgentHello, AgentTimeouts, Record
from profiles.errors import ExitCode, MusterError
from training.records.events import AnswerEvent, Event, MemberEvent, RequestEvent, RunEvent, from_line
from training.records.run_folder import RunFolder
from training.run.intake import CLOCK, EventIntake
from training.run.members.member_history import MemberHistory
from training.run.members.membership import Membership
from training.run.processes import NumberedLine

_OF_THE_RUN = (RunEvent, RequestEvent, AnswerEvent)
"""Events that mean something only to a supervisor that is there."""


@dataclass(frozen=True)
class Backlog:
    """The unrecorded work of one worker."""

    rank: int
    machine: str
    lines: Sequence[NumberedLine] = ()
    """Event lines that the run has not recorded, oldest first; none of a worker that is not ``over``."""
    is_over: bool = False
    """Whether its agent has ended."""
    exit_code: int | None = None
    """Of the worker; ``None``: it is not over, or was killed with its agent."""


class LeftAlone(NamedTuple):
    """What became of a run after its supervisor was gone."""

    working: list[str]
    """Machines whose workers go on."""
    is_completed: bool
    """Whether a worker has trained to the end, and has the model."""
    events: list[Event]
    """What the others have reported since then, in the order of time."""


def since_supervisor(folder: RunFolder, links: Iterable[MachineLink]) -> LeftAlone:
    """Return what became of a run on these machines of which nobody has recorded the end; nothing if somebody has, or
    the run is live.

    Raises:
        BadInput: its plan cannot be read.
    """
    trains = folder.metadata.status in ("running", "paused") and not folder.live
    if not trains or (plan := folder.plan()).is_staged:
        return LeftAlone([], False, [])
    history, link_by_name = MemberHistory.of(folder.events()), {link.name: link for link in links}
    plan = plan.model_copy(update={"added": folder.added_members()})
    machines = {rank: plan.process(rank).device.machine for rank in history.attached}
    asked = {rank: link_by_name[machine] for rank, machine in machines.items() if machine in link_by_name}
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        backlogs = [*pool.map(lambda rank: _read(asked[rank], plan.run_id, rank, history.attached[rank]), asked)]
    members = Membership(plan)
    members.restore(history)
    working = [backlog.machine for backlog in backlogs if not backlog.is_over]
    is_completed = any(backlog.exit_code == ExitCode.DONE for backlog in backlogs)
    return LeftAlone(working, is_completed, list(_checked(members, folder.events(), backlogs)))


def _read(link: MachineLink, run_id: str, rank: int, after: int) -> Backlog:
    """Return the backlog of a worker, of which the run has recorded the lines up to ``after``."""
    timeouts, nothing = AgentTimeouts(), Backlog(rank, link.name, is_over=True)
    with contextlib.suppress(MusterError, OSError, ValueError):  # then it is as lost as it was
        with contextlib.closing(link.stream(Attach(run_id, str(rank), after, timeouts.lease))) as process:
            hello = AgentHello.parse(process.read_line(timeouts.silence))
            if hello.gone:
                return nothing
            if hello.commands != NO_MORE_COMMANDS:
                return Backlog(rank, link.name)
            lines, code = list[NumberedLine](), None
            while (line := process.read_line(timeouts.silence)).endswith(b"\n"):
                with contextlib.suppress(ValidationError):
                    record = Record.model_validate_json(line)
                    code = record.end if record.end is not None and not record.why else code
                    lines += [NumberedLine.of(record.event, record.seq)] if record.event else []
        return Backlog(rank, link.name, lines, True, code)
    return nothing


def _checked(members: Membership, earlier: Iterable[Event], backlogs: Sequence[Backlog]) -> Iterator[Event]:
    """Yield the events of backlogs that are valid, and not recorded yet, in the order of time."""
    intake, since = EventIntake(members, lambda warning: None, lambda rank, cause: None), 0.0
    for event in earlier:
        intake.note_earlier(event)
        since = event.time

    def events(backlog: Backlog) -> Iterator[Event]:
        intake.listen(backlog.rank, ())
        for line in backlog.lines:
            event = intake.event(backlog.rank, line)
            if event is None or isinstance(event, _OF_THE_RUN):
                continue
            if since - CLOCK < (happened := from_line(line).time) < time.time():  # it may be days ago
                event = event.model_copy(update={"time": happened})
            if not isinstance(event, MemberEvent) or members.note(backlog.rank, event):
                yield members.attributed(event)

    yield from heapq.merge(*map(events, backlogs), key=lambda event: event.time)
