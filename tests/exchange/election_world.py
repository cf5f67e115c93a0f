"""A run in one thread: members, their results, and every coordinator that has carried it, with no network between."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from training.exchange.coordinator_protocol import (
    PROTOCOL_VERSION,
    Configuration,
    GroupStatus,
    Hello,
    ProtocolError,
    Report,
    Standing,
    newest_of,
)
from training.exchange.group.coordinator_state import CoordinatorConfig, Member
from training.exchange.group.election import Neighbour, choose
from training.exchange.group.group_membership import GroupMembership
from training.exchange.group.quorum import VotingRecord

RUN = "r"
Result = tuple[int, tuple[int, ...]]
"""The mesh that has computed a result, and its members."""


@dataclass(eq=False)
class Worker:
    """A member's process, which does message by message what a member does."""

    rank: int
    incarnation: int = 0
    report: Report = Report(elements=1, started=1)
    results: list[Result] = field(default_factory=list)
    followed: int = 0
    """The latest term of which it has heard from the coordinator itself."""
    term: int = 0
    """Of the coordinator that it dials."""
    member: Member | None = None
    inbox: list[GroupStatus] = field(default_factory=list)
    settled: int = 0
    linked: set[int] = field(default_factory=set)
    """Members with which it has been connected in its mesh."""
    held_after: int | None = None
    """A donor starts no operation after this one until the newcomers are in."""
    published: int = 0
    is_held: bool = True
    dead: bool = False
    ended: str = ""

    def note(self, **news: object) -> None:
        self.report = self.report.model_copy(update=news)

    def set_results(self, results: list[Result]) -> None:
        self.results, full = results, len(results)
        self.note(full=full, started=full + 1, dropped=min(self.settled, full))

    @property
    def is_alive(self) -> bool:
        return not self.dead and not self.ended


class ElectionWorld:
    """A run of ``size`` members, and ``spare`` ones that may join, that elect coordinators; the first one is that of
    term 0."""

    def __init__(self, size: int, spare: int = 0) -> None:
        self.size, self.machines = size, size + spare
        self.cuts: set[frozenset[int]] = set()
        names = tuple(f"m{rank}" for rank in range(size))
        self.config = CoordinatorConfig(run_id=RUN, names=names, elects=True, quorum=0.5, spare=spare)
        self.coordinators = {0: GroupMembership(self.config, lambda event: None)}
        self.workers = [Worker(rank, dead=rank >= size) for rank in range(self.machines)]
        for worker in self.workers:
            self.dial(worker.rank, 0)
        for _ in range(3):
            self.hear_all()

    # ------------------------------------------------------------------------------------------------ what may happen

    def dial(self, rank: int, term: int) -> None:
        """A member goes to a coordinator, if that is not of an earlier term than one that it has followed."""
        worker = self.workers[rank]
        if not worker.is_alive or term not in self.coordinators or term < worker.followed:
            return
        self.hang_up(rank)
        worker.note(heard=0)
        hello = Hello(
            version=PROTOCOL_VERSION, run_id=RUN, rank=rank, world_size=self.size, name=f"m{rank}",
            incarnation=f"{rank}.{worker.incarnation}", port=1,
        )  # fmt: skip
        member = Member(hello, worker.inbox.append, lambda: None, report=worker.report)
        worker.term, worker.member = term, member
        try:
            self.coordinators[term].register(member)
        except ProtocolError:
            worker.member = None

    def hang_up(self, rank: int, is_noticed: bool = True) -> None:
        """A member's connection breaks; its coordinator may not hear of that for long."""
        worker = self.workers[rank]
        if worker.member is not None and is_noticed:
            self.coordinators[worker.term].lose(worker.member, "its connection broke")
        worker.member = None
        worker.inbox.clear()

    def kill(self, rank: int, is_noticed: bool = True) -> None:
        """A process ends without a word."""
        self.workers[rank].dead = True
        self.hang_up(rank, is_noticed)

    def note_end(self, rank: int) -> None:
        """The supervisor hears that a process has ended, after all that it had said; its coordinator hears of it,
        unless the process has told of another one."""
        if self.workers[rank].dead and not self.workers[rank].followed:
            self.coordinators[0].note_end(rank)

    def start_again(self, rank: int, term: int = 0) -> None:
        """A machine is added, or that of a process that has ended again: another process, which remembers nothing, and
        is told of the coordinator that the run is known to have."""
        if not self.workers[rank].is_alive and term in self.coordinators:
            self.workers[rank] = Worker(rank, self.workers[rank].incarnation + 1, followed=term)
            self.dial(rank, term)

    def restart(self, term: int, remembers: bool = True) -> None:
        """The first coordinator is killed and started again; its disk has what it has committed, or is damaged."""
        if term:
            return
        for worker in self.workers:
            if worker.term == term:
                self.hang_up(worker.rank, is_noticed=False)
        record = self.coordinators[term]._quorum.record if remembers else VotingRecord()
        self.coordinators[term] = GroupMembership(self.config, lambda event: None)
        self.coordinators[term]._quorum.record = record

    def elect(self, rank: int, seen: Collection[int]) -> None:
        """A member asks those that it can reach, and goes where it decides to."""
        if not self.workers[rank].is_alive:
            return
        reached = {w.rank: Neighbour(w.rank, self._standing(w)) for w in self.workers if w.rank in {*seen, rank}}
        asker = reached.pop(rank)
        chosen = choose(asker, [n for n in reached.values() if self.workers[n.rank].is_alive])
        if chosen is not None and not self.reaches(rank, chosen.carrier):
            return
        if chosen is not None and chosen.carrier == rank and chosen.term not in self.coordinators:
            config = self.config.model_copy(update={"term": chosen.term})
            self.coordinators[chosen.term] = GroupMembership(config, lambda event: None)
        if chosen is not None:
            self.dial(rank, chosen.term)

    def _standing(self, worker: Worker) -> Standing:
        coordinator = {"carrier": worker.followed % 4096, "port": 1} if worker.followed else {}
        lost = worker.member is None or worker.is_held
        return Standing(
            report=worker.report, lost=lost, able=bool(worker.report.mesh), term=worker.followed, **coordinator
        )

    # ----------------------------------------------------------------------------------------- whole stretches of time

    def set_cuts(self, cuts: Collection[frozenset[int]]) -> None:
        """From now on these pairs of machines cannot hear each other; the one after those of the members is that of the
        first coordinator, whose supervisor reaches all machines that it does."""
        self.cuts = set(cuts)

    def reaches(self, machine: int, other: int) -> bool:
        return frozenset((machine, other)) not in self.cuts

    def host(self, term: int) -> int:
        """The machine of a coordinator."""
        return term % 4096 if term else self.machines

    def lose_machine(self, rank: int) -> None:
        """A machine loses power: its process, the coordinators on it, and what they remember."""
        self.workers[rank].dead = True
        self.hang_up(rank, is_noticed=False)
        for term in [term for term in self.coordinators if self.host(term) == rank]:
            del self.coordinators[term]
            for worker in self.workers:
                if worker.term == term:
                    worker.member = None
                    worker.inbox.clear()

    def go_on(self, rounds: int, finishing: Collection[int] = ()) -> None:
        """Everybody does what it can, for some seconds each round.

        Args:
            finishing: members that notice the end of operations; empty: all.
        """
        for _ in range(rounds):
            for worker in self.workers:
                if worker.is_alive:
                    self._act(worker)
            for _ in range(2):
                self.hear_all()
                for worker in self.workers:
                    self.say(worker.rank)
            self.hear_all()
            for rank in range(self.machines):
                self.connect(rank)
            for rank in finishing or range(self.machines):
                self.finish(rank)
            for term in list(self.coordinators):
                self.tick(term)

    def _act(self, worker: Worker) -> None:
        rank = worker.rank
        for other in worker.report.members:
            if not self.reaches(rank, other) or not self.workers[other].is_alive:
                self.break_link(rank, other)
        if worker.member is not None and not self.reaches(rank, self.host(worker.term)):
            self.hang_up(rank)
        if worker.member is None and self.reaches(rank, self.host(worker.followed)):
            self.dial(rank, worker.followed)
            self.hear(rank)
        if worker.member is None or worker.is_held:
            self.elect(rank, [o for o in range(self.machines) if self.reaches(rank, o)])
            self.hear(rank)

    def tick(self, term: int, seconds: float = 1.0) -> None:
        if term in self.coordinators:
            for _ in range(round(seconds / 0.25)):
                self.coordinators[term].tick(0.25)

    def break_link(self, rank: int, other: int) -> None:
        worker = self.workers[rank]
        if worker.is_alive and worker.report.up and other in worker.report.members and other != rank:
            worker.note(up=False, lost=other)
            self.say(rank)

    def say(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.member is not None and worker.is_alive:
            try:
                self.coordinators[worker.term].on_report(worker.member, worker.report)
            except ProtocolError as error:
                self.coordinators[worker.term].lose(worker.member, str(error))
                worker.member = None

    def hear_all(self) -> None:
        for worker in self.workers:
            self.hear(worker.rank)

    def hear(self, rank: int, most: int = 100, answers: bool = True) -> None:
        """A member reads what was sent to it; it may be cut off before it ``answers``."""
        worker = self.workers[rank]
        while worker.inbox and worker.is_alive and most:
            self._obey(worker, worker.inbox.pop(0), answers)
            most -= 1

    def _obey(self, worker: Worker, status: GroupStatus, answers: bool) -> None:
        if status.failed:
            return self._end(worker, status)
        worker.note(heard=status.sent)
        form, before = status.form, worker.report
        worker.followed, worker.is_held = worker.term, status.held
        worker.settled = max(worker.settled, status.settled)
        worker.note(committed=newest_of(status.committed, before.committed))
        worker.note(barred=status.barred if status.epoch else before.barred)
        if worker.held_after is not None and (status.joining is None or status.joining.number != worker.published):
            worker.held_after = None
        if status.newcomer:
            self._fetch(worker, status)
        elif form is None:
            if status.epoch and (before.up or before.epoch < status.epoch):
                worker.note(up=False, epoch=max(status.epoch, before.epoch))
        elif status.epoch > before.epoch:
            mesh = {"epoch": status.epoch, "mesh": status.epoch, "members": tuple(form.peers), "earlier": form.earlier}
            worker.note(**mesh, up=True, lost=None, ready=False, taken=0)
            worker.linked.clear()
        if worker.report != before and answers:
            self.say(worker.rank)

    def _end(self, worker: Worker, status: GroupStatus) -> None:
        worker.member = None
        worker.inbox.clear()
        if not status.may_return:
            worker.ended = status.failed
            return
        fresh = self.workers[worker.rank] = Worker(worker.rank, worker.incarnation + 1)
        fresh.followed = fresh.term = worker.term  # the same process, which keeps its allegiance alone
        self.dial(worker.rank, fresh.term)

    def _fetch(self, worker: Worker, status: GroupStatus) -> None:
        """A newcomer takes the state, where its donor is between two operations."""
        worker.note(ready=True)
        if status.joining is None or worker.report.taken == status.joining.number:
            return
        donor = self.workers[status.joining.donor]
        if not donor.is_alive or donor.held_after is not None:
            return
        donor.published, donor.held_after = status.joining.number, len(donor.results)
        worker.settled = len(donor.results)
        worker.set_results(list(donor.results))
        worker.note(taken=status.joining.number)

    # ---------------------------------------------------------------------------------------------------- operations

    def _stands(self, worker: Worker) -> bool:
        """Whether all members of a member's mesh are in it, so that an operation can end there."""
        return worker.report.up and all(
            self.workers[rank].is_alive
            and self.workers[rank].report.up
            and self.workers[rank].report.mesh == worker.report.mesh
            for rank in worker.report.members
        )

    def connect(self, rank: int) -> None:
        """A member connects with others that are in its mesh, and knows that it is committed once these are all."""
        worker, mesh = self.workers[rank], self.workers[rank].report.mesh
        if worker.is_alive and worker.report.up:
            there = [o for o in self.workers if o.is_alive and o.report.up and o.report.mesh == mesh]
            worker.linked |= {other.rank for other in there if self.reaches(rank, other.rank)}
            if worker.linked >= set(worker.report.members):
                full = Configuration.of(mesh, worker.report.members)
                worker.note(committed=newest_of(full, worker.report.committed))
                self.say(rank)

    def standing_meshes(self) -> set[tuple[int, ...]]:
        return {worker.report.members for worker in self.workers if worker.is_alive and self._stands(worker)}

    def finish(self, rank: int) -> None:
        """A member of a standing mesh takes the results that it lacks, then notices that the next operation has ended.

        Another member may hold a result that was computed again without it: it is dropped then, as in
        :func:`training.exchange.mean.handover.holders_of_recomputed`.
        """
        worker = self.workers[rank]
        if not worker.is_alive or not self._stands(worker):
            return
        mesh = [self.workers[other] for other in worker.report.members]
        for other in mesh:
            self.connect(other.rank)
        if not all(other.linked >= {*worker.report.members} for other in mesh) or self._drop_astray(mesh):
            return
        longest = max((other.results for other in mesh), key=len)
        number = len(worker.results)
        if number < len(longest):
            assert number >= min(other.report.dropped for other in mesh if other.results == longest)
            worker.set_results(list(longest))
        elif all(len(o.results) >= number and (o.held_after is None or number < o.held_after) for o in mesh):
            worker.set_results([*worker.results, (worker.report.mesh, worker.report.members)])
        self.say(rank)

    def _drop_astray(self, mesh: Collection[Worker]) -> bool:
        """Drop members whose results others have computed again without them; all others must have the same bits."""
        astray = {
            one.rank
            for one in mesh
            for other in mesh
            for mine, theirs in zip(one.results, other.results)
            if mine != theirs and one.rank in mine[1] and one.rank not in theirs[1]
        }
        for one in mesh:
            for other in mesh:
                if not {one.rank, other.rank} & astray:
                    pairs = zip(one.results, other.results)
                    assert all(mine == theirs for mine, theirs in pairs), f"{one.rank} and {other.rank} differ"
        for rank in astray:
            worker = self.workers[rank]
            self.hang_up(rank)
            self._end(worker, GroupStatus(failed="the others recomputed a result without it", may_return=True))
        return bool(astray)
