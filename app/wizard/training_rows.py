"""Rows of the set-up's screens about the training: job, ways to train, plan, launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.wizard.machine_rows import Part, Row, Status

if TYPE_CHECKING:  # modules that load pydantic, which the first screen does without
    from distributed.planning.document import Candidate, Choice
    from profiles.options import OptionSpec

# ----------------------------------------------------------------------------------------------------------------- job


MAIN = ("max_steps", "epochs", "batch_size", "learning_rate", "language", "tuning", "max_train_samples", "augmentation")
"""Options that everybody sees; the others are folded under "advanced"."""


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
    options: tuple[JobOption, ...] = ()
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
class Way:
    """One way to train: a candidate of the ranking, with H as the person left it."""

    candidate: Candidate
    index: int = 0
    """In the ranking."""
    same_loss_seconds: float = 0.0
    """Time to the loss that the best single machine's whole run ends with: what ways compare by."""
    best_interval: int = 1
    """The H that the planner chose for it."""
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
class Strategy(Part):
    rows: tuple[Way, ...] = ()
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
