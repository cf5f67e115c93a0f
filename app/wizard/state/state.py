"""State of the guided set-up: the user's answers, and the parts computed from them, for screens and prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from app.wizard.state.answers import Answers as Answers
from app.wizard.state.answers import PlanRequest as PlanRequest
from app.wizard.state.assessment import named, of_findings
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.records import (
    Access,
    Assessment,
    CandidateRow,
    Check,
    DataSummary,
    DiscoveredMachines,
    Fit,
    Home,
    ItemStatus,
    JobForm,
    KnownProfile,
    MachineRow,
    PlanPreview,
    Presence,
    StrategyRanking,
)

T = TypeVar("T")


class Step(str, Enum):
    """One screen of the set-up."""

    question: str
    """The decision that the user makes there, in one line."""

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
        """Title in the breadcrumb and at the head of a screen."""
        return self.capitalize()


ORDER = tuple(Step)
BETWEEN_MACHINES = frozenset({Step.ACCESS, Step.CHECKS, Step.LINKS})
"""Steps about machines reached over the network: not needed if this computer trains alone."""


def visited(needless: Collection[Step] = ()) -> tuple[Step, ...]:
    """Return the steps that are shown: all but those in which there is nothing to decide."""
    return tuple(step for step in ORDER if step not in needless)


def after(step: Step, needless: Collection[Step] = ()) -> Step:
    """Return the next step that is shown; the last step is followed by itself."""
    return next((other for other in visited(needless) if ORDER.index(other) > ORDER.index(step)), ORDER[-1])


def before(step: Step, needless: Collection[Step] = ()) -> Step:
    """Return the previous step that is shown; the first step is preceded by itself."""
    return next((other for other in reversed(visited(needless)) if ORDER.index(other) < ORDER.index(step)), ORDER[0])


# ----------------------------------------------------------------------------------------------------- tasks and parts


class TaskKind(str, Enum):
    """Kind of a request to the services; the value describes the work in progress."""

    HOME = "reading runs and profiles"
    DOCTOR = "checking this computer"
    SAVED_MACHINES = "reading the profile's machines"
    NEIGHBOURS = "asking the machines of this network"
    ACCESS = "connecting to a machine"
    APPROVAL = "storing an approval"
    INSTALL_KEY = "installing a key"
    CHECKS = "checking the machines"
    REPAIR = "installing packages"
    LINKS = "measuring links"
    JOB = "reading the profile"
    DATA = "reading the data"
    SELECTING = "making a data set of what can be read"
    FITS = "comparing the model with the machines' memory"
    FORECAST = "measuring machines"
    INTERVAL = "predicting"
    PLAN = "making the plan"
    SAVE = "saving"
    LAUNCH = "starting the run"


@dataclass(frozen=True)
class ServiceTask:
    """A request to the services."""

    kind: TaskKind
    key: str = ""
    """Key of a machine or name of a profile; empty if there is only one such task."""
    inputs: object = field(default=None, hash=False)
    """The answers it was started with: its result counts only while they hold."""


@dataclass(frozen=True)
class StatePart(Assessment, Generic[T]):
    """A part of the state that the services compute from the answers: its progress and result."""

    value: T
    progress: tuple[str, ...] = ()
    """Last lines of its progress."""
    inputs: object = field(default=None, repr=False)
    """The answers it was computed from: for other answers it is computed anew."""
    failure: str = ""
    """Identifier of why it failed last: the ``cause`` of the error; empty: it has none."""

    def outdated(self) -> StatePart[T]:
        """Return the part as waiting to be recomputed; its current value stays on the screen meanwhile."""
        return StatePart(self.value, inputs=self.inputs)


class _PartOf(Generic[T]):
    """Descriptor of a part of the state; ``empty`` is its value before the first result."""

    def __init__(self, kind: TaskKind, empty: T) -> None:
        self.kind, self.nothing = kind, StatePart(empty)

    def __get__(self, state: WizardState, owner: type[WizardState]) -> StatePart[T]:
        return state.parts.get((self.kind, ""), self.nothing)


@dataclass(frozen=True)
class WizardState:
    """The set-up at one moment."""

    step: Step = Step.HOME
    answers: Answers = Answers()
    machines: DiscoveredMachines = DiscoveredMachines()
    parts: Mapping[tuple[TaskKind, str], StatePart[Any]] = field(default_factory=dict)
    """By kind and key; :mod:`app.wizard.state.dependencies` defines what each depends on."""
    orders: tuple[ServiceTask, ...] = ()
    """Tasks ordered by the user that have not been started."""
    deferred: tuple[ServiceTask, ...] = ()
    """Tasks ordered by the user before what they need was there (:mod:`app.wizard.state.deferred`)."""
    under_way: tuple[tuple[ServiceTask, str], ...] = ()
    """Tasks in progress, each with a description of its work."""
    notice: str = ""
    """One line about the last action, mostly why it could not be carried out. The next action clears it."""
    log: tuple[str, ...] = ()
    """Last lines about work on the machines; contains no secret."""
    logged: int = 0
    """Number of lines ever added to the log."""
    reached: Step = Step.HOME
    """The furthest step that was shown: ``go_to`` leads to any step up to it."""
    pinned: tuple[MachineRow, ...] = ()
    """Typed machines and those of a saved profile, shown even while they are not discovered."""
    preselected: tuple[str, ...] | None = ()
    """Keys of machines that were selected automatically, each once; ``None``: a profile names the machines."""

    home = _PartOf(TaskKind.HOME, Home())
    doctor = _PartOf[tuple[Any, ...]](TaskKind.DOCTOR, ())
    """Findings about this computer; empty: not checked."""
    examined = _PartOf[Mapping[str, tuple[Any, ...]]](TaskKind.CHECKS, {})
    """Findings by machine."""
    links = _PartOf[tuple[Any, ...]](TaskKind.LINKS, ())
    """``PairFigures`` of every pair of members."""
    job = _PartOf(TaskKind.JOB, JobForm())
    data = _PartOf(TaskKind.DATA, DataSummary())
    fits = _PartOf[tuple[Fit, ...]](TaskKind.FITS, ())
    strategy = _PartOf(TaskKind.FORECAST, StrategyRanking())
    moved = _PartOf[CandidateRow | None](TaskKind.INTERVAL, None)
    """The chosen candidate plan with the sync interval that the user set."""
    plan = _PartOf(TaskKind.PLAN, PlanPreview())
    launch = _PartOf(TaskKind.LAUNCH, LaunchProgress())
    repairs = _PartOf[Mapping[str, str]](TaskKind.REPAIR, {})
    """Last line about the installation on each machine, by its name."""

    @property
    def busy(self) -> tuple[str, ...]:
        """Descriptions of work in progress, for a spinner."""
        return tuple(dict.fromkeys(words for _, words in self.under_way))

    @property
    def tasks(self) -> tuple[ServiceTask, ...]:
        """Tasks that were requested and are not finished."""
        return (*self.orders, *(task for task, _ in self.under_way))

    def is_under_way(self, kind: TaskKind, key: str = "") -> bool:
        return any((task.kind, task.key) == (kind, key) for task in self.tasks)

    @property
    def listed(self) -> tuple[MachineRow, ...]:
        """All machines that are known, each by the name that it has told at its login."""
        return tuple(named(row, self.part(TaskKind.ACCESS, row.key).value) for row in self.machines.rows)

    @property
    def picked(self) -> tuple[MachineRow, ...]:
        """The selected machines that are known, this computer first."""
        rows = {row.key: row for row in self.listed}
        users = dict(self.answers.users)
        chosen = [rows[key].reached_as(users.get(key, "")) for key in self.answers.picked if key in rows]
        return tuple(sorted(chosen, key=lambda row: not row.here))

    @property
    def members(self) -> tuple[MachineRow, ...]:
        """The selected machines that were not skipped."""
        return tuple(row for row in self.picked if row.key not in self.answers.skipped)

    @property
    def left_out(self) -> tuple[MachineRow, ...]:
        """The selected machines that this run goes without."""
        return tuple(row for row in self.picked if row.key in self.answers.skipped)

    @property
    def far(self) -> bool:
        """Whether a machine other than this computer was selected: only then there is access to check."""
        return any(not row.here for row in self.picked)

    @property
    def needless(self) -> frozenset[Step]:
        """Steps with nothing to decide: Links and Strategy for a single machine; for this computer alone also Access
        and Checks, unless packages have to be installed, or a Python that was named to be approved."""
        needed = {Step.CHECKS: lambda row: row.here and row.unequipped, Step.ACCESS: lambda row: row.other_python}
        here = {step for step, is_needed in needed.items() if any(map(is_needed, self.picked))}
        between = BETWEEN_MACHINES if not self.far else frozenset[Step]()
        return between - here | ({Step.LINKS, Step.STRATEGY} if len(self.members) < 2 else set())

    @property
    def access(self) -> tuple[Access, ...]:
        """The login to each selected machine other than this computer, or of this one the use of a named Python."""
        rows = [(row, self.part(TaskKind.ACCESS, row.key)) for row in self.picked if not row.here or row.other_python]
        return tuple(Access(row.key, row.name, part.value, **self._shown(row, part)) for row, part in rows)

    def access_of(self, key: str) -> Access | None:
        """Return the login to one selected machine."""
        return next((row for row in self.access if row.key == key), None)

    def _shown(self, row: MachineRow, assessment: Assessment) -> dict[str, Any]:
        """Return the assessment of a selected machine; a skipped one has that status whatever was found."""
        status = ItemStatus.SKIPPED if row.key in self.answers.skipped else assessment.status
        return {"status": status, "words": assessment.words, "cause": assessment.cause, "fix": assessment.fix}

    @property
    def under_repair(self) -> frozenset[str]:
        """Keys of machines whose repair was requested or is in progress."""
        repairs = [task.inputs for task in self.tasks if task.kind is TaskKind.REPAIR]
        return frozenset(key for keys in repairs if isinstance(keys, tuple) for key in keys)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The findings about each selected machine."""
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
    def ways(self) -> tuple[CandidateRow, ...]:
        """The candidate plans, best first; the chosen one has the requested sync interval."""
        base, moved = self.moved.inputs, self.moved.value
        of = base[0] if moved is not None and isinstance(base, tuple) else None
        return tuple(moved if moved is not None and way == of else way for way in self.strategy.value.ways)

    @property
    def chosen(self) -> CandidateRow | None:
        """The candidate plan that will be used."""
        candidates, identity = self.ways, self.answers.strategy
        named = next((way for way in candidates if way.identity == identity), None)
        return named or next((way for way in candidates if way.recommended), candidates[0] if candidates else None)

    @property
    def saved(self) -> bool:
        """Whether the files of the plan as shown are written, so that its command works."""
        return (TaskKind.SAVE, "") in self.parts and self.part(TaskKind.SAVE).inputs == self.plan.inputs

    @property
    def started(self) -> bool:
        """Whether this set-up has started a run, which may have ended since."""
        return self.launch.status is ItemStatus.OK and bool(self.launch.value.run)

    @property
    def request(self) -> PlanRequest:
        """Everything that a plan for these answers is made from."""
        ranking = self.strategy.value
        handle, measure = ranking.planning, ranking.measure
        return PlanRequest(self.members, self.answers, self.chosen, handle, measure, self.left_out)

    def presence_of(self, profile: KnownProfile) -> tuple[Presence, ...]:
        """Return the machines of a profile, each with whether it is online."""
        if profile.name in self.machines.presence:
            return self.machines.presence[profile.name]
        # the profile was saved after the search began
        seen = {(row.entry.host, row.entry.port) for row in self.machines.rows if row.status is ItemStatus.OK}
        return tuple(Presence(m.name, (m.host, m.port) in seen or None, not m.is_local) for m in profile.machines)

    # ---------------------------------------------------------------------------------------------------- transitions

    def answering(self, **changes: Any) -> WizardState:
        """Return the state with other answers."""
        return replace(self, answers=replace(self.answers, **changes))

    def noting(self, text: str) -> WizardState:
        """Return the state with a notice about the last action."""
        return replace(self, notice=text)

    def ordering(self, kind: TaskKind, key: str = "", inputs: object = None) -> WizardState:
        """Return the state with a task to be started; unchanged if the task is requested already."""
        task = ServiceTask(kind, key, inputs)
        return self if task in self.tasks else replace(self, orders=(*self.orders, task))

    def part(self, kind: TaskKind, key: str = "") -> StatePart[Any]:
        return self.parts.get((kind, key)) or self.empty(kind)

    def empty(self, kind: TaskKind) -> StatePart[Any]:
        """Return a part as it is before the first result."""
        empty = {part.kind: part.nothing for part in vars(WizardState).values() if isinstance(part, _PartOf)}
        return empty.get(kind) or StatePart(None)

    def putting(
        self, kind: TaskKind, key: str = "", state_part: StatePart[Any] | None = None, **changes: Any
    ) -> WizardState:
        """Return the state with a part replaced, or with changes to the current one."""
        return replace(self, parts={**self.parts, (kind, key): replace(state_part or self.part(kind, key), **changes)})


@dataclass(frozen=True)
class Transition:
    """A change of the state: a rule with its arguments."""

    rule: Callable[..., WizardState]
    arguments: tuple[object, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict)

    def on(self, state: WizardState) -> WizardState:
        """Return the state after the change, not yet settled."""
        return self.rule(state, *self.arguments, **self.named)


class Action(Transition):
    """A change made by the user."""
