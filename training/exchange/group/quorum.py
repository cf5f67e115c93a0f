"""Which members may go on as the run when others cannot be reached, so that never two groups do. Pure: no network.

The rule is dynamic voting (Jajodia and Mutchler 1990, "Dynamic voting algorithms for maintaining the consistency of a
replicated database"): those count who were in the last *configuration*, the members of a mesh.

- A coordinator goes on with half of the members of the last committed configuration, its own vote breaking the tie.
- Members that have lost it elect another one, of a later *term*, with more than half of them. Both cannot be.
- A configuration is committed once as many of the last committed one have adopted it: from then on it alone counts.
  Before that, a group needs the votes of both. The coordinator may see that first, or a member that is connected with
  all others of a mesh: all of them have adopted it.
- So a coordinator that has formed a mesh needs votes of it, too: it may be committed though nobody has said so.
- A process that is started again remembers nothing, and so has no vote until it is in a mesh.

A member adopts a configuration when it hears of it, and with it those that counted when it was formed. It follows no
coordinator of an earlier term than it has followed, and tells every coordinator that it comes to what it has adopted.
So any majority of a configuration knows all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from training.exchange.coordinator_protocol import COUNT_BITS, MAX_UNCOMMITTED, RANK_BITS, Configuration, Report


class Voter(Protocol):
    """A member as it reports."""

    @property
    def rank(self) -> int: ...

    @property
    def report(self) -> Report: ...


def term_of(epoch: int) -> int:
    """Return the term of the coordinator that formed a mesh; 0: the one that the run was started with."""
    return epoch >> COUNT_BITS


def next_term(term: int, rank: int) -> int:
    """Return a term after ``term`` in which nobody but ``rank`` carries a coordinator."""
    return ((term >> RANK_BITS) + 1 << RANK_BITS) + rank


def carrier_of(term: int) -> int:
    """Return the rank on whose machine the elected coordinator of a term is."""
    return term & (1 << RANK_BITS) - 1


def first_epoch(term: int) -> int:
    """Return the number that those of a term's meshes come after."""
    return term << COUNT_BITS


def adopted(report: Report) -> Configuration | None:
    """Return the newest configuration that a member has adopted; ``None``: it has no state."""
    return Configuration(epoch=report.mesh, members=report.members) if report.mesh else None


def has_votes(configuration: Configuration, ranks: Collection[int], breaks_tie: bool = False) -> bool:
    """Whether ``ranks`` are more than half of a configuration; half of it, where ``breaks_tie``."""
    votes, needed = 2 * len(set(ranks) & set(configuration.members)), len(configuration.members)
    return votes > needed or (breaks_tie and votes == needed)


def counting(group: Iterable[Voter]) -> list[Configuration]:
    """Return the configurations of which a group needs the votes."""
    configurations: dict[int, Configuration] = {}
    newest_committed = 0
    for report in (member.report for member in group):
        for known in (*report.earlier, adopted(report), report.committed):
            if known is not None:
                configurations[known.epoch] = known
        newest_committed = max(newest_committed, report.committed.epoch if report.committed is not None else 0)
    return [configuration for epoch, configuration in configurations.items() if epoch >= newest_committed]


def may_elect(group: Iterable[Voter]) -> bool:
    """Whether these members may go on under a coordinator that they elect."""
    holders = [member for member in group if member.report.mesh]
    configurations, ranks = counting(holders), {member.rank for member in holders}
    return bool(configurations) and all(has_votes(configuration, ranks) for configuration in configurations)


class VotingRecord(BaseModel):
    """What a coordinator must remember to vote only once, also when it is started again."""

    model_config = ConfigDict(frozen=True)

    committed: Configuration | None = None
    """The newest configuration that it has committed, unless there was a later coordinator."""
    formed: tuple[Configuration, ...] = ()
    """The meshes that it has formed since."""


class Quorum:
    """A coordinator's side.

    Args:
        is_needed: ``False``: members never elect another coordinator, and any of them may go on.
        record: of this coordinator, before it was started again.
        write: writes the record, before anybody hears of what it says.
        warn: takes a line about why the members wait, once.
    """

    def __init__(
        self,
        is_needed: bool = True,
        record: VotingRecord | None = None,
        write: Callable[[VotingRecord], None] = lambda record: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._is_needed, self._write, self._warn = is_needed, write, warn
        self.record = record if is_needed and record is not None else VotingRecord()
        self._earlier: list[Configuration] = []
        """The configurations whose votes the newest mesh has."""
        self._breaks_tie = False
        """Whether it has them with this coordinator's vote."""
        self.left: set[int] = set()
        """Members that have left."""
        self.ended: set[int] = set()
        """Members whose process is known to have ended."""

    @property
    def committed(self) -> Configuration | None:
        return self.record.committed

    @property
    def _departed(self) -> set[int]:
        """Members that follow no other coordinator."""
        return self.left | self.ended

    def begin(self, members: Iterable[int]) -> None:
        """Begin a new run with these members."""
        if self._is_needed:
            self.record = VotingRecord(committed=Configuration(epoch=1, members=tuple(sorted(members))))

    def note_return(self, member: Voter) -> None:
        """Note that a member has connected: it has neither left nor ended, unless another process takes its place."""
        if member.report.epoch:
            self.left.discard(member.rank)
            self.ended.discard(member.rank)

    def may_form(self, group: Collection[Voter]) -> bool:
        """Whether these members may be the next mesh; if not, all wait for others.

        Where a member has heard of a later coordinator, what this one has committed does not count.
        """
        if not self._is_needed:
            return True
        committed = self._counting_for(group)
        needed = counting(group) if committed is None else [committed, *self.record.formed]
        if len(needed) > MAX_UNCOMMITTED:
            self._warn(
                f"{MAX_UNCOMMITTED} meshes one after the other have broken before enough members had heard of them: "
                "all wait, and end with a snapshot; resume the run from it when their connections hold"
            )
            self._warn = lambda line: None
            return False
        if committed is None:
            return may_elect(group)
        voters = {member.rank for member in group if member.report.epoch} | self._departed
        return all(has_votes(earlier, voters, breaks_tie=True) for earlier in needed)

    def form(self, mesh: Configuration, group: Collection[Voter]) -> tuple[Configuration, ...]:
        """Note that a group, which may, becomes this mesh; return the configurations whose votes it has."""
        self.left -= set(mesh.members)
        self.ended -= set(mesh.members)
        if not self._is_needed:
            return ()
        committed, formed = self._counting_for(group), self.record.formed
        self._breaks_tie = committed is not None
        self._earlier = counting(group) if committed is None else [committed, *formed]
        self._write_down(committed, (*formed, mesh))
        return tuple(self._earlier)

    def commit(self, proposed: Configuration, group: Iterable[Voter]) -> bool:
        """Commit a configuration if enough members have adopted it; return whether that is news."""
        if not self._is_needed or (self.committed is not None and self.committed.epoch >= proposed.epoch):
            return False
        adopters = {member.rank for member in group if member.report.mesh == proposed.epoch}
        adopters |= self._departed if self._breaks_tie else set()
        votes = [has_votes(earlier, adopters, self._breaks_tie) for earlier in self._earlier]
        if is_enough := bool(votes) and all(votes):
            self._write_down(proposed, self.record.formed)
        return is_enough

    def note_full(self, report: Report) -> None:
        """Commit a mesh of this coordinator of which a member knows that all its members have adopted it."""
        if report.committed is not None and report.committed in self.record.formed:
            self._write_down(report.committed, self.record.formed)

    def _write_down(self, committed: Configuration | None, formed: Iterable[Configuration]) -> None:
        later = tuple(mesh for mesh in formed if committed is None or mesh.epoch > committed.epoch)
        self.record = VotingRecord(committed=committed, formed=later)
        self._write(self.record)

    def _counting_for(self, group: Iterable[Voter]) -> Configuration | None:
        """Return what this coordinator has committed, if no member has heard of a later coordinator."""
        committed = self.committed
        if committed is not None and all(_is_known(member.report, committed) for member in group):
            return committed
        return None


def _is_known(report: Report, committed: Configuration) -> bool:
    """Whether a member has heard of no later coordinator than that which has committed a configuration."""
    later = report.committed is not None and report.committed.epoch > committed.epoch
    return term_of(report.mesh) <= term_of(committed.epoch) and not later
