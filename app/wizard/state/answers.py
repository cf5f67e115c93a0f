"""What the user has chosen in the guided set-up, and what a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.wizard.state.records import CandidateRow, JobAnswers, MachineRow


@dataclass(frozen=True)
class Answers:
    """Everything the user has chosen. Going back and forth loses none of it."""

    picked: tuple[str, ...] = ()
    """Keys of machines, in the order of selection."""
    typed: tuple[str, ...] = ()
    """Addresses such as ``user@host``, as typed."""
    skipped: tuple[str, ...] = ()
    """Selected machines that were left out at Access, Checks or Launch."""
    trusted: tuple[tuple[str, str], ...] = ()
    """Pairs of machine key and fingerprint of host keys that the user has compared and accepted."""
    users: tuple[tuple[str, str], ...] = ()
    """Pairs of machine key and login user, where the user has changed it."""
    profile: str = "demo"
    options: tuple[tuple[str, str], ...] = ()
    """Options (and ``model``, ``dataset``) that differ from the profile, as text."""
    preference: str = "fastest"
    strategy: str = ""
    """``CandidateRow.identity`` of the chosen candidate plan; empty: the recommended one."""
    interval: int = 0
    """Chosen sync interval (H) in steps; 0: as recommended."""
    save_as: str = ""
    """Name of the profile to save; empty: generated."""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of new host keys that the user accepted."""
        return tuple(dict.fromkeys(fingerprint for _, fingerprint in self.trusted))

    @property
    def job(self) -> JobAnswers:
        return JobAnswers(self.profile, self.options)


@dataclass(frozen=True)
class PlanRequest:
    """Everything a plan is made from."""

    machines: tuple[MachineRow, ...]
    """The machines that take part."""
    answers: Answers
    chosen: CandidateRow | None = None
    """With its sync interval as the user set it; ``None``: nothing was predicted."""
    planning: Any = field(default=None, repr=False, compare=False)
    """``StrategyRanking.planning`` of the forecast that ``chosen`` belongs to."""
    measure: bool = False
    """Whether the user requested new measurements instead of saved ones."""
    left_out: tuple[MachineRow, ...] = ()
    """Selected machines that this run goes without; a saved profile keeps those that it names."""
