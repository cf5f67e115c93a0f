"""Which parts of the state still stand after a change of answers, and what is to be asked for at the step shown.

Every part (*slot*) remembers the answers it was worked out for. :func:`settle` throws away what was worked out for
others, so that going back changes nothing, and changing an answer asks anew for just what depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from app.wizard.observations import Kind, Task
from app.wizard.state import AccessRow, CheckRow, DataRow, FitRow, MachineRow, Plan, Status, Strategy, WizardState
from app.wizard.state import Links as LinksState
from app.wizard.steps import Step

GOOD = (Status.OK, Status.WARNING)
_OF_THE_DATA = (
    "model", "dataset", "dataset_path", "task", "text_column", "long_audio", "max_broken_share", "block_size"
)  # fmt: skip
"""Options on which the findings about the data depend."""


def stamp(state: WizardState, kind: Kind, key: str = "") -> object:
    """Return the answers on which a part of the state depends."""
    answers = state.answers
    if kind is Kind.ACCESS:
        return next((_way(state, row) for row in state.picked if row.key == key), None)
    if kind is Kind.CHECKS:
        return tuple((row.key, row.address, row.port, row.user) for row in state.picked)
    if kind is Kind.LINKS:
        return _members(state)
    if kind is Kind.JOB:
        return answers.profile, answers.options
    if kind is Kind.DATA:
        return answers.profile, tuple(pair for pair in answers.options if pair[0] in _OF_THE_DATA)
    if kind is Kind.FITS:
        return _members(state), answers.profile, answers.options
    if kind is Kind.FORECAST:
        return _members(state), answers.profile, answers.options, answers.preference
    if kind is Kind.INTERVAL:
        return _interval(state)
    if kind is Kind.PLAN:
        chosen = state.chosen
        way = (chosen.identity, chosen.interval) if chosen is not None else ()
        return stamp(state, Kind.FORECAST), way, state.strategy.status, answers.save_as
    return None


def _way(state: WizardState, row: MachineRow) -> object:
    return row.address, row.port, row.user, tuple(pair for pair in state.answers.trusted if pair[0] == row.key)


def _members(state: WizardState) -> tuple[object, ...]:
    return tuple((row.key, row.address, row.port, row.user) for row in state.members)


def _interval(state: WizardState) -> tuple[str, int]:
    """Return the chosen way and the H that the person wants of it."""
    chosen = state.chosen
    if chosen is None or not chosen.periodic:
        return "", 0
    return chosen.identity, state.answers.interval or chosen.best_interval


def needs_no_figures(state: WizardState) -> bool:
    """Whether only this computer trains, and nobody asked how fast: nothing to choose from, nothing to wait for."""
    return len(state.members) == 1 and state.members[0].here and not state.strategy.measure


# -------------------------------------------------------------------------------------------------------------- settle


def settle(state: WizardState) -> WizardState:
    """Return the state with every part that its answers no longer fit put back to ``waiting``."""
    state = _settle_access(state)
    for kind, reset in _RESETS:
        wanted = stamp(state, kind)
        if dict(state.made_for).get(kind.value) != wanted:
            state = _stamped(reset(state), kind.value, wanted)
    return _settle_skipped_checks(state)


def _stamped(state: WizardState, name: str, wanted: object) -> WizardState:
    return replace(state, made_for=tuple({**dict(state.made_for), name: wanted}.items()))


def _settle_access(state: WizardState) -> WizardState:
    """One row for each far machine that was picked; anew where the way to it is another."""
    known = {row.key: row for row in state.access}
    made_for = dict(state.made_for)
    rows = []
    for machine in state.picked:
        if machine.here:
            continue
        slot, wanted = f"{Kind.ACCESS.value} {machine.key}", stamp(state, Kind.ACCESS, machine.key)
        row = known.get(machine.key)
        if row is None or made_for.get(slot) != wanted:
            row = AccessRow(machine.key, machine.name)
            state = _stamped(state, slot, wanted)
        out = machine.key in state.answers.skipped
        if out != (row.status is Status.SKIPPED):
            row = replace(row, status=Status.SKIPPED) if out else AccessRow(machine.key, machine.name)
        rows.append(row if row.name == machine.name else replace(row, name=machine.name))
    return state if tuple(rows) == state.access else replace(state, access=tuple(rows))


def _settle_skipped_checks(state: WizardState) -> WizardState:
    """What was found on the others stands when a machine is left out."""
    rows = []
    for row in state.checks:
        out = row.key in state.answers.skipped
        if out != (row.status is Status.SKIPPED):
            row = replace(row, status=Status.SKIPPED) if out else CheckRow(row.key, row.name)
        rows.append(row)
    return state if tuple(rows) == state.checks else replace(state, checks=tuple(rows))


def _reset_checks(state: WizardState) -> WizardState:
    return replace(state, checks=tuple(CheckRow(row.key, row.name) for row in state.picked))


def _reset_links(state: WizardState) -> WizardState:
    return replace(state, links=LinksState(names=tuple(row.name for row in state.members)))


def _reset_job(state: WizardState) -> WizardState:
    """What is shown stays until the profile was read again: a form must not flicker."""
    return replace(state, job=replace(state.job, status=Status.WAITING, cause="", fix=""))


def _reset_data(state: WizardState) -> WizardState:
    return replace(state, job=replace(state.job, data=DataRow("data")))


def _reset_fits(state: WizardState) -> WizardState:
    rows = tuple(FitRow(row.key, row.name) for row in state.members)
    return replace(state, job=replace(state.job, fits=rows))


def _reset_strategy(state: WizardState) -> WizardState:
    return replace(state, strategy=Strategy())


def _reset_plan(state: WizardState) -> WizardState:
    """Where no way can be predicted, there is no plan for the same reason."""
    found = state.strategy
    if found.status is Status.FAILED:
        return replace(state, plan=Plan(status=Status.FAILED, cause=found.cause, fix=found.fix))
    return replace(state, plan=Plan())


_RESETS: tuple[tuple[Kind, Callable[[WizardState], WizardState]], ...] = (
    (Kind.CHECKS, _reset_checks),
    (Kind.LINKS, _reset_links),
    (Kind.JOB, _reset_job),
    (Kind.DATA, _reset_data),
    (Kind.FITS, _reset_fits),
    (Kind.FORECAST, _reset_strategy),
    (Kind.PLAN, _reset_plan),
)


# -------------------------------------------------------------------------------------------------------------- wanted


def wanted(state: WizardState) -> tuple[Task, ...]:
    """Return what is to be asked for: what the step shown needs and is still ``waiting``."""
    return tuple(Task(kind, key, stamp(state, kind, key)) for kind, key in _wanted(state))


def _wanted(state: WizardState) -> Iterator[tuple[Kind, str]]:
    step = state.step
    if step is Step.HOME and state.home.status is Status.WAITING:
        yield Kind.HOME, ""
    if step is Step.ACCESS:
        yield from ((Kind.ACCESS, row.key) for row in state.access if row.status is Status.WAITING)
    if step is Step.CHECKS and any(row.status is Status.WAITING for row in state.checks):
        yield Kind.CHECKS, ""
    if step is Step.LINKS and state.links.status is Status.WAITING and state.members:
        yield Kind.LINKS, ""
    if step in (Step.JOB, Step.STRATEGY, Step.PLAN) and state.job.status is Status.WAITING:
        yield Kind.JOB, ""
    if step is Step.JOB and state.job.status is not Status.WAITING:
        yield from _about_the_job(state)
    if step in (Step.STRATEGY, Step.PLAN) and state.members:
        yield from _about_the_way(state)


def _about_the_job(state: WizardState) -> Iterator[tuple[Kind, str]]:
    if state.job.data.status is Status.WAITING:
        yield Kind.DATA, ""
    if any(row.status is Status.WAITING for row in state.job.fits):
        yield Kind.FITS, ""


def _about_the_way(state: WizardState) -> Iterator[tuple[Kind, str]]:
    found = state.strategy
    if found.status is Status.WAITING:
        yield Kind.FORECAST, ""
    chosen = state.chosen
    _, interval = _interval(state)
    moving = chosen is not None and interval > 0 and chosen.interval != interval
    if found.status in GOOD and moving:
        yield Kind.INTERVAL, ""
    decided = (found.status in GOOD and not moving) or (needs_no_figures(state) and found.status is not Status.FAILED)
    if state.step is Step.PLAN and state.plan.status is Status.WAITING and decided:
        yield Kind.PLAN, ""
