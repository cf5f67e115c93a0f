"""Scripted access: every stage of the way to a machine, and the causes for which it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from app.demo.machines import ScriptedMachine, Trouble
from app.demo.pace import Pace
from app.wizard.state import AccessRow, MachineRow, Need, Status
from distributed.ssh.errors import REMOTE_LOGIN

_COMPARE = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
STAGES = ("reach", "host key", "login", "shell")
ASKING = 0.7
OPENS_AFTER = 9.0
"""Seconds after the first try at which a closed port opens."""
WRONG = "wrong"
"""The one password that the script refuses."""


class Entry:
    """The way to the scripted machines; remembers what was mended."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._first_try: dict[str, float] = {}
        self._with_key: set[str] = set()

    def check(self, row: MachineRow, machine: ScriptedMachine, trusted: Sequence[str]) -> AccessRow:
        """Go the way once."""
        tried = self._first_try.setdefault(machine.name, self._pace.passed)
        self._pace.work(ASKING)
        way = _way(row, machine)
        match machine.trouble:
            case Trouble.FIRST_MEETING if machine.fingerprint not in trusted:
                return _first_meeting(way, machine)
            case Trouble.PASSWORD if machine.name not in self._with_key:
                return _password(way)
            case Trouble.PORT_CLOSED if self._pace.passed - tried < OPENS_AFTER:
                cause = "it answers, but no SSH server listens on port 22 (scripted: one will, in some seconds)"
                return _ended(way, 0, "port_closed", "port closed", cause, REMOTE_LOGIN)
            case Trouble.KEY_CHANGED:
                return _changed(way, machine)
            case Trouble.USER_REFUSED:
                fix = f"which user is yours there? add it as: USER@{machine.address}"
                return _ended(way, 2, "user_refused", "user refused", f"'{row.user}' may not log in there", fix)
        return way

    def install_key(self, row: MachineRow, machine: ScriptedMachine, password: str) -> AccessRow:
        """Take any password but one."""
        self._pace.work(ASKING)
        if password == WRONG:
            failed = _password(_way(row, machine))
            return dataclasses.replace(failed, code="password_refused", cause="it refused this password")
        self._with_key.add(machine.name)
        return _way(row, machine)


def _way(row: MachineRow, machine: ScriptedMachine) -> AccessRow:
    return AccessRow(
        key=row.key,
        name=row.name,
        status=Status.OK,
        words="ready",
        stages=tuple((stage, Status.OK) for stage in STAGES),
        where=f"{machine.address}:22",
        user=row.user,
        system="Darwin arm64" if machine.system == "darwin" else "Linux x86_64",
        fingerprint=machine.fingerprint,
        attempts=1,
    )


def _ended(way: AccessRow, stage: int, code: str, words: str, cause: str, fix: str) -> AccessRow:
    marks = [Status.OK] * stage + [Status.FAILED] + [Status.WAITING] * (len(STAGES) - stage - 1)
    return dataclasses.replace(
        way, status=Status.FAILED, words=words, cause=cause, fix=fix, code=code, stages=tuple(zip(STAGES, marks))
    )


def _first_meeting(way: AccessRow, machine: ScriptedMachine) -> AccessRow:
    cause = "first meeting: its ssh-ed25519 host key was never seen here"
    fix = f"compare its fingerprint on {machine.name} itself, then accept it"
    ended = _ended(way, 1, "unknown_host_key", "first meeting", cause, fix)
    return dataclasses.replace(ended, need=Need.TRUST, compare=_COMPARE)


def _password(way: AccessRow) -> AccessRow:
    cause = "none of our keys fits (scripted: any password but 'wrong' will do)"
    ended = _ended(way, 2, "no_key_accepted", "password", cause, "its password, given once, installs our key")
    return dataclasses.replace(ended, need=Need.PASSWORD)


def _changed(way: AccessRow, machine: ScriptedMachine) -> AccessRow:
    cause = f"its host key is not the one that {machine.name} had: another machine may pose as it"
    fix = f"if you know why: ssh-keygen -R {machine.address}; or leave it out"
    return _ended(way, 1, "host_key_changed", "key changed", cause, fix)
