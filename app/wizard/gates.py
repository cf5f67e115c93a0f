"""What stands between one step and the next, in words: why it cannot be left, and what leaving it does elsewhere."""

from __future__ import annotations

from app.wizard.slots import needs_no_figures
from app.wizard.state import Need, Status, WizardState
from app.wizard.steps import Step

_UNSETTLED = (Status.WAITING, Status.WORKING)
MEASURES = "measures {names}: code and data go to ~/.cache/muster there"
"""What leads to Strategy, or to the Plan of a saved profile, does before anything is confirmed."""


def blockers(state: WizardState) -> tuple[str, ...]:
    """Return why ``Next`` does nothing at this step; empty: it goes on."""
    gate = _GATES.get(state.step)
    return gate(state) if gate is not None else ()


def started(state: WizardState) -> bool:
    """Whether a run was started from this set-up, and trains or has trained."""
    return state.launch.status is Status.OK and bool(state.launch.run)


def measures(state: WizardState) -> str:
    """Return what going on from the Job brings to other machines; empty where nothing is brought."""
    names = [row.name for row in state.members if not row.here]
    if not names or state.strategy.status is not Status.WAITING:
        return ""
    return MEASURES.format(names=names[0] if len(names) == 1 else f"{len(names)} machines")


def _machines(state: WizardState) -> tuple[str, ...]:
    return () if state.picked else ("pick at least one machine",)


def _members(state: WizardState) -> tuple[str, ...]:
    return () if state.members else ("every picked machine was left out: take one back in, or pick others",)


def _access(state: WizardState) -> tuple[str, ...]:
    wanted = {row.key for row in state.members}
    rows = [row for row in state.access if row.key in wanted]
    asked = {
        Need.TRUST: "compare its fingerprint and trust it, or skip it",
        Need.PASSWORD: "give its password once, or skip it",
    }
    needs = [f"{row.name}: {asked[row.need]}" for row in rows if row.need is not Need.NOTHING]
    failed = [
        f"{row.name}: {row.cause or row.label}; mend it, or skip it"
        for row in rows
        if row.status is Status.FAILED and row.need is Need.NOTHING
    ]
    waiting = [f"{row.name} is still being asked" for row in rows if row.status in _UNSETTLED]
    return (*_members(state), *needs, *failed, *waiting)


def _checks(state: WizardState) -> tuple[str, ...]:
    wanted = {row.key for row in state.members}
    rows = [row for row in state.checks if row.key in wanted]
    waiting = [f"{row.name} is still being looked at" for row in rows if row.status in _UNSETTLED]
    failed = [
        f"{row.name}: {row.cause or row.label}; fix it, or skip it" for row in rows if row.status is Status.FAILED
    ]
    return (*_members(state), *failed, *waiting)


def _links(state: WizardState) -> tuple[str, ...]:
    links = state.links
    if links.status in _UNSETTLED:
        return ("the links are being measured",)
    return (links.cause,) if links.status is Status.FAILED else ()


def _job(state: WizardState) -> tuple[str, ...]:
    job = state.job
    if job.status in _UNSETTLED:
        return ("the profile is being read",)
    wrong = [f"{option.name}: {option.problem}" for option in job.options if option.problem]
    data = [job.data.cause] if job.data.status is Status.FAILED else []
    return (*([job.cause] if job.status is Status.FAILED else []), *wrong, *data)


def _strategy(state: WizardState) -> tuple[str, ...]:
    found = state.strategy
    if found.status is Status.FAILED:
        return (found.cause,)
    if found.status in _UNSETTLED:
        return () if needs_no_figures(state) else ("the machines are being measured",)
    chosen = state.chosen
    return (f"{chosen.choice.name}: {chosen.problem}",) if chosen is not None and chosen.problem else ()


def _plan(state: WizardState) -> tuple[str, ...]:
    plan = state.plan
    if plan.status is Status.FAILED:
        return (plan.cause,)
    if not state.members:
        return ("no machine takes part",)
    return ("the plan is being made",) if plan.status in _UNSETTLED else ()


_GATES = {
    Step.MACHINES: _machines,
    Step.ACCESS: _access,
    Step.CHECKS: _checks,
    Step.LINKS: _links,
    Step.JOB: _job,
    Step.STRATEGY: _strategy,
    Step.PLAN: _plan,
}
