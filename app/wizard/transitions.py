"""The guided set-up as a pure function: ``apply(state, action or observation) -> state``. It never raises.

What a person does is in :mod:`app.wizard.on_actions`, what the machines' side tells in
:mod:`app.wizard.on_observations`; afterwards :func:`app.wizard.slots.settle` throws away what no longer fits.
"""

from __future__ import annotations

from app.wizard.actions import Action
from app.wizard.observations import Observation
from app.wizard.on_actions import act
from app.wizard.on_observations import observe
from app.wizard.slots import settle
from app.wizard.state import WizardState


def apply(state: WizardState, change: Action | Observation) -> WizardState:
    """Return the state after a person's action, or after something was seen."""
    if isinstance(change, Action):
        return settle(act(state, change))
    return settle(observe(state, change))


def begin() -> WizardState:
    """Return the state of a set-up that has just been opened."""
    return settle(WizardState())
