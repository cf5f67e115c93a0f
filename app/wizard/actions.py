"""What a person can do in the guided set-up, as small values. ``Wizard.do`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from app.wizard.machine_actions import (
    AddMachine,
    Fix,
    FixAll,
    GivePassword,
    Pick,
    RemoveMachine,
    Skip,
    TrustKey,
    typed_row,
)
from app.wizard.records import GOOD, Launch, Status, Strategy
from app.wizard.state import ORDER, Action, Answers, Kind, Part, Step, after, before
from app.wizard.state import WizardState as State
from app.wizard.validation import blockers

__all__ = [
    "IN_CLEAR", "PREFERENCES", "Action", "AddMachine", "Back", "ChooseProfile", "ChooseStrategy", "Confirm", "Doctor",
    "Drop", "Fix", "FixAll", "GivePassword", "GoTo", "NewSetup", "Next", "Pick", "RemoveMachine", "Rerun",
    "ResetOption", "Retry", "SaveAs", "SaveOnly", "SetInterval", "SetOption", "SetPreference", "Skip", "TrustKey",
    "typed_row",
]  # fmt: skip
IN_CLEAR = "in clear"
"""What a person types to agree to training traffic that others can read."""
PREFERENCES = ("fastest", "closest-to-exact", "least-traffic")
UNDER_WAY = "that is in progress"
_STARTING = "the run is being started"
_LONGEST_INTERVAL = 100_000


# --------------------------------------------------------------------------------------------------------------- steps


def _to(state: State, step: Step) -> State:
    """Show a step; runs and profiles are read anew for Home."""
    reached = step if ORDER.index(step) > ORDER.index(state.reached) else state.reached
    state = replace(state, step=step, reached=reached)
    return _again(state, Kind.HOME) if step is Step.HOME else state


@dataclass(frozen=True)
class Next(Action):
    """To the following step; a notice says why where that cannot be."""

    def on(self, state: State) -> State:
        reasons = blockers(state)
        if reasons:
            return state.noting(reasons[0])
        if state.step is Step.PLAN:
            return state.noting("confirm the plan to start it")
        return _to(state, after(state.step, state.far)) if state.step is not Step.LAUNCH else state


@dataclass(frozen=True)
class Back(Action):
    """To the step before; from a run that trains to Home, as behind it lies a plan that is carried out."""

    def on(self, state: State) -> State:
        if state.step is Step.LAUNCH and state.launch.status is Status.WORKING:
            return state.noting(_STARTING)
        home = state.step is Step.LAUNCH and state.started
        return _to(state, Step.HOME if home else before(state.step, state.far))


@dataclass(frozen=True)
class GoTo(Action):
    """To any step that was reached already, or back to Home."""

    step: Step

    def on(self, state: State) -> State:
        if state.step is Step.LAUNCH and state.launch.status is Status.WORKING:
            return state.noting(_STARTING)
        if self.step is Step.LAUNCH or ORDER.index(self.step) > ORDER.index(state.reached):
            return state.noting(f"{self.step.heading} comes later")
        return _to(state, self.step)


@dataclass(frozen=True)
class NewSetup(Action):
    """From Home: begin with the machines."""

    def on(self, state: State) -> State:
        return _to(_without_launch(state) if state.started else state, Step.MACHINES)


@dataclass(frozen=True)
class Rerun(Action):
    """From Home: a profile with its machines, at the Plan."""

    profile: str

    def on(self, state: State) -> State:
        kept = state.answers
        answers = Answers(typed=kept.typed, trusted=kept.trusted, profile=self.profile)
        state = replace(_without_launch(state), answers=answers, preselected=True)
        return _to(state.ordering(Kind.SAVED_MACHINES, self.profile), Step.PLAN)


def _without_launch(state: State) -> State:
    return state.putting(Kind.LAUNCH, part=state.empty(Kind.LAUNCH))


@dataclass(frozen=True)
class Doctor(Action):
    """Look at this computer only."""

    def on(self, state: State) -> State:
        return state.ordering(Kind.DOCTOR)


# --------------------------------------------------------------------------------------------------------------- retry


@dataclass(frozen=True)
class Retry(Action):
    """Do the step's work again: of a row, or of all rows that did not go well. Takes a skipped machine back in."""

    key: str = ""

    def on(self, state: State) -> State:
        return _RETRIES[state.step](state, self.key)


def _again(state: State, *kinds: Kind) -> State:
    """Have parts worked out once more; what is shown stays meanwhile."""
    for kind in kinds:
        state = state.putting(kind, part=state.part(kind).again())
    return state


def _anew(state: State, kind: Kind, found: object = None) -> State:
    """Have a part worked out once more from nothing."""
    fresh = state.empty(kind)
    return state.putting(kind, part=replace(fresh, found=found or fresh.found, inputs=state.part(kind).inputs))


def _unskipped(state: State, key: str) -> State:
    return state.answering(skipped=tuple(other for other in state.answers.skipped if other != key))


def _retry_access(state: State, key: str) -> State:
    for row in state.access:
        if row.key == key or (not key and row.status in (Status.FAILED, Status.WARNING)):
            inputs = state.part(Kind.ACCESS, row.key).inputs
            state = state.putting(Kind.ACCESS, row.key, Part(None, inputs=inputs))
    return _unskipped(state, key)


def _retry_links(state: State, _: str) -> State:
    return state.noting(UNDER_WAY) if state.links.status is Status.WORKING else _anew(state, Kind.LINKS)


def _retry_strategy(state: State, _: str) -> State:
    """After a failure: once more. Otherwise: with new figures."""
    if state.strategy.status is Status.WORKING:
        return state.noting(UNDER_WAY)
    return _anew(state, Kind.FORECAST, Strategy(measure=state.strategy.status in GOOD))


def _retry_plan(state: State, _: str) -> State:
    if state.strategy.status is Status.FAILED:
        state = _anew(state, Kind.FORECAST)
    return _anew(state, Kind.PLAN)


def _retry_launch(state: State, _: str) -> State:
    if state.launch.status is not Status.FAILED:
        return state
    return Confirm(IN_CLEAR).on(replace(state, step=Step.PLAN))  # as it was confirmed before


_RETRIES: Mapping[Step, Callable[[State, str], State]] = {
    Step.HOME: lambda state, _: _again(state, Kind.HOME),
    Step.MACHINES: lambda state, _: state.noting("machines are searched for all the time"),
    Step.ACCESS: _retry_access,
    Step.CHECKS: lambda state, key: _unskipped(_anew(state, Kind.CHECKS), key),
    Step.LINKS: _retry_links,
    Step.JOB: lambda state, _: _again(state, Kind.JOB, Kind.DATA, Kind.FITS),
    Step.STRATEGY: _retry_strategy,
    Step.PLAN: _retry_plan,
    Step.LAUNCH: _retry_launch,
}


# --------------------------------------------------------------------------------------------------- job and strategy


@dataclass(frozen=True)
class ChooseProfile(Action):
    """Another profile; options that a person set stay."""

    name: str

    def on(self, state: State) -> State:
        return state.answering(profile=self.name)


@dataclass(frozen=True)
class SetOption(Action):
    """Any option of a profile, or ``model`` or ``dataset``, as text. The profile's own value takes the change back."""

    name: str
    text: str

    def on(self, state: State) -> State:
        text = " ".join(self.text.splitlines()).strip()
        if any(option.name == self.name and option.default == text for option in state.job.found.options):
            return ResetOption(self.name).on(state)
        return state.answering(options=(*_others(state, self.name), (self.name, text)))


@dataclass(frozen=True)
class ResetOption(Action):
    """The profile's own value again."""

    name: str

    def on(self, state: State) -> State:
        return state.answering(options=_others(state, self.name))


def _others(state: State, name: str) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in state.answers.options if pair[0] != name)


@dataclass(frozen=True)
class ChooseStrategy(Action):
    """A way of the Strategy screen."""

    index: int

    def on(self, state: State) -> State:
        way = next((way for way in state.ways if way.index == self.index), None)
        if way is None:
            return state.noting("no such way to train")
        if way.problem:
            return state.noting(f"{way.choice.name}: {way.problem}")
        return state.answering(strategy="" if way.recommended else way.identity)


@dataclass(frozen=True)
class SetInterval(Action):
    """Steps between exchanges, H, of the chosen way; 0: as recommended."""

    steps: int

    def on(self, state: State) -> State:
        if state.chosen is None or not state.chosen.periodic:
            return state.noting("this strategy exchanges in every step")
        return state.answering(interval=max(0, min(self.steps, _LONGEST_INTERVAL)))


@dataclass(frozen=True)
class SetPreference(Action):
    """One of :data:`PREFERENCES`."""

    preference: str

    def on(self, state: State) -> State:
        if self.preference not in PREFERENCES:
            return state.noting("choose fastest, closest-to-exact or least-traffic")
        return state.answering(preference=self.preference, strategy="", interval=0)


# ----------------------------------------------------------------------------------------------------- plan and launch


@dataclass(frozen=True)
class SaveAs(Action):
    """Name of the profile that keeps these choices."""

    name: str

    def on(self, state: State) -> State:
        return state.answering(save_as=self.name.strip())


def _not_yet(state: State, said: str) -> tuple[str, ...]:
    """Return why the Plan cannot be carried out; ``said``: what the person typed."""
    if state.step is not Step.PLAN:
        return ("there is no plan yet",)
    open_ = state.plan.found.in_clear if said.strip().casefold() != IN_CLEAR else ()
    return (*blockers(state), *(f"not encrypted: {text}; nothing was started" for text in open_[:1]))


@dataclass(frozen=True)
class SaveOnly(Action):
    """Write the profile and its files, and start nothing."""

    said: str = ""
    """As for :class:`Confirm`."""

    def on(self, state: State) -> State:
        reasons = _not_yet(state, self.said)
        return state.noting(reasons[0]) if reasons else state.ordering(Kind.SAVE, inputs=state.plan.inputs)


@dataclass(frozen=True)
class Confirm(Action):
    """Carry out the Plan: save the profile, start the run."""

    said: str = ""
    """:data:`IN_CLEAR`, where the Plan sends training traffic that others can read."""
    another: bool = False
    """Where a run was started from this Plan already: whether another one is meant."""

    def on(self, state: State) -> State:
        if state.step is Step.PLAN and state.started and not self.another:
            return _to(state, Step.LAUNCH)
        reasons = _not_yet(state, self.said)
        if reasons:
            return state.noting(reasons[0])
        state = state.putting(Kind.LAUNCH, part=Part(Launch(), status=Status.WORKING))
        return _to(state.ordering(Kind.LAUNCH), Step.LAUNCH)


@dataclass(frozen=True)
class Drop(Action):
    """At Launch: leave a machine out of a start that failed; back to the Plan, which is made anew."""

    key: str

    def on(self, state: State) -> State:
        row = next((row for row in state.members if self.key in (row.key, row.name)), None)
        if state.launch.status is not Status.FAILED or row is None:
            return state.noting("machines can be dropped only after a launch has failed")
        if len(state.members) == 1:
            return state.noting("it is the only machine")
        return _to(state.answering(skipped=(*state.answers.skipped, row.key)), Step.PLAN)
