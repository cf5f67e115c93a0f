"""Where the time of a run's start went, for a person."""

from __future__ import annotations

from collections.abc import Iterable

from training.events import Event, TimingEvent


def start_line(events: Iterable[Event]) -> str:
    """Return the parts of the newest start in the order in which they ended; empty where nothing was measured.

    A part that several machines have is as long as the slowest of them took. Parts overlap, so they do not add up.
    """
    newest = {(event.part, event.member): event for event in events if isinstance(event, TimingEvent)}
    seconds: dict[str, float] = {}
    for (part, _), event in sorted(newest.items(), key=lambda item: item[1].time):
        seconds[part] = max(event.seconds, seconds.get(part, 0.0))
    return ", ".join(f"{part} {value:.1f} s" for part, value in seconds.items())
