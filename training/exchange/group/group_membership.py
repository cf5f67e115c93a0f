"""Group membership as the coordinator decides it: its members, when the mesh is formed anew, and newcomers. No I/O.

A group goes from mesh to mesh; each has a number, its epoch. A mesh ends when a member is lost, a link between two
members breaks, a member joins, or a late member is left behind. The live members then give it up and report their
progress. Operations whose result any member has stand (it is handed to members that miss it); all others are repeated
on the next mesh. So a result is held either by all members or by none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from training.exchange.coordinator_protocol import (
    BEAT,
    LAST_EPOCH,
    LEASE,
    Configuration,
    GroupStatus,
    MeshStart,
    ProtocolError,
    Report,
)
from training.exchange.group import coordinator_state, verdicts
from training.exchange.group.bans import BANNED, Bans
from training.exchange.group.coordinator_state import CoordinatorConfig, LastReportedRoutes, Member, Role
from training.exchange.group.presence import REDIAL_SECONDS, PresenceLog
from training.exchange.group.quorum import first_epoch
from training.records.events import MemberEvent, WarningEvent, WaysEvent

Log = Callable[[MemberEvent | WarningEvent | WaysEvent], None]
_MODEL_SHARE = 0.8  # of the time after which an operation is given up, for a member to build its model
_MAX_EPOCHS_AHEAD = 1000  # meshes that a member may have heard of, and a coordinator started again has not
_SKIPPED_EPOCHS = 8  # meshes that no member may have told a coordinator of that was started again
_ELECTION_SECONDS = 1.0  # for members to come to a coordinator that they elect
_RETURN_SECONDS = 2 * LEASE  # for members to come back to a coordinator started again, or to give up a mesh


class GroupMembership:
    """All members of a run and the mesh they are in. Thread-safe.

    Args:
        log: receives events of members that join and leave, and of the routes between them.
    """

    def __init__(self, config: CoordinatorConfig, log: Log) -> None:
        self._config, self._log, self._presence = config, log, PresenceLog(log)
        self._lock = threading.RLock()
        self.members: dict[int, Member] = {}
        self._quorum = coordinator_state.quorum_of(config, log)
        self._bans, self._left = Bans(config.term > 0), self._quorum.left
        self._verdicts: dict[str, GroupStatus] = {}  # of dropped members, by incarnation
        self.relay = 0  # port of the relay for pairs of members that cannot dial one another
        self.started, self.epoch, self.orphaned = False, 0, False  # orphaned: the supervisor of this process is gone
        self.form: MeshStart | None = None
        self._joining, self._building = coordinator_state.StateOrders(config.is_column), 0.0
        self._link_faults, self._reported_routes = verdicts.LinkFaultJudge(), LastReportedRoutes()
        self._size, self._mismatch = verdicts.ModelSizeVote(), verdicts.OperationMismatch(config.give_up)
        self._last_mesh: MeshStart | None = None  # as formed by this coordinator
        self._bounds: dict[int, int] = {}  # by absent rank: operations that stood when the first mesh without it began
        self._now = self._given_up_since = self._since_status = 0.0
        self._awaited, self._standstill = verdicts.AwaitedOperation(config), verdicts.Standstill(config.standstill)
        self._resuming_until: float | None = None

    # -- members that join and leave ---------------------------------------------------------------------------------

    def register(self, member: Member) -> None:
        """Register a connected member. If its report names a mesh, it reconnects, or this coordinator was restarted.

        Raises:
            ProtocolError: it does not belong to this run, was dropped, or no member with the state is left.
        """
        with self._lock:
            verdicts.check_hello(member.hello, self._config, self.started)
            self._quorum.note_full(member.report)
            running = self.started and self._resuming_until is None
            verdicts.check_report(member.rank, member.report, self.epoch + _MAX_EPOCHS_AHEAD if running else LAST_EPOCH)
            self._bans.check(member.rank)
            if verdict := self._verdicts.get(member.hello.incarnation):  # its connection ended before it had read it
                member.send(verdict)
                return member.close()
            previous, is_news = self.members.get(member.rank), True
            if previous is not None and previous.hello.incarnation != member.hello.incarnation:
                self._drop(previous, "lost", "came back on a new connection")
                previous = None
            if previous is not None:
                member.role, is_news = previous.role, previous.frozen
                previous.close()
                if member.seen != previous.seen and self.form is not None and member.rank in self.form.peers:
                    self.form, self._given_up_since = None, self._now  # its links have ended like its old connection
            elif member.report.epoch:
                self._take_back(member)
            elif self.started:
                if not self._in_role("live", "late"):
                    raise ProtocolError("no machine has the training state; resume the run from its newest snapshot")
                member.role = "newcomer"
            self._quorum.note_return(member)
            self.members[member.rank] = member
            if member.role == "newcomer":
                self._presence.note(member, "joined", "joins a running group")
            elif is_news:
                self._presence.note_return(member, "is back" if member.report.epoch else "", self._now)
            self._settle()

    def on_report(self, member: Member, report: Report) -> None:
        """Process a member's report.

        Raises:
            ProtocolError: the report is inconsistent.
        """
        with self._lock:
            if self.members.get(member.rank) is not member:
                return
            self._quorum.note_full(report)
            verdicts.check_report(member.rank, report, self.epoch, self._quorum.committed)
            is_back, is_news = member.receive(report, self._now)
            for news in self._reported_routes.changes(member, self.members):
                self._log(news)
            if is_back and member.role != "waiting":
                self._presence.note_return(member, "answers again", self._now)
            if report.leaves:
                self._drop(member, "left", "")
                self._left.add(member.rank)
            banned = self._drop_all(self._bans.review(self._in_role("live"), self.members))
            self._commit()
            is_going = is_news and any(other.report.is_going for other in self.members.values())
            if banned or report.leaves or self._advance() or is_going:
                self._settle()

    def lose(self, member: Member, reason: str, hung_up: bool = False) -> None:
        """Drop a member whose connection is gone, or that has broken the protocol. One that was left behind and only
        ``hung_up`` may dial again: until then it counts as silent, and the results that it lacks are kept."""
        with self._lock:
            if self.members.get(member.rank) is member:
                if hung_up and member.role == "late" and member.rank not in self._quorum.ended:
                    member.frozen = member.hung_up = True
                    self._presence.note(member, "lost", reason)
                else:
                    self._drop(member, "lost", reason)
                self._settle()

    def ban(self, rank: int) -> None:
        """Drop a member and refuse it from now on."""
        with self._lock:
            self._bans.ranks.add(rank)
            if rank in self.members:
                self._drop(self.members[rank], "lost", BANNED)
                self._settle()

    def admit(self, rank: int) -> None:
        """Revoke a ban."""
        with self._lock:
            self._bans.ranks.discard(rank)

    def note_end(self, rank: int) -> None:
        """Record that the process of a member has ended: it will not follow another coordinator."""
        with self._lock:
            self._quorum.ended.add(rank)

    def tick(self, elapsed: float) -> None:
        """Enforce leases and deadlines; call it a few times a second.

        Args:
            elapsed: seconds since the last call, at most a few ticks, so that a coordinator that slept drops no member.
        """
        with self._lock:
            self._now += elapsed
            self._presence.confirm(self._now)
            for member in list(self.members.values()):
                is_lost = member.pass_time(elapsed, self._config.lease)
                if member.hung_up and member.silent > REDIAL_SECONDS:
                    self._drop(member, "lost", "it did not dial again")
                elif is_lost and member.rank not in self._config.local and not member.frozen:
                    self._freeze(member)
            self._building += elapsed if self.started else 0.0
            for member in self._in_role("live") if self._building > _MODEL_SHARE * self._config.give_up else ():
                if member.report.elements < 0:
                    self._drop(member, "lost", "has not reported its model")
            self._since_status += elapsed
            if self._advance() or self._since_status >= BEAT:
                self._settle()

    def close(self, reason: str) -> None:
        """End all connections."""
        with self._lock:
            for member in list(self.members.values()):
                member.send(GroupStatus(failed=reason))
                member.close()

    @property
    def all_left(self) -> bool:
        """Whether all members have left."""
        everybody = self._quorum.committed.members if self._quorum.committed else range(len(self._config.names))
        return self._left >= set(everybody) and all(member.hung_up for member in self.members.values())

    def missing(self) -> list[str]:
        """Return, in words, which members are not there yet, before the start."""
        there = self._config.absent | {member.rank for member in self.members.values() if not member.frozen}
        names = enumerate(() if self.started else self._config.names)
        return [f"rank {rank} ({name})" for rank, name in names if rank not in there]

    def _take_back(self, member: Member) -> None:
        """Resume with a member that has state: its connection was lost, or this coordinator was restarted."""
        if not self.started:
            seconds = _ELECTION_SECONDS if self._config.term else _RETURN_SECONDS
            self.started, self._resuming_until, self._last_mesh = True, self._now + seconds, None
            for early in self._in_role("waiting"):  # it has connected to a group that existed before
                early.role = "newcomer"
        member.role = "late" if self._resuming_until is None else "live"
        if member.report.epoch > self.epoch:
            self.epoch, self.form, self._given_up_since = member.report.epoch, None, self._now

    def _freeze(self, member: Member) -> None:
        """Take a silent member for lost until it answers; a newcomer, which may hold the others up, begins anew."""
        if member.role == "newcomer":
            self._drop(member, "lost", self._config.silence_text, may_return=True)
        elif member.role != "waiting":
            member.role = "late"
            self._presence.note(member, "lost", self._config.silence_text)
        member.frozen = True

    def _drop(self, member: Member, status: Literal["left", "lost"], why: str, may_return: bool = False) -> GroupStatus:
        del self.members[member.rank]
        verdict = GroupStatus(failed=f"dropped from the group: {why}" if why else "it has left", may_return=may_return)
        member.send(verdict)
        member.close()
        self._presence.note(member, status, why)
        return verdict

    def _in_role(self, *roles: Role) -> list[Member]:
        return [member for _, member in sorted(self.members.items()) if member.role in roles]

    # -- from mesh to mesh ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Advance as far as the members' reports allow, and send every member its status."""
        while self._advance():
            pass
        self._send_status()

    def _advance(self) -> bool:
        """Make one transition that the members' reports allow; return whether there was one."""
        if not self.started:
            return self._begin()
        if self._resuming_until is not None and not self._finish_resuming():
            return False
        too_far_behind = verdicts.too_far_behind(self._in_role("live"), self._in_role("late"))
        if (
            self._drop_all(too_far_behind, may_return=True)
            or self._drop_all(self._unsuitable())
            or self._joining.update(self._in_role("newcomer"), self._in_role("live"))
        ):
            return True
        if self.form is None:
            return self._form_next()
        if not self._end_mesh_if_needed(self.form):
            return False
        self.form, self._given_up_since = None, self._now
        return True

    def _begin(self) -> bool:
        if self.missing() or self._config.term:
            return False
        self.started = True
        self._quorum.begin(self.members)
        self._new_epoch([member for _, member in sorted(self.members.items())])
        return True

    def _finish_resuming(self) -> bool:
        """Resume once all members of the mesh are back, or the time for that is over; return whether it resumed."""
        live = self._in_role("live")
        expected = {rank for member in live for rank in member.report.members}
        if expected - set(self.members) and self._now < (self._resuming_until or 0.0):
            return False
        if not self._quorum.may_form(live):
            return False
        self._given_up_since = self._now
        self.epoch = max(self.epoch + _SKIPPED_EPOCHS * self._config.elects, first_epoch(self._config.term))
        self._resuming_until, self._joining.last = None, 1000 * self.epoch  # above all earlier numbers
        self._drop_all(verdicts.left_behind(live, self._config.elects), may_return=True)
        self._drop_all(self._bans.adopt(self._in_role("live"), self.members))
        return True

    def _end_mesh_if_needed(self, form: MeshStart) -> bool:
        """Judge the reports, and end the mesh under way where it cannot go on; return whether it ended."""
        present = [member for member in self._in_role("live") if member.rank in form.peers]
        broken = [member for member in present if member.report.epoch == self.epoch and not member.report.up]
        if broken:
            self._link_faults.record_break(broken[0], form.peers)
            return True
        gone = set(form.peers) - {member.rank for member in present}
        if gone - self._left or (gone and any(member.waits for member in present)) or not present:
            return True
        is_stalled = self._joining.current is None and self._standstill.judge(present, self._now)
        return bool(self._entering()) or self._leave_behind(present) or is_stalled

    def _entering(self) -> list[Member]:
        """Return the members that can join the next mesh: they have the others' state, or lag little behind it."""
        returning = [member for member in self._in_role("late") if member.waits and not member.still_holds(self.epoch)]
        joiners = self._joining.receivers(self._in_role("newcomer"))
        if self._joining.current is None or any(
            member.report.taken != self._joining.current.number for member in joiners
        ):
            return returning
        fewest_results = min((member.report.full for member in self._in_role("live")), default=0)
        return returning + [member for member in joiners if member.report.full <= fewest_results]

    def _leave_behind(self, present: list[Member]) -> bool:
        """Mark members as late that have not reached an operation the others wait for; return whether any changed."""
        dropped, late = self._awaited.judge(present, self._joining.receivers(self._in_role("newcomer")), self._now)
        for member in late:
            member.role = "late"
            self._log(self._awaited.warning(member))
        return self._drop_all(dropped) or bool(late)

    def _form_next(self) -> bool:
        """Form the next mesh once all live members have given up the last one."""
        live = self._in_role("live") or [m for m in self._in_role("late") if not m.still_holds(self.epoch)]
        slow = [member for member in live if member.still_holds(self.epoch)]
        if slow and self._now - self._given_up_since > _RETURN_SECONDS:
            for member in slow:  # its threads hang: it is taken back when they end
                member.role = "late"
                self._log(WarningEvent(message=f"{member.hello.name} does not let go of a group that has ended"))
            return True
        if slow or not live:
            return False
        entering = [member for member in self._entering() if member not in live]
        group = live + entering
        if not self._quorum.may_form(group):
            return False
        if self._mismatch.is_undecided and len({member.report.full for member in live}) == 1:
            return False  # repeating it would be in vain, and no member lacks an earlier result
        if not self._mismatch.is_undecided and (verdict := self._link_faults.judge(live)) is not None:
            return self._drop_all([verdict])
        holders = [member for member in group if member.role != "newcomer"]
        if self._drop_all(verdicts.holders_of_recomputed(holders, self._bounds), may_return=True):
            return True
        if (false_claim := verdicts.find_false_claim(holders, self._last_mesh)) is not None:
            return self._drop_all([false_claim])
        if self._drop_all(verdicts.without_kept_results(group), may_return=True):
            return True
        for member in (m for m in entering if m.role == "newcomer"):
            self._presence.note(member, "ready", "has the training state")
            self._joining.current = None
        self._new_epoch(group)
        return True

    def _commit(self) -> None:
        """Commit the mesh under way once enough of its members know of it."""
        mesh = Configuration.of(self.epoch, self.form.peers if self.form is not None else ())
        if self.form is not None and self._quorum.commit(mesh, self._in_role("live")):
            self._send_status()

    def _unsuitable(self) -> list[verdicts.Verdict]:
        """Return members with another model or other operations than the majority, or that wait for a lost state."""
        if not (with_state := self._in_role("live", "late")):
            return [(member.rank, "no machine has the training state") for member in self._in_role("newcomer")]
        building = any(member.report.elements < 0 for member in self._in_role("live"))
        return self._mismatch.judge(with_state, self._now) or self._size.deviating(with_state, building)

    def _drop_all(self, judged: list[verdicts.Verdict], may_return: bool = False) -> bool:
        for rank, why in judged:
            member = self.members[rank]
            self._verdicts[member.hello.incarnation] = self._drop(member, "lost", why, may_return)
        return bool(judged)

    def _new_epoch(self, members: list[Member]) -> None:
        away = any(member not in members for member in self._in_role("live", "late"))
        self.epoch += 1
        earlier = self._quorum.form(Configuration.of(self.epoch, (member.rank for member in members)), members)
        self.form = self._last_mesh = form = coordinator_state.mesh_start(members, away, earlier)
        gone = set(range(len(self._config.names) + self._config.spare)) - set(form.peers)
        self._bounds = {rank: min(form.stand, self._bounds.get(rank, form.stand)) for rank in gone}
        self._awaited.reset()
        self._presence.confirm(self._now, *members)
        for member in members:
            member.role = "live"

    def _send_status(self) -> None:
        """Send every member the group's status from its point of view."""
        self._since_status, missing, holders = 0.0, tuple(self.missing()), self._in_role("live", "late")
        live = tuple(member.rank for member in self._in_role("live"))
        held = self.started and self.form is None and not self._quorum.may_form([m for m in holders if not m.frozen])
        for member in list(self.members.values()):
            member.send(GroupStatus(
                sent=coordinator_state.clock_stamp(self._now),
                epoch=0 if self._resuming_until is not None else self.epoch,
                form=coordinator_state.seen_by(member, self.form, self.members),
                started=self.started,
                newcomer=member.role == "newcomer",
                members=live,
                missing=missing,
                **coordinator_state.progress_of(holders, self.orphaned),
                joining=coordinator_state.seen_by(member, self._joining.current, self.members),
                relay=self.relay,
                committed=self._quorum.committed,
                held=held,
                barred=tuple(sorted(self._bans.ranks)),
            ))  # fmt: skip
