"""The guided set-up as a pure function: ``apply(state, change) -> state``. It never raises.

A change is what a person did (:mod:`app.wizard.actions`) or what was seen (:mod:`app.wizard.observations`); each says
itself what it changes, and afterwards :func:`app.wizard.dependencies.settle` puts back what no longer fits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from app.wizard.dependencies import settle
from app.wizard.state import WizardState


class Change(ABC):
    """Something that happens to the set-up."""

    @abstractmethod
    def on(self, state: WizardState) -> WizardState:
        """Return the state after it, not yet settled."""


class Action(Change):
    """Something that a person does. A password in it is shown by no ``repr`` and reaches no state."""


class Observation(Change):
    """Something that the machines' side tells."""


def apply(state: WizardState, change: Change) -> WizardState:
    """Return the state after a change."""
    if isinstance(change, Action) and state.notice:
        state = replace(state, notice="")
    return settle(change.on(state))


def begin() -> WizardState:
    """Return the state of a set-up that has just been opened."""
    return settle(WizardState())
