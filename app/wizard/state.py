"""State of the guided set-up: a person's answers, and for each part what was worked out from them. Screens and prompts
draw it; :func:`app.wizard.dependencies.apply` makes the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from app.wizard.assessment import of_findings
from app.wizard.launch_records import LaunchProgress
from app.wizard.records import (
    Access,
    Assessment,
    Check,
    DataSummary,
    DiscoveredMachines,
    Fit,
    Home,
    ItemStatus,
    JobAnswers,
    JobForm,
    KnownProfile,
    MachineRow,
    Plan,
    Presence,
    RankedCandidate,
    StrategyRanking,
)

T = TypeVar("T")


class Step(str, Enum):
    """One screen of the set-up."""

    question: str
    """What a person decides there, in one line."""

    def __new__(cls, value: str, question: str) -> Step:
        step = str.__new__(cls, value)
        step._value_, step.question = value, question
        return step

    HOME = "home", "What do you want to do?"
    MACHINES = "machines", "Which machines take part?"
    ACCESS = "access", "Can Muster log in there?"
    CHECKS = "checks", "Are they ready to train?"
    LINKS = "links", "How fast is the network between them?"
    JOB = "job", "Which model, on which data?"
    STRATEGY = "strategy", "How should they train together?"
    PLAN = "plan", "Review and start"
    LAUNCH = "launch", "Starting the run"

    @property
    def heading(self) -> str:
        """As the breadcrumb and the head of a screen say it."""
        return self.capitalize()


ORDER = tuple(Step)
BETWEEN_MACHINES = frozenset({Step.ACCESS, Step.CHECKS, Step.LINKS})
"""Steps about machines that are reached over the network: there is nothing to do for this computer alone."""


def visited(far: bool, unequipped: bool = False) -> tuple[Step, ...]:
    """Return the steps that are shown.

    Args:
        far: whether a machine other than this computer takes part.
        unequipped: whether this computer takes part and lacks the packages that train, which Checks installs.
    """
    needless = BETWEEN_MACHINES - {Step.CHECKS} if unequipped else BETWEEN_MACHINES
    return ORDER if far else tuple(step for step in ORDER if step not in needless)


def after(step: Step, far: bool, unequipped: bool = False) -> Step:
    """Return the next step that is shown, the last one after itself."""
    shown = visited(far, unequipped)
    return next((other for other in shown if ORDER.index(other) > ORDER.index(step)), shown[-1])


def before(step: Step, far: bool, unequipped: bool = False) -> Step:
    """Return the step shown before, the first one before itself."""
    shown = visited(far, unequipped)
    return next((other for other in reversed(shown) if ORDER.index(other) < ORDER.index(step)), shown[0])


# ----------------------------------------------------------------------------------------------------- tasks and parts


class TaskKind(str, Enum):
    """What the services are asked for; the value says what is done meanwhile."""

    HOME = "reading runs and profiles"
    DOCTOR = "checking this computer"
    SAVED_MACHINES = "reading the profile's machines"
    ACCESS = "connecting to a machine"
    INSTALL_KEY = "installing a key"
    CHECKS = "checking the machines"
    REPAIR = "installing packages"
    LINKS = "measuring links"
    JOB = "reading the profile"
    DATA = "reading the data"
    FITS = "comparing the model with the machines' memory"
    FORECAST = "measuring machines"
    INTERVAL = "predicting"
    PLAN = "making the plan"
    SAVE = "saving"
    LAUNCH = "starting the run"


@dataclass(frozen=True)
class ServiceTask:
    """Something to ask the services for."""

    kind: TaskKind
    key: str = ""
    """Of a machine, a profile or a finding; empty where there is only one."""
    inputs: object = field(default=None, hash=False)
    """The answers it is asked for: its result counts only while they hold."""


@dataclass(frozen=True)
class StatePart(Assessment, Generic[T]):
    """What the services work out from the answers: how far they are, and what came of it."""

    value: T
    progress: tuple[str, ...] = ()
    """What was said on the way, the last lines."""
    inputs: object = field(default=None, repr=False)
    """The answers that it was worked out for: for others it is worked out anew."""

    def outdated(self) -> StatePart[T]:
        """Return it as to be worked out once more; what is shown stays meanwhile."""
        return StatePart(self.value, inputs=self.inputs)


class _PartOf(Generic[T]):
    """A part of the state, as an attribute of it; ``empty`` is shown before anything was found."""

    def __init__(self, kind: TaskKind, empty: T) -> None:
        self.kind, self.nothing = kind, StatePart(empty)

    def __get__(self, state: WizardState, owner: type[WizardState]) -> StatePart[T]:
        return state.parts.get((self.kind, ""), self.nothing)


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
    users: tuple[tuple[str, str], ...] = ()
    """Machine and the user to log in as, where a person has changed it."""
    profile: str = "demo"
    options: tuple[tuple[str, str], ...] = ()
    """Options (and ``model``, ``dataset``) that differ from the profile, as text."""
    preference: str = "fastest"
    strategy: str = ""
    """``RankedCandidate.identity`` of the chosen way; empty: the recommended one."""
    interval: int = 0
    """Chosen H; 0: as recommended."""
    save_as: str = ""
    """Name of the profile to save; empty: one is made up."""

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of new host keys that the person accepted."""
        return tuple(dict.fromkeys(fingerprint for _, fingerprint in self.trusted))

    @property
    def job(self) -> JobAnswers:
        return JobAnswers(self.profile, self.options)


@dataclass(frozen=True)
class PlanRequest:
    """Everything a plan is made of."""

    machines: tuple[MachineRow, ...]
    """That take part; this computer alone or others with or without it."""
    answers: Answers
    chosen: RankedCandidate | None = None
    """With its interval as the person left it; ``None``: nothing was predicted."""
    planning: Any = field(default=None, repr=False, compare=False)
    """``StrategyRanking.planning`` of the forecast that ``chosen`` is from."""
    measure: bool = False
    """A person asked for new figures: what was measured before does not do."""


@dataclass(frozen=True)
class WizardState:
    """One moment of the set-up."""

    step: Step = Step.HOME
    answers: Answers = Answers()
    machines: DiscoveredMachines = DiscoveredMachines()
    parts: Mapping[tuple[TaskKind, str], StatePart[Any]] = field(default_factory=dict)
    """By kind and key; :mod:`app.wizard.dependencies` says what each depends on."""
    orders: tuple[ServiceTask, ...] = ()
    """What a person asked for and is not begun."""
    under_way: tuple[tuple[ServiceTask, str], ...] = ()
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
    preselected: tuple[str, ...] | None = ()
    """Machines that were picked by themselves, once; ``None``: a profile says which take part."""

    home = _PartOf(TaskKind.HOME, Home())
    doctor = _PartOf[tuple[Any, ...]](TaskKind.DOCTOR, ())
    """Findings about this computer; empty: not asked."""
    examined = _PartOf[Mapping[str, tuple[Any, ...]]](TaskKind.CHECKS, {})
    """Findings by machine."""
    links = _PartOf[tuple[Any, ...]](TaskKind.LINKS, ())
    """``PairFigures`` of every two members."""
    job = _PartOf(TaskKind.JOB, JobForm())
    data = _PartOf(TaskKind.DATA, DataSummary())
    fits = _PartOf[tuple[Fit, ...]](TaskKind.FITS, ())
    strategy = _PartOf(TaskKind.FORECAST, StrategyRanking())
    moved = _PartOf[RankedCandidate | None](TaskKind.INTERVAL, None)
    """The chosen way with the H that the person wants of it."""
    plan = _PartOf(TaskKind.PLAN, Plan())
    launch = _PartOf(TaskKind.LAUNCH, LaunchProgress())
    repairs = _PartOf[Mapping[str, str]](TaskKind.REPAIR, {})
    """The last line about the installation on each machine, by its name."""

    # ------------------------------------------------------------------------------------------------- what is known

    @property
    def busy(self) -> tuple[str, ...]:
        """Work in progress, in words: for a spinner."""
        return tuple(dict.fromkeys(words for _, words in self.under_way))

    @property
    def tasks(self) -> tuple[ServiceTask, ...]:
        """What was asked for and is not done."""
        return (*self.orders, *(task for task, _ in self.under_way))

    def is_under_way(self, kind: TaskKind, key: str = "") -> bool:
        return any((task.kind, task.key) == (kind, key) for task in self.tasks)

    @property
    def picked(self) -> tuple[MachineRow, ...]:
        """The machines that were chosen and are known, this computer first."""
        rows = {row.key: row for row in self.machines.rows}
        users = dict(self.answers.users)
        chosen = [rows[key].reached_as(users.get(key, "")) for key in self.answers.picked if key in rows]
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
    def unequipped(self) -> bool:
        """Whether this computer takes part and has no packages to train with yet."""
        return any(row.here and row.unequipped for row in self.picked)

    @property
    def access(self) -> tuple[Access, ...]:
        """The way to each picked machine but this computer."""
        rows = [(row, self.part(TaskKind.ACCESS, row.key)) for row in self.picked if not row.here]
        return tuple(Access(row.key, row.name, part.value, **self._shown(row, part)) for row, part in rows)

    def access_of(self, key: str) -> Access | None:
        """Return the way to one picked machine."""
        return next((row for row in self.access if row.key == key), None)

    def _shown(self, row: MachineRow, assessment: Assessment) -> dict[str, Any]:
        """Return how a picked machine stands; one that was left out is skipped, whatever was found."""
        status = ItemStatus.SKIPPED if row.key in self.answers.skipped else assessment.status
        return {"status": status, "words": assessment.words, "cause": assessment.cause, "fix": assessment.fix}

    @property
    def under_repair(self) -> frozenset[str]:
        """Machines that are being fixed, or are about to be."""
        repairs = [task.inputs for task in self.tasks if task.kind is TaskKind.REPAIR]
        return frozenset(key for keys in repairs if isinstance(keys, tuple) for key in keys)

    @property
    def checks(self) -> tuple[Check, ...]:
        """What was found on each picked machine."""
        return tuple(self._check(row) for row in self.picked)

    def _check(self, row: MachineRow) -> Check:
        examined, findings = self.examined, self.examined.value.get(row.key)
        assessment: Assessment = examined if examined.status is not ItemStatus.OK else Assessment()
        if examined.status is ItemStatus.OK and findings is not None:
            assessment = of_findings(findings)
        if row.key in self.under_repair:
            assessment = replace(assessment, status=ItemStatus.WORKING, words="fixing")
        return Check(row.key, row.name, findings or (), **self._shown(row, assessment))

    @property
    def ways(self) -> tuple[RankedCandidate, ...]:
        """The ways to train, the best first, the chosen one with the H that was asked for."""
        base, moved = self.moved.inputs, self.moved.value
        of = base[0] if moved is not None and isinstance(base, tuple) else None
        return tuple(moved if moved is not None and way == of else way for way in self.strategy.value.ways)

    @property
    def chosen(self) -> RankedCandidate | None:
        """The way to train that will be taken."""
        candidates, identity = self.ways, self.answers.strategy
        named = next((way for way in candidates if way.identity == identity), None)
        return named or next((way for way in candidates if way.recommended), candidates[0] if candidates else None)

    @property
    def saved(self) -> bool:
        """Whether the files of the Plan as it is shown are written, so that its command works."""
        return (TaskKind.SAVE, "") in self.parts and self.part(TaskKind.SAVE).inputs == self.plan.inputs

    @property
    def started(self) -> bool:
        """Whether a run was started from this set-up, and trains or has trained."""
        return self.launch.status is ItemStatus.OK and bool(self.launch.value.run)

    @property
    def request(self) -> PlanRequest:
        """Everything that a plan for these answers is made of."""
        ranking = self.strategy.value
        return PlanRequest(self.members, self.answers, self.chosen, ranking.planning, ranking.measure)

    def presence_of(self, profile: KnownProfile) -> tuple[Presence, ...]:
        """Return the machines of a profile, each with whether it is here."""
        if profile.name in self.machines.presence:
            return self.machines.presence[profile.name]
        # saved since the search began
        seen = {(row.entry.host, row.entry.port) for row in self.machines.rows if row.status is ItemStatus.OK}
        return tuple(Presence(m.name, (m.host, m.port) in seen or None, not m.is_local) for m in profile.machines)

    # --------------------------------------------------------------------------------------------------- the next one

    def answering(self, **changes: Any) -> WizardState:
        """Return it with other answers."""
        return replace(self, answers=replace(self.answers, **changes))

    def noting(self, text: str) -> WizardState:
        """Return it with a line about the last action."""
        return replace(self, notice=text)

    def ordering(self, kind: TaskKind, key: str = "", inputs: object = None) -> WizardState:
        """Return it with something to be asked for."""
        task = ServiceTask(kind, key, inputs)
        return self if task in self.tasks else replace(self, orders=(*self.orders, task))

    def part(self, kind: TaskKind, key: str = "") -> StatePart[Any]:
        return self.parts.get((kind, key)) or self.empty(kind)

    def empty(self, kind: TaskKind) -> StatePart[Any]:
        """Return a part as it is before anything was found."""
        empty = {part.kind: part.nothing for part in vars(WizardState).values() if isinstance(part, _PartOf)}
        return empty.get(kind) or StatePart(None)

    def putting(
        self, kind: TaskKind, key: str = "", state_part: StatePart[Any] | None = None, **changes: Any
    ) -> WizardState:
        """Return it with another part, or with changes of the one that it has."""
        return replace(self, parts={**self.parts, (kind, key): replace(state_part or self.part(kind, key), **changes)})


@dataclass(frozen=True)
class Transition:
    """A change of the set-up that the machines' side reports: a rule with its arguments."""

    rule: Callable[..., WizardState]
    arguments: tuple[object, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict)

    def on(self, state: WizardState) -> WizardState:
        """Return the state after it, not yet settled."""
        return self.rule(state, *self.arguments, **self.named)


class Action(Transition):
    """Something that a person does."""
