"""The duration of a run: the time spent in its attempts, not between them. Every duration of a run that is shown is
computed here."""

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
    ended: float | None = None
    samples: int = 0
    first_steps: Mapping[int | None, float] = field(default_factory=dict)
    """When each member began its first step, by its own clock."""
    longest: float = 0.0
    """Seconds for which the member with the longest training has trained."""

    @property
    def seconds(self) -> float:
        """Duration; of a killed attempt, whose end was not recorded, the time of its steps."""
        if self.begun is None or self.ended is None:
            return self.longest
        return max(0.0, self.ended - self.begun)

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
    if isinstance(event, RunEvent) and event.status in FINAL:
        return (*attempts[:-1], replace(newest, ended=event.time))
    return (*attempts[:-1], newest.with_step(event)) if isinstance(event, StepEvent) else attempts


def counted_attempts(attempts: Sequence[RunAttempt]) -> list[RunAttempt]:
    """Return the attempts that made at least one step; if none did, all of them."""
    return [attempt for attempt in attempts if attempt.first_steps] or list(attempts)


def seconds_in(attempts: Sequence[RunAttempt], now: float | None = None) -> float:
    """Return the total seconds of the attempts of a run.

    Args:
        now: the present time, if the run is still going on.
    """
    if now is None or not attempts or attempts[-1].ended is not None:
        return sum(attempt.seconds for attempt in counted_attempts(attempts))
    earlier = [attempt for attempt in attempts[:-1] if attempt.first_steps]
    newest = attempts[-1].longest if attempts[-1].begun is None else max(0.0, now - attempts[-1].begun)
    return sum(attempt.seconds for attempt in earlier) + newest
