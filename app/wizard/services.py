"""What the guided set-up asks of the machines: the seam behind which the real ones or scripted ones stand.

All calls block and are made from threads of the :class:`app.wizard.engine.Wizard`. They may raise
``profiles.errors.MusterError``; the set-up shows its message and hint in the row or screen concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.wizard.records import (
    DataSummary,
    Examination,
    Fit,
    Home,
    Job,
    JobAnswers,
    Launch,
    MachineRow,
    Machines,
    Plan,
    Presence,
    Strategy,
    Way,
)

if TYPE_CHECKING:  # modules that load SSH, which the first screen does without
    from distributed.checks.findings import Finding
    from distributed.measuring.link_figures import PairFigures
    from distributed.ssh.access import AccessReport

Tell = Callable[[str], None]
"""Hears a line for each thing that was done or began."""


@dataclass(frozen=True)
class Request:
    """Everything a plan is made of."""

    machines: tuple[MachineRow, ...]
    """That take part; this computer alone or others with or without it."""
    job: JobAnswers
    preference: str = "fastest"
    chosen: Way | None = None
    """With its interval as the person left it; ``None``: nothing was predicted."""
    save_as: str = ""
    trusted: tuple[str, ...] = ()
    """Fingerprints of new host keys that a person accepted."""
    planning: Any = field(default=None, repr=False, compare=False)
    """``Strategy.planning`` of the forecast that ``chosen`` is from."""
    measure: bool = False
    """A person asked for new figures: what was measured before does not do."""


@dataclass(frozen=True)
class Sight:
    """What discovery sees at a moment."""

    machines: Machines
    presence: Mapping[str, tuple[Presence, ...]] = field(default_factory=dict)
    """By saved profile: which of its machines are here."""


class Watch(Protocol):
    """A look-out for machines that goes on until it is closed."""

    def add(self, text: str) -> None:
        """Look for ``[user@]host[:port]`` too.

        Raises:
            BadInput: it is no address.
        """

    def remove(self, text: str) -> None:
        """Look for it no more."""

    def close(self) -> None: ...


class Services(Protocol):
    """The world, as the set-up sees it."""

    def home(self) -> Home:
        """Return live and recent runs, and profiles, the newest first."""

    def doctor(self) -> Sequence[Finding]:
        """Look at this computer."""

    def watch(self, see: Callable[[Sight], None]) -> Watch:
        """Look for machines; ``see`` is called at once and after every change, from a thread of its own."""

    def saved_machines(self, profile: str) -> Sequence[MachineRow]:
        """Return the machines that a saved profile names, each ``here`` or with address, port and user; none: here."""

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessReport:
        """Go the whole way to a machine once. A new host key is accepted only if its fingerprint is ``trusted``."""

    def install_key(self, machine: MachineRow, password: str, trusted: Sequence[str]) -> AccessReport:
        """Install our key with the password, and return how the way goes with the key alone."""

    def examine(self, machines: Sequence[MachineRow], job: JobAnswers) -> Sequence[Examination]:
        """Look at all machines side by side; one result a machine, in their order."""

    def repair(self, machines: Sequence[MachineRow], job: JobAnswers, check: str, tell: Tell) -> None:
        """Mend what is safe to mend there; ``check`` names one finding, empty: all."""

    def measure_links(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[PairFigures]:
        """Measure every pair, or return what is known and fresh."""

    def job(self, answers: JobAnswers) -> Job:
        """Return the options with their values and errors, and what can be chosen; quick, no data is read."""

    def look_at_data(self, answers: JobAnswers) -> DataSummary:
        """Look at the data set: samples, hours, columns, broken files."""

    def fits(self, machines: Sequence[MachineRow], answers: JobAnswers) -> Sequence[Fit]:
        """Say for each machine whether the model fits its memory."""

    def forecast(self, request: Request, tell: Tell) -> Strategy:
        """Measure what is not known yet, and rank all ways to train."""

    def with_interval(self, planning: Any, index: int, steps: int) -> Way:
        """Predict a candidate with another H; pure and quick."""

    def plan(self, request: Request) -> Plan:
        """Say what will be done. Changes nothing anywhere."""

    def save(self, request: Request) -> tuple[str, ...]:
        """Write profile, machines and plan; return the files."""

    def launch(self, request: Request, see: Callable[[Launch], None], tell: Tell) -> Path:
        """Save, start the run in the background, and return its folder when the first step is made.

        ``see`` hears every change on the way; the run goes on if the caller stops listening.
        """

    def close(self) -> None:
        """Let go of everything that is still held."""
