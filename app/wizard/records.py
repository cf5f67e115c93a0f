"""What the set-up knows about each of its parts, as frozen data; most of it is the domain's own records.

Text in it may come from other machines: show it escaped. No password is ever in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # modules that load SSH or pydantic, which the first screen does without
    from distributed.checks.findings import Finding
    from distributed.discovery.machine_identity import FoundPath
    from distributed.hosts.file import Machine
    from distributed.planning.document import Candidate, Choice
    from distributed.planning.run_time import RunTime
    from distributed.ssh.access import AccessReport
    from profiles.options import OptionSpec
    from profiles.resolve import ProfileEntry
    from training.records.runs import RunSummary

Tell = Callable[[str], None]
"""Hears a line for each thing that was done or began."""
MAIN = ("epochs", "batch_size", "learning_rate", "language", "tuning", "max_train_samples", "augmentation")
"""Options that everybody sees; the others are folded under "advanced"."""


SENT = "sent"
"""Key of the task of an installation whose packages come from this computer."""


class ItemStatus(str, Enum):
    """How a row, or a part of the set-up, stands: drawn as a symbol, a word and a colour."""

    WAITING = "waiting"
    WORKING = "working"
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"
    STOPPED = "stopped"


UNSETTLED = (ItemStatus.WAITING, ItemStatus.WORKING)
GOOD = (ItemStatus.OK, ItemStatus.WARNING)


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """How something is shown."""

    status: ItemStatus = ItemStatus.WAITING
    words: str = ""
    """The state in a word or two: ``online``, ``new host key``; empty: the status itself."""
    cause: str = ""
    """What is wrong, in one plain sentence; empty where nothing is."""
    fix: str = ""
    """What to do about it: an exact command where there is one."""

    @property
    def label(self) -> str:
        return self.words or self.status.value


FINE = Assessment(status=ItemStatus.OK)


@dataclass(frozen=True)
class AssessedRow(Assessment):
    """One line of a screen, and how what it is about stands."""

    key: str
    name: str = ""


# ------------------------------------------------------------------------------------------------------ home, machines


@dataclass(frozen=True)
class Presence:
    """One machine of a saved profile."""

    name: str
    present: bool | None = None
    """``None``: not known yet."""
    far: bool = False
    """Whether it is another machine than this computer."""


@dataclass(frozen=True)
class KnownProfile:
    """A profile that can be run."""

    entry: ProfileEntry
    saved: bool = False
    """Of ``profiles/saved``, so that it may bring its machines along."""
    machines: tuple[Machine, ...] = ()

    @property
    def name(self) -> str:
        return self.entry.name


@dataclass(frozen=True)
class Home:
    runs: tuple[RunSummary, ...] = ()
    """The live ones first."""
    profiles: tuple[KnownProfile, ...] = ()


@dataclass(frozen=True)
class MachineRow(AssessedRow):
    """One machine, whatever the number of its names and addresses. ``key`` is its host key's fingerprint once known."""

    entry: Machine = field(kw_only=True)
    """How it is reached, as a hosts file says it; the name there is that of ``name`` once the file is written."""
    ssh_config: str = ""
    """The OpenSSH configuration that its hosts file names."""
    chip: str = ""
    memory: str = ""
    system: str = ""
    found_by: tuple[str, ...] = ()
    paths: tuple[FoundPath, ...] = ()
    fingerprint: str = ""
    names: tuple[str, ...] = ()
    """All that it is called, in small letters."""
    aliases: tuple[str, ...] = ()
    """Keys of what was typed and is this machine; a choice made by them still holds."""
    unequipped: bool = False
    """This computer, before the packages that train are installed on it."""

    @property
    def here(self) -> bool:
        """Whether it is this computer."""
        return self.entry.is_local

    def reached_as(self, user: str) -> MachineRow:
        """Return it as another user reaches it; empty: as it is."""
        return replace(self, entry=self.entry.model_copy(update={"user": user})) if user else self


@dataclass(frozen=True)
class DiscoveredMachines:
    """What discovery sees at a moment."""

    rows: tuple[MachineRow, ...] = ()
    searched: tuple[str, ...] = ()
    """Where was looked, in words: services and interfaces, files."""
    seconds: float = 0.0
    """How long was looked."""
    advice: tuple[str, ...] = ()
    """What to do if a machine is missing; filled when nothing was found for some seconds."""
    presence: Mapping[str, tuple[Presence, ...]] = field(default_factory=dict)
    """By saved profile: which of its machines are here."""
    picks_all: bool = False
    """Whether every machine that is online is picked by itself, as those of a hosts file are."""


# ------------------------------------------------------------------------------------------------------ access, checks


class AccessNeed(str, Enum):
    """What a machine waits for a person to give."""

    NOTHING = ""
    TRUST = "trust"
    """The host key is new: compare its fingerprint, then ``trust_key``."""
    PASSWORD = "password"
    """No key of ours fits, and a password would be taken: ``Wizard.give_password``."""


@dataclass(frozen=True)
class Access(AssessedRow):
    """The way to one picked machine as it stands; ``key`` is the machine's."""

    report: AccessReport | None = None
    """What came of it last; ``None``: not asked yet."""

    @property
    def need(self) -> AccessNeed:
        report = self.report
        if report is None or report.ok:
            return AccessNeed.NOTHING
        if report.unknown_key is not None:
            return AccessNeed.TRUST
        asks = report.password_possible or report.cause == "password_refused"
        return AccessNeed.PASSWORD if asks else AccessNeed.NOTHING

    @property
    def fingerprint(self) -> str:
        return self.report.fingerprint if self.report is not None else ""

    @property
    def compare(self) -> str:
        """Command that prints the same fingerprint on the machine itself."""
        key = self.report.unknown_key if self.report is not None else None
        return key.compare_command if key is not None else ""

    @property
    def place(self) -> str:
        """``user@host:port``; empty where it was not asked yet."""
        report = self.report
        return "" if report is None else f"{report.user}@{report.where}" if report.user else report.where


@dataclass(frozen=True)
class Check(AssessedRow):
    """One picked machine with its findings as they stand; ``key`` is the machine's."""

    findings: tuple[Finding, ...] = ()

    @property
    def fixable(self) -> bool:
        """Whether a problem can be fixed from here."""
        return any(finding.safe and finding.level == "problem" for finding in self.findings)


# ----------------------------------------------------------------------------------------------------------------- job


@dataclass(frozen=True)
class JobAnswers:
    """What is to be trained."""

    profile: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class JobOption:
    """One option of the profile with its value in this job."""

    spec: OptionSpec
    value: str
    default: str
    """What the profile says without the person's change."""
    problem: str = ""
    """Why the value does not fit; empty where it does."""
    changed: bool = False
    """By the person."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def advanced(self) -> bool:
        return self.name not in MAIN


@dataclass(frozen=True)
class JobForm:
    options: tuple[JobOption, ...] = ()
    """All options with their values; main ones first, then the advanced."""
    models: tuple[str, ...] = ()
    """Names to choose ``model`` from; a path or hub name does as well."""
    datasets: tuple[str, ...] = ()
    model: str = ""
    dataset: str = ""
    assessment: Assessment = FINE


@dataclass(frozen=True)
class DataSummary:
    """What is known of the data set."""

    samples: int = 0
    hours: float | None = None
    columns: tuple[str, ...] = ()
    splits: tuple[tuple[str, int], ...] = ()
    broken: tuple[str, ...] = ()
    """Files that cannot be read, the first few."""
    broken_count: int = 0
    notes: tuple[str, ...] = ()
    """What commands did to it, each with the command that says more."""
    instead: str = ""
    """A profile whose model hears all recordings, where that of the job does not; empty elsewhere."""
    assessment: Assessment = FINE


@dataclass(frozen=True)
class Fit(AssessedRow):
    """Whether the model fits one machine's memory; ``key`` is the machine's."""

    needed: int = 0
    free: int = 0
    """Bytes; 0: unknown."""


# ------------------------------------------------------------------------------------------------------------ strategy


@dataclass(frozen=True)
class RankedCandidate:
    """One way to train: a candidate of the ranking, with H as the person left it."""

    candidate: Candidate
    index: int = 0
    """In the ranking."""
    same_loss_seconds: float = 0.0
    """Time to the loss that the best single machine's whole run ends with: what ways compare by."""
    best_interval: int = 1
    """The H that the planner chose for it."""
    best_speed: float = 0.0
    """Its ``useful_speed_up`` with that H."""
    time: RunTime | None = None
    """When its run ends; ``None``: its speed is not known."""
    quality: str = ""
    """What it does to the result, in words."""
    exact: bool = False
    """Whether all machines exchange in every step, as one large machine would."""
    acceptable: bool = True
    """Whether the loss may end no higher than is accepted."""
    periodic: bool = False
    """Whether H can be moved."""
    recommended: bool = False

    @property
    def choice(self) -> Choice:
        return self.candidate.choice

    @property
    def interval(self) -> int:
        """Steps between exchanges, H; ``SetInterval`` moves it."""
        return self.choice.interval

    @property
    def problem(self) -> str:
        """Why it cannot be taken; empty where it can."""
        return "" if self.candidate.fits else "it needs more memory than is free"

    @property
    def seconds(self) -> float:
        """Time of the whole run this way; ways differ in the samples that their runs see."""
        return self.candidate.steps * self.candidate.step

    @property
    def identity(self) -> str:
        """What tells it from all others, whatever its place in the ranking and its H."""
        return "|".join((self.choice.name, self.choice.over, *self.choice.members))


@dataclass(frozen=True)
class StrategyRanking:
    ways: tuple[RankedCandidate, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why the recommended one, in plain words; the deciding sentence first."""
    details: tuple[str, ...] = ()
    """More of it, with the names of strategies and options."""
    cables: tuple[str, ...] = ()
    """What cables would give, where that matters; these are among the reasons too."""
    measure: bool = False
    """New figures were asked for."""
    planning: Any = field(default=None, repr=False, compare=False)
    """What the services need to go on from here; nobody else looks at it."""
    assessment: Assessment = FINE


# -------------------------------------------------------------------------------------------------------- plan, launch


@dataclass(frozen=True)
class MachineChange:
    """What will change on one machine."""

    key: str
    machine: str
    what: str
    sign: str = "+"
    """``+`` new, ``~`` changed, ``-`` removed."""
    bytes: int = 0


@dataclass(frozen=True)
class Plan:
    changes: tuple[MachineChange, ...] = ()
    bytes_to_copy: int = 0
    network: tuple[str, ...] = ()
    time: tuple[str, ...] = ()
    """How long the run takes, and what has to be known beside it, in sentences; empty: not measured."""
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
    assessment: Assessment = FINE
    staying: str = ""
    """What is said of data that stay on their machines."""
