"""The members of a run: its workers as seen by the process that started them, and which of them come and go."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from profiles.errors import BadInput, ExitCode
from training.records.events import ErrorEvent, Event, MemberEvent, RunEvent, WaysEvent
from training.records.plan import MemberPlan, RunPlan
from training.run.meeting_point import SPARE, Elected
from training.run.processes import Worker

_ANOTHER = "stop the run and start it again with the machines that you want"


@dataclass
class WorkerHandle:
    """A worker's process and its state as far as the run knows it."""

    process: Worker
    step: int = 0
    exit_code: int | None = None
    error: ErrorEvent | None = None
    failure: str = ""  # why the others went on without it, unless it had only lost others

    def kill(self) -> None:
        """Kill it, unless it is known to have ended."""
        if self.exit_code is None:
            self.process.signal(signal.SIGKILL)


class MemberHistory:
    """The members of a live run as its events describe them."""

    def __init__(self) -> None:
        self.attached: dict[int, int] = {}
        """Ranks whose workers may still run, with the number of the last line at their agents that was recorded."""
        self.status: dict[int, str] = {}
        """The newest status of each member."""
        self.joining: set[int] = set()
        """Members that came after the run had begun, and have not joined yet."""
        self.run_status = "starting"
        self.newest = 0
        """Number of the newest event."""
        self.elected: Elected | None = None
        """The coordinator that the members follow instead of that of the run's supervisor."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> MemberHistory:
        """Return that of the newest attempt in the events of a run."""
        history = cls()
        for event in events:
            history = cls() if isinstance(event, RunEvent) and event.status == "starting" else history
            history._note(event)
        return history

    def _note(self, event: Event) -> None:
        self.newest = event.seq or 0
        self.elected = Elected.newest(event, self.elected)
        if isinstance(event, RunEvent):
            self.run_status = event.status
        if event.member is None:
            return
        rank = event.member
        if event.line is not None and rank in self.attached:
            self.attached[rank] = event.line
        if isinstance(event, ErrorEvent):
            self._note_end(rank, "failed")
        elif isinstance(event, MemberEvent):
            self._note_member(rank, event)

    def _note_member(self, rank: int, event: MemberEvent) -> None:
        if event.status == "started":
            self.attached[rank] = event.line or 0
            self.joining |= set() if self.run_status == "starting" else {rank}
        elif event.status == "left":
            return self._note_end(rank, "left")
        elif event.status == "joined":
            self.joining.discard(rank)
        self.status[rank] = event.status

    def _note_end(self, rank: int, status: str) -> None:
        self.attached.pop(rank, None)
        self.joining.discard(rank)
        self.status[rank] = status

    def ranks(self, *statuses: str) -> set[int]:
        """Return the members of which one of these statuses is the newest."""
        return {rank for rank, status in self.status.items() if status in statuses}


class Membership:
    """The workers of one run by rank.

    Used by the thread that merges events and by the one that carries out requests.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        """The plan, with the members that were added later."""
        self._is_staged = plan.is_staged
        self._gate = threading.Lock()
        self._over = False
        self.workers: dict[int, WorkerHandle] = {}
        self.lost = [process for member in plan.absent for process in plan.processes_of(member)]
        self.detached: set[int] = set()
        """Members that do not count: lost to the coordinator, asked to leave, or joining."""
        self.joining: set[int] = set()
        """Those of them that are joining."""
        self.leaving: set[int] = set()
        """Those of them that were asked to leave."""
        self.aware_members: dict[str, set[int]] = {}
        """Members that know of an announced member, by its name."""
        self.left: set[int] = set()
        """Members that have left the group."""
        self.done: set[int] = set()
        """Members that have reported that they trained to the end."""
        self._reported_gone = set(self.lost)
        """Members whose loss is in the run's events."""
        self._reported_joined: set[int] = set()
        """Workers whose joining, since they were gone last, is in the run's events."""
        self._confirmed: set[int] = set()
        """Those of them that have said so themselves: if they say it again, the others had gone on without them."""

    def restore(self, history: MemberHistory) -> None:
        """Take over the members of a run whose supervisor was killed; their workers are entered one by one."""
        gone = history.ranks("lost", "left", "failed")
        self.lost = sorted({*self.plan.absent, *history.ranks("failed"), *gone - history.attached.keys()})
        self.joining = set(history.joining)
        self.detached = gone | self.joining
        self.left = history.ranks("left")
        self.done = history.ranks("done")
        self._reported_gone = {*self.plan.absent, *gone}
        self._reported_joined = history.ranks("joined", "ready", "done") - self.joining
        self._confirmed = history.ranks("ready", "done")

    def name(self, rank: int) -> str:
        return self.plan.process(rank).name

    def speaks(self, rank: int) -> bool:
        """Whether a worker speaks for its member; those of a pipeline's further stages do not."""
        return not self._is_staged or self.plan.process(rank).is_lead

    def attributed(self, event: Event) -> Event:
        """Return the event of a worker as that of its member."""
        if event.member is None or not self._is_staged:
            return event
        member = self.plan.process(event.member).member
        changes: dict[str, Any] = {"member": member.rank}
        if isinstance(event, MemberEvent) and event.status not in ("lost", "left"):  # of these, the machine counts
            changes["name"] = member.name
        if isinstance(event, WaysEvent):
            changes["ways"] = tuple(p.model_copy(update={"peer": self._member_of(p.peer)}) for p in event.ways)
        return event.model_copy(update=changes)

    def announce(self, member: MemberPlan) -> None:
        """Add a member that was not planned to the plan; it has the next rank.

        Raises:
            BadInput: the run cannot take another member.
        """
        self.check_extendable()
        with self._gate:
            if member.rank != len(self.plan.all_members):
                raise BadInput("two machines tried to join at once", "try again")
            if len(self.plan.added) == SPARE:
                raise BadInput(f"{SPARE} machines have joined this run, and no more can", _ANOTHER)
            self.plan = self.plan.model_copy(update={"added": (*self.plan.added, member)})
            self.aware_members[member.name] = set()

    def unaware(self, rank: int) -> list[int]:
        """Return the training members that do not know yet of an announced member."""
        knowing = self.aware_members.get(self.name(rank))
        return [] if knowing is None else sorted(set(self.active_ranks) - knowing)

    @property
    def active_ranks(self) -> list[int]:
        """Ranks of the members that train."""
        return [r for r, worker in self.workers.items() if worker.exit_code is None and r not in self.detached]

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to every worker, joining ones included."""
        for worker in self.workers.values():
            worker.process.send(message)

    def kill(self) -> None:
        """Kill every worker."""
        for worker in self.workers.values():
            worker.kill()

    def is_running(self) -> bool:
        """Whether a worker is still running; once this is false, no member can join."""
        with self._gate:
            self._over = all(worker.exit_code is not None for worker in self.workers.values())
            return not self._over

    @property
    def error_messages(self) -> list[str]:
        """The errors of members that could not continue."""
        return [worker.error.message for worker in self.workers.values() if worker.error is not None]

    def all_done(self) -> bool:
        """Whether all counting members have trained to the end."""
        return {w.exit_code for rank, w in self.workers.items() if rank not in self.detached} == {ExitCode.DONE}

    @property
    def stopped_early(self) -> bool:
        """Whether counting members have stopped, on whosever word, and none has trained to the end."""
        codes = {worker.exit_code for rank, worker in self.workers.items() if rank not in self.detached}
        return ExitCode.STOPPED in codes and ExitCode.DONE not in codes

    def can_continue_without(self, rank: int) -> bool:
        """Whether another member trains or has trained to the end, on all its devices."""
        gone = {self._member_of(worker) for worker in (rank, *self.lost)}
        others = [(r, w.exit_code) for r, w in self.workers.items() if self._member_of(r) not in gone]
        return any(code == ExitCode.DONE or (code is None and r not in self.detached) for r, code in others)

    @property
    def lost_members(self) -> list[int]:
        """Ranks of the members that are lost."""
        return [*dict.fromkeys(map(self._member_of, self.lost))]

    def note_lost(self, rank: int) -> bool:
        """Record that a worker is lost; return whether it is the first of its member, which is lost with it."""
        is_first = self._member_of(rank) not in self.lost_members
        self.lost.append(rank)
        return is_first

    def end_member_of(self, rank: int, seconds: float) -> None:
        """Count on the other devices of a lost worker's member no more; they have some seconds to end by themselves."""
        for other in {*self.plan.processes_of(self._member_of(rank))} - {rank}:
            self.detached.add(other)
            self.end_within(other, seconds)

    def end_within(self, rank: int, seconds: float) -> None:
        """Kill a worker in some seconds; it may end by itself before."""
        end = threading.Timer(seconds, self.workers[rank].kill)
        end.daemon = True
        end.start()

    def forget_left(self, rank: int) -> None:
        """Forget that a worker, or another device of its member, has left the group."""
        self.left = {other for other in self.left if self._member_of(other) != self._member_of(rank)}

    def _member_of(self, rank: int) -> int:
        return self.plan.process(rank).member.rank if self._is_staged else rank

    def none_can_return(self) -> bool:
        """Whether only joining or lost members are left, which no member could let in."""
        left = {rank for rank, worker in self.workers.items() if worker.exit_code is None}
        return left <= self.joining or (left <= self.detached - self.leaving and self.all_done())

    def note(self, source: int, event: MemberEvent) -> bool:
        """Record that a member came or went; return whether that is not in the run's events yet.

        A loss is recorded once, from the coordinator or from the end of the worker: the first of them knows the cause.
        So is a joining, which the coordinator reports when it lets a worker in, and the worker when it has the state.
        """
        rank = event.member
        if rank is None:
            return True
        speaks = self.speaks(rank)
        if event.status == "joined":
            return self._note_joined(source, rank)
        if event.status == "ready" and source == rank:
            self._confirmed.add(rank)
        if event.status == "done":
            self.done.add(rank)
        if event.status == "left":
            self._forget_joining(rank)
            news = source == rank or rank not in self.left  # the member itself reports why
            news &= not (self._is_staged and self._member_of(rank) in self.lost_members)
            self.left.add(rank)
            return news and speaks
        if event.status == "lost":
            if rank not in self.left:
                self.detached.add(rank)
            return self.note_gone(rank)
        return speaks

    def _note_joined(self, source: int, rank: int) -> bool:
        """Record that a worker has joined, or is back; return whether that is not in the run's events yet."""
        gone = {other for other in self._reported_gone if self._member_of(other) == self._member_of(rank)}
        news = rank not in self._reported_joined or (source == rank and rank in self._confirmed)
        self._reported_joined.add(rank)
        self._reported_gone.discard(rank)
        if source == rank:
            self._confirmed.add(rank)
            self.joining.discard(rank)
            self.detached.discard(rank)
        return gone == {rank} if gone else news and self.speaks(rank)

    def _forget_joining(self, rank: int) -> None:
        """Record that a worker is gone: its next joining is news."""
        self._reported_joined.discard(rank)
        self._confirmed.discard(rank)

    def note_gone(self, rank: int) -> bool:
        """Record that a member is gone; return whether that is not in the run's events yet."""
        before = any(self._member_of(other) == self._member_of(rank) for other in self._reported_gone | self.left)
        news = not before or rank in self.joining  # what was recorded of a joining member is of its earlier time
        if self._is_staged:  # its other devices go with it
            self.joining -= {*self.plan.processes_of(self._member_of(rank))}
        self._reported_gone.add(rank)
        self._forget_joining(rank)
        return news

    def dismiss(self, members: Collection[int]) -> None:
        """Ask members to leave at their next synchronisation point. Joining ones are killed.

        Raises:
            BadInput: they do not take part, or no member would be left.
        """
        ranks = [rank for member in members for rank in self.plan.processes_of(member)]
        if set(ranks) <= self.joining:
            for rank in ranks:
                self.workers[rank].failure = "it was dropped"
                self.workers[rank].kill()
            return
        self.mark_leaving(ranks)
        for r in ranks:
            self.workers[r].process.send({"command": "stop", "at_sync": True, "reason": "dropped", "snapshot": False})

    def mark_leaving(self, ranks: Collection[int]) -> None:
        """Record that workers were asked to leave.

        Raises:
            BadInput: they do not take part, or no member would be left.
        """
        self.check_changeable()
        for rank in ranks:
            if rank not in self.active_ranks:
                raise BadInput(f"{self.name(rank)} does not take part")
        if not set(self.active_ranks) - set(ranks):
            raise BadInput("no machine would be left to train", "stop the run instead")
        self.detached.update(ranks)
        self.leaving.update(ranks)

    def is_ending(self, member: int) -> bool:
        """Whether a worker of a member that does not count any more still runs."""
        return bool(self._ending(member))

    def _ending(self, member: int) -> list[int]:
        gone = self.plan.processes_of(member) if member in self.lost_members else self.detached - self.joining
        return [rank for rank in self.plan.processes_of(member) if rank in gone and self._runs(rank)]

    def _runs(self, rank: int) -> bool:
        return rank in self.workers and self.workers[rank].exit_code is None

    def give_up(self, member: int) -> None:
        """Kill the workers of a member that its coordinator has lost but that still run; it may join again then."""
        for rank in {*self._ending(member)} - self.leaving:
            self.workers[rank].kill()

    def add_workers(self, member: int, workers: Mapping[int, Worker]) -> None:
        """Enter the workers of a member that comes back, by rank.

        Raises:
            BadInput: see :meth:`check_can_join`; they are not entered.
        """
        with self._gate:
            self.check_can_join(member)
            self.lost = [rank for rank in self.lost if rank not in workers]
            for status in (self.left, self.leaving, self._reported_gone, self._reported_joined, self._confirmed):
                status.difference_update(workers)
            self.detached.update(workers)
            self.joining.update(workers)
            self.workers = {**self.workers, **{rank: WorkerHandle(worker) for rank, worker in workers.items()}}

    def check_can_join(self, member: int) -> None:
        """Check that a member may come back.

        Raises:
            BadInput: it takes part, another one is joining, or the run's members stay as they are.
        """
        self.check_changeable()
        if self._over or not self.active_ranks:
            raise BadInput("no machine is training that could let it join")
        if any(map(self._runs, self.plan.processes_of(member))):
            going = "has not ended yet" if self.is_ending(member) else "already takes part"
            raise BadInput(f"{self.plan.all_members[member].name} {going}")
        if self._is_staged and self.joining:  # each of their columns could let another of them in first
            raise BadInput(f"{self.plan.process(min(self.joining)).member.name} is joining first", "try again then")

    def check_changeable(self) -> None:
        """Raise ``BadInput`` if the members of this run cannot change."""
        if self.plan.world_size == 1:
            raise BadInput("a run that started with one machine takes no others", _ANOTHER)
        if not self.plan.has_coordinator:
            raise BadInput("the machines of a launched script cannot change", _ANOTHER)

    def check_extendable(self) -> None:
        """Raise ``BadInput`` if this run takes no machine that it did not start with."""
        self.check_changeable()
        if self._is_staged:
            raise BadInput("members of several devices take back those that were planned, and no others", _ANOTHER)
