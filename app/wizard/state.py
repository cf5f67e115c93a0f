"""Everything the guided set-up knows, as frozen data: what a person chose, and what was found for each step.

Screens and prompts draw it; :mod:`app.wizard.transitions` makes the next one. Text in it may come from other machines:
show it escaped. No password is ever in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from app.wizard.steps import Step


class Status(str, Enum):
    """State of a row: drawn as a symbol, this word or the row's own, and a colour."""

    WAITING = "waiting"
    WORKING = "working"
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


class Need(str, Enum):
    """What a row waits for a person to give."""

    NOTHING = ""
    TRUST = "trust"
    """The host key is new: compare its fingerprint, then ``TrustKey``."""
    PASSWORD = "password"
    """No key of ours fits, and a password would be taken: ``GivePassword``."""


@dataclass(frozen=True)
class Row:
    """One line of a screen."""

    key: str
    name: str = ""
    status: Status = Status.WAITING
    words: str = ""
    """The state in a word or two: ``online``, ``first meeting``; empty: the status itself."""
    cause: str = ""
    """What is wrong, in one plain sentence; empty where nothing is."""
    fix: str = ""
    """What to do about it: an exact command where there is one."""

    @property
    def label(self) -> str:
        return self.words or self.status.value


# ---------------------------------------------------------------------------------------------------------------- home


@dataclass(frozen=True)
class RunRow(Row):
    """A run that can be attached to; ``key`` is its id, ``name`` its profile."""

    path: str = ""
    started: str = ""
    live: bool = False


@dataclass(frozen=True)
class Presence:
    """One machine of a saved profile."""

    name: str
    present: bool | None = None
    """``None``: not known yet."""


@dataclass(frozen=True)
class ProfileRow(Row):
    """A profile that can be run; ``key`` and ``name`` are its name."""

    description: str = ""
    saved: bool = False
    """Of ``profiles/saved``, so that it may bring its machines along."""
    machines: tuple[Presence, ...] = ()
    changed: float = 0.0
    """Unix time of its file; the newest stand first."""


@dataclass(frozen=True)
class Home:
    runs: tuple[RunRow, ...] = ()
    profiles: tuple[ProfileRow, ...] = ()
    doctor: tuple[FindingRow, ...] = ()
    """What the doctor found on this computer; empty: not asked."""
    status: Status = Status.WAITING
    cause: str = ""
    fix: str = ""


# ------------------------------------------------------------------------------------------------------------ machines


@dataclass(frozen=True)
class PathRow:
    """One way to a machine."""

    where: str
    """Address and port."""
    kind: str = ""
    """``wired``, ``wifi``, ``vpn``, ...: see ``distributed.network_interfaces.PathKind``."""
    interface: str = ""
    online: bool = False


@dataclass(frozen=True)
class MachineRow(Row):
    """One machine, whatever the number of its names and addresses. ``key`` is its host key's fingerprint once known."""

    address: str = ""
    """What SSH connects to."""
    port: int | None = None
    user: str = ""
    here: bool = False
    chip: str = ""
    memory: str = ""
    system: str = ""
    found_by: tuple[str, ...] = ()
    paths: tuple[PathRow, ...] = ()
    fingerprint: str = ""
    aliases: tuple[str, ...] = ()
    """Keys it had before its host key was seen; a choice made then still holds."""
    python: str = ""
    """Interpreter there, where a hosts file names one."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further fields of its entry in a hosts file, which a saved profile keeps."""


@dataclass(frozen=True)
class Machines:
    rows: tuple[MachineRow, ...] = ()
    searched: tuple[str, ...] = ()
    """Where was looked, in words: services and interfaces, files."""
    seconds: float = 0.0
    """How long was looked."""
    advice: tuple[str, ...] = ()
    """What to do if a machine is missing; filled when nothing was found for some seconds."""


# -------------------------------------------------------------------------------------------------------------- access


@dataclass(frozen=True)
class AccessRow(Row):
    """The way to one machine; ``key`` is the machine's."""

    stages: tuple[tuple[str, Status], ...] = ()
    """``reach``, ``host key``, ``login``, ``shell``."""
    code: str = ""
    """Stable word for the cause: ``port_closed``, ``host_key_changed``, ..."""
    need: Need = Need.NOTHING
    fingerprint: str = ""
    compare: str = ""
    """Command that prints the same fingerprint on the machine itself."""
    where: str = ""
    user: str = ""
    system: str = ""
    attempts: int = 0
    """How often it was tried."""

    @property
    def blocked(self) -> bool:
        """Whether its host key has changed: no action of ours goes round that."""
        return self.code == "host_key_changed"


# -------------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class FindingRow(Row):
    """One thing that was looked at on one machine; ``key`` and ``name`` say what."""

    seen: str = ""
    needed: str = ""
    safe: bool = False
    """Whether ``Fix`` may mend it from here."""


@dataclass(frozen=True)
class CheckRow(Row):
    """All findings of one machine; ``key`` is the machine's."""

    findings: tuple[FindingRow, ...] = ()
    fixable: bool = False
    """Whether any finding can be mended from here."""


# --------------------------------------------------------------------------------------------------------------- links


@dataclass(frozen=True)
class LinkRow(Row):
    """One pair of machines; ``key`` is ``source|target``, by the machines' names."""

    source: str = ""
    target: str = ""
    mbit: float = 0.0
    mbit_back: float = 0.0
    rtt_ms: float = 0.0
    path: str = ""
    """The way that was chosen and why."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Links:
    rows: tuple[LinkRow, ...] = ()
    names: tuple[str, ...] = ()
    """Machines of the matrix, in order."""
    progress: tuple[str, ...] = ()
    status: Status = Status.WAITING
    cause: str = ""
    fix: str = ""


# ----------------------------------------------------------------------------------------------------------------- job


@dataclass(frozen=True)
class OptionRow(Row):
    """One option of the profile; ``key`` and ``name`` are its name. A value that does not fit has a cause."""

    value: str = ""
    default: str = ""
    """What the profile says without the person's change."""
    help: str = ""
    unit: str = ""
    type: str = "text"
    choices: tuple[str, ...] = ()
    limits: str = ""
    section: str = ""
    advanced: bool = False
    changed: bool = False
    """By the person."""


@dataclass(frozen=True)
class DataRow(Row):
    """What is known of the data set."""

    samples: int = 0
    hours: float | None = None
    columns: tuple[str, ...] = ()
    splits: tuple[tuple[str, int], ...] = ()
    broken: tuple[str, ...] = ()
    """Files that cannot be read, the first few."""
    broken_count: int = 0


@dataclass(frozen=True)
class FitRow(Row):
    """Whether the model fits one machine's memory; ``key`` is the machine's."""

    needed: int = 0
    free: int = 0
    """Bytes; 0: unknown."""


@dataclass(frozen=True)
class Job:
    options: tuple[OptionRow, ...] = ()
    """All options with their values; main ones first, then the advanced."""
    models: tuple[str, ...] = ()
    """Names to choose ``model`` from; a path or hub name does as well."""
    datasets: tuple[str, ...] = ()
    model: str = ""
    dataset: str = ""
    data: DataRow = DataRow("data")
    fits: tuple[FitRow, ...] = ()
    status: Status = Status.WAITING
    cause: str = ""
    fix: str = ""


# ------------------------------------------------------------------------------------------------------------ strategy


@dataclass(frozen=True)
class CandidateRow(Row):
    """One way to train and what it should cost; ``key`` is its index, ``name`` the way without its H: ``diloco mxfp4``."""

    index: int = 0
    over: str = ""
    """The machine that trains alone, ``hub NAME``, or ``torch``."""
    members: tuple[str, ...] = ()
    step_seconds: float = 0.0
    total_seconds: float = 0.0
    speed_up: float = 1.0
    useful_speed_up: float = 1.0
    communication: float = 0.0
    """Share of a step that waits for the network."""
    bytes_per_hour: float = 0.0
    loss_increase: float = 0.0
    interval: int = 1
    """Steps between exchanges, H."""
    periodic: bool = False
    """Whether H can be moved."""
    alone: bool = False
    recommended: bool = False

    @property
    def identity(self) -> str:
        """What tells it from all others, whatever its place in the ranking and its H."""
        return "|".join((self.name, self.over, *self.members))


@dataclass(frozen=True)
class Strategy:
    rows: tuple[CandidateRow, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why the recommended one; the deciding sentence first."""
    progress: tuple[str, ...] = ()
    recommended: int = 0
    status: Status = Status.WAITING
    cause: str = ""
    fix: str = ""
    planning: Any = field(default=None, repr=False, compare=False)
    """What the services need to go on from here; nobody else looks at it."""


# ---------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class ChangeRow(Row):
    """What will change on one machine."""

    sign: str = "+"
    """``+`` new, ``~`` changed, ``-`` removed."""
    machine: str = ""
    what: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class Plan:
    changes: tuple[ChangeRow, ...] = ()
    bytes_to_copy: int = 0
    ports: tuple[str, ...] = ()
    seconds: float | None = None
    """Predicted training time; ``None``: not measured."""
    way: str = ""
    encrypted: tuple[str, ...] = ()
    in_clear: tuple[str, ...] = ()
    profile: str = ""
    """Name under which the choices are saved."""
    files: tuple[str, ...] = ()
    """What is written on this computer when the plan is confirmed, beside the run's folder."""
    command: str = ""
    """What to type for the same, once the profile is saved."""
    hash: str = ""
    """Of the run's plan, as far as it is known before the machines are asked; empty: not known."""
    saved: bool = False
    """Whether the files are written, so that the command works."""
    status: Status = Status.WAITING
    cause: str = ""
    fix: str = ""


# -------------------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class LaunchRow(Row):
    """One machine; ``key`` is its name in the run. One status a column of :attr:`Launch.steps`."""

    cells: tuple[Status, ...] = ()
    log: tuple[str, ...] = ()
    """The last lines of what went wrong there."""


@dataclass(frozen=True)
class Launch:
    steps: tuple[str, ...] = ()
    rows: tuple[LaunchRow, ...] = ()
    progress: tuple[str, ...] = ()
    run: str = ""
    """The run's folder, as soon as there is one: attach to it."""
    status: Status = Status.WAITING
    """``ok``: the run has made its first step."""
    cause: str = ""
    fix: str = ""


# ----------------------------------------------------------------------------------------------------------- the whole


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
    """``CandidateRow.identity`` of the chosen way; empty: the recommended one."""
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
    busy: tuple[str, ...] = ()
    """What is being worked on, in words: for a spinner."""
    notice: str = ""
    """One line about the last action: why it could not be done. The next action clears it."""
    log: tuple[str, ...] = ()
    """What was done on which machine, the last lines; holds no secret."""

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
    def chosen(self) -> CandidateRow | None:
        """The way to train that will be taken."""
        rows = self.strategy.rows
        wanted = self.answers.strategy
        named = next((row for row in rows if row.identity == wanted), None)
        return named or next((row for row in rows if row.recommended), rows[0] if rows else None)

    @property
    def blockers(self) -> tuple[str, ...]:
        """Why ``Next`` (on the Plan: ``Confirm``) does nothing here; empty: it goes on."""
        from app.wizard.gates import blockers

        return blockers(self)
