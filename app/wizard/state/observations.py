"""Observations: results of service tasks, and events from discovery and a starting run, as rules from state to state.

A result for answers that no longer hold changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.wizard.state.assessment import THIS_NETWORK, of_pairs, of_report
from app.wizard.state.data_actions import STILL_READ, with_selection
from app.wizard.state.deferred import with_deferred
from app.wizard.state.dependencies import inputs, is_current, needs_no_figures, observation
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.neighbours import by_this_network, with_neighbours
from app.wizard.state.records import (
    FINE,
    GOOD,
    AccessNeed,
    Assessment,
    DataSummary,
    DiscoveredMachines,
    ItemStatus,
    MachineRow,
)
from app.wizard.state.state import ServiceTask, StatePart, Step, TaskKind
from app.wizard.state.state import WizardState as State
from distributed.discovery.sightings import SightingOrigin
from training.numerics.schedule import IN_EACH_QUARTER, few_samples_remark, is_length_open

_LONGEST_LOG = 400
_PARTLESS = (
    TaskKind.SAVED_MACHINES, TaskKind.NEIGHBOURS, TaskKind.APPROVAL, TaskKind.INSTALL_KEY, TaskKind.REPAIR,
    TaskKind.SELECTING,
)  # fmt: skip
"""Tasks without a part of their own: their results change other parts."""
_ON_MACHINES = (TaskKind.CHECKS, TaskKind.LINKS, TaskKind.FORECAST, TaskKind.PLAN)
"""Tasks that use the selected machines."""
_SHOWN_LINES = 12


# ------------------------------------------------------------------------------------------------- start, log, failure


@observation
def begun(state: State, task: ServiceTask) -> State:
    """A task was started."""
    state = replace(state, orders=tuple(order for order in state.orders if order != task))
    if not is_current(state, task):
        return state
    words: str = task.kind.value
    if task.kind is TaskKind.ACCESS and (row := state.access_of(task.key)) is not None:
        words = f"connecting to {row.name}"
    elif task.kind is TaskKind.NEIGHBOURS and task.inputs:
        words = "asking every address for SSH; esc ends it and keeps those that have answered"
    elif task.kind is TaskKind.FORECAST and needs_no_figures(state):
        words = TaskKind.DOCTOR.value
    state = replace(state, under_way=(*state.under_way, (task, words)))
    if task.kind in _PARTLESS:
        return _with_repairs_of_others(state, task) if task.kind is TaskKind.REPAIR else state
    words = "connecting" if task.kind is TaskKind.ACCESS else ""
    return state.putting(task.kind, task.key, status=ItemStatus.WORKING, words=words)


def _with_repairs_of_others(state: State, task: ServiceTask) -> State:
    """Forget how earlier repairs of the machines of this one went."""
    keys = task.inputs if isinstance(task.inputs, tuple) else ()
    names = {row.name for row in state.checks if row.key in keys}
    others = {name: line for name, line in state.repairs.value.items() if name not in names}
    return state.putting(TaskKind.REPAIR, value=others)


@observation
def log_line(state: State, task: ServiceTask, line: str) -> State:
    """A task reported a line of progress."""
    state = replace(state, log=(*state.log, line)[-_LONGEST_LOG:], logged=state.logged + 1)
    if task.kind is TaskKind.REPAIR and (machine := getattr(line, "machine", "")):
        return state.putting(TaskKind.REPAIR, value={**state.repairs.value, machine: line})
    if task.kind is TaskKind.SELECTING:
        under_way = [
            (other, f"{task.kind.value}: {line}" if other == task else words) for other, words in state.under_way
        ]
        return replace(state, under_way=tuple(under_way))
    if task.kind in _PARTLESS or not is_current(state, task):
        return state
    lines = _with_line(state.part(task.kind, task.key).progress, line, {row.name for row in state.machines.rows})
    return state.putting(task.kind, task.key, progress=tuple(lines)[-_SHOWN_LINES:])


def _with_line(lines: Sequence[str], newest: str, machines: Collection[str]) -> Sequence[str]:
    """Return lines of progress with the ``newest``, which takes the place of the one of the same machine.

    A machine is named by the first word: the services call it by its own name, which its row may not have yet.
    """
    speaker, colon, _ = newest.partition(": ")
    if not colon or (" " in speaker and speaker not in machines) or speaker in ("error", "hint", "warning"):
        return (*lines, newest)
    replaced = [newest if line.startswith(f"{speaker}: ") else line for line in lines]
    return tuple(dict.fromkeys(replaced)) if newest in replaced else (*lines, newest)


@observation
def failed(state: State, task: ServiceTask, cause: str, fix: str = "", failure: str = "") -> State:
    """A task failed; ``failure`` is the ``cause`` of its error, an identifier."""
    return with_deferred(_with_failure(_at_rest(state, task), task, cause, fix, failure))


def _with_failure(state: State, task: ServiceTask, cause: str, fix: str, failure: str) -> State:
    if not is_current(state, task):
        return state
    noted = state.noting(f"{cause} ({fix})" if fix else cause)
    if task.kind is TaskKind.REPAIR:
        return _to_be_examined(noted)
    if task.kind is TaskKind.INTERVAL:
        return _as_before(noted)
    if task.kind is TaskKind.SELECTING:  # so nothing can be read of it, or nothing be written
        data = replace(state.data, value=replace(state.data.value, salvageable=False), cause=cause, fix=fix)
        return noted.putting(TaskKind.DATA, state_part=data)
    if task.kind in (
        TaskKind.DOCTOR, TaskKind.SAVED_MACHINES, TaskKind.NEIGHBOURS, TaskKind.APPROVAL, TaskKind.SAVE
    ):  # fmt: skip
        return noted
    kind = TaskKind.ACCESS if task.kind is TaskKind.INSTALL_KEY else task.kind
    return state.putting(kind, task.key, status=ItemStatus.FAILED, words="", cause=cause, fix=fix, failure=failure)


def _at_rest(state: State, task: ServiceTask) -> State:
    remaining = tuple(pair for pair in state.under_way if pair[0] != task)
    return state if remaining == state.under_way else replace(state, under_way=remaining)


def _as_before(state: State) -> State:
    """Return the state with the previous sync interval after the requested one was rejected."""
    chosen = state.chosen
    if chosen is None or chosen.interval == chosen.best_interval:
        return state.answering(interval=0)
    state = state.answering(interval=chosen.interval)
    return state.putting(TaskKind.INTERVAL, status=ItemStatus.OK, inputs=inputs(state, TaskKind.INTERVAL))


# ------------------------------------------------------------------------------------------------------------- results


@observation
def done(state: State, task: ServiceTask, result: Any) -> State:
    """A task finished; ``result`` has the return type of its service method."""
    return with_deferred(_with_outcome(_at_rest(state, task), task, result))


def _with_outcome(state: State, task: ServiceTask, result: Any) -> State:
    if not is_current(state, task):
        return state
    row = state.access_of(task.key)
    if task.kind is TaskKind.DATA and state.notice == STILL_READ:
        state = state.noting("")
    match task.kind:
        case TaskKind.SAVED_MACHINES:
            return _with_machines_of(state, task.key, result)
        case TaskKind.ACCESS if (
            row is None or row.status is ItemStatus.OK or state.is_under_way(TaskKind.INSTALL_KEY, task.key)
        ):
            return state  # this login attempt was made before the key was installed
        case TaskKind.INSTALL_KEY if row is not None:
            words = "accepts the login: a key is installed there" if result.ok else result.problem
            access_task = ServiceTask(TaskKind.ACCESS, task.key, inputs(state, TaskKind.ACCESS, task.key))
            state = _with_result(state, access_task, result)
            named_row = state.access_of(task.key) or row  # by the name that it has told at this login
            return state.noting(f"{named_row.name}: {words}")
        case TaskKind.INSTALL_KEY:
            return state
        case TaskKind.APPROVAL:
            return _to_be_contacted(state)
        case TaskKind.NEIGHBOURS:
            return with_neighbours(state, result)
        case TaskKind.REPAIR:
            return _to_be_examined(state)
        case TaskKind.SELECTING:
            is_wanted = task.inputs == inputs(state, TaskKind.DATA)  # else another data set was chosen meanwhile
            return with_selection(state, result) if is_wanted else state
        case TaskKind.SAVE:
            return _with_result(state, task, result).noting(f"saved: {', '.join(result)}")
        case TaskKind.DATA if result.instead and _is_free(state):
            return _with_profile_that_hears(state, result)
        case TaskKind.DATA if result.epochs and is_length_open(dict(state.answers.options)):
            return _with_result(_with_epochs(state, result), task, result)
        case TaskKind.LAUNCH:
            return state.putting(
                TaskKind.LAUNCH, status=ItemStatus.OK, value=replace(state.launch.value, run=str(result))
            )
    return _with_result(state, task, result)


def _with_result(state: State, task: ServiceTask, result: Any) -> State:
    judged: Mapping[TaskKind, Callable[[Any], Assessment]] = {TaskKind.ACCESS: of_report, TaskKind.LINKS: of_pairs}
    assessment: Assessment = judged[task.kind](result) if task.kind in judged else getattr(result, "assessment", FINE)
    state_part = StatePart(
        result, progress=state.part(task.kind, task.key).progress, inputs=task.inputs, **vars(assessment)
    )
    return state.putting(task.kind, task.key, state_part)


def _is_free(state: State) -> bool:
    """Whether the profile decides the model: one that the user has set is kept."""
    return "model" not in dict(state.answers.options)


def _with_profile_that_hears(state: State, data: DataSummary) -> State:
    """Switch to the profile whose model handles recordings of this length, and keep the language."""
    options_set = dict(state.answers.options)
    language = next((row.value for row in state.job.value.options if row.name == "language" and row.value), "")
    options = state.answers.options if "language" in options_set or not language else (
        *state.answers.options, ("language", language)
    )  # fmt: skip
    taken = state.answering(profile=data.instead, options=options)
    return taken.noting(f"{data.instead} is taken: the model of {state.answers.profile} does not hear such long clips")


def _with_epochs(state: State, data: DataSummary) -> State:
    """Take more passes over a data set for which those of the profile would hardly train."""
    profile_epochs = next((row.default for row in state.job.value.options if row.name == "epochs"), "")
    remark = few_samples_remark(data.samples, float(profile_epochs or 1), data.epochs)
    often = () if "eval_interval" in dict(state.answers.options) else (IN_EACH_QUARTER,)
    return state.answering(options=(*state.answers.options, ("epochs", data.epochs), *often)).noting(remark)


def _with_machines_of(state: State, profile: str, saved_rows: Iterable[MachineRow]) -> State:
    """Add and select the machines of a saved profile."""
    if state.answers.profile != profile:
        return state
    pinned = tuple({row.key: row for row in (*state.pinned, *saved_rows)}.values())
    rows = _with_pinned(state.machines.rows, saved_rows)
    picked = tuple(next((row.key for row in rows if _is_same_machine(one, row)), one.key) for one in saved_rows)
    return replace(state, pinned=pinned, machines=replace(state.machines, rows=rows)).answering(picked=picked)


def _to_be_contacted(state: State) -> State:
    """Reset the log-ins that waited for an approval, and what has failed without it."""
    waiting = [(TaskKind.ACCESS, row.key) for row in state.access if row.need is AccessNeed.APPROVAL]
    waiting += [(kind, "") for kind in _ON_MACHINES if state.part(kind).status is ItemStatus.FAILED]
    for kind, key in waiting:
        fresh = replace(state.empty(kind), inputs=inputs(state, kind, key))
        state = state.putting(kind, key, state_part=fresh)
    return state


def _to_be_examined(state: State) -> State:
    """Reset the checks after a repair, whether it succeeded or not."""
    return state.putting(
        TaskKind.CHECKS, state_part=replace(state.empty(TaskKind.CHECKS), inputs=inputs(state, TaskKind.CHECKS))
    )


@observation
def launch_seen(state: State, launch: LaunchProgress) -> State:
    """A launch made progress; it has written the files of the plan by then."""
    state = state.putting(TaskKind.LAUNCH, value=launch)
    return state.putting(TaskKind.SAVE, inputs=state.plan.inputs) if state.step is Step.LAUNCH else state


# ----------------------------------------------------------------------------------------------------------- discovery


@observation
def watch_failed(state: State, cause: str, fix: str = "") -> State:
    """Discovery could not be started."""
    return replace(state, machines=replace(state.machines, advice=(cause, fix)))


@observation
def sighted(state: State, seen: DiscoveredMachines) -> State:
    """Discovery reported machines; this computer and those of the hosts file are selected automatically, once."""
    rows = _with_pinned(by_this_network(state, seen.rows), state.pinned)
    state = _follow_keys(replace(state, machines=replace(seen, rows=rows)), state.machines.rows)
    if state.preselected is None or state.step not in (Step.HOME, Step.MACHINES):
        return state
    fresh = [row for row in rows if _is_offered(row, seen.picks_all) and row.key not in state.preselected]
    if not fresh:
        return state
    picked = sorted({**dict.fromkeys(state.answers.picked), **{row.key: None for row in fresh}}, key=_order_in(rows))
    preselected = (*state.preselected, *(row.key for row in fresh))
    return replace(state, preselected=preselected).answering(picked=tuple(picked))


def _is_offered(row: MachineRow, picks_all: bool) -> bool:
    """Whether a row is selected automatically: this computer, or a machine of a hosts file that is online or waits for
    an approval at Access."""
    listed = picks_all or SightingOrigin.HOSTS_FILE.value in row.found_by
    return row.here or (listed and row.status in GOOD)


def _order_in(rows: Sequence[MachineRow]) -> Callable[[str], int]:
    """Return the sort key of a machine: this computer first, the others as listed."""
    places = {row.key: -1 if row.here else place for place, row in enumerate(rows)}
    return lambda key: places.get(key, len(rows))


def _with_pinned(rows: Iterable[MachineRow], pinned: Iterable[MachineRow]) -> tuple[MachineRow, ...]:
    """Return discovered rows, followed by typed and saved machines that were not discovered."""
    listed = tuple(rows)
    return (*listed, *(row for row in pinned if not any(_is_same_machine(row, other) for other in listed)))


def _is_same_machine(first: MachineRow, second: MachineRow) -> bool:
    if first.key in (second.key, *second.aliases) or (first.here and second.here):
        return True
    if first.fingerprint and second.fingerprint:
        return first.fingerprint == second.fingerprint
    here, there = first.entry, second.entry
    return not (here.is_local or there.is_local) and (here.host, here.port or 22) == (there.host, there.port or 22)


def _is_now(row: MachineRow, seen: MachineRow) -> bool:
    """Whether a row without host key is this discovered machine: by endpoint, or by name if it has no endpoint."""
    endpoints = {path.endpoint for path in row.paths}
    met = (
        not endpoints.isdisjoint(path.endpoint for path in seen.paths)
        if endpoints
        else row.name.casefold() in seen.names
    )
    return met and not row.fingerprint and not row.here


def _follow_keys(state: State, before: Iterable[MachineRow]) -> State:
    """Carry choices over to the new keys of machines whose host key was seen since ``before``."""
    rows, answers = state.machines.rows, state.answers
    listed_keys = {row.key for row in rows}
    now = {row.key: other.key for row in state.pinned for other in rows if _is_same_machine(row, other)}
    now |= {row.key: other.key for row in before if row.key not in listed_keys for other in rows if _is_now(row, other)}
    now |= {alias: row.key for row in rows for alias in row.aliases}

    def moved(keys: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(now.get(key, key) for key in keys))

    if state.preselected:
        state = replace(state, preselected=moved(state.preselected))
    if not any(key in now for key in (*answers.picked, *answers.skipped)):
        return state
    trusted = tuple((now.get(key, key), fingerprint) for key, fingerprint in answers.trusted)
    users = tuple((now.get(key, key), user) for key, user in answers.users)
    return state.answering(picked=moved(answers.picked), skipped=moved(answers.skipped), trusted=trusted, users=users)


def origin_of(row: MachineRow) -> str:
    """Return how a machine came into the list, in words."""
    words = {
        SightingOrigin.TYPED.value: "added by you",
        SightingOrigin.PAST_LOGIN.value: "used before",
        THIS_NETWORK: "answers SSH on this network",
    }
    finders = [finder for finder in row.found_by if finder not in words]
    found = f"found by {' and '.join(finders)}" if finders else ""
    return ", ".join(filter(None, (found, *(words[finder] for finder in row.found_by if finder in words))))
