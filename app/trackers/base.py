"""What every tracker does, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from training.events import Event
from training.run_metadata import RunMetadata


@dataclass(frozen=True)
class TrackedRun:
    """The run, as a tracker needs it."""

    path: Path
    metadata: RunMetadata

    @property
    def names(self) -> Mapping[int, str]:
        """Names of the members by rank, each once: two workers of one machine are two."""
        planned = {host["rank"]: str(host.get("name", "")) for host in self.metadata.hosts if "rank" in host}
        taken = list(planned.values())
        return {
            rank: name if name and taken.count(name) == 1 else f"{name or 'member'}-{rank}"
            for rank, name in planned.items()
        }

    def name(self, rank: int) -> str:
        """Return the name of a member; one that joined later has none in the plan."""
        return self.names.get(rank, f"member-{rank}")

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen, for the tracker's table of settings."""
        sections = {key: value for key, value in self.metadata.config.items() if isinstance(value, dict)}
        flat = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
        about = ("model", "dataset", "strategy", "strategy_reason", "engine")
        return {**flat, **{name: getattr(self.metadata, name) for name in about}}


class Tracker(Protocol):
    """Takes the events of one run, in the order of its log."""

    def log(self, event: Event, newest_step: int) -> None:
        """Take one event; those of a kind that it has no use for it passes over.

        Args:
            newest_step: of the event's member, before this event.
        """

    def flush(self) -> None:
        """Make sure that what was logged is kept, also if this process is killed afterwards."""

    def close(self, status: str) -> str:
        """End with the status of the run and return in one line where its figures are."""


OpenTracker = Callable[[TrackedRun, Path], Tracker]
"""Opens a tracker for a run in a folder of its own, which holds what it wrote of the run before."""
