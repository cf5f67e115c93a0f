"""The members of a run: its workers as seen by the process that started them, and which of them come and go."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from profiles.errors import BadInput, ExitCode
from training.records.events import ErrorEvent, Event, MemberEvent, WaysEvent
from training.records.plan import MemberPlan, RunPlan
from training.run.meeting_point import SPARE
from training.run.members.member_history import MemberHistory
from training.run.members.recorded_presence import RecordedPresence
from training.run.processes import Worker

_ANOTHER = "stop the run and start it again with the machines that you want"


@dataclass
class WorkerHandle:
    """A worker's process and its state as far as the run knows it."""

    process: Worker
    step: int = 0
    exit_code: int | None = None
    error: ErrorEvent | None = None
    failure: str = ""
    """Why the others went on without it, unless it had only lost others, or why it was killed."""

    def kill(self) -> None:
        """Kill it, unless it is known to have ended."""
        if self.exit_code is None:
            self.process.signal(signal.SIGKILL)


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
        self._recorded = RecordedPresence(self.lost)

    def restore(self, history: MemberHistory) -> None:
        """Take over the members of a run whose supervisor was killed; their workers are entered one by one."""
        gone = history.ranks("lost", "left", "failed")
        self.lost = sorted({*self.plan.absent, *history.ranks("failed"), *gone - history.attached.keys()})
        self.joining = set(history.joining)
        self.detached = gone | self.joining
        self.left = history.ranks("left")
        self.done = history.ranks("done")
        self._recorded = RecordedPresence.of(history, self.plan.absent)

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
            changes["ways"] = tuple(path.model_copy(update={"peer": self._member_of(path.peer)}) for path in event.ways)
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
        return [rank for rank, worker in self.workers.items() if worker.exit_code is None and rank not in self.detached]

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to every worker, joining ones included."""
        for worker in self.workers.values():
            worker.process.send(message)

    def kill(self) -> None:
        """Kill every worker; those that are joining do not get to it any more."""
        for rank, worker in self.workers.items():
            if rank in self.joining and worker.exit_code is None:
                worker.failure = worker.failure or "the run ended before it had joined"
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
        return self._counting_exit_codes == {ExitCode.DONE}

    @property
    def stopped_early(self) -> bool:
        """Whether counting members have stopped, on whosever word, and none has trained to the end."""
        codes = self._counting_exit_codes
        return ExitCode.STOPPED in codes and ExitCode.DONE not in codes

    @property
    def _counting_exit_codes(self) -> set[int | None]:
        return {worker.exit_code for rank, worker in self.workers.items() if rank not in self.detached}

    def can_continue_without(self, rank: int) -> bool:
        """Whether another member trains or has trained to the end, on all its devices."""
        gone = {self._member_of(lost) for lost in (rank, *self.lost)}
        return any(
            worker.exit_code == ExitCode.DONE or (worker.exit_code is None and other not in self.detached)
            for other, worker in self.workers.items()
            if self._member_of(other) not in gone
        )

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
        for other in self._devices_with(rank) - {rank}:
            self.detached.add(other)
            self.end_within(other, seconds)

    def end_within(self, rank: int, seconds: float) -> None:
        """Kill a worker in some seconds; it may end by itself before."""
        end = threading.Timer(seconds, self.workers[rank].kill)
        end.daemon = True
        end.start()

    def forget_left(self, rank: int) -> None:
        """Forget that a worker, or another device of its member, has left the group."""
        self.left = self.left - self._devices_with(rank)

    def _member_of(self, rank: int) -> int:
        return self.plan.process(rank).member.rank if self._is_staged else rank

    def _devices_with(self, rank: int) -> set[int]:
        """Return the workers of a worker's member."""
        return {*self.plan.processes_of(self._member_of(rank))} if self._is_staged else {rank}

    def none_can_return(self) -> bool:
        """Whether only joining or lost members are left, which no member could let in."""
        left = {rank for rank, worker in self.workers.items() if worker.exit_code is None}
        return left <= self.joining or (left <= self.detached - self.leaving and self.all_done())

    def note(self, source: int, event: MemberEvent) -> bool:
        """Note that a member came or went; return whether that is not in the run's events yet.

        Args:
            source: rank of the worker that reports it, or another number: the coordinator.
        """
        rank = event.member
        if rank is None:
            return True
        speaks = self.speaks(rank)
        if event.status == "joined":
            if source == rank:
                self.joining.discard(rank)
                self.detached.discard(rank)
            return self._recorded.note_joined(rank, self._devices_with(rank), source == rank, speaks)
        if event.status == "ready" and source == rank:
            self._recorded.note_ready(rank)
        if event.status == "done":
            self.done.add(rank)
        if event.status == "left":
            self._recorded.note_away(rank)
            is_news = source == rank or rank not in self.left  # the member itself reports why
            is_lost = self._is_staged and self._member_of(rank) in self.lost_members
            self.left.add(rank)
            return is_news and not is_lost and speaks
        if event.status == "lost":
            if rank not in self.left:
                self.detached.add(rank)
            return self.note_gone(rank)
        return speaks

    def note_gone(self, rank: int) -> bool:
        """Record that a member is gone; return whether that is not in the run's events yet."""
        devices, was_joining = self._devices_with(rank), rank in self.joining
        if self._is_staged:  # its other devices go with it
            self.joining -= devices
        is_news = self._recorded.note_gone(rank, devices, self.left)
        return is_news or was_joining  # what was recorded of a joining member is of its earlier time

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
        order = {"command": "stop", "at_sync": True, "reason": "dropped", "snapshot": False}
        for rank in ranks:
            self.workers[rank].process.send(order)

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
            self.left.difference_update(workers)
            self.leaving.difference_update(workers)
            self._recorded.forget(workers)
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
