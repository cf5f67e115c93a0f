"""Rows of the set-up's screens about runs and machines: found, let in, looked at, measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # modules that load SSH, which the first screen does without
    from distributed.checks.findings import Finding
    from distributed.discovery.machine_identity import FoundPath
    from distributed.measuring.link_figures import PairFigures
    from training.runs import RunSummary


class Status(str, Enum):
    """State of a row: drawn as a symbol, this word or the row's own, and a colour."""

    WAITING = "waiting"
    WORKING = "working"
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"
    STOPPED = "stopped"


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


@dataclass(frozen=True, kw_only=True)
class Part:
    """How far one part of the set-up is, and why it could not be worked out."""

    status: Status = Status.WAITING
    cause: str = ""
    fix: str = ""


# ---------------------------------------------------------------------------------------------------------------- home


@dataclass(frozen=True)
class Presence:
    """One machine of a saved profile."""

    name: str
    present: bool | None = None
    """``None``: not known yet."""
    far: bool = False
    """Whether it is another machine than this computer."""


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
class Home(Part):
    runs: tuple[RunSummary, ...] = ()
    profiles: tuple[ProfileRow, ...] = ()
    doctor: tuple[Finding, ...] = ()
    """What the doctor found on this computer; empty: not asked."""


# ------------------------------------------------------------------------------------------------------------ machines


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
    paths: tuple[FoundPath, ...] = ()
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
class CheckRow(Row):
    """All findings of one machine; ``key`` is the machine's."""

    findings: tuple[Finding, ...] = ()
    fixable: bool = False
    """Whether any finding can be mended from here."""
    memory: tuple[int, int] = (0, 0)
    """Free bytes and all, of the smallest device that trains; 0: unknown."""


# --------------------------------------------------------------------------------------------------------------- links


@dataclass(frozen=True)
class Links(Part):
    rows: tuple[PairFigures, ...] = ()
    names: tuple[str, ...] = ()
    """Machines of the matrix, in order."""
    progress: tuple[str, ...] = ()
