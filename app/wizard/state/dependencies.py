"""The guided set-up as a pure function ``apply(state, change) -> state``, and the dependencies of its parts.

A change is a user action (:mod:`app.wizard.state.actions`) or an observation (:mod:`app.wizard.state.observations`).
Every part records the answers it was computed from. :func:`settle` resets the parts whose answers have changed, so
going back changes nothing, and changing an answer recomputes only what depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from app.wizard.state.records import GOOD, UNSETTLED, Access, AccessNeed, CandidateRow, Check, ItemStatus, MachineRow
from app.wizard.state.state import Action, ServiceTask, StatePart, Step, TaskKind, Transition, WizardState
from profiles.quantities import machine_text

C = TypeVar("C", bound=Transition)
P = ParamSpec("P")
_OF_THE_DATA = (
    "model", "dataset", "dataset_path", "task", "text_column", "long_audio", "max_broken_share", "block_size"
)  # fmt: skip
"""Options that affect the findings about the data set."""
SENT = "sent"
"""Key of the task that installs packages sent from this computer."""


def needs_no_figures(state: WizardState) -> bool:
    """Whether only this computer trains and the user requested no measurement, so that there is nothing to choose."""
    return len(state.members) == 1 and state.members[0].here and not state.strategy.value.measure


# -------------------------------------------------------------------------------------------------------------- inputs


DEPENDENT = (
    TaskKind.ACCESS, TaskKind.CHECKS, TaskKind.LINKS, TaskKind.JOB, TaskKind.DATA, TaskKind.FITS,
    TaskKind.FORECAST, TaskKind.INTERVAL, TaskKind.PLAN,
)  # fmt: skip
"""Parts that follow from answers, each after those it depends on; all other work is done at the user's request."""


def inputs(state: WizardState, kind: TaskKind, key: str = "") -> object:
    """Return the answers that a part depends on; ``None`` if it depends on none."""
    answers, members = state.answers, tuple(map(_login_of, state.members))
    match kind:
        case TaskKind.ACCESS:
            trusted = tuple(pair for pair in answers.trusted if pair[0] == key)
            return next(((*_login_of(row), trusted) for row in state.picked if row.key == key), None)
        case TaskKind.CHECKS:
            return tuple(map(_login_of, state.picked))
        case TaskKind.LINKS:
            return members
        case TaskKind.JOB:
            return answers.job
        case TaskKind.DATA:
            return answers.profile, tuple(pair for pair in answers.options if pair[0] in _OF_THE_DATA)
        case TaskKind.FITS:
            return members, answers.job
        case TaskKind.FORECAST:
            return members, answers.job, answers.preference
        case TaskKind.INTERVAL:
            return _interval(state)
        case TaskKind.PLAN:
            selection = (state.chosen.identity, state.chosen.interval) if state.chosen is not None else ()
            figures = state.strategy.status, state.strategy.value.measure
            left_out = tuple(row.key for row in state.left_out)
            return members, answers.job, answers.preference, selection, figures, answers.save_as, left_out
    return None


def is_current(state: WizardState, task: ServiceTask) -> bool:
    """Whether the answers with which a task was started still hold."""
    return task.kind not in DEPENDENT or task.inputs == inputs(state, task.kind, task.key)


def _login_of(row: MachineRow) -> tuple[object, ...]:
    return row.key, row.entry.host, row.entry.port, row.entry.user


def _interval(state: WizardState) -> tuple[CandidateRow, int] | None:
    """Return the chosen candidate plan as predicted and the requested sync interval, if they differ in it."""
    chosen, steps = state.chosen, state.answers.interval
    base = next((way for way in state.strategy.value.ways if chosen and way.index == chosen.index), None)
    return (base, steps) if base is not None and base.periodic and steps not in (0, base.interval) else None


# -------------------------------------------------------------------------------------------------------------- settle


def settle(state: WizardState) -> WizardState:
    """Return the state with every part whose answers have changed reset to ``waiting``."""
    for kind in DEPENDENT:
        for key in [row.key for row in state.access] if kind is TaskKind.ACCESS else [""]:
            current, part = inputs(state, kind, key), state.part(kind, key)
            if part.inputs != current:
                state = state.putting(kind, key, _fresh(state, kind, part, current))
    return state


def _fresh(state: WizardState, kind: TaskKind, old: StatePart[Any], current: object) -> StatePart[Any]:
    """Return a part that is to be computed. Forms keep their current values until then, so that they do not flicker."""
    if kind is TaskKind.PLAN and state.strategy.status is ItemStatus.FAILED:
        # if no candidate plan can be predicted, the plan fails for the same reason
        return replace(state.strategy, value=state.empty(kind).value, progress=(), words="", inputs=current)
    stays = kind is TaskKind.JOB
    if kind is TaskKind.INTERVAL and isinstance(old.inputs, tuple) and isinstance(current, tuple):
        stays = old.inputs[0] == current[0]  # the same candidate plan with another sync interval
    return replace(old.outdated() if stays else state.empty(kind), inputs=current)


def is_unsaved(state: WizardState) -> bool:
    """Whether the plan's command works only once its files are written."""
    return bool(state.plan.value.files) and not (state.saved or state.started)


# --------------------------------------------------------------------------------------------------------------- apply


def apply(state: WizardState, change: Transition) -> WizardState:
    """Return the state after a change. Never raises."""
    if isinstance(change, Action) and state.notice:
        state = replace(state, notice="")
    return settle(change.on(state))


def begin() -> WizardState:
    """Return the state of a newly opened set-up."""
    return settle(WizardState())


def as_transition(kind: type[C]) -> Callable[[Callable[Concatenate[WizardState, P], WizardState]], Callable[P, C]]:
    """Make a decorator: the rule is then called without the state, and returns a transition of this kind."""

    def wrap(rule: Callable[Concatenate[WizardState, P], WizardState]) -> Callable[P, C]:
        def transition(*words: P.args, **named: P.kwargs) -> C:
            return kind(rule, words, named)

        return transition

    return wrap


action, observation = as_transition(Action), as_transition(Transition)
"""Decorators for user actions, and for observations from services and discovery."""


# ------------------------------------------------------------------------------------------------------ tasks to start


def tasks_to_start(state: WizardState) -> tuple[ServiceTask, ...]:
    """Return the tasks to start: those that the user ordered, and waiting parts that the current step needs."""
    needed = (ServiceTask(kind, key, inputs(state, kind, key)) for kind, key in _needed(state))
    return (*state.orders, *needed)


def _needed(state: WizardState) -> Iterator[tuple[TaskKind, str]]:
    if state.step is Step.ACCESS:
        yield from ((TaskKind.ACCESS, row.key) for row in state.access if row.status is ItemStatus.WAITING)
    for kind in _NEEDED.get(state.step, ()):
        if state.part(kind).status is ItemStatus.WAITING and (kind not in _READY or _READY[kind](state)):
            yield kind, ""
    if state.step is Step.CHECKS and any(row.status is ItemStatus.WAITING for row in state.checks):
        yield TaskKind.CHECKS, ""


def _is_moving(state: WizardState) -> bool:
    return state.strategy.status in GOOD and _interval(state) is not None


def _is_decided(state: WizardState) -> bool:
    """Whether the candidate plan is settled, or there is none to choose."""
    moving = _is_moving(state) and state.moved.status in UNSETTLED
    alone = needs_no_figures(state) and state.strategy.status is not ItemStatus.FAILED
    return bool(state.members) and ((state.strategy.status in GOOD and not moving) or alone)


def _can_read(state: WizardState) -> bool:
    """Whether this computer reads data sets: at Checks it may still lack the packages."""
    return state.step is not Step.CHECKS or not any(row.unequipped for row in state.machines.rows)


def busy_here(state: WizardState) -> tuple[str, ...]:
    """Return descriptions of the work in progress, without the work of steps that are not shown."""
    needed = {**_NEEDED, Step.ACCESS: (TaskKind.ACCESS,), Step.CHECKS: (TaskKind.CHECKS,)}
    elsewhere = {kind for kinds in needed.values() for kind in kinds} - set(needed.get(state.step, ()))
    return tuple(dict.fromkeys(words for task, words in state.under_way if task.kind not in elsewhere))


_NEEDED = {
    Step.HOME: (TaskKind.HOME,),
    Step.CHECKS: (TaskKind.JOB, TaskKind.DATA),  # read while machines answer: Job then has them at once
    Step.LINKS: (TaskKind.LINKS,),
    Step.JOB: (TaskKind.JOB, TaskKind.DATA, TaskKind.FITS),
    Step.STRATEGY: (TaskKind.JOB, TaskKind.FORECAST, TaskKind.INTERVAL),
    Step.PLAN: (TaskKind.JOB, TaskKind.FORECAST, TaskKind.INTERVAL, TaskKind.PLAN),
}
_READY: Mapping[TaskKind, Callable[[WizardState], bool]] = {
    TaskKind.LINKS: lambda state: bool(state.members),
    TaskKind.DATA: lambda state: state.job.status is not ItemStatus.WAITING and _can_read(state),
    TaskKind.FITS: lambda state: state.job.status is not ItemStatus.WAITING and bool(state.members),
    TaskKind.FORECAST: lambda state: bool(state.members),
    TaskKind.INTERVAL: lambda state: bool(state.members) and _is_moving(state),
    TaskKind.PLAN: _is_decided,
}


# ------------------------------------------------------------------------------------------------------------ blockers

MEASURES = "copies code and data to {names} and measures the speed there"
"""What going on to Strategy, or to the Plan of a saved profile, does before the user confirms anything."""
_ASKED = {
    AccessNeed.TRUST: "compare its fingerprint and trust it, or skip it",
    AccessNeed.APPROVAL: "approve what its hosts file names, or skip it",
    AccessNeed.PASSWORD: "give its password once, or skip it",
}


def blockers(state: WizardState) -> tuple[str, ...]:
    """Return the reasons why ``go_on`` is blocked at this step; empty if it is not."""
    chosen = state.chosen
    match state.step:
        case Step.MACHINES:
            return () if state.picked else ("select at least one machine",)
        case Step.ACCESS:
            return _taking_part(state, state.access, "contacted")
        case Step.CHECKS:
            return _taking_part(state, state.checks, "checked")
        case Step.LINKS:
            return _not_done(state.links, "the links are being measured")
        case Step.JOB if state.job.status not in UNSETTLED:
            failed = [part.cause for part in (state.job, state.data) if part.status is ItemStatus.FAILED]
            return (*failed, *(f"{one.name}: {one.problem}" for one in state.job.value.options if one.problem))
        case Step.JOB:
            return ("the profile is being read",)
        case Step.STRATEGY if state.strategy.status in GOOD and chosen is not None and chosen.problem:
            return (f"this way cannot be taken: {chosen.problem}",)
        case Step.STRATEGY:
            return _not_done(state.strategy, "the machines are being measured")
        case Step.PLAN if not state.members and state.plan.status is not ItemStatus.FAILED:
            return ("no machine takes part",)
        case Step.PLAN:
            return _not_done(state.plan, "the plan is being made")
    return ()


def _not_done(state_part: StatePart[Any], doing: str) -> tuple[str, ...]:
    if state_part.status is ItemStatus.FAILED:
        return (state_part.cause,)
    return (doing,) if state_part.status in UNSETTLED else ()


def measures(state: WizardState) -> str:
    """Return a sentence about what leaving the Job step copies to other machines; empty if nothing is copied."""
    names = [machine_text(row.name) for row in state.members if not row.here]
    if not names or state.strategy.status is not ItemStatus.WAITING:
        return ""
    bring = MEASURES.format(names=" and ".join(names) if len(names) < 3 else f"{len(names)} machines")
    return f"Enter {bring}."


def _taking_part(state: WizardState, rows: Sequence[Access | Check], doing: str) -> tuple[str, ...]:
    """Return the reasons why the machines in ``rows`` that were not skipped block the step."""
    included = [row for row in rows if row.status is not ItemStatus.SKIPPED]
    needy = [row for row in included if isinstance(row, Access) and row.need is not AccessNeed.NOTHING]
    failed = [row for row in included if row.status is ItemStatus.FAILED and row not in needy]
    nobody = () if state.members else ("every selected machine was skipped: include one again, or select others",)
    return (
        *nobody,
        *(f"{row.name}: {_ASKED[row.need]}" for row in needy),
        *(f"{row.name}: {row.cause or row.label}; fix it, or skip it" for row in failed),
        *(f"{row.name} is still being {doing}" for row in included if row.status in UNSETTLED),
    )


# -------------------------------------------------------------------------------------------------------------- access


def logins_alike(state: WizardState, opened: Access) -> tuple[Access, ...]:
    """Return the machines that wait for a password of the same user as on one whose password was accepted."""
    user = opened.report.user if opened.report is not None else ""
    waiting = (row for row in state.access if row.need is AccessNeed.PASSWORD and row.key not in state.answers.skipped)
    return tuple(row for row in waiting if user and row.report is not None and row.report.user == user)


def same_password_question(alike: Sequence[Access]) -> str:
    """Return the question whether these machines have the password that another one has accepted."""
    names = " and ".join(row.name for row in alike) if len(alike) < 3 else f"{len(alike)} other machines"
    return f"Use the same password for {names}, too?"
