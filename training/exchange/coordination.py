"""The coordinator's view of the group: who is in it, when its mesh is formed anew, who is let in. No network in here.

A group goes from mesh to mesh, each with a number, its epoch. A mesh ends when one of its members is lost, a connection
between two of them breaks, somebody is let in, or one that is late is left behind. All who live then give it up and
report how far they are; operations of which anybody has the result stand (it is handed to those who miss it), all
others are done again by the members of the next mesh. So a result is either everybody's or nobody's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Literal

from training.events import MemberEvent, WarningEvent, WaysEvent
from training.exchange import verdicts
from training.exchange.control import BEAT, LAST_EPOCH, LEASE, GroupStatus, MeshStart, ProtocolError, Report, StateOrder
from training.exchange.group_member import CoordinatorConfig, Member, Role, ToldWays, seen_by, standing
from training.exchange.verdicts import Verdict

Log = Callable[[MemberEvent | WarningEvent | WaysEvent], None]
_BANNED = "it was dropped from the run"
_MODEL_SHARE = 0.8
"""Of the time after which an operation is given up: how long a member may build its model while the others wait."""
_STATE_PATIENCE = 4  # times the same time, for a newcomer that takes the state
_MOST_AHEAD = 1000
"""Meshes that a member may have heard of and a coordinator that was started again has not."""
_PATIENCE = 2 * LEASE
"""Seconds in which members come back to a coordinator that was started again, or give up a mesh."""


class Coordination:
    """All members of a run and the mesh they are in. Every method may be called from any thread.

    Args:
        log: hears of members that come and go, and of the ways between them.
    """

    def __init__(self, config: CoordinatorConfig, log: Log) -> None:
        self._config = config
        self._log = log
        self._lock = threading.RLock()
        self.members: dict[int, Member] = {}
        self._banned, self._left = set[int](), set[int]()
        self.relay = 0
        """Port on which pairs meet that cannot dial one another."""
        self.started, self.epoch, self.orphaned = False, 0, False
        """Whether the group has begun, the number of its mesh, and whether whoever started this coordinator is gone."""
        self.form: MeshStart | None = None
        self._joining: StateOrder | None = None
        self._orders, self._building = 0, 0.0
        self._quarrels, self._ways = verdicts.Quarrels(), ToldWays()
        self._size, self._odds = verdicts.ModelSizeVote(), verdicts.Odds(config.give_up)
        self._last: MeshStart | None = None
        """The last mesh that was formed; ``None``: there was none, or another coordinator formed it."""
        self._bounds: dict[int, int] = {}
        """What stood when the first mesh without a member was formed, by its rank."""
        self._now = self._given_up_since = self._since_status = 0.0
        self._awaited: tuple[int, float] = (0, 0.0)
        """An operation to which not all have come, and since when."""
        self._standstill = verdicts.Standstill(config.standstill)
        self._resuming_until: float | None = None

    # -- who comes and goes ------------------------------------------------------------------------------------------

    def hello(self, came: Member) -> None:
        """Take a member in. With a report of a mesh it was a member before: its connection, or the coordinator, is new.

        Raises:
            ProtocolError: it is none of this run, or no more, or nobody is left to join.
        """
        with self._lock:
            verdicts.check_hello(came.hello, self._config, self.started)
            running = self.started and self._resuming_until is None
            verdicts.check_report(came.rank, came.report, self.epoch + _MOST_AHEAD if running else LAST_EPOCH)
            if came.rank in self._banned:
                raise ProtocolError(_BANNED)
            known, news = self.members.get(came.rank), True
            if known is not None and known.hello.incarnation != came.hello.incarnation:
                self._drop(known, "lost", "came back on a new connection")
                known = None
            if known is not None:
                came.role, news = known.role, known.frozen
                known.close()
                if came.seen != known.seen and self.form is not None and came.rank in self.form.peers:
                    self.form, self._given_up_since = None, self._now  # its links are as dead as the old line
            elif came.report.epoch:
                self._take_back(came)
            elif self.started:
                if not self._of("live", "late"):
                    raise ProtocolError("no machine has the training state; resume the run from its newest snapshot")
                came.role = "newcomer"
            self._left.discard(came.rank)
            self.members[came.rank] = came
            if news:
                new = "joins a running group" if came.role == "newcomer" else ""
                self._tell_event(came, "joined", "is back" if came.report.epoch else new)
            self._settle()

    def heard(self, member: Member, report: Report) -> None:
        """Take in a member's report.

        Raises:
            ProtocolError: it cannot be.
        """
        with self._lock:
            if self.members.get(member.rank) is not member:
                return
            verdicts.check_report(member.rank, report, self.epoch)
            member.silent, member.report = 0.0, report
            for news in self._ways.news(member, self.members):
                self._log(news)
            if member.frozen:
                member.frozen = False
                self._tell_event(member, "joined", "answers again")
            if report.leaves:
                self._drop(member, "left", "")
                self._left.add(member.rank)
            if report.leaves or self._advance() or any(one.report.is_going for one in self.members.values()):
                self._settle()

    def lose(self, member: Member, reason: str) -> None:
        """A member's connection is gone, or it has broken the protocol."""
        with self._lock:
            if self.members.get(member.rank) is member:
                self._drop(member, "lost", reason)
                self._settle()

    def ban(self, rank: int) -> None:
        """Drop a member and let it in no more."""
        with self._lock:
            self._banned.add(rank)
            if rank in self.members:
                self._drop(self.members[rank], "lost", _BANNED)
                self._settle()

    def admit(self, rank: int) -> None:
        """Take a ban back."""
        with self._lock:
            self._banned.discard(rank)

    def tick(self, elapsed: float) -> None:
        """Enforce leases and deadlines; call it a few times a second.

        Args:
            elapsed: seconds since the last call, at most a few ticks, so that a coordinator that slept drops nobody.
        """
        with self._lock:
            self._now += elapsed
            for member in list(self.members.values()):
                member.silent += elapsed
                if member.silent > self._config.lease and member.rank not in self._config.local and not member.frozen:
                    self._freeze(member)
            self._building += elapsed if self.started else 0.0
            for member in self._of("live") if self._building > _MODEL_SHARE * self._config.give_up else ():
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
    def deserted(self) -> bool:
        """Whether all have taken their leave."""
        return self._left >= set(range(len(self._config.names))) and not self.members

    def missing(self) -> list[str]:
        """Return, in words, which members have not connected yet, before the start."""
        absent, names = self._config.absent, enumerate(() if self.started else self._config.names)
        return [f"rank {rank} ({name})" for rank, name in names if rank not in self.members and rank not in absent]

    def _take_back(self, came: Member) -> None:
        """Go on with a member that has state: its connection was lost, or this coordinator was started again."""
        if not self.started:
            self.started, self._resuming_until, self._last = True, self._now + _PATIENCE, None
            for member in self._of("waiting"):  # it has come to a group that was there before
                member.role = "newcomer"
        came.role = "late" if self._resuming_until is None else "live"
        if came.report.epoch > self.epoch:
            self.epoch, self.form, self._given_up_since = came.report.epoch, None, self._now

    def _freeze(self, member: Member) -> None:
        """A member is silent: the others go on without it, and it is taken back when it answers."""
        why = f"silent for {self._config.lease:g} s"
        if member.role in ("waiting", "newcomer"):
            return self._drop(member, "lost", why)
        member.frozen, member.role = True, "late"
        self._tell_event(member, "lost", why)

    def _drop(self, member: Member, status: Literal["left", "lost"], reason: str, again: bool = False) -> None:
        del self.members[member.rank]
        member.send(GroupStatus(failed=f"dropped from the group: {reason}" if reason else "it has left", again=again))
        member.close()
        self._tell_event(member, status, reason)

    def _tell_event(self, member: Member, status: Literal["joined", "left", "lost", "ready"], message: str) -> None:
        self._log(MemberEvent(member=member.rank, name=member.hello.name, status=status, message=message))

    def _of(self, *roles: Role) -> list[Member]:
        return [member for _, member in sorted(self.members.items()) if member.role in roles]

    # -- from mesh to mesh ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do all that the members' reports allow, and tell them."""
        while self._advance():
            pass
        self._tell_all()

    def _advance(self) -> bool:
        """Do one thing that the members' reports allow; return whether there was one."""
        if not self.started:
            return self._begin()
        if self._resuming_until is not None and not self._resumed():
            return False
        outrun = verdicts.outrun(self._of("live"), self._of("late"))
        if self._drop_all(outrun, again=True) or self._drop_all(self._unfit()) or self._order_state():
            return True
        if self.form is None:
            return self._form_next()
        if not self._is_over(self.form):
            return False
        self.form, self._given_up_since = None, self._now
        return True

    def _begin(self) -> bool:
        if self.missing():
            return False
        self.started = True
        self._new_epoch([member for _, member in sorted(self.members.items())])
        return True

    def _resumed(self) -> bool:
        """Whether all members of the mesh are back, or had the time to."""
        live = self._of("live")
        expected = {rank for member in live for rank in member.report.members}
        if expected - set(self.members) and self._now < (self._resuming_until or 0.0):
            return False
        self._resuming_until, self._orders = None, 1000 * self.epoch  # no number that there was before
        self._drop_all(verdicts.left_behind(live), again=True)
        return True

    def _is_over(self, form: MeshStart) -> bool:
        """Whether the mesh under way must end."""
        there = [member for member in self._of("live") if member.rank in form.peers]
        broken = [member for member in there if member.report.epoch == self.epoch and not member.report.up]
        if broken:
            self._quarrels.broken_by(broken[0], form.peers)
            return True
        gone = set(form.peers) - {member.rank for member in there}
        if gone - self._left or (gone and any(member.waits for member in there)) or not there:
            return True
        still = self._joining is None and self._standstill.noted(there, self._now)
        return bool(self._entering()) or self._leave_behind(there) or still

    def _entering(self) -> list[Member]:
        """Return who can be let into the next mesh: with the state of the others, or little behind it."""
        found = [member for member in self._of("late") if not member.frozen and member.waits and not member.report.up]
        guests = self._guests()
        if self._joining is None or any(member.report.taken != self._joining.number for member in guests):
            return found
        least = min((member.report.full for member in self._of("live")), default=0)
        return found + [member for member in guests if member.report.full <= least]

    def _guests(self) -> list[Member]:
        """Return the newcomers to whom the state is handed now."""
        there = self._joining.peers if self._joining is not None else {}
        return [member for member in self._of("newcomer") if member.rank in there and member.report.ready]

    def _leave_behind(self, there: list[Member]) -> bool:
        """Regard as late who has not come to an operation for which the others wait; return whether there is one."""
        number, config = min(member.report.full for member in there) + 1, self._config
        absent = [member for member in there if member.report.started < number]
        guests, building = self._guests(), any(member.report.elements < 0 for member in there)
        if building or not (absent or guests) or len(absent) == len(there):
            self._awaited = 0, 0.0
            return False
        self._awaited = self._awaited if self._awaited[0] == number else (number, self._now)
        waited = self._now - self._awaited[1]
        if not absent:
            late = guests if waited >= _STATE_PATIENCE * config.give_up else ()
            return self._drop_all([(m.rank, f"did not take the training state within {waited:.0f} s") for m in late])
        if waited >= config.give_up:
            return self._drop_all([(m.rank, f"did not reach exchange {number} within {waited:.0f} s") for m in absent])
        enough = len(there) - len(absent) >= max(1, math.ceil(config.quorum * len(there)))
        if not enough or waited < config.round_deadline:
            return False
        for member in absent:
            member.role = "late"
            self._log(WarningEvent(message=f"{member.hello.name} is late; exchange {number} goes on without it"))
        return True

    def _form_next(self) -> bool:
        """Form the next mesh when all who live have given up the last one."""
        live = self._of("live") or [member for member in self._of("late") if not self._keeps(member)]
        slow = [member for member in live if self._keeps(member)]
        if slow and self._now - self._given_up_since > _PATIENCE:
            for member in slow:  # its threads hang: it comes back when it has
                member.role = "late"
                self._log(WarningEvent(message=f"{member.hello.name} does not let go of a group that has ended"))
            return True
        if slow or not live:
            return False
        if self._odds.doubt and len({member.report.full for member in live}) == 1:
            return False  # once more is in vain, and nobody lacks what comes before
        if not self._odds.doubt and (quarrel := self._quarrels.noted(live)) is not None:
            return self._drop_all([quarrel])
        entering = [member for member in self._entering() if member not in live]
        group = live + entering
        holders = [member for member in group if member.role != "newcomer"]
        if self._drop_all(verdicts.strayed(holders, self._bounds), again=True):
            return True
        if (liar := verdicts.unbelievable(holders, self._last)) is not None:
            return self._drop_all([liar])
        stand = max(member.report.full for member in group)
        kept = min(min(m.report.kept, verdicts.joint(m.report)) for m in group if m.report.full == stand)
        beyond = [(m.rank, "it is too far behind the others") for m in group if m.report.full < kept]
        if self._drop_all(beyond, again=True):
            return True
        for member in (one for one in entering if one.role == "newcomer"):
            self._tell_event(member, "ready", "has the training state")
            self._joining = None
        self._new_epoch(group)
        return True

    def _keeps(self, member: Member) -> bool:
        """Whether a member has not given up the mesh that has ended, as far as anybody knows."""
        return member.frozen or member.report.up or member.report.epoch != self.epoch

    def _unfit(self) -> list[Verdict]:
        """Return who has another model or does other things than most, or waits for a state that is gone."""
        there = self._of("live", "late")
        if not there:
            return [(member.rank, "no machine has the training state") for member in self._of("newcomer")]
        building = any(member.report.elements < 0 for member in self._of("live"))
        return self._odds.judged(there, self._now) or self._size.wrong(there, building)

    def _drop_all(self, verdicts: list[Verdict], again: bool = False) -> bool:
        for rank, why in verdicts:
            self._drop(self.members[rank], "lost", why, again)
        return bool(verdicts)

    def _new_epoch(self, members: list[Member]) -> None:
        stand = max(member.report.full for member in members)
        have = [member for member in members if member.report.full == stand]
        self.epoch += 1
        gone = set(range(len(self._config.names) + self._config.spare)) - {member.rank for member in members}
        self._bounds = {rank: min(stand, self._bounds.get(rank, stand)) for rank in gone}
        self.form = self._last = MeshStart(
            peers={member.rank: member.peer(member) for member in members},
            stand=stand,
            donor=min(have, key=lambda member: (member.report.kept, member.rank)).rank,
            behind={member.rank: member.report.full for member in members if member.report.full < stand},
            away=any(one not in members for one in self._of("live", "late")),
        )
        self._awaited = 0, 0.0
        for member in members:
            member.role = "live"

    def _order_state(self) -> bool:
        """Have the state handed to newcomers that are ready; return whether that has changed."""
        ready = [member for member in self._of("newcomer") if member.report.ready]
        live, order = self._of("live"), self._joining
        donates = order is not None and any(member.rank == order.donor for member in live)
        if order is not None and donates and any(member.rank in order.peers for member in ready):
            return False
        if not ready or not live:
            self._joining = None
            return order is not None
        self._orders += 1
        peers = {member.rank: member.peer(member) for member in (live[0], *ready)}
        self._joining = StateOrder(number=self._orders, donor=live[0].rank, peers=peers)
        return True

    def _tell_all(self) -> None:
        """Send everyone the state of the group as it is to see it."""
        self._since_status = 0.0
        live, missing = tuple(member.rank for member in self._of("live")), tuple(self.missing())
        for member in list(self.members.values()):
            member.send(
                GroupStatus(
                    epoch=0 if self._resuming_until is not None else self.epoch,
                    form=seen_by(member, self.form, self.members),
                    started=self.started,
                    newcomer=member.role == "newcomer",
                    members=live,
                    missing=missing,
                    **standing(self._of("live", "late"), self.orphaned),
                    joining=seen_by(member, self._joining, self.members),
                    relay=self.relay,
                )
            )
