"""What a person can do about machines: select, trust, log in, fix, skip. ``Wizard.do`` takes these."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from app.wizard.records import Check, MachineRow, Need, Status
from app.wizard.state import Action, Kind
from app.wizard.state import WizardState as State
from profiles.errors import BadInput

INSTALLING = "installing a key"
_QUOTED = 60
"""Longest typed address that is quoted in a notice."""


@dataclass(frozen=True)
class Pick(Action):
    """Choose a machine, or no more; ``to`` empty: the other of the two."""

    key: str
    to: bool | None = None

    def on(self, state: State) -> State:
        row = next((row for row in state.machines.rows if self.key in (row.key, *row.aliases)), None)
        if row is None:
            return state.noting("that machine is no longer listed")
        picked = state.answers.picked
        to = row.key not in picked if self.to is None else self.to
        rest = _without(picked, row.key)
        skipped = _without(state.answers.skipped, row.key)
        return state.answering(picked=(*rest, row.key) if to else rest, skipped=skipped)


@dataclass(frozen=True)
class AddMachine(Action):
    """``[user@]host[:port]``, as one would type it after ``ssh``; it is picked too.

    It has a row at once; discovery makes it one with the machine that answers there.
    """

    text: str

    def on(self, state: State) -> State:
        text = " ".join(self.text.split())
        row, quoted = typed_row(text), text[:_QUOTED]
        if row is None:
            return state.noting(f"'{quoted}' is not an address: type it as after ssh, for example ada@studio.local")
        if text in state.answers.typed:
            return state.noting(f"{quoted} is listed already")
        machines = replace(state.machines, rows=(*state.machines.rows, row))
        state = replace(state, pinned=(*state.pinned, row), machines=machines)
        return state.answering(typed=(*state.answers.typed, text), picked=(*state.answers.picked, row.key))


def typed_row(text: str) -> MachineRow | None:
    """Return the row of ``[user@]host[:port]``; ``None`` if it is no such thing."""
    from distributed.hosts.file import typed_machine  # with pydantic, which the first paint does without

    try:
        entry = typed_machine(text)
    except BadInput:
        return None
    return MachineRow(f"typed:{text}", entry.name, words="searching", entry=entry, found_by=("typed",))


@dataclass(frozen=True)
class RemoveMachine(Action):
    """Take a typed machine away again."""

    text: str

    def on(self, state: State) -> State:
        key, rows = f"typed:{self.text}", state.machines.rows
        gone = {row.key for row in rows if key in (row.key, *row.aliases) and row.found_by == ("typed",)}
        kept = tuple(row for row in rows if row.key not in gone)
        pinned = tuple(row for row in state.pinned if row.key != key)
        state = replace(state, machines=replace(state.machines, rows=kept), pinned=pinned)
        return state.answering(
            typed=_without(state.answers.typed, self.text), picked=_without(state.answers.picked, *gone)
        )


@dataclass(frozen=True)
class TrustKey(Action):
    """A person has compared the fingerprint with the machine's own."""

    key: str
    fingerprint: str

    def on(self, state: State) -> State:
        row = next((row for row in state.access if row.key == self.key), None)
        if row is None or row.need is not Need.TRUST or row.fingerprint != self.fingerprint:
            return state.noting("that is not the key that it shows")
        pair = (self.key, self.fingerprint)
        return state.answering(trusted=(*(known for known in state.answers.trusted if known != pair), pair))


@dataclass(frozen=True)
class GivePassword(Action):
    """Used once, to install our key there."""

    key: str
    password: str = field(repr=False)

    def on(self, state: State) -> State:
        row = next((row for row in state.access if row.key == self.key), None)
        if row is None or row.need is not Need.PASSWORD:
            return state.noting("this machine needs no password")
        if row.words == INSTALLING:
            return state.noting("that is in progress")
        state = state.putting(Kind.ACCESS, self.key, status=Status.WORKING, words=INSTALLING)
        return state.ordering(Kind.INSTALL_KEY, self.key)


@dataclass(frozen=True)
class Skip(Action):
    """Go on without this machine."""

    key: str

    def on(self, state: State) -> State:
        if self.key not in state.answers.picked or self.key in state.answers.skipped:
            return state
        return state.answering(skipped=(*state.answers.skipped, self.key))


@dataclass(frozen=True)
class Fix(Action):
    """Fix one problem of one machine, or all of it."""

    key: str
    check: str = ""

    def on(self, state: State) -> State:
        return _repair(state, self.check, [row for row in state.checks if row.key == self.key])


@dataclass(frozen=True)
class FixAll(Action):
    """Fix everything that is safe to fix, on all machines."""

    def on(self, state: State) -> State:
        return _repair(state, "", state.checks)


def _repair(state: State, check: str, rows: tuple[Check, ...] | list[Check]) -> State:
    keys = tuple(row.key for row in rows if row.fixable and row.status is not Status.SKIPPED)
    if not keys or state.under_repair.issuperset(keys):
        return state.noting("nothing there can be fixed from here")
    return state.ordering(Kind.REPAIR, check, keys)


def _without(keys: tuple[str, ...], *gone: str) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in gone)
