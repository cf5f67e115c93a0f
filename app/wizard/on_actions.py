"""What a person's actions change in the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.wizard import actions as do
from app.wizard.gates import blockers, started
from app.wizard.state import AccessRow, Answers, CheckRow, Launch, Links, MachineRow, Need, Plan, Status, Strategy
from app.wizard.state import WizardState as State
from app.wizard.steps import ORDER, Step, after, before

INSTALLING = "installing our key"
UNDER_WAY = "that is under way"
_QUOTED = 60
"""Longest typed address that is quoted in a notice."""


def act(state: State, action: do.Action) -> State:
    """Return the state after an action, not yet settled."""
    handler: Callable[[State, Any], State] | None = _HANDLERS.get(type(action))
    cleared = replace(state, notice="") if state.notice else state
    return handler(cleared, action) if handler is not None else cleared


def _answer(state: State, **changes: Any) -> State:
    return replace(state, answers=replace(state.answers, **changes))


def _notice(state: State, text: str) -> State:
    return replace(state, notice=text)


# --------------------------------------------------------------------------------------------------------------- steps


def _to(state: State, step: Step) -> State:
    """Show a step; runs and profiles are read anew for Home."""
    reached = step if ORDER.index(step) > ORDER.index(state.reached) else state.reached
    state = replace(state, step=step, reached=reached)
    return _retry_home(state, "") if step is Step.HOME else state


def _next(state: State, _: do.Next) -> State:
    reasons = blockers(state)
    if reasons:
        return _notice(state, reasons[0])
    if state.step is Step.PLAN:
        return _notice(state, "this plan starts when it is confirmed")
    if state.step is Step.LAUNCH:
        return state
    return _to(state, after(state.step, state.far))


def _back(state: State, _: do.Back) -> State:
    if state.step is Step.LAUNCH and state.launch.status is Status.WORKING:
        return _notice(state, "the run is being started")
    if state.step is Step.LAUNCH and started(state):
        return _to(state, Step.HOME)  # behind it lies a plan that is carried out
    return _to(state, before(state.step, state.far))


def _go_to(state: State, action: do.GoTo) -> State:
    if state.step is Step.LAUNCH and state.launch.status is Status.WORKING:
        return _notice(state, "the run is being started")
    if action.step is Step.LAUNCH or ORDER.index(action.step) > ORDER.index(state.reached):
        return _notice(state, f"{action.step.heading} comes later")
    return _to(state, action.step)


def _new_setup(state: State, _: do.NewSetup) -> State:
    return _to(replace(state, launch=Launch()) if started(state) else state, Step.MACHINES)


def _rerun(state: State, action: do.Rerun) -> State:
    """A profile as it is; its machines follow (``Kind.SAVED_MACHINES``)."""
    answers = Answers(typed=state.answers.typed, trusted=state.answers.trusted, profile=action.profile)
    return _to(replace(state, answers=answers, preselected=True, launch=Launch()), Step.PLAN)


# ------------------------------------------------------------------------------------------------------------ machines


def _pick(state: State, action: do.Pick) -> State:
    row = next((row for row in state.machines.rows if action.key in (row.key, *row.aliases)), None)
    if row is None:
        return _notice(state, "that machine is no longer listed")
    picked = state.answers.picked
    on = row.key not in picked if action.on is None else action.on
    rest = tuple(key for key in picked if key != row.key)
    skipped = tuple(key for key in state.answers.skipped if key != row.key)
    return _answer(state, picked=(*rest, row.key) if on else rest, skipped=skipped)


def _add(state: State, action: do.AddMachine) -> State:
    """A row for it at once, picked; discovery makes it one with the machine that answers there."""
    text = " ".join(action.text.split())
    row = typed_row(text)
    if row is None:
        return _notice(
            state, f"'{text[:_QUOTED]}' is not a machine: type what you would type after ssh, as ada@studio.local"
        )
    if text in state.answers.typed:
        return _notice(state, f"{text[:_QUOTED]} is there already")
    pinned = (*state.pinned, row)
    machines = replace(state.machines, rows=(*state.machines.rows, row))
    picked = (*state.answers.picked, row.key)
    return _answer(replace(state, pinned=pinned, machines=machines), typed=(*state.answers.typed, text), picked=picked)


def typed_row(text: str) -> MachineRow | None:
    """Return the row of ``[user@]host[:port]``; ``None`` if it is no such thing."""
    from distributed.hosts.file import Machine, split_address  # with pydantic, which the first paint does without

    place = split_address(text)
    host, user = str(place["name"]), place["user"] or ""
    try:
        Machine(name=host, address=host, port=place["port"], user=user)
    except ValueError:
        return None
    return MachineRow(
        key=f"typed:{text}", name=host, words="looking", address=host, port=place["port"], user=user,
        found_by=("typed",),
    )  # fmt: skip


def _remove(state: State, action: do.RemoveMachine) -> State:
    key = f"typed:{action.text}"
    gone = {row.key for row in state.machines.rows if key in (row.key, *row.aliases) and row.found_by == ("typed",)}
    typed = tuple(text for text in state.answers.typed if text != action.text)
    picked = tuple(other for other in state.answers.picked if other not in gone)
    rows = tuple(row for row in state.machines.rows if row.key not in gone)
    pinned = tuple(row for row in state.pinned if row.key != key)
    state = replace(state, machines=replace(state.machines, rows=rows), pinned=pinned)
    return _answer(state, typed=typed, picked=picked)


# --------------------------------------------------------------------------------------------------- access and checks


def _access(state: State, key: str, **changes: Any) -> State:
    rows = tuple(replace(row, **changes) if row.key == key else row for row in state.access)
    return replace(state, access=rows)


def _trust(state: State, action: do.TrustKey) -> State:
    row = next((row for row in state.access if row.key == action.key), None)
    if row is None or row.need is not Need.TRUST or row.fingerprint != action.fingerprint:
        return _notice(state, "that is not the key it shows")
    pair = (action.key, action.fingerprint)
    return _answer(state, trusted=(*(known for known in state.answers.trusted if known != pair), pair))


def _password(state: State, action: do.GivePassword) -> State:
    row = next((row for row in state.access if row.key == action.key), None)
    if row is None or row.need is not Need.PASSWORD:
        return _notice(state, "no password is needed there")
    return _access(state, action.key, status=Status.WORKING, words=INSTALLING)


def _retry(state: State, action: do.Retry) -> State:
    return _RETRIES[state.step](state, action.key)


def _retry_home(state: State, key: str) -> State:
    """What is shown stays meanwhile."""
    return replace(state, home=replace(state.home, status=Status.WAITING))


def _retry_machines(state: State, key: str) -> State:
    return _notice(state, "machines are looked for all the time")


def _retry_access(state: State, key: str) -> State:
    skipped = tuple(other for other in state.answers.skipped if key != other)
    rows = tuple(
        AccessRow(row.key, row.name) if row.key == key or (not key and row.status in _NOT_WELL) else row
        for row in state.access
    )
    return _answer(replace(state, access=rows), skipped=skipped)


def _retry_checks(state: State, key: str) -> State:
    skipped = tuple(other for other in state.answers.skipped if key != other)
    rows = tuple(row if row.status is Status.SKIPPED else CheckRow(row.key, row.name) for row in state.checks)
    return _answer(replace(state, checks=rows), skipped=skipped)


def _retry_links(state: State, key: str) -> State:
    if state.links.status is Status.WORKING:
        return _notice(state, UNDER_WAY)
    return replace(state, links=Links(names=state.links.names))


def _retry_job(state: State, key: str) -> State:
    waiting = replace(state.job.data, status=Status.WAITING)
    fits = tuple(replace(row, status=Status.WAITING) for row in state.job.fits)
    return replace(state, job=replace(state.job, status=Status.WAITING, data=waiting, fits=fits))


def _retry_strategy(state: State, key: str) -> State:
    """After a failure: once more. Otherwise: with new figures."""
    if state.strategy.status is Status.WORKING:
        return _notice(state, UNDER_WAY)
    return replace(state, strategy=Strategy(measure=state.strategy.status in (Status.OK, Status.WARNING)))


def _retry_plan(state: State, key: str) -> State:
    again = Strategy() if state.strategy.status is Status.FAILED else state.strategy
    return replace(state, plan=Plan(), strategy=again)


def _retry_launch(state: State, key: str) -> State:
    if state.launch.status is not Status.FAILED:
        return state
    return _confirm(replace(state, step=Step.PLAN), do.Confirm(do.IN_CLEAR))  # as it was confirmed before


_NOT_WELL = (Status.FAILED, Status.WARNING)
_RETRIES = {
    Step.HOME: _retry_home,
    Step.MACHINES: _retry_machines,
    Step.ACCESS: _retry_access,
    Step.CHECKS: _retry_checks,
    Step.LINKS: _retry_links,
    Step.JOB: _retry_job,
    Step.STRATEGY: _retry_strategy,
    Step.PLAN: _retry_plan,
    Step.LAUNCH: _retry_launch,
}


def _skip(state: State, action: do.Skip) -> State:
    if action.key not in state.answers.picked or action.key in state.answers.skipped:
        return state
    return _answer(state, skipped=(*state.answers.skipped, action.key))


def _mend(state: State, keys: set[str]) -> State:
    rows = tuple(
        replace(row, status=Status.WORKING, words="mending") if row.key in keys and row.fixable else row
        for row in state.checks
    )
    if rows == state.checks:
        return _notice(state, "nothing there can be mended from here")
    return replace(state, checks=rows)


def _fix(state: State, action: do.Fix) -> State:
    return _mend(state, {action.key})


def _fix_all(state: State, _: do.FixAll) -> State:
    return _mend(state, {row.key for row in state.checks})


# --------------------------------------------------------------------------------------------------- job and strategy


def _profile(state: State, action: do.ChooseProfile) -> State:
    return _answer(state, profile=action.name)


def _set(state: State, action: do.SetOption) -> State:
    text = " ".join(action.text.splitlines()).strip()
    row = next((row for row in state.job.options if row.name == action.name), None)
    rest = {name: value for name, value in state.answers.options if name != action.name}
    if row is not None and text == row.default:
        return _answer(state, options=tuple(rest.items()))
    return _answer(state, options=(*rest.items(), (action.name, text)))


def _reset(state: State, action: do.ResetOption) -> State:
    return _answer(state, options=tuple(pair for pair in state.answers.options if pair[0] != action.name))


def _choose(state: State, action: do.ChooseStrategy) -> State:
    row = next((row for row in state.strategy.rows if row.index == action.index), None)
    if row is None:
        return _notice(state, "there is no such way")
    if row.problem:
        return _notice(state, f"{row.choice.name}: {row.problem}")
    return _answer(state, strategy="" if row.recommended else row.identity)


def _interval(state: State, action: do.SetInterval) -> State:
    chosen = state.chosen
    if chosen is None or not chosen.periodic:
        return _notice(state, "this way exchanges in every step")
    return _answer(state, interval=max(0, min(action.steps, 100_000)))


def _preference(state: State, action: do.SetPreference) -> State:
    if action.preference not in ("fastest", "closest-to-exact", "least-traffic"):
        return _notice(state, "fastest, closest-to-exact or least-traffic")
    return _answer(state, preference=action.preference, strategy="", interval=0)


# ----------------------------------------------------------------------------------------------------- plan and launch


def _save_as(state: State, action: do.SaveAs) -> State:
    return _answer(state, save_as=action.name.strip())


def _not_yet(state: State, said: str) -> tuple[str, ...]:
    """Return why the Plan cannot be carried out; ``said``: what the person typed."""
    if state.step is not Step.PLAN:
        return ("there is no plan yet",)
    unsaid = state.plan.in_clear and said.strip().casefold() != do.IN_CLEAR
    return (*blockers(state), *([f"not encrypted: {state.plan.in_clear[0]}; nothing was done"] if unsaid else []))


def _save_only(state: State, action: do.SaveOnly) -> State:
    reasons = _not_yet(state, action.said)
    return _notice(state, reasons[0]) if reasons else state


def _confirm(state: State, action: do.Confirm) -> State:
    if state.step is Step.PLAN and started(state) and not action.another:
        return _to(state, Step.LAUNCH)
    reasons = _not_yet(state, action.said)
    if reasons:
        return _notice(state, reasons[0])
    return _to(replace(state, launch=Launch(status=Status.WORKING)), Step.LAUNCH)


def _drop(state: State, action: do.Drop) -> State:
    """Leave a machine out of a launch that failed; back to the Plan, which is made anew."""
    row = next((row for row in state.members if action.key in (row.key, row.name)), None)
    if state.launch.status is not Status.FAILED or row is None:
        return _notice(state, "only a launch that failed can go on with fewer machines")
    if len(state.members) == 1:
        return _notice(state, "it is the only machine")
    return _to(_answer(state, skipped=(*state.answers.skipped, row.key)), Step.PLAN)


_HANDLERS: dict[type, Callable[[State, Any], State]] = {
    do.Next: _next,
    do.Back: _back,
    do.GoTo: _go_to,
    do.NewSetup: _new_setup,
    do.Rerun: _rerun,
    do.Pick: _pick,
    do.AddMachine: _add,
    do.RemoveMachine: _remove,
    do.TrustKey: _trust,
    do.GivePassword: _password,
    do.Retry: _retry,
    do.Skip: _skip,
    do.Fix: _fix,
    do.FixAll: _fix_all,
    do.ChooseProfile: _profile,
    do.SetOption: _set,
    do.ResetOption: _reset,
    do.ChooseStrategy: _choose,
    do.SetInterval: _interval,
    do.SetPreference: _preference,
    do.SaveAs: _save_as,
    do.SaveOnly: _save_only,
    do.Confirm: _confirm,
    do.Drop: _drop,
}
