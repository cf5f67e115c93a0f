"""What a person can do in the guided set-up, as rules from state to state: ``Wizard.do(pick("here"))``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from app.wizard.dependencies import action, blockers
from app.wizard.launch_records import LaunchProgress
from app.wizard.records import GOOD, SENT, AccessNeed, Check, ItemStatus, MachineRow, StrategyRanking
from app.wizard.state import ORDER, Answers, StatePart, Step, TaskKind, after, before
from app.wizard.state import WizardState as State
from profiles.errors import BadInput

IN_CLEAR = "unencrypted"
"""What a person types to agree to training traffic that others can read."""
PREFERENCES = ("fastest", "closest-to-exact", "least-traffic")
UNDER_WAY = "that is in progress"
_STARTING = "the run is being started"
_LONGEST_INTERVAL = 100_000
_QUOTED = 60
"""Longest typed address that is quoted in a notice."""


# --------------------------------------------------------------------------------------------------------------- steps


def _to(state: State, step: Step) -> State:
    """Show a step; runs and profiles are read anew for Home."""
    reached = step if ORDER.index(step) > ORDER.index(state.reached) else state.reached
    state = replace(state, step=step, reached=reached)
    return _redo(state, TaskKind.HOME) if step is Step.HOME else state


@action
def go_on(state: State) -> State:
    """To the following step; a notice says why where that cannot be."""
    reasons = blockers(state)
    if reasons:
        return state.noting(reasons[0])
    if state.step is Step.PLAN:
        return state.noting("confirm the plan to start it")
    return _to(state, after(state.step, state.far, state.unequipped)) if state.step is not Step.LAUNCH else state


@action
def go_back(state: State) -> State:
    """To the step before; from a run that trains to Home, as behind it lies a plan that is carried out."""
    if state.step is Step.LAUNCH and state.launch.status is ItemStatus.WORKING:
        return state.noting(_STARTING)
    home = state.step is Step.LAUNCH and state.started
    return _to(state, Step.HOME if home else before(state.step, state.far, state.unequipped))


@action
def go_to(state: State, step: Step) -> State:
    """To any step that was reached already, or back to Home."""
    if state.step is Step.LAUNCH and state.launch.status is ItemStatus.WORKING:
        return state.noting(_STARTING)
    if step is Step.LAUNCH or ORDER.index(step) > ORDER.index(state.reached):
        return state.noting(f"{step.heading} comes later")
    return _to(state, step)


@action
def new_setup(state: State) -> State:
    """From Home: begin with the machines."""
    return _to(_anew(state, TaskKind.LAUNCH) if state.started else state, Step.MACHINES)


@action
def rerun(state: State, profile: str) -> State:
    """From Home: a profile with its machines, at the Plan."""
    answers_before = state.answers
    answers = Answers(typed=answers_before.typed, trusted=answers_before.trusted, profile=profile)
    state = replace(_anew(state, TaskKind.LAUNCH), answers=answers, preselected=None)
    return _to(state.ordering(TaskKind.SAVED_MACHINES, profile), Step.PLAN)


@action
def doctor(state: State) -> State:
    """Look at this computer only."""
    return state.ordering(TaskKind.DOCTOR)


# --------------------------------------------------------------------------------------------------------------- retry


@action
def retry(state: State, key: str = "") -> State:
    """Do the step's work again: of a row, or of all rows that did not go well. Takes a skipped machine back in."""
    match state.step:
        case Step.HOME:
            return _redo(state, TaskKind.HOME)
        case Step.MACHINES:
            return state.noting("the search for machines never stops")
        case Step.ACCESS:
            for row in state.access:
                if row.key == key or (not key and row.status in (ItemStatus.FAILED, ItemStatus.WARNING)):
                    state = _anew(state, TaskKind.ACCESS, row.key)
            return _unskipped(state, key)
        case Step.CHECKS:
            return _unskipped(_anew(state, TaskKind.CHECKS), key)
        case Step.LINKS:
            return state.noting(UNDER_WAY) if state.links.status is ItemStatus.WORKING else _anew(state, TaskKind.LINKS)
        case Step.JOB:
            return _redo(state, TaskKind.JOB, TaskKind.DATA, TaskKind.FITS)
        case Step.STRATEGY if state.strategy.status is ItemStatus.WORKING:
            return state.noting(UNDER_WAY)
        case Step.STRATEGY:  # after a failure once more; otherwise with new figures
            return _anew(state, TaskKind.FORECAST, value=StrategyRanking(measure=state.strategy.status in GOOD))
        case Step.PLAN:
            failed = state.strategy.status is ItemStatus.FAILED
            return _anew(_anew(state, TaskKind.FORECAST) if failed else state, TaskKind.PLAN)
    if state.launch.status is not ItemStatus.FAILED:
        return state
    return confirm(IN_CLEAR).on(replace(state, step=Step.PLAN))  # as it was confirmed before


def _redo(state: State, *kinds: TaskKind) -> State:
    """Have parts worked out once more; what is shown stays meanwhile."""
    for kind in kinds:
        state = state.putting(kind, state_part=state.part(kind).outdated())
    return state


def _anew(state: State, kind: TaskKind, key: str = "", value: object = None) -> State:
    fresh = state.empty(kind)
    return state.putting(kind, key, replace(fresh, value=value or fresh.value, inputs=state.part(kind, key).inputs))


def _unskipped(state: State, key: str) -> State:
    return state.answering(skipped=_without(state.answers.skipped, key))


def _without(keys: tuple[str, ...], *gone: str) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in gone)


# ------------------------------------------------------------------------------------------------------------ machines


@action
def pick(state: State, key: str, to: bool | None = None) -> State:
    """Choose a machine, or no more; ``to`` left out: the other of the two."""
    row = next((row for row in state.machines.rows if key in (row.key, *row.aliases)), None)
    if row is None:
        return state.noting("that machine is no longer listed")
    picked = state.answers.picked
    to = row.key not in picked if to is None else to
    others = _without(picked, row.key)
    return _unskipped(state.answering(picked=(*others, row.key) if to else others), row.key)


@action
def add_machine(state: State, text: str) -> State:
    """``[user@]host[:port]``, as one would type it after ``ssh``; it is picked too.

    It has a row at once; discovery makes it one with the machine that answers there.
    """
    from distributed.hosts.file import typed_machine  # with pydantic, which the first paint does without

    text = " ".join(text.split())
    quoted = text[:_QUOTED]
    try:
        entry = typed_machine(text)
    except BadInput:
        return state.noting(f"'{quoted}' is not an address: type it as after ssh, for example ada@studio.local")
    if text in state.answers.typed:
        return state.noting(f"{quoted} is listed already")
    row = MachineRow(f"typed:{text}", entry.name, words="searching", entry=entry, found_by=("typed",))
    machines = replace(state.machines, rows=(*state.machines.rows, row))
    state = replace(state, pinned=(*state.pinned, row), machines=machines)
    return state.answering(typed=(*state.answers.typed, text), picked=(*state.answers.picked, row.key))


@action
def remove_machine(state: State, text: str) -> State:
    """Take a typed machine away again."""
    key, rows = f"typed:{text}", state.machines.rows
    gone = {row.key for row in rows if key in (row.key, *row.aliases) and row.found_by == ("typed",)}
    remaining = tuple(row for row in rows if row.key not in gone)
    pinned = tuple(row for row in state.pinned if row.key != key)
    state = replace(state, machines=replace(state.machines, rows=remaining), pinned=pinned)
    return state.answering(typed=_without(state.answers.typed, text), picked=_without(state.answers.picked, *gone))


@action
def trust_key(state: State, key: str, fingerprint: str) -> State:
    """A person has compared the fingerprint with the machine's own."""
    row = state.access_of(key)
    if row is None or row.need is not AccessNeed.TRUST or row.fingerprint != fingerprint:
        return state.noting("that is not the host key that the machine shows")
    pair = (key, fingerprint)
    return state.answering(trusted=(*(known for known in state.answers.trusted if known != pair), pair))


@action
def set_user(state: State, key: str, user: str) -> State:
    """Log in on a machine as another user."""
    user = user.strip()
    if state.access_of(key) is None or re.fullmatch(r"[A-Za-z0-9_][\w.@+-]{0,63}", user, re.ASCII) is None:
        return state.noting(f"'{user[:_QUOTED]}' cannot be the name of a user")
    return state.answering(users=(*(pair for pair in state.answers.users if pair[0] != key), (key, user)))


@action
def install_key(state: State, key: str) -> State:
    """Install our key with the password that ``Wizard.give_password`` was given."""
    row = state.access_of(key)
    if row is None or row.need is not AccessNeed.PASSWORD:
        return state.noting("this machine needs no password")
    if state.is_under_way(TaskKind.INSTALL_KEY, key):
        return state.noting(UNDER_WAY)
    state = state.putting(TaskKind.ACCESS, key, status=ItemStatus.WORKING, words=TaskKind.INSTALL_KEY.value)
    return state.ordering(TaskKind.INSTALL_KEY, key)


@action
def skip(state: State, key: str) -> State:
    """Go on without this machine."""
    if key not in state.answers.picked or key in state.answers.skipped:
        return state
    return state.answering(skipped=(*state.answers.skipped, key))


@action
def unskip(state: State, key: str) -> State:
    """Take this machine back in, with what was found on it."""
    return _unskipped(state, key)


@action
def fix(state: State, key: str) -> State:
    """Fix what is safe to fix on one machine."""
    return _repair(state, [row for row in state.checks if row.key == key])


@action
def fix_all(state: State) -> State:
    """Fix everything that is safe to fix, on all machines."""
    return _repair(state, state.checks)


@action
def send_packages(state: State) -> State:
    """Install what is missing on all machines, with packages from this computer: for those without internet."""
    return _repair(state, state.checks, SENT)


def _repair(state: State, rows: Iterable[Check], source: str = "") -> State:
    keys = tuple(row.key for row in rows if row.fixable and row.status is not ItemStatus.SKIPPED)
    if not keys or state.under_repair.issuperset(keys):
        return state.noting("no problem there can be fixed from here")
    return state.ordering(TaskKind.REPAIR, source, keys)


# --------------------------------------------------------------------------------------------------- job and strategy


@action
def choose_profile(state: State, name: str) -> State:
    """Another profile; options that a person set stay."""
    return state.answering(profile=name)


@action
def set_option(state: State, name: str, text: str) -> State:
    """Any option of a profile, or ``model`` or ``dataset``, as text. The profile's own value takes the change back."""
    text = " ".join(text.splitlines()).strip()
    is_default = any(option.name == name and option.default == text for option in state.job.value.options)
    others = tuple(pair for pair in state.answers.options if pair[0] != name)
    return state.answering(options=others if is_default else (*others, (name, text)))


@action
def reset_option(state: State, name: str) -> State:
    """The profile's own value again."""
    return state.answering(options=tuple(pair for pair in state.answers.options if pair[0] != name))


@action
def choose_strategy(state: State, index: int) -> State:
    """A way of the Strategy screen."""
    candidate = next((way for way in state.ways if way.index == index), None)
    if candidate is None:
        return state.noting("there is no such way to train")
    if candidate.problem:
        return state.noting(f"{candidate.choice.name}: {candidate.problem}")
    return state.answering(strategy="" if candidate.recommended else candidate.identity)


@action
def set_interval(state: State, steps: int) -> State:
    """Steps between exchanges, H, of the chosen way; 0: as recommended."""
    if state.chosen is None or not state.chosen.periodic:
        return state.noting("this strategy exchanges in every step")
    return state.answering(interval=max(0, min(steps, _LONGEST_INTERVAL)))


@action
def set_preference(state: State, preference: str) -> State:
    """One of :data:`PREFERENCES`."""
    if preference not in PREFERENCES:
        return state.noting("choose fastest, closest-to-exact or least-traffic")
    return state.answering(preference=preference, strategy="", interval=0)


# ----------------------------------------------------------------------------------------------------- plan and launch


@action
def save_as(state: State, name: str) -> State:
    """Name of the profile that keeps these choices."""
    return state.answering(save_as=name.strip())


def _not_yet(state: State, consent: str) -> tuple[str, ...]:
    """Return why the Plan cannot be carried out; ``consent``: what the person typed."""
    if state.step is not Step.PLAN:
        return ("there is no plan yet",)
    open_ = state.plan.value.in_clear if consent.strip().casefold() != IN_CLEAR else ()
    return (*blockers(state), *(f"not encrypted: {text}; nothing was started" for text in open_[:1]))


@action
def save_only(state: State, consent: str = "") -> State:
    """Write the profile and its files, and start nothing; ``consent`` as for :func:`confirm`."""
    reasons = _not_yet(state, consent)
    return state.noting(reasons[0]) if reasons else state.ordering(TaskKind.SAVE, inputs=state.plan.inputs)


@action
def confirm(state: State, consent: str = "", another: bool = False) -> State:
    """Carry out the Plan: save the profile, start the run.

    Args:
        consent: :data:`IN_CLEAR`, where the Plan sends training traffic that others can read.
        another: where a run was started from this Plan already: whether another one is meant.
    """
    if state.step is Step.PLAN and state.started and not another:
        return _to(state, Step.LAUNCH)
    reasons = _not_yet(state, consent)
    if reasons:
        return state.noting(reasons[0])
    state = state.putting(TaskKind.LAUNCH, state_part=StatePart(LaunchProgress(), status=ItemStatus.WORKING))
    return _to(state.ordering(TaskKind.LAUNCH), Step.LAUNCH)


@action
def drop(state: State, key: str) -> State:
    """At Launch: leave a machine out of a start that failed; back to the Plan, which is made anew."""
    row = next((row for row in state.members if key in (row.key, row.name)), None)
    if state.launch.status is not ItemStatus.FAILED or row is None:
        return state.noting("machines can be dropped only after a launch has failed")
    if len(state.members) == 1:
        return state.noting("it is the only machine")
    return _to(state.answering(skipped=(*state.answers.skipped, row.key)), Step.PLAN)
