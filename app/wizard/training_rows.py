"""Rows of the set-up's screens about the training: job, ways to train, plan, launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.wizard.machine_rows import Part, Row, Status

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
    notes: tuple[str, ...] = ()
    """What commands did to it, each with the command that says more."""


@dataclass(frozen=True)
class FitRow(Row):
    """Whether the model fits one machine's memory; ``key`` is the machine's."""

    needed: int = 0
    free: int = 0
    """Bytes; 0: unknown."""


@dataclass(frozen=True)
class Job(Part):
    options: tuple[OptionRow, ...] = ()
    """All options with their values; main ones first, then the advanced."""
    models: tuple[str, ...] = ()
    """Names to choose ``model`` from; a path or hub name does as well."""
    datasets: tuple[str, ...] = ()
    model: str = ""
    dataset: str = ""
    data: DataRow = DataRow("data")
    fits: tuple[FitRow, ...] = ()


# ------------------------------------------------------------------------------------------------------------ strategy


@dataclass(frozen=True)
class CandidateRow(Row):
    """One way to train and what it should cost; ``key`` is its index, ``name`` the way without H: ``diloco mxfp4``."""

    index: int = 0
    over: str = ""
    """The machine that trains alone, ``hub NAME``, or ``torch``."""
    members: tuple[str, ...] = ()
    predicted: bool = True
    """``False``: what the strategy costs is not known."""
    step_seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    """Of one step, of all members together."""
    same_loss_seconds: float = 0.0
    """Time to the loss that the best single machine's whole run ends with: what ways compare by."""
    speed_up: float = 1.0
    useful_speed_up: float = 1.0
    communication: float = 0.0
    """Share of a step that waits for the network."""
    bytes_per_hour: float = 0.0
    loss_increase: float = 0.0
    interval: int = 1
    """Steps between exchanges, H; ``SetInterval`` moves it."""
    best_interval: int = 1
    """The H that the planner chose for it."""
    periodic: bool = False
    """Whether H can be moved."""
    alone: bool = False
    recommended: bool = False

    @property
    def total_seconds(self) -> float:
        """Time of the whole run this way; ways differ in the samples that their runs see."""
        return self.steps * self.step_seconds

    @property
    def identity(self) -> str:
        """What tells it from all others, whatever its place in the ranking and its H."""
        return "|".join((self.name, self.over, *self.members))


@dataclass(frozen=True)
class Strategy(Part):
    rows: tuple[CandidateRow, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why the recommended one; the deciding sentence first."""
    progress: tuple[str, ...] = ()
    measure: bool = False
    """New figures were asked for."""
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
class Plan(Part):
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


# -------------------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class LaunchRow(Row):
    """One machine; ``key`` is its name in the run. One status a column of :attr:`Launch.steps`."""

    cells: tuple[Status, ...] = ()
    log: tuple[str, ...] = ()
    """The last lines of what went wrong there."""


@dataclass(frozen=True)
class Launch(Part):
    """``ok``: the run has made its first step."""

    steps: tuple[str, ...] = ()
    rows: tuple[LaunchRow, ...] = ()
    progress: tuple[str, ...] = ()
    run: str = ""
    """The run's folder, as soon as there is one: attach to it."""
