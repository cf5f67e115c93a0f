"""What results and sightings change in the state. A result for answers that no longer hold changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from app.wizard import observations as seen
from app.wizard.assessment import of_pair
from app.wizard.observations import Kind, Task
from app.wizard.on_actions import INSTALLING
from app.wizard.slots import needs_no_figures, stamp
from app.wizard.state import AccessRow, CheckRow, Home, LaunchRow, MachineRow, Plan, Presence, ProfileRow, Status
from app.wizard.state import WizardState as State

_LONGEST_LOG = 400
_SHOWN_LINES = 12


def observe(state: State, observation: seen.Observation) -> State:
    """Return the state after an observation, not yet settled."""
    if isinstance(observation, seen.Sighted):
        return _sighted(state, observation)
    if isinstance(observation, seen.WatchFailed):
        return replace(state, machines=replace(state.machines, advice=(observation.cause, observation.fix)))
    if isinstance(observation, seen.LaunchSeen):
        return replace(state, launch=replace(observation.launch, progress=state.launch.progress))
    task = observation.task
    if isinstance(observation, seen.Told):
        return _told(state, task, observation.line)
    if not is_current(state, task):
        return _at_rest(state, task)
    if isinstance(observation, seen.Begun):
        return _begun(state, task)
    if isinstance(observation, seen.Failed):
        return _failed(_at_rest(state, task), observation)
    handler = _DONE.get(task.kind)
    return handler(_at_rest(state, task), task, observation.found) if handler is not None else state


def is_current(state: State, task: Task) -> bool:
    """Whether the answers a task was begun for still hold."""
    return task.stamp == stamp(state, task.kind, task.key)


# ------------------------------------------------------------------------------------------------- begin, end and talk


def _begun(state: State, task: Task) -> State:
    state = replace(state, under_way=(*state.under_way, (task, _busy_words(state, task))))
    working = Status.WORKING
    if task.kind is Kind.HOME:
        return replace(state, home=replace(state.home, status=working))
    if task.kind is Kind.ACCESS:
        return _with_access(state, task.key, status=working, words="asking")
    if task.kind is Kind.CHECKS:
        return _with_checks(state, status=working)
    if task.kind is Kind.LINKS:
        return replace(state, links=replace(state.links, status=working))
    if task.kind in (Kind.JOB, Kind.DATA, Kind.FITS):
        return _begun_job(state, task.kind)
    if task.kind is Kind.FORECAST:
        return replace(state, strategy=replace(state.strategy, status=working))
    return replace(state, plan=replace(state.plan, status=working)) if task.kind is Kind.PLAN else state


def _begun_job(state: State, kind: Kind) -> State:
    job = state.job
    if kind is Kind.DATA:
        return replace(state, job=replace(job, data=replace(job.data, status=Status.WORKING)))
    if kind is Kind.FITS:
        return replace(state, job=replace(job, fits=tuple(replace(row, status=Status.WORKING) for row in job.fits)))
    return replace(state, job=replace(job, status=Status.WORKING))


def _at_rest(state: State, task: Task) -> State:
    rest = tuple(pair for pair in state.under_way if pair[0] != task)
    return state if rest == state.under_way else replace(state, under_way=rest)


def _busy_words(state: State, task: Task) -> str:
    if task.kind is Kind.ACCESS:
        return f"asking {next((row.name for row in state.access if row.key == task.key), '')}".rstrip()
    if task.kind is Kind.FORECAST and needs_no_figures(state):
        return "looking at this computer"
    return _BUSY[task.kind]


def _told(state: State, task: Task, line: str) -> State:
    state = replace(state, log=(*state.log, line)[-_LONGEST_LOG:], logged=state.logged + 1)
    if task.kind is Kind.LINKS:
        return replace(state, links=replace(state.links, progress=_more(state.links.progress, line)))
    if task.kind is Kind.FORECAST:
        return replace(state, strategy=replace(state.strategy, progress=_more(state.strategy.progress, line)))
    if task.kind is Kind.LAUNCH:
        return replace(state, launch=replace(state.launch, progress=_more(state.launch.progress, line)))
    return state


def _more(lines: tuple[str, ...], line: str) -> tuple[str, ...]:
    return (*lines, line)[-_SHOWN_LINES:]


def _failed(state: State, failure: seen.Failed) -> State:
    kind, key = failure.task.kind, failure.task.key
    wrong: dict[str, Any] = {"status": Status.FAILED, "cause": failure.cause, "fix": failure.fix}
    if kind is Kind.HOME:
        return replace(state, home=replace(state.home, **wrong))
    if kind in (Kind.ACCESS, Kind.INSTALL_KEY):
        return _with_access(state, key, words="", **wrong)
    if kind is Kind.CHECKS:
        return _with_checks(state, **wrong)
    if kind is Kind.REPAIR:
        return _repaired(replace(state, notice=_words(failure)), failure.task, None)
    if kind in (Kind.JOB, Kind.DATA, Kind.FITS):
        return _failed_job(state, kind, wrong)
    if kind is Kind.INTERVAL:
        return replace(state, notice=_words(failure), answers=replace(state.answers, interval=_interval_now(state)))
    slot = {Kind.LINKS: "links", Kind.FORECAST: "strategy", Kind.PLAN: "plan", Kind.LAUNCH: "launch"}.get(kind)
    if slot is None:
        return replace(state, notice=_words(failure))
    return replace(state, **{slot: replace(getattr(state, slot), **wrong)})


def _words(failure: seen.Failed) -> str:
    return f"{failure.cause} ({failure.fix})" if failure.fix else failure.cause


def _failed_job(state: State, kind: Kind, wrong: dict[str, Any]) -> State:
    job = state.job
    if kind is Kind.DATA:
        return replace(state, job=replace(job, data=replace(job.data, **wrong)))
    if kind is Kind.FITS:
        unknown = {**wrong, "status": Status.WARNING}
        return replace(state, job=replace(job, fits=tuple(replace(row, **unknown) for row in job.fits)))
    return replace(state, job=replace(job, **wrong))


def _interval_now(state: State) -> int:
    chosen = state.chosen
    return chosen.interval if chosen is not None and chosen.interval != chosen.best_interval else 0


# ------------------------------------------------------------------------------------------------------------ sighting


def _sighted(state: State, observation: seen.Sighted) -> State:
    sight = observation.sight
    rows = _with_pinned(sight.machines.rows, state.pinned)
    state = replace(state, machines=replace(sight.machines, rows=rows))
    state = replace(state, home=_with_presence(state.home, sight.presence))
    state = _follow_keys(state)
    here = next((row.key for row in rows if row.here), None)
    if here is not None and not state.preselected:
        picked = state.answers.picked if here in state.answers.picked else (here, *state.answers.picked)
        state = replace(state, preselected=True, answers=replace(state.answers, picked=picked))
    return state


def _with_pinned(rows: Sequence[MachineRow], pinned: Iterable[MachineRow]) -> tuple[MachineRow, ...]:
    """Typed and saved machines stay listed until they are seen."""
    found = list(rows)
    for row in pinned:
        if not any(_same(row, other) for other in rows):
            found.append(row)
    return tuple(found)


def _same(row: MachineRow, other: MachineRow) -> bool:
    if row.key in (other.key, *other.aliases) or (row.here and other.here):
        return True
    if row.fingerprint and other.fingerprint:
        return row.fingerprint == other.fingerprint
    return bool(row.address) and (row.address, row.port or 22) == (other.address, other.port or 22)


def _follow_keys(state: State) -> State:
    """A machine whose host key was seen since has another key: choices made before still mean it."""
    now = {alias: row.key for row in state.machines.rows for alias in row.aliases}
    pinned = {row.key: other.key for row in state.pinned for other in state.machines.rows if _same(row, other)}
    now = {**pinned, **now}

    def moved(keys: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(now.get(key, key) for key in keys))

    answers = state.answers
    if not any(key in now for key in (*answers.picked, *answers.skipped)):
        return state
    trusted = tuple((now.get(key, key), fingerprint) for key, fingerprint in answers.trusted)
    answers = replace(answers, picked=moved(answers.picked), skipped=moved(answers.skipped), trusted=trusted)
    return replace(state, answers=answers)


def _with_presence(home: Home, presence: Any) -> Home:
    profiles = tuple(
        replace(row, machines=tuple(presence[row.name])) if row.name in presence else row for row in home.profiles
    )
    return home if profiles == home.profiles else replace(home, profiles=profiles)


# -------------------------------------------------------------------------------------------------------------- results


def _home(state: State, task: Task, found: Home) -> State:
    known: dict[str, tuple[Presence, ...]] = {row.name: row.machines for row in state.home.profiles if row.machines}
    profiles: tuple[ProfileRow, ...] = tuple(
        row if row.machines else replace(row, machines=known.get(row.name, ())) for row in found.profiles
    )
    status = Status.OK if found.status is Status.WAITING else found.status
    return replace(state, home=replace(found, profiles=profiles, doctor=state.home.doctor, status=status))


def _doctor(state: State, task: Task, found: Any) -> State:
    return replace(state, home=replace(state.home, doctor=tuple(found)))


def _saved_machines(state: State, task: Task, found: Any) -> State:
    """A profile brings its machines along; none of its own: this computer."""
    if state.answers.profile != task.key:
        return state
    wanted = tuple(found) or (MachineRow("here", "this computer", here=True),)
    pinned = tuple({row.key: row for row in (*state.pinned, *wanted)}.values())
    rows = _with_pinned(state.machines.rows, wanted)
    picked = tuple(next((row.key for row in rows if _same(one, row)), one.key) for one in wanted)
    machines = replace(state.machines, rows=rows)
    return replace(state, pinned=pinned, machines=machines, answers=replace(state.answers, picked=picked))


def _with_access(state: State, key: str, **changes: Any) -> State:
    return replace(state, access=tuple(replace(row, **changes) if row.key == key else row for row in state.access))


def _access(state: State, task: Task, found: AccessRow) -> State:
    """A look that was under way while a key was being installed tells of the time before."""
    row = next((row for row in state.access if row.key == task.key), None)
    if row is None or row.status in (Status.SKIPPED, Status.OK) or row.words == INSTALLING:
        return state
    return _with_access_row(state, row, found)


def _with_access_row(state: State, row: AccessRow, found: AccessRow) -> State:
    new = replace(found, key=row.key, name=row.name, attempts=row.attempts + 1)
    return replace(state, access=tuple(new if other.key == row.key else other for other in state.access))


def _installed(state: State, task: Task, found: AccessRow) -> State:
    row = next((row for row in state.access if row.key == task.key), None)
    if row is None:
        return state
    words = "let us in: our key is installed there" if found.status is Status.OK else found.cause
    return replace(_with_access_row(state, row, found), notice=f"{row.name}: {words}")


def _with_checks(state: State, **changes: Any) -> State:
    skipped = Status.SKIPPED
    rows = tuple(row if row.status is skipped else replace(row, **changes) for row in state.checks)
    return replace(state, checks=rows)


def _checks(state: State, task: Task, found: Any) -> State:
    by_key = {row.key: row for row in found}
    return replace(state, checks=tuple(replace(by_key.get(row.key, row), name=row.name) for row in state.checks))


def _repaired(state: State, task: Task, found: Any) -> State:
    """Mended or not, all is looked at again."""
    return replace(state, checks=tuple(CheckRow(row.key, row.name) for row in state.checks))


def _links(state: State, task: Task, found: Any) -> State:
    pairs = tuple(found)
    weak = any(of_pair(pair).status is not Status.OK for pair in pairs)
    return replace(state, links=replace(state.links, rows=pairs, status=Status.WARNING if weak else Status.OK))


def _job(state: State, task: Task, found: Any) -> State:
    status = Status.OK if found.status is Status.WAITING else found.status
    return replace(state, job=replace(found, data=state.job.data, fits=state.job.fits, status=status))


def _data(state: State, task: Task, found: Any) -> State:
    return replace(state, job=replace(state.job, data=found))


def _fits(state: State, task: Task, found: Any) -> State:
    by_key = {row.key: row for row in found}
    rows = tuple(by_key.get(row.key, replace(row, status=Status.WARNING, words="unknown")) for row in state.job.fits)
    return replace(state, job=replace(state.job, fits=rows))


def _forecast(state: State, task: Task, found: Any) -> State:
    status = Status.OK if found.status is Status.WAITING else found.status
    return replace(state, strategy=replace(found, progress=state.strategy.progress, status=status))


def _moved_interval(state: State, task: Task, found: Any) -> State:
    """Where the services could not take the asked H, what they took is the answer: else it would be asked for ever."""
    rows = tuple(found if row.index == found.index else row for row in state.strategy.rows)
    interval = found.interval if state.answers.interval else 0
    if not interval and found.interval != found.best_interval:
        rows = tuple(replace(row, best_interval=row.interval) if row.index == found.index else row for row in rows)
    return replace(
        state, strategy=replace(state.strategy, rows=rows), answers=replace(state.answers, interval=interval)
    )


def _plan(state: State, task: Task, found: Any) -> State:
    return replace(state, plan=replace(found, status=Status.OK if found.status is Status.WAITING else found.status))


def _saved(state: State, task: Task, found: Any) -> State:
    files = tuple(found)
    plan: Plan = replace(state.plan, files=files, saved=True)
    return replace(state, plan=plan, notice=f"saved: {', '.join(files)}")


def _launched(state: State, task: Task, found: Any) -> State:
    rows: tuple[LaunchRow, ...] = state.launch.rows
    return replace(state, launch=replace(state.launch, run=str(found), rows=rows, status=Status.OK))


_DONE: dict[Kind, Callable[[State, Task, Any], State]] = {
    Kind.HOME: _home,
    Kind.DOCTOR: _doctor,
    Kind.SAVED_MACHINES: _saved_machines,
    Kind.ACCESS: _access,
    Kind.INSTALL_KEY: _installed,
    Kind.CHECKS: _checks,
    Kind.REPAIR: _repaired,
    Kind.LINKS: _links,
    Kind.JOB: _job,
    Kind.DATA: _data,
    Kind.FITS: _fits,
    Kind.FORECAST: _forecast,
    Kind.INTERVAL: _moved_interval,
    Kind.PLAN: _plan,
    Kind.SAVE: _saved,
    Kind.LAUNCH: _launched,
}
_BUSY = {
    Kind.HOME: "reading runs and profiles",
    Kind.DOCTOR: "looking at this computer",
    Kind.SAVED_MACHINES: "reading the profile's machines",
    Kind.INSTALL_KEY: "installing our key",
    Kind.CHECKS: "looking at the machines",
    Kind.REPAIR: "mending",
    Kind.LINKS: "measuring links",
    Kind.JOB: "reading the profile",
    Kind.DATA: "looking at the data",
    Kind.FITS: "comparing the model with the machines' memory",
    Kind.FORECAST: "measuring machines",
    Kind.INTERVAL: "predicting",
    Kind.PLAN: "making the plan",
    Kind.SAVE: "saving",
    Kind.LAUNCH: "starting the run",
}
