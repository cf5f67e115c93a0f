"""What stands between one step and the next, in words: why it cannot be left, and what leaving it does elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from app.wizard.dependencies import needs_no_figures
from app.wizard.records import UNSETTLED, Access, Check, Need, Status
from app.wizard.state import Step, WizardState

MEASURES = "measures {names} and copies code and data to ~/.cache/muster there"
"""What leads to Strategy, or to the Plan of a saved profile, does before anything is confirmed."""
_ASKED = {
    Need.TRUST: "compare its fingerprint and trust it, or skip it",
    Need.PASSWORD: "give its password once, or skip it",
}


def blockers(state: WizardState) -> tuple[str, ...]:
    """Return why ``Next`` does nothing at this step; empty: it goes on."""
    check = _CHECKS.get(state.step)
    return check(state) if check is not None else ()


def measures(state: WizardState) -> str:
    """Return what going on from the Job brings to other machines; empty where nothing is brought."""
    names = [row.name for row in state.members if not row.here]
    if not names or state.strategy.status is not Status.WAITING:
        return ""
    return MEASURES.format(names=names[0] if len(names) == 1 else f"{len(names)} machines")


def _taking_part(state: WizardState, rows: Sequence[Access | Check], doing: str) -> tuple[str, ...]:
    """What keeps the members among ``rows`` from going on."""
    kept = [row for row in rows if row.status is not Status.SKIPPED]
    needy = [row for row in kept if isinstance(row, Access) and row.need is not Need.NOTHING]
    failed = [row for row in kept if row.status is Status.FAILED and row not in needy]
    nobody = () if state.members else ("every selected machine was skipped: include one again, or select others",)
    return (
        *nobody,
        *(f"{row.name}: {_ASKED[row.need]}" for row in needy),
        *(f"{row.name}: {row.cause or row.label}; fix it, or skip it" for row in failed),
        *(f"{row.name} is still being {doing}" for row in kept if row.status in UNSETTLED),
    )


def _links(state: WizardState) -> tuple[str, ...]:
    links = state.links
    if links.status in UNSETTLED:
        return ("the links are being measured",)
    return (links.cause,) if links.status is Status.FAILED else ()


def _job(state: WizardState) -> tuple[str, ...]:
    if state.job.status in UNSETTLED:
        return ("the profile is being read",)
    failed = [part.cause for part in (state.job, state.data) if part.status is Status.FAILED]
    wrong = [f"{option.name}: {option.problem}" for option in state.job.found.options if option.problem]
    return (*failed, *wrong)


def _strategy(state: WizardState) -> tuple[str, ...]:
    found, chosen = state.strategy, state.chosen
    if found.status is Status.FAILED:
        return (found.cause,)
    if found.status in UNSETTLED:
        return () if needs_no_figures(state) else ("the machines are being measured",)
    return (f"{chosen.choice.name}: {chosen.problem}",) if chosen is not None and chosen.problem else ()


def _plan(state: WizardState) -> tuple[str, ...]:
    if state.plan.status is Status.FAILED:
        return (state.plan.cause,)
    if not state.members:
        return ("no machine takes part",)
    return ("the plan is being made",) if state.plan.status in UNSETTLED else ()


_CHECKS: Mapping[Step, Callable[[WizardState], tuple[str, ...]]] = {
    Step.MACHINES: lambda state: () if state.picked else ("select at least one machine",),
    Step.ACCESS: lambda state: _taking_part(state, state.access, "contacted"),
    Step.CHECKS: lambda state: _taking_part(state, state.checks, "checked"),
    Step.LINKS: _links,
    Step.JOB: _job,
    Step.STRATEGY: _strategy,
    Step.PLAN: _plan,
}
