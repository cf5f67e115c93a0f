"""Frozen records of the set-up's parts; most fields hold domain records.

Text in them may come from other machines: escape it for display. They never contain a password.
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
    from distributed.planning.documents.document import Candidate, Choice
    from distributed.planning.run_time import RunTime
    from distributed.ssh.access import AccessReport
    from profiles.files.resolve import ProfileEntry
    from profiles.options import OptionSpec
    from training.records.runs import RunSummary

Tell = Callable[[str], None]
"""Callback for a line about something that was done or started."""
MAIN = ("epochs", "batch_size", "learning_rate", "language", "tuning", "max_train_samples", "augmentation")
"""Options that are always shown; the others are folded under "advanced"."""


class ItemStatus(str, Enum):
    """Status of a row or a part of the set-up: drawn as a symbol, a word and a colour."""

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
    """Status of a thing as it is shown."""

    status: ItemStatus = ItemStatus.WAITING
    words: str = ""
    """The status in a word or two: ``online``, ``new host key``; empty: the status itself."""
    cause: str = ""
    """The problem in one plain sentence; empty if there is none."""
    fix: str = ""
    """How to fix it: an exact command if there is one."""

    @property
    def label(self) -> str:
        return self.words or self.status.value


FINE = Assessment(status=ItemStatus.OK)


@dataclass(frozen=True)
class AssessedRow(Assessment):
    """One line of a screen with its assessment."""

    key: str
    name: str = ""


# ------------------------------------------------------------------------------------------------------ home, machines


@dataclass(frozen=True)
class Presence:
    """One machine of a saved profile, and whether it is online; ``None``: not known yet."""

    name: str
    present: bool | None = None
    far: bool = False
    """Whether it is a machine other than this computer."""


@dataclass(frozen=True)
class KnownProfile:
    """A profile that can be run."""

    entry: ProfileEntry
    saved: bool = False
    """Whether it is in ``profiles/saved``; such a profile may name its machines."""
    machines: tuple[Machine, ...] = ()

    @property
    def name(self) -> str:
        return self.entry.name


@dataclass(frozen=True)
class Home:
    runs: tuple[RunSummary, ...] = ()
    """Recent runs, live ones first."""
    profiles: tuple[KnownProfile, ...] = ()


@dataclass(frozen=True)
class MachineRow(AssessedRow):
    """One machine, with all its names and addresses. ``key`` is its host key's fingerprint once known."""

    entry: Machine = field(kw_only=True)
    """How it is reached, as a hosts file entry; its name there becomes ``name`` when the file is written."""
    ssh_config: str = ""
    """OpenSSH configuration file named by its hosts file."""
    chip: str = ""
    memory: str = ""
    system: str = ""
    found_by: tuple[str, ...] = ()
    paths: tuple[FoundPath, ...] = ()
    fingerprint: str = ""
    names: tuple[str, ...] = ()
    """All its names, in lower case."""
    aliases: tuple[str, ...] = ()
    """Keys of typed addresses that reach this machine; choices made under them still hold."""
    unequipped: bool = False
    """Whether it is this computer and lacks the packages for training."""
    other_python: bool = False
    """Whether it is this computer and its hosts file names a Python that is not Muster's own: the user approves it."""

    @property
    def here(self) -> bool:
        """Whether it is this computer."""
        return self.entry.is_local

    def reached_as(self, user: str) -> MachineRow:
        """Return the row with another login user; empty: unchanged."""
        return replace(self, entry=self.entry.model_copy(update={"user": user})) if user else self


@dataclass(frozen=True)
class DiscoveredMachines:
    """Results of discovery at one moment, ``seconds`` after it began."""

    rows: tuple[MachineRow, ...] = ()
    searched: tuple[str, ...] = ()
    """Description of the search: services and interfaces, files."""
    seconds: float = 0.0
    advice: tuple[str, ...] = ()
    """What prevents the search, and what to do about it."""
    nothing_found: tuple[str, ...] = ()
    """Advice while no other machine is listed; filled when none was found for some seconds."""
    presence: Mapping[str, tuple[Presence, ...]] = field(default_factory=dict)
    """By saved profile: its machines, and which of them are online."""
    picks_all: bool = False
    """Whether every online machine is selected automatically, as those of a hosts file are."""


# ------------------------------------------------------------------------------------------------------ access, checks


class AccessNeed(str, Enum):
    """What a machine needs from the user before it can be logged in to."""

    NOTHING = ""
    TRUST = "trust"
    """The host key is new: compare its fingerprint, then ``trust_key``."""
    APPROVAL = "approval"
    """Its hosts file names an SSH configuration or a Python that run programs here: see them, then ``approve``."""
    PASSWORD = "password"
    """None of our keys is accepted, but a password would be: ``Wizard.give_password``."""


@dataclass(frozen=True)
class Access(AssessedRow):
    """The login to one selected machine; ``key`` is the machine's. Of this computer: the use of a named Python."""

    report: AccessReport | None = None
    """Report of the last attempt; ``None``: not tried yet."""

    @property
    def need(self) -> AccessNeed:
        report = self.report
        if report is None or report.ok:
            return AccessNeed.NOTHING
        if report.unknown_key is not None:
            return AccessNeed.TRUST
        asks = report.password_possible or report.cause == "password_refused"
        return AccessNeed.PASSWORD if asks else AccessNeed.APPROVAL if report.demands else AccessNeed.NOTHING

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
        """``user@host:port``; empty before the first attempt."""
        report = self.report
        return "" if report is None else f"{report.user}@{report.where}" if report.user else report.where


@dataclass(frozen=True)
class Check(AssessedRow):
    """One selected machine with its findings so far; ``key`` is the machine's."""

    findings: tuple[Finding, ...] = ()

    @property
    def fixable(self) -> bool:
        """Whether a problem can be fixed from here."""
        return any(finding.safe and finding.level == "problem" for finding in self.findings)


# ----------------------------------------------------------------------------------------------------------------- job


@dataclass(frozen=True)
class JobAnswers:
    """The job that the user chose: a profile and changed options."""

    profile: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class JobOption:
    """One option of the profile with its value in this job."""

    spec: OptionSpec
    value: str
    default: str
    """The profile's value, without the user's change."""
    problem: str = ""
    """Why the value is invalid; empty if it is valid."""
    changed: bool = False
    """Whether the user changed it."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def advanced(self) -> bool:
        return self.name not in MAIN


@dataclass(frozen=True)
class JobForm:
    options: tuple[JobOption, ...] = ()
    """All options with their values: main ones first, then the advanced ones."""
    models: tuple[str, ...] = ()
    """Names to choose ``model`` from; a path or hub name is accepted too."""
    datasets: tuple[str, ...] = ()
    model: str = ""
    dataset: str = ""
    assessment: Assessment = FINE


@dataclass(frozen=True)
class DataSummary:
    """Summary of the data set."""

    samples: int = 0
    hours: float | None = None
    columns: tuple[str, ...] = ()
    splits: tuple[tuple[str, int], ...] = ()
    broken: tuple[str, ...] = ()  # files that cannot be read, the first few
    broken_count: int = 0
    notes: tuple[str, ...] = ()  # what commands did to it, each with the command that shows more
    examples: tuple[str, ...] = ()  # texts of a few samples
    instead: str = ""  # a profile whose model handles all recordings, if that of the job does not
    problems: tuple[str, ...] = ()  # of its tables, each with file and line
    epochs: str = ""  # to take over few samples, if those of the profile would hardly train
    salvageable: bool = False
    """Whether it cannot be used as it is, and a data set may be made of the part of it that can be read."""
    assessment: Assessment = FINE


@dataclass(frozen=True)
class Fit(AssessedRow):
    """Whether the model fits one machine's memory; ``key`` is the machine's."""

    needed: int = 0
    free: int = 0
    """Bytes; 0: unknown."""


# ------------------------------------------------------------------------------------------------------------ strategy


@dataclass(frozen=True)
class CandidateRow:
    """A candidate plan of the ranking, with the sync interval (H) that the user set."""

    candidate: Candidate
    index: int = 0
    """Position in the ranking."""
    same_loss_seconds: float = 0.0
    """Seconds until it reaches the final loss of the best single machine's run, by which candidates are compared."""
    best_interval: int = 1
    """The sync interval that the planner chose."""
    best_speed: float = 0.0
    """Its ``useful_speed_up`` with that interval."""
    time: RunTime | None = None
    """Predicted end of its run; ``None``: its speed is not known."""
    quality: str = ""
    """Its effect on the result, in words."""
    exact: bool = False
    """Whether all machines synchronise in every step, as one large machine would."""
    acceptable: bool = True
    """Whether the predicted increase of the final loss is within the accepted limit."""
    periodic: bool = False
    """Whether its sync interval can be changed."""
    recommended: bool = False

    @property
    def choice(self) -> Choice:
        return self.candidate.choice

    @property
    def interval(self) -> int:
        """Sync interval (H): steps from one synchronisation to the next; ``set_interval`` changes it."""
        return self.choice.interval

    @property
    def problem(self) -> str:
        """Why it cannot be chosen; empty if it can."""
        return "" if self.candidate.fits else "it needs more memory than is free"

    @property
    def seconds(self) -> float:
        """Predicted seconds of its whole run; candidates differ in the number of samples they train on."""
        return self.candidate.seconds

    @property
    def identity(self) -> str:
        """Identifies it regardless of its position in the ranking and its sync interval."""
        return "|".join((self.choice.name, self.choice.over, *self.choice.members))


@dataclass(frozen=True)
class StrategyRanking:
    ways: tuple[CandidateRow, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why the recommended candidate plan was chosen, in one plain sentence, and why machines are left out of it."""
    details: tuple[str, ...] = ()
    """Further reasons, with the names of strategies and options."""
    cables: tuple[str, ...] = ()
    """What cables would gain, if that matters; these sentences are among the reasons too."""
    in_use: tuple[str, ...] = ()
    """Machines that were measured while other programs used them: the predicted times may be wrong."""
    measure: bool = False
    """Whether the user requested new measurements."""
    planning: Any = field(default=None, repr=False, compare=False)
    """Passed back to the services by later calls; opaque to all other code."""
    assessment: Assessment = FINE


# -------------------------------------------------------------------------------------------------------- plan, launch


@dataclass(frozen=True)
class MachineChange:
    """A change on one machine."""

    key: str
    machine: str
    what: str
    sign: str = "+"
    """``+`` new, ``~`` changed, ``-`` removed."""
    bytes: int = 0


@dataclass(frozen=True)
class PlanPreview:
    changes: tuple[MachineChange, ...] = ()
    copying: str = ""
    network: tuple[str, ...] = ()
    time: tuple[str, ...] = ()
    """Sentences about the run time and its conditions; empty: not measured."""
    way: str = ""
    encrypted: tuple[str, ...] = ()
    in_clear: tuple[str, ...] = ()
    profile: str = ""
    """Name under which the choices are saved."""
    files: tuple[str, ...] = ()
    """Files written on this computer on confirmation, besides the run folder."""
    command: str = ""
    """Command that does the same, once the profile is saved."""
    hash: str = ""
    """Hash of the run's plan, as far as it is known before machines are contacted; empty: not known."""
    assessment: Assessment = FINE
    about_data: str = ""  # where the data stay, and what is done with them before the first step
    left_out: str = ""  # which machines of the saved profile this run goes without
