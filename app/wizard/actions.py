"""What a person can do in the guided set-up, as small values. ``Wizard.do`` takes them.

A password is shown by no ``repr`` and reaches no state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.wizard.steps import Step

IN_CLEAR = "in clear"
"""What a person types to agree to training traffic that others can read."""


@dataclass(frozen=True)
class Next:
    """To the following step; a notice says why where that cannot be."""


@dataclass(frozen=True)
class Back:
    """To the step before."""


@dataclass(frozen=True)
class GoTo:
    """To any step that was reached already, or back to Home."""

    step: Step


@dataclass(frozen=True)
class NewSetup:
    """From Home: begin with the machines."""


@dataclass(frozen=True)
class Rerun:
    """From Home: a profile with its machines, at the Plan."""

    profile: str


@dataclass(frozen=True)
class Doctor:
    """Look at this computer only."""


@dataclass(frozen=True)
class Pick:
    """Choose a machine, or no more; ``on`` empty: the other of the two."""

    key: str
    on: bool | None = None


@dataclass(frozen=True)
class AddMachine:
    """``[user@]host[:port]``, as one would type it after ``ssh``; it is picked too."""

    text: str


@dataclass(frozen=True)
class RemoveMachine:
    """Take a typed machine away again."""

    text: str


@dataclass(frozen=True)
class TrustKey:
    """A person has compared the fingerprint with the machine's own."""

    key: str
    fingerprint: str


@dataclass(frozen=True)
class GivePassword:
    """Used once, to install our key there."""

    key: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Retry:
    """Do the step's work again: of a row, or of all rows that did not go well. Takes a skipped machine back in."""

    key: str = ""


@dataclass(frozen=True)
class Skip:
    """Go on without this machine."""

    key: str


@dataclass(frozen=True)
class Fix:
    """Mend one finding of one machine."""

    key: str
    check: str = ""


@dataclass(frozen=True)
class FixAll:
    """Mend everything that is safe to mend, on all machines."""


@dataclass(frozen=True)
class ChooseProfile:
    """Another profile; options that a person set stay."""

    name: str


@dataclass(frozen=True)
class SetOption:
    """Any option of a profile, or ``model`` or ``dataset``, as text. The profile's own value takes the change back."""

    name: str
    text: str


@dataclass(frozen=True)
class ResetOption:
    """The profile's own value again."""

    name: str


@dataclass(frozen=True)
class ChooseStrategy:
    """A row of the Strategy screen."""

    index: int


@dataclass(frozen=True)
class SetInterval:
    """Steps between exchanges, H, of the chosen way; 0: as recommended."""

    steps: int


@dataclass(frozen=True)
class SetPreference:
    """``fastest``, ``closest-to-exact`` or ``least-traffic``."""

    preference: str


@dataclass(frozen=True)
class SaveAs:
    """Name of the profile that keeps these choices."""

    name: str


@dataclass(frozen=True)
class SaveOnly:
    """Write the profile and its files, and start nothing."""

    said: str = ""
    """As for :class:`Confirm`."""


@dataclass(frozen=True)
class Confirm:
    """Carry out the Plan: save the profile, start the run."""

    said: str = ""
    """:data:`IN_CLEAR`, where the Plan sends training traffic that others can read."""
    another: bool = False
    """Where a run was started from this Plan already: whether another one is meant."""


@dataclass(frozen=True)
class Drop:
    """At Launch: leave a machine out and plan anew with the rest."""

    key: str


Action = (
    Next | Back | GoTo | NewSetup | Rerun | Doctor
    | Pick | AddMachine | RemoveMachine | TrustKey | GivePassword | Retry | Skip | Fix | FixAll
    | ChooseProfile | SetOption | ResetOption | ChooseStrategy | SetInterval | SetPreference
    | SaveAs | SaveOnly | Confirm | Drop
)  # fmt: skip
