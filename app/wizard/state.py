"""Everything the guided set-up knows, as frozen data: what a person chose, and what was found for each step.

Screens and prompts draw it; :mod:`app.wizard.transitions` makes the next one. Text in it may come from other machines:
show it escaped. No password is ever in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.wizard.machine_rows import (
    AccessRow,
    CheckRow,
    Home,
    Links,
    MachineRow,
    Machines,
    Need,
    Presence,
    ProfileRow,
    Row,
    Status,
)
from app.wizard.steps import Step
from app.wizard.training_rows import (
    ChangeRow,
    DataRow,
    FitRow,
    Job,
    JobOption,
    Launch,
    LaunchRow,
    Plan,
    Strategy,
    Way,
)

__all__ = [
    "AccessRow", "Answers", "ChangeRow", "CheckRow", "DataRow", "FitRow", "Home", "Job", "JobOption", "Launch",
    "LaunchRow", "Links", "MachineRow", "Machines", "Need", "Plan", "Presence", "ProfileRow", "Row", "Status",
    "Strategy", "Way", "WizardState",
]  # fmt: skip


@dataclass(frozen=True)
class Answers:
    """All that a person has chosen. Going back and forth loses none of it."""

    picked: tuple[str, ...] = ()
    """Keys of machines, in the order of picking."""
    typed: tuple[str, ...] = ()
    """``user@host`` as they were typed."""
    skipped: tuple[str, ...] = ()
    """Picked machines that were left out at Access, Checks or Launch."""
    trusted: tuple[tuple[str, str], ...] = ()
    """Machine and fingerprint of host keys that a person has compared and accepted."""
    profile: str = "demo"
    options: tuple[tuple[str, str], ...] = ()
    """Options (and ``model``, ``dataset``) that differ from the profile, as text."""
    preference: str = "fastest"
    strategy: str = ""
    """``Way.identity`` of the chosen way; empty: the recommended one."""
    interval: int = 0
    """Chosen H; 0: as recommended."""
    save_as: str = ""
    """Name of the profile to save; empty: one is made up."""

    def option(self, name: str) -> str | None:
        return dict(self.options).get(name)


@dataclass(frozen=True)
class WizardState:
    """One moment of the set-up."""

    step: Step = Step.HOME
    answers: Answers = Answers()
    home: Home = Home()
    machines: Machines = Machines()
    access: tuple[AccessRow, ...] = ()
    checks: tuple[CheckRow, ...] = ()
    links: Links = Links()
    job: Job = Job()
    strategy: Strategy = Strategy()
    plan: Plan = Plan()
    launch: Launch = Launch()
    under_way: tuple[tuple[object, str], ...] = ()
    """Tasks that are being worked on, each with what it does in words."""
    notice: str = ""
    """One line about the last action: why it could not be done. The next action clears it."""
    log: tuple[str, ...] = ()
    """What was done on which machine, the last lines; holds no secret."""
    logged: int = 0
    """Lines that were ever added to the log."""
    reached: Step = Step.HOME
    """The furthest step that was shown: ``GoTo`` leads anywhere up to it."""
    pinned: tuple[MachineRow, ...] = ()
    """Machines of a saved profile, shown also while nothing is seen of them."""
    preselected: bool = False
    """This computer was picked by itself, once."""
    made_for: tuple[tuple[str, object], ...] = field(default=(), repr=False)
    """For each part of the state, the answers it was worked out for; see :mod:`app.wizard.slots`."""

    @property
    def busy(self) -> tuple[str, ...]:
        """What is being worked on, in words: for a spinner."""
        return tuple(dict.fromkeys(words for _, words in self.under_way))

    @property
    def picked(self) -> tuple[MachineRow, ...]:
        """The machines that were chosen and are known, this computer first."""
        rows = {row.key: row for row in self.machines.rows}
        chosen = [rows[key] for key in self.answers.picked if key in rows]
        return tuple(sorted(chosen, key=lambda row: not row.here))

    @property
    def members(self) -> tuple[MachineRow, ...]:
        """The picked machines that were not left out."""
        return tuple(row for row in self.picked if row.key not in self.answers.skipped)

    @property
    def far(self) -> bool:
        """Whether a machine other than this computer was picked: only then there is access to check."""
        return any(not row.here for row in self.picked)

    @property
    def chosen(self) -> Way | None:
        """The way to train that will be taken."""
        rows = self.strategy.rows
        wanted = self.answers.strategy
        named = next((row for row in rows if row.identity == wanted), None)
        return named or next((row for row in rows if row.recommended), rows[0] if rows else None)
