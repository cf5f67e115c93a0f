"""Orders given before what they need is there: saving waits for the plan, installing for the findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.wizard.state.dependencies import SENT, action, blockers, inputs
from app.wizard.state.records import UNSETTLED, ItemStatus
from app.wizard.state.state import ServiceTask, Step, TaskKind
from app.wizard.state.state import WizardState as State

IN_CLEAR = "unencrypted"
"""Text that the user types to accept unencrypted training traffic."""
_NOTHING_TO_INSTALL = "there is nothing that can be installed from here"


# -------------------------------------------------------------------------------------------------------------- saving


def why_not_confirmed(state: State, consent: str) -> tuple[str, ...]:
    """Return the reasons why the plan cannot be carried out; ``consent`` is what the user typed."""
    if state.step is not Step.PLAN:
        return ("there is no plan yet",)
    open_ = state.plan.value.in_clear if consent.strip().casefold() != IN_CLEAR else ()
    return (*blockers(state), *(f"not encrypted: {text}; nothing was started" for text in open_[:1]))


@action
def save_only(state: State, consent: str = "") -> State:
    """Write the profile and its files without starting a run, once the plan is made.

    Args:
        consent: :data:`IN_CLEAR`, required if the plan sends unencrypted training traffic.
    """
    if state.step is Step.PLAN and _is_plan_awaited(state):
        return _deferring(state, ServiceTask(TaskKind.SAVE), "saved as soon as the plan is made")
    reasons = why_not_confirmed(state, consent)
    return state.noting(reasons[0]) if reasons else state.ordering(TaskKind.SAVE, inputs=state.plan.inputs)


def _is_plan_awaited(state: State) -> bool:
    """Whether the plan as the answers are now is still being made."""
    statuses = state.plan.status, state.strategy.status
    if ItemStatus.FAILED in statuses or not state.members:
        return False
    is_outdated = state.plan.inputs != inputs(state, TaskKind.PLAN)
    return is_outdated or any(status in UNSETTLED for status in statuses)


# ---------------------------------------------------------------------------------------------------------- installing


@action
def fix(state: State, key: str) -> State:
    """Fix the safely fixable problems of one machine."""
    return _repair(state, (key,))


@action
def fix_all(state: State) -> State:
    """Fix the safely fixable problems of all machines."""
    return _repair(state)


@action
def send_packages(state: State) -> State:
    """Install missing packages on all machines from copies on this computer, for machines without internet access."""
    return _repair(state, source=SENT)


def _repair(state: State, only: Sequence[str] = (), source: str = "") -> State:
    """Install on these machines, or on all; while they are checked, once that is done."""
    rows = [row for row in state.checks if row.key in only or not only]
    fixable = [row.key for row in rows if row.fixable and row.status is not ItemStatus.SKIPPED]
    keys = tuple(key for key in fixable if key not in state.under_repair)  # two would write the same files
    if keys:
        return state.ordering(TaskKind.REPAIR, source, keys)
    if fixable or any(row.key in state.under_repair for row in rows):
        return state.noting("that is being installed already")
    if any(row.status in UNSETTLED for row in rows):
        return _deferring(
            state, ServiceTask(TaskKind.REPAIR, source, tuple(only)), "installed as soon as it is checked"
        )
    ready = all(row.status in (ItemStatus.OK, ItemStatus.SKIPPED) for row in rows)
    return state.noting("nothing is missing" if ready else _NOTHING_TO_INSTALL)


# --------------------------------------------------------------------------------------------------------- carried out


def _deferring(state: State, task: ServiceTask, notice: str) -> State:
    tasks = (*(other for other in state.deferred if other.kind is not task.kind), task)
    return replace(state, deferred=tasks).noting(notice)


def with_deferred(state: State) -> State:
    """Return the state with the deferred orders whose turn has come; those of a step that was left are dropped."""
    for task in state.deferred:
        if task.kind is TaskKind.SAVE:
            is_dropped, is_awaited = state.step is not Step.PLAN, _is_plan_awaited(state)
        else:
            is_dropped = state.step is not Step.CHECKS
            is_awaited = any(row.status in UNSETTLED for row in state.checks)
        if is_dropped or not is_awaited:
            state = replace(state, deferred=tuple(other for other in state.deferred if other != task))
            state = state if is_dropped else _carried_out(state, task)
    return state


def _carried_out(state: State, task: ServiceTask) -> State:
    if task.kind is TaskKind.REPAIR:
        keys = task.inputs if isinstance(task.inputs, tuple) else ()
        return _repair(state.noting(""), keys, task.key)
    failures = [part.cause for part in (state.strategy, state.plan) if part.status is ItemStatus.FAILED]
    reasons = (*failures, *why_not_confirmed(state, ""))
    state = state.noting(f"not saved: {reasons[0]}" if reasons else "")
    return state if reasons else state.ordering(TaskKind.SAVE, inputs=state.plan.inputs)
