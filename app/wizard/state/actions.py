"""User actions of the guided set-up, as rules from state to state: ``Wizard.do(pick("here"))``."""

from __future__ import annotations

import re
from dataclasses import replace

from app.wizard.state.deferred import IN_CLEAR as IN_CLEAR
from app.wizard.state.deferred import fix as fix
from app.wizard.state.deferred import fix_all as fix_all
from app.wizard.state.deferred import save_only as save_only
from app.wizard.state.deferred import send_packages as send_packages
from app.wizard.state.deferred import why_not_confirmed
from app.wizard.state.dependencies import action, blockers
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.records import GOOD, AccessNeed, ItemStatus, MachineRow, StrategyRanking
from app.wizard.state.state import ORDER, Answers, StatePart, Step, TaskKind, after, before
from app.wizard.state.state import WizardState as State
from profiles.errors import BadInput
from training.numerics.schedule import IN_EACH_QUARTER

PREFERENCES = ("fastest", "closest-to-exact", "least-traffic")
UNDER_WAY = "that is in progress"
_STARTING = "the run is being started"
_LONGEST_INTERVAL = 100_000
_QUOTED = 60  # characters of a typed address in a notice


# --------------------------------------------------------------------------------------------------------------- steps


def _to(state: State, step: Step) -> State:
    """Show a step. Returning to Home reloads runs and profiles."""
    reached = step if ORDER.index(step) > ORDER.index(state.reached) else state.reached
    state = replace(state, step=step, reached=reached)
    return _redo(state, TaskKind.HOME) if step is Step.HOME else state


@action
def go_on(state: State) -> State:
    """Go to the next step; if it is blocked, show the reason as a notice."""
    reasons = blockers(state)
    if reasons:
        return state.noting(reasons[0])
    if state.step is Step.PLAN:
        return state.noting("confirm the plan to start it")
    return _to(state, after(state.step, state.needless)) if state.step is not Step.LAUNCH else state


@action
def go_back(state: State) -> State:
    """Go to the previous step; from a started run go to Home, since its plan is already carried out."""
    if state.step is Step.LAUNCH and state.launch.status is ItemStatus.WORKING:
        return state.noting(_STARTING)
    home = state.step is Step.LAUNCH and state.started
    return _to(state, Step.HOME if home else before(state.step, state.needless))


@action
def go_to(state: State, step: Step) -> State:
    """Go to a step that was reached before, or back to Home."""
    if state.step is Step.LAUNCH and state.launch.status is ItemStatus.WORKING:
        return state.noting(_STARTING)
    if step is Step.LAUNCH or ORDER.index(step) > ORDER.index(state.reached):
        return state.noting(f"{step.heading} comes later")
    return _to(state, step)


@action
def new_setup(state: State) -> State:
    """Start a new set-up at the Machines step."""
    return _to(_anew(state, TaskKind.LAUNCH) if state.started else state, Step.MACHINES)


@action
def begin_with_hosts(state: State) -> State:
    """Start at the Machines step with the machines of the hosts file that was named, and no others."""
    state = replace(state, preselected=None)
    return _to(state.ordering(TaskKind.SAVED_MACHINES, state.answers.profile), Step.MACHINES)


@action
def rerun(state: State, profile: str) -> State:
    """Open a profile with its saved machines: at the Plan step, or at Job if it lacks a model or data."""
    answers = Answers(typed=state.answers.typed, trusted=state.answers.trusted, profile=profile)
    state = replace(_anew(state, TaskKind.LAUNCH), answers=answers, preselected=None)
    lacking = any(shown.entry.needs for shown in state.home.value.profiles if shown.name == profile)
    return _to(state.ordering(TaskKind.SAVED_MACHINES, profile), Step.JOB if lacking else Step.PLAN)


@action
def doctor(state: State) -> State:
    """Check this computer only."""
    return state.ordering(TaskKind.DOCTOR)


@action
def close_doctor(state: State) -> State:
    """Put the findings about this computer away."""
    return state.putting(TaskKind.DOCTOR, state_part=state.empty(TaskKind.DOCTOR))


# --------------------------------------------------------------------------------------------------------------- retry


@action
def retry(state: State, key: str = "") -> State:
    """Repeat the work of the current step.

    Args:
        key: machine whose row is repeated; a skipped machine is included again. Empty: every row with a problem.
    """
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
        case Step.STRATEGY:  # repeat a failed forecast as it was; otherwise measure again
            return _anew(state, TaskKind.FORECAST, value=StrategyRanking(measure=state.strategy.status in GOOD))
        case Step.PLAN:
            failed = state.strategy.status is ItemStatus.FAILED
            return _anew(_anew(state, TaskKind.FORECAST) if failed else state, TaskKind.PLAN)
    if state.launch.status is not ItemStatus.FAILED:
        return state
    return confirm(IN_CLEAR).on(replace(state, step=Step.PLAN))  # with the consent that was given before


def _redo(state: State, *kinds: TaskKind) -> State:
    """Recompute parts; their current values stay on the screen meanwhile."""
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
    """Select or deselect a machine; ``to=None`` toggles it."""
    row = next((row for row in state.machines.rows if key in (row.key, *row.aliases)), None)
    if row is None:
        return state.noting("that machine is no longer listed")
    picked = state.answers.picked
    to = row.key not in picked if to is None else to
    others = _without(picked, row.key)
    return _unskipped(state.answering(picked=(*others, row.key) if to else others), row.key)


@action
def add_machine(state: State, text: str) -> State:
    """Add and select a machine given as ``[user@]host[:port]``, as typed after ``ssh``; one that is listed is selected.

    Its row appears at once; discovery later merges it with the machine that answers at that address.
    """
    from distributed.hosts.file import typed_machine  # imports pydantic, which the first paint does without

    text = " ".join(text.split())
    quoted = text[:_QUOTED]
    if (listed := row_named(state, text)) is not None:
        return pick(listed.key, True).on(state)
    try:
        entry = typed_machine(text)
    except BadInput:
        return state.noting(f"'{quoted}' is not an address: type it as after ssh, for example ada@studio.local")
    row = MachineRow(f"typed:{text}", entry.name, words="searching", entry=entry, found_by=("typed",))
    machines = replace(state.machines, rows=(*state.machines.rows, row))
    state = replace(state, pinned=(*state.pinned, row), machines=machines)
    typed = tuple(dict.fromkeys((*state.answers.typed, text)))
    return state.answering(typed=typed, picked=tuple(dict.fromkeys((*state.answers.picked, row.key))))


def row_named(state: State, text: str) -> MachineRow | None:
    """Return the listed machine that a typed name or address means; ``None`` if none is."""
    name, key = " ".join(text.split()), f"typed:{' '.join(text.split())}"
    as_typed = (row for row in state.machines.rows if key in (row.key, *row.aliases))
    named = (row for row in state.listed if name.casefold() in (row.name.casefold(), *row.names))
    return next(as_typed, None) or next(named, None)


@action
def remove_machine(state: State, text: str) -> State:
    """Remove a typed machine."""
    key, rows = f"typed:{text}", state.machines.rows
    gone = {row.key for row in rows if key in (row.key, *row.aliases) and len(row.found_by) == 1}
    remaining = tuple(row for row in rows if row.key not in gone)
    pinned = tuple(row for row in state.pinned if row.key != key)
    state = replace(state, machines=replace(state.machines, rows=remaining), pinned=pinned)
    return state.answering(typed=_without(state.answers.typed, text), picked=_without(state.answers.picked, *gone))


@action
def trust_key(state: State, key: str, fingerprint: str) -> State:
    """Record that the user compared the fingerprint with the one shown on the machine, and trusts the key."""
    row = state.access_of(key)
    if row is not None and row.status is ItemStatus.FAILED and not row.fingerprint:
        return state.noting(f"{row.name} did not answer meanwhile: compare its key again when it does")
    if row is None or row.need is not AccessNeed.TRUST or row.fingerprint != fingerprint:
        return state.noting("that is not the host key that the machine shows")
    return state.answering(trusted=tuple(dict.fromkeys((*state.answers.trusted, (key, fingerprint)))))


@action
def approve(state: State, key: str) -> State:
    """Use what the machine's hosts file names: the user has seen what it can run here."""
    row = state.access_of(key)
    if row is None or row.need is not AccessNeed.APPROVAL:
        return state.noting("this machine needs no approval")
    return state.ordering(TaskKind.APPROVAL, key)


@action
def set_user(state: State, key: str, user: str) -> State:
    """Log in to a machine as another user."""
    user = user.strip()
    if any(row.here for row in state.picked if row.key == key):
        return state.noting("no login is needed on this computer")
    if state.access_of(key) is None or re.fullmatch(r"[A-Za-z0-9_][\w.@+-]{0,63}", user, re.ASCII) is None:
        return state.noting(f"'{user[:_QUOTED]}' cannot be the name of a user")
    return state.answering(users=(*(pair for pair in state.answers.users if pair[0] != key), (key, user)))


@action
def install_key(state: State, key: str) -> State:
    """Install our SSH key with the password passed to ``Wizard.give_password``."""
    row = state.access_of(key)
    if row is None or row.need is not AccessNeed.PASSWORD:
        return state.noting("this machine needs no password")
    if state.is_under_way(TaskKind.INSTALL_KEY, key):
        return state.noting(UNDER_WAY)
    state = state.putting(TaskKind.ACCESS, key, status=ItemStatus.WORKING, words=TaskKind.INSTALL_KEY.value)
    return state.ordering(TaskKind.INSTALL_KEY, key)


@action
def skip(state: State, key: str) -> State:
    """Exclude this machine from the run."""
    if key not in state.answers.picked or key in state.answers.skipped:
        return state
    return state.answering(skipped=(*state.answers.skipped, key))


@action
def unskip(state: State, key: str) -> State:
    """Include this machine again; its earlier findings are kept."""
    return _unskipped(state, key)


# --------------------------------------------------------------------------------------------------- job and strategy


@action
def choose_profile(state: State, name: str) -> State:
    """Choose another profile; options changed by the user are kept."""
    return state.answering(profile=name)


@action
def set_option(state: State, name: str, text: str) -> State:
    """Set an option of the profile, or ``model`` or ``dataset``, from text. Its default value undoes the change."""
    text = " ".join(text.splitlines()).strip()
    is_default = any(option.name == name and option.default == text for option in state.job.value.options)
    gone = {(name, value) for option, value in state.answers.options if option == name}
    if name == "dataset":
        gone |= {("epochs", state.data.value.epochs), IN_EACH_QUARTER}  # those were for the other data set
    others = tuple(pair for pair in state.answers.options if pair not in gone)
    return state.answering(options=others if is_default else (*others, (name, text)))


@action
def reset_option(state: State, name: str) -> State:
    """Restore the profile's value of an option."""
    return state.answering(options=tuple(pair for pair in state.answers.options if pair[0] != name))


@action
def choose_strategy(state: State, index: int) -> State:
    """Choose the candidate plan with this index in the ranking."""
    candidate = next((way for way in state.ways if way.index == index), None)
    if candidate is None:
        return state.noting("there is no such way to train")
    if candidate.problem:
        return state.noting(f"this way cannot be taken: {candidate.problem}")
    return state.answering(strategy="" if candidate.recommended else candidate.identity)


@action
def set_interval(state: State, steps: int) -> State:
    """Set the sync interval (H, in steps) of the chosen candidate plan; 0 restores the recommended one."""
    if state.chosen is None or not state.chosen.periodic:
        return state.noting("this strategy exchanges in every step")
    return state.answering(interval=max(0, min(steps, _LONGEST_INTERVAL)))


@action
def set_preference(state: State, preference: str) -> State:
    """Rank candidate plans by one of :data:`PREFERENCES`."""
    if preference not in PREFERENCES:
        return state.noting("choose fastest, closest-to-exact or least-traffic")
    return state.answering(preference=preference, strategy="", interval=0)


# ----------------------------------------------------------------------------------------------------- plan and launch


@action
def measure(state: State) -> State:
    """Run the task briefly on every machine, and make the plan with the new figures."""
    working = state.strategy.status is ItemStatus.WORKING
    return state if working else _anew(state, TaskKind.FORECAST, value=StrategyRanking(measure=True))


@action
def save_as(state: State, name: str) -> State:
    """Set the name of the profile in which these choices are saved."""
    return state.answering(save_as=name.strip())


@action
def confirm(state: State, consent: str = "", another: bool = False) -> State:
    """Save the profile and start the run.

    Args:
        consent: :data:`IN_CLEAR`, required if the plan sends unencrypted training traffic.
        another: start another run, even if one was already started from this plan.
    """
    if state.step is Step.PLAN and state.started and not another:
        return _to(state, Step.LAUNCH)
    reasons = why_not_confirmed(state, consent)
    if reasons:
        return state.noting(reasons[0])
    state = state.putting(TaskKind.LAUNCH, state_part=StatePart(LaunchProgress(), status=ItemStatus.WORKING))
    return _to(state.ordering(TaskKind.LAUNCH), Step.LAUNCH)


@action
def drop(state: State, key: str) -> State:
    """After a failed launch: exclude a machine and return to the Plan step, where the plan is made again."""
    row = next((row for row in state.members if key in (row.key, row.name)), None)
    if state.launch.status is not ItemStatus.FAILED or row is None:
        return state.noting("machines can be dropped only after a launch has failed")
    if len(state.members) == 1:
        return state.noting("it is the only machine")
    return _to(state.answering(skipped=(*state.answers.skipped, row.key)), Step.PLAN)
