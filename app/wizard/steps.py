"""The steps of the guided set-up: their order, their titles, and which of them a choice makes needless."""

from __future__ import annotations

from enum import Enum


class Step(str, Enum):
    """One screen of the set-up."""

    HOME = "home"
    MACHINES = "machines"
    ACCESS = "access"
    CHECKS = "checks"
    LINKS = "links"
    JOB = "job"
    STRATEGY = "strategy"
    PLAN = "plan"
    LAUNCH = "launch"

    @property
    def heading(self) -> str:
        """As the breadcrumb and the head of a screen say it."""
        return self.value.capitalize()

    @property
    def question(self) -> str:
        """What a person decides there, in one line."""
        return _QUESTIONS[self]


ORDER = tuple(Step)
BETWEEN_MACHINES = frozenset({Step.ACCESS, Step.CHECKS, Step.LINKS})
"""Steps about machines that are reached over the network: there is nothing to do for this computer alone."""
_QUESTIONS = {
    Step.HOME: "What do you want to do?",
    Step.MACHINES: "Which machines shall train?",
    Step.ACCESS: "May we log in there?",
    Step.CHECKS: "Can they train?",
    Step.LINKS: "How fast is the network between them?",
    Step.JOB: "What is to be trained, on what?",
    Step.STRATEGY: "How do they work together?",
    Step.PLAN: "Shall this be done?",
    Step.LAUNCH: "It starts.",
}


def visited(far: bool) -> tuple[Step, ...]:
    """Return the steps that are shown; ``far``: whether a machine other than this computer takes part."""
    return ORDER if far else tuple(step for step in ORDER if step not in BETWEEN_MACHINES)


def after(step: Step, far: bool) -> Step:
    """Return the next step that is shown, the last one after itself."""
    shown = visited(far)
    return next((other for other in shown if ORDER.index(other) > ORDER.index(step)), shown[-1])


def before(step: Step, far: bool) -> Step:
    """Return the step shown before, the first one before itself."""
    shown = visited(far)
    return next((other for other in reversed(shown) if ORDER.index(other) < ORDER.index(step)), shown[0])
