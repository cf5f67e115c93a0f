"""A code that this computer shares, as commands and screens see it: what happens, and the person's answer."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from distributed.hosts.joined import (
    DEFAULT_PORT,
    NotConnected,
    ask_door,
    identity_of,
    is_door_open,
    joining_folder,
    parse_line,
)
from distributed.hosts.lending import PERMITS
from distributed.joining.pairing.codes import LIFETIME, TRIES
from distributed.joining.pairing.exchange import Introduction
from distributed.joining.pairing.introductions import address_text
from profiles.errors import MachinesNotReady
from profiles.quantities import memory_text
from training.records.run_files import explain_errors, write_atomically

TRUST = (
    "It gets the code, the weights and its share of the data of what you train on it.",
    "It can lie about its results, keep what it saw, and leave at any time.",
    "It cannot read other files here, or run anything on this computer.",
)
"""What a person should know of a machine before admitting it."""


@dataclass(frozen=True)
class WrongTry:
    """Somebody has tried another code with its number."""

    address: str
    tries_left: int


@dataclass(frozen=True)
class Applicant:
    """A machine that knows the code wants to join; :meth:`OpenShare.answer` is waited for."""

    introduction: Introduction
    address: str


@dataclass(frozen=True)
class Joined:
    """A machine has joined; the code is used."""

    name: str


@dataclass(frozen=True)
class ShareClosed:
    """Nobody can join with the code any more."""

    reason: str


ShareEvent = WrongTry | Applicant | Joined | ShareClosed


class SharedOffer(Protocol):
    """A code and what becomes of it; :class:`OpenShare` is one."""

    code: str
    addresses: tuple[str, ...]
    port: int
    tries_left: int

    def seconds_left(self) -> float:
        """Return the seconds for which the code is open."""

    def events(self) -> Iterator[ShareEvent]:
        """Yield what happens, until a machine has joined or the code is closed."""

    def answer(self, admitted: bool) -> None:
        """Admit the machine that asks, or not."""

    def close(self) -> None:
        """Withdraw the code."""


class OpenShare:
    """A code of this computer's door; it is withdrawn when this is closed.

    Args:
        port: TCP port of the door, where it does not run yet; default: that of before.

    Raises:
        MachinesNotReady: no code can be opened.
    """

    def __init__(self, port: int | None = None) -> None:
        if port is not None and not is_door_open():
            settings = joining_folder() / "door.json"
            with explain_errors(settings, "the configuration folder"):
                write_atomically(settings, json.dumps({"port": port}).encode())
        try:
            self._door = ask_door({"share": True, "port": port})
        except NotConnected as error:
            raise MachinesNotReady(error.problem, error.hint) from None
        self._door.settimeout(None)
        self._lines = self._door.makefile("rb")
        self._end = time.monotonic() + LIFETIME
        opening = self._next()
        if "code" not in opening:
            self.close()
            problem = str(opening.get("problem", "the door of this computer has ended"))
            raise MachinesNotReady(problem, str(opening.get("hint", "share again")))
        self.code, self.port = str(opening["code"]), int(opening["port"])
        self.addresses = tuple(map(str, opening["addresses"]))
        self.tries_left = TRIES

    def _next(self) -> dict[str, Any]:
        return parse_line(self._lines.readline())

    def seconds_left(self) -> float:
        """Return the seconds for which the code is open."""
        return max(0.0, self._end - time.monotonic())

    def events(self) -> Iterator[ShareEvent]:
        """Yield what happens, until a machine has joined or the code is closed; :meth:`close` ends it from another
        thread."""
        with contextlib.suppress(OSError, ValueError):
            while event := self._next():
                if "wrong" in event:
                    self.tries_left = int(event["tries_left"])
                    yield WrongTry(str(event["wrong"]), self.tries_left)
                elif "asks" in event:
                    yield Applicant(Introduction.model_validate(event["asks"]), str(event["address"]))
                elif "joined" in event:
                    yield Joined(str(event["joined"]))
                    return
                elif "closed" in event:
                    yield ShareClosed(str(event["closed"]))
                    return
        yield ShareClosed("the door of this computer has ended")

    def answer(self, admitted: bool) -> None:
        """Admit the machine that asks, or not."""
        with contextlib.suppress(OSError):  # the door has ended, which the next event says
            self._door.sendall(json.dumps({"admit": admitted}).encode() + b"\n")

    def close(self) -> None:
        """Withdraw the code. Idempotent."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes who reads events
        self._lines.close()
        self._door.close()


def door_addresses(offer: SharedOffer) -> tuple[str, ...]:
    """Return the addresses by which the door is reached, as they are typed, the likeliest first."""
    is_default = offer.port == DEFAULT_PORT
    return tuple(host if is_default else address_text(host, offer.port) for host in offer.addresses)


def lent_line(introduction: Introduction) -> str:
    """Return in one line what a machine lets this computer run on it, and when. Escape it."""
    limits = f"; {introduction.limits}" if introduction.limits else ""
    return f"It lends itself as class {introduction.lend}: {PERMITS[introduction.lend]}{limits}."


def described(introduction: Introduction) -> str:
    """Return in one line who a machine says that it is, and the beginning of its key's identity. Escape it."""
    memory = memory_text(float(introduction.memory)) if introduction.memory else ""
    details = ", ".join(filter(None, (introduction.system, introduction.devices, memory)))
    user = f"{introduction.user} on " if introduction.user else ""
    return f"{user}{introduction.name} ({details or 'no details'}; key {identity_of(introduction.key)[:8]})"
