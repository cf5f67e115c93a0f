"""``share``, ``join`` and ``leave``: machines that dial this computer, with a code for the first time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from app.cli.arguments import Yes
from app.cli.machines.discover import until_signal
from app.cli.terminal import confirmed, somebody
from app.console import answered_yes, command_line, ctrl_c_heard, say, show_line, visible
from distributed.hosts.joined import (
    DEFAULT_PORT,
    NotConnected,
    ask_door,
    forget_joined,
    joined_machines,
    joining_folder,
)
from distributed.joining.dialling import Meeting
from distributed.joining.helper import leave as leave_pool
from distributed.joining.helper import serve_pools
from distributed.joining.nearby import meet_nearby
from distributed.joining.pairing.codes import Code, parse_code
from distributed.joining.pairing.exchange import Introduction
from distributed.joining.pairing.introductions import introduce
from distributed.joining.pools import helper_identity, joined_pools
from distributed.joining.share_client import TRUST, Applicant, Joined, OpenShare, WrongTry, described, door_addresses
from distributed.ssh.connection import SshConnection, SshTarget
from profiles.errors import BadInput, ExitCode, MachinesNotReady

_LONGEST_CODE = 200
_TRUST_THERE = (
    "It can run any program here with your rights, and read all your files, as somebody who logs in as you.",
    "Join only a computer of yours, or of somebody to whom you would give your password.",
    "It can do so while this command runs. Ctrl-C ends what it runs here; leave also ends the permission.",
)


def share(
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help=f"TCP port to which the others connect; default: that of before, {DEFAULT_PORT} at first.",
        ),
    ] = None,
    yes: Yes = False,
) -> ExitCode:
    """Show a code with which one machine joins this computer; it needs no SSH server and accepts no connection."""
    if not yes and not somebody():
        raise BadInput("who joins must be confirmed, and no terminal is here", "add --yes to admit who knows the code")
    with contextlib.closing(OpenShare(port)) as offer:
        _show_code(offer)
        for event in offer.events():
            if isinstance(event, WrongTry):
                say(f"a wrong code came from {visible(event.address)}; tries left: {event.tries_left}")
            elif isinstance(event, Applicant):
                offer.answer(yes or answered_yes(_question(event.introduction, event.address)))
            elif isinstance(event, Joined):
                return _welcome(event.name)
            else:
                raise MachinesNotReady(f"no machine has joined: {visible(event.reason)}", "share again")
    raise AssertionError("a share ends with an event")


def _show_code(offer: OpenShare) -> None:
    say(f"On the other machine: muster machines join {offer.code}")
    say(f"If it does not find this computer, add its address: --at {' or '.join(door_addresses(offer)) or 'ADDRESS'}")
    say("The code is good once, for ten minutes. Tell it only to whom you want to join:")
    show_line(offer.code)


def _question(introduction: Introduction, address: str) -> str:
    say(f"{_shown(introduction)} at {visible(address)} wants to join this computer.")
    for line in TRUST:
        say(f"  {line}")
    return f"Admit {introduction.name}?"


def _shown(introduction: Introduction) -> str:
    return visible(described(introduction))


def _welcome(name: str) -> ExitCode:
    """Log in to a machine that has joined, and say how it is used.

    Raises:
        SshError: it cannot be used.
    """
    machine = next(machine for machine in joined_machines() if machine.name == name)
    say(f"{name} has joined; logging in")
    with SshConnection.connect(SshTarget(name, machine.address)) as connection:
        say(f"{name} can be used ({visible(connection.system)}). For example:")
    show_line(f"  {command_line('train', 'demo', '--hosts', f'localhost,{machine.address}')}")
    return ExitCode.DONE


def join(
    code: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CODE",
            help="Code that share shows on the other computer; empty: go on with what was joined, or else, and with "
            "--at, ask for it or read it from stdin.",
        ),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address of that computer, which share shows; empty: it is on this network."
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="Name of this computer there; default: its host name.")] = "",
    yes: Yes = False,
) -> ExitCode:
    """Join a computer that shares a code, and be driven by it until Ctrl-C; alone, by those joined before.

    Other users of this computer may see a code on the command line while it is open, but not one that is asked for.
    """
    typed = " ".join(code or ())
    if typed or at:
        _pair(typed, at, name, yes)
    elif not joined_pools():
        if not somebody():
            raise BadInput("this computer has joined nothing yet", "type the code that share shows on the other one")
        _pair("", "", name, yes)
    with until_signal() as stop, _only_one() as is_only:
        if not is_only:
            say("a join that runs on this computer already takes it up")
            return ExitCode.DONE
        say(f"Ctrl-C ends what others run here; to go on: {command_line('machines', 'join')}")
        serve_pools(stop.wait, lambda line: say(visible(line)))
    return stop.code


def _pair(typed: str, address: str, name: str, yes: bool) -> None:
    identity = helper_identity()
    code = _parsed(typed or _asked_code(address))
    introduction = introduce(identity.public, name=name)
    if address:
        meeting = Meeting(code, address, identity, introduction)
    else:
        say("looking for the computer that shares it on this network")
        meeting = meet_nearby(code, identity, introduction)
    with contextlib.closing(meeting):
        pool = meeting.agree(lambda pool: _agreed(pool, meeting.door, yes))
    say(f"joined {visible(pool.name)}; this computer is {visible(pool.known_as)} there")


def _parsed(typed: str) -> Code:
    """Return the code that was typed.

    Raises:
        BadInput: it is none.
    """
    try:
        return parse_code(typed)
    except BadInput as error:
        if set(typed) & set(".:@"):
            raise BadInput(error.message, "an address stands after --at, the code before it") from None
        raise


def _asked_code(address: str) -> str:
    say(f"Code that {visible(address) if address else 'the other computer'} shows: ")
    with ctrl_c_heard():
        return sys.stdin.readline(_LONGEST_CODE)


def _agreed(pool: Introduction, address: str, yes: bool) -> bool:
    say(f"The code is right. {_shown(pool)} at {visible(address)} wants to train on this computer.")
    for line in _TRUST_THERE:
        say(f"  {line}")
    is_willing = yes or confirmed(f"Join {pool.name}?", "joining gives another computer your rights")
    if is_willing:
        say(f"waiting until {pool.name} admits this computer")
    return is_willing


@contextlib.contextmanager
def _only_one() -> Iterator[bool]:
    """Yield whether no other process of this user serves those that this computer has joined."""
    descriptor = os.open(joining_folder() / "join.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def leave(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Computer to leave, or machine to remove; empty: what was joined.")
    ] = "",
) -> ExitCode:
    """Leave a computer that this one has joined; or, there, remove a machine that has joined."""
    plain = name.casefold().removesuffix(".joined")
    pools = [pool for pool in joined_pools() if plain in ("", pool.name)]
    machines = [machine for machine in joined_machines() if plain == machine.name]
    if not pools and not machines:
        names = ", ".join([*(pool.name for pool in joined_pools()), *(m.address for m in joined_machines())])
        problem = f"nothing joined is called '{name}'" if name else "this computer has joined nothing"
        raise BadInput(problem, f"there is: {names}" if names else "nothing has joined this computer, either")
    for pool in pools:
        is_told = leave_pool(pool)
        notice = "" if is_told else "; it could not be told: remove this computer there, too"
        say(f"left {visible(pool.name)}: it can run nothing here any more{notice}")
    for machine in machines:
        try:
            with ask_door({"forget": machine.name}, start=False) as door, door.makefile("rb") as answers:
                answers.readline()
        except NotConnected:  # none runs, so nothing is to be told
            forget_joined(machine.name)
        say(f"removed {machine.name}: runs lose it, and it is told when it dials again")
    return ExitCode.DONE
