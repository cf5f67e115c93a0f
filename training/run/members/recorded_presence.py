"""Which comings and goings of workers are in the events of a run: every change is recorded once.

A loss is reported by the coordinator and by the end of the worker: the first of them knows the cause. A joining is
reported by the coordinator when it lets a worker in, and by the worker when it has the state. Of a member with several
devices, the first loss and the last return count.
"""

from __future__ import annotations

from collections.abc import Collection

from training.run.members.member_history import MemberHistory


class RecordedPresence:
    """What the events of a run say of its workers, by rank.

    Args:
        gone: workers that are recorded as gone.
        joined: workers whose joining, since they were gone last, is recorded.
        confirmed: those of them that have said so themselves: if they say it again, the others had gone on without
            them.
    """

    def __init__(self, gone: Collection[int], joined: Collection[int] = (), confirmed: Collection[int] = ()) -> None:
        self._gone, self._joined, self._confirmed = set(gone), set(joined), set(confirmed)

    @classmethod
    def of(cls, history: MemberHistory, absent: Collection[int]) -> RecordedPresence:
        """Return that of a run whose supervisor was killed.

        Args:
            absent: workers that were not started.
        """
        joined = history.ranks("joined", "ready", "done") - history.joining
        return cls({*absent, *history.ranks("lost", "left", "failed")}, joined, history.ranks("ready", "done"))

    def note_joined(self, rank: int, devices: Collection[int], by_itself: bool, speaks: bool) -> bool:
        """Note that a worker has joined, or is back; return whether that is news.

        Args:
            devices: the workers of its member.
            by_itself: whether the worker says so, and not the coordinator.
            speaks: whether it speaks for its member.
        """
        gone_devices = self._gone.intersection(devices)
        is_news = rank not in self._joined or (by_itself and rank in self._confirmed)
        self._joined.add(rank)
        self._gone.discard(rank)
        if by_itself:
            self._confirmed.add(rank)
        return gone_devices == {rank} if gone_devices else is_news and speaks

    def note_ready(self, rank: int) -> None:
        """Note that a worker has said itself that it is ready."""
        self._confirmed.add(rank)

    def note_away(self, rank: int) -> None:
        """Note that a worker does not take part now: its next joining is news."""
        self._joined.discard(rank)
        self._confirmed.discard(rank)

    def note_gone(self, rank: int, devices: Collection[int], left: Collection[int]) -> bool:
        """Note that a worker is gone; return whether that is news: none of its member is recorded as gone.

        Args:
            devices: the workers of its member.
            left: workers that have left the group.
        """
        is_news = self._gone.union(left).isdisjoint(devices)
        self._gone.add(rank)
        self.note_away(rank)
        return is_news

    def forget(self, ranks: Collection[int]) -> None:
        """Forget what was recorded of workers that come back as new ones."""
        for recorded in (self._gone, self._joined, self._confirmed):
            recorded.difference_update(ranks)
