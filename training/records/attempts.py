"""The duration of a run: from when its training begins to its end, with evaluations and snapshots.

Starting, pauses, and the time between attempts are not part of it. Every duration of a run that is shown is computed
here; :class:`distributed.planning.run_time.RunTime` predicts the same span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from training.records.events import Event, RunEvent, StepEvent
from training.records.plan import FINAL


@dataclass(frozen=True)
class RunAttempt:
    """One attempt of a run, as its events describe it."""

    begun: float | None = None
    """``None``: not recorded."""
    trains_since: float | None = None
    """When the first member was ready to train; ``None``: none is, or it was not recorded."""
    paused_since: float | None = None
    """``None``: it is not paused."""
    paused: float = 0.0
    """Seconds of its earlier pauses."""
    ended: float | None = None
    samples: int = 0
    first_steps: Mapping[int | None, float] = field(default_factory=dict)
    """When each member began its first step, by its own clock."""
    longest: float = 0.0
    """Seconds for which the member with the longest training has trained."""

    @property
    def seconds(self) -> float:
        """Duration; of a killed attempt, whose end was not recorded, the time of its steps."""
        return self.longest if self.ended is None else self.until(self.ended)

    def until(self, now: float) -> float:
        """Return its duration up to ``now``; before training begins, how long it has been starting."""
        since = next((time for time in (self.trains_since, self.begun) if time is not None), None)
        if since is None:
            return self.longest
        last = now if self.paused_since is None else min(now, self.paused_since)
        return max(0.0, last - since - self.paused)

    def with_status(self, event: RunEvent) -> RunAttempt:
        """Return it after the run, or a member for all, has changed its status."""
        if event.status in FINAL:
            return replace(self, ended=event.time)
        if event.status == "paused":
            return self if self.paused_since is not None else replace(self, paused_since=event.time)
        if event.status != "running":
            return self
        pause = 0.0 if self.paused_since is None else max(0.0, event.time - self.paused_since)
        since = self.trains_since or max(event.time, self.begun or event.time)
        return replace(self, trains_since=since, paused_since=None, paused=self.paused + pause)

    def with_step(self, event: StepEvent) -> RunAttempt:
        """Return it after a member's step."""
        firsts = self.first_steps
        if event.member not in firsts:
            begun = event.time - (event.seconds if event.clock is None else 0.0)
            firsts = dict(sorted({**firsts, event.member: begun}.items(), key=_rank))
        longest = max(self.longest, event.time - firsts[event.member])
        return replace(self, samples=self.samples + event.samples, first_steps=firsts, longest=longest)


def _rank(item: tuple[int | None, float]) -> int:
    return -1 if item[0] is None else item[0]


Attempts = tuple[RunAttempt, ...]


def attempts_after(attempts: Attempts, event: Event) -> Attempts:
    """Return the attempts of a run after one more event."""
    if isinstance(event, RunEvent) and event.status == "starting":
        return (*attempts, RunAttempt(begun=event.time))
    newest = attempts[-1] if attempts else RunAttempt()
    if isinstance(event, RunEvent):
        return (*attempts[:-1], newest.with_status(event))
    return (*attempts[:-1], newest.with_step(event)) if isinstance(event, StepEvent) else attempts


def counted_attempts(attempts: Sequence[RunAttempt]) -> list[RunAttempt]:
    """Return the attempts that made at least one step; if none did, all of them."""
    return [attempt for attempt in attempts if attempt.first_steps] or list(attempts)


def starting_seconds_in(attempts: Sequence[RunAttempt]) -> float | None:
    """Return the seconds that the newest attempt took to start; ``None``: unknown, or it has not begun to train."""
    newest = attempts[-1] if attempts else RunAttempt()
    known = newest.begun is not None and newest.trains_since is not None
    return (newest.trains_since or 0.0) - (newest.begun or 0.0) if known else None


def seconds_in(attempts: Sequence[RunAttempt], now: float | None = None) -> float:
    """Return the total seconds of the attempts of a run.

    Args:
        now: the present time, if the run is still going on. Before its training begins, how long it has been starting.
    """
    if now is None or not attempts or attempts[-1].ended is not None:
        return sum(attempt.seconds for attempt in counted_attempts(attempts))
    earlier, newest = [attempt for attempt in attempts[:-1] if attempt.first_steps], attempts[-1]
    is_starting = newest.trains_since is None and not newest.first_steps
    return sum(attempt.seconds for attempt in earlier) + (0.0 if earlier and is_starting else newest.until(now))
