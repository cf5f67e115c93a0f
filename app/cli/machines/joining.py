"""``share``, ``join`` and ``leave``: machines that dial this computer, with a code for the first time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from typing import Annotated, Any

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
    identity_of,
    is_door_open,
    joined_machines,
    joining_folder,
    parse_line,
)
from distributed.joining.codes import parse_code
from distributed.joining.helper import leave as leave_pool
from distributed.joining.helper import pair, serve_pools
from distributed.joining.introductions import address_text, introduce
from distributed.joining.pairing import Introduction
from distributed.joining.pools import helper_identity, joined_pools
from distributed.ssh.connection import SshConnection, SshTarget
from profiles.errors import BadInput, ExitCode, MachinesNotReady
from profiles.quantities import memory_text
from training.records.run_files import explain_errors, write_atomically

_LONGEST_CODE = 200
_TRUST_HERE = (
    "It gets the code, the weights and its share of the data of what you train on it.",
    "It can lie about its results, keep what it saw, and leave at any time.",
    "It cannot read other files here, or run anything on this computer.",
)
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
    with _door(port) as (door, lines):
        opening = next(lines, {})
        _refuse(opening)
        _show_code(opening)
        for event in lines:
            if "wrong" in event:
                left = event["tries_left"]
                say(f"a wrong code came from {visible(event['wrong'])}; tries left: {left}")
            elif "asks" in event:
                admitted = yes or answered_yes(_question(Introduction.model_validate(event["asks"]), event["address"]))
                door.sendall(json.dumps({"admit": admitted}).encode() + b"\n")
            elif "joined" in event:
                return _welcome(str(event["joined"]))
            elif "closed" in event:
                raise MachinesNotReady(f"no machine has joined: {visible(event['closed'])}", "share again")
    raise MachinesNotReady("no machine has joined: the door of this computer has ended", "share again")


@contextlib.contextmanager
def _door(port: int | None) -> Iterator[tuple[socket.socket, Iterator[dict[str, Any]]]]:
    """Yield a connection to this computer's door that shares a code, and its events."""
    if port is not None and not is_door_open():
        settings = joining_folder() / "door.json"
        with explain_errors(settings, "the configuration folder"):
            write_atomically(settings, json.dumps({"port": port}).encode())
    try:
        door = ask_door({"share": True, "port": port})
    except NotConnected as error:
        raise MachinesNotReady(error.problem, error.hint) from None
    with door, door.makefile("rb") as stream:
        door.settimeout(None)
        yield door, (parse_line(line) for line in iter(stream.readline, b""))


def _refuse(opening: dict[str, Any]) -> None:
    if "problem" in opening or "code" not in opening:
        problem = visible(opening.get("problem", "the door of this computer has ended"))
        raise MachinesNotReady(problem, visible(opening.get("hint", "share again")))


def _show_code(opening: dict[str, Any]) -> None:
    port = int(opening["port"])
    hosts = [address_text(host, port) if port != DEFAULT_PORT else host for host in opening["addresses"]]
    say(f"On the other machine: muster machines join {hosts[0] if hosts else 'ADDRESS'}")
    if hosts[1:]:
        say(f"(other addresses of this computer: {', '.join(hosts[1:])})")
    say("It asks for this code, which is good once, for ten minutes. Tell it only to whom you want to join:")
    show_line(str(opening["code"]))


def _question(introduction: Introduction, address: str) -> str:
    say(f"{_described(introduction)} at {visible(address)} wants to join this computer.")
    for line in _TRUST_HERE:
        say(f"  {line}")
    return f"Admit {introduction.name}?"


def _described(introduction: Introduction) -> str:
    memory = memory_text(float(introduction.memory)) if introduction.memory else ""
    details = ", ".join(filter(None, (introduction.system, introduction.devices, memory)))
    user = f"{introduction.user} on " if introduction.user else ""
    return visible(f"{user}{introduction.name} ({details or 'no details'}; key {identity_of(introduction.key)[:8]})")


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
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="Address of the computer that shares a code, as share shows it; the code is asked for, or read from "
            "stdin. Empty: go on with what was joined.",
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="Name of this computer there; default: its host name.")] = "",
    yes: Yes = False,
) -> ExitCode:
    """Join a computer that shares a code, and be driven by it until Ctrl-C; alone, by those joined before.

    CODE@ADDRESS is taken, too; other users of this computer may see it then.
    """
    if address:
        _pair(address, name, yes)
    elif not joined_pools():
        raise BadInput("this computer has joined nothing yet", "type the address that share shows on the other one")
    with until_signal() as stop, _only_one() as is_only:
        if not is_only:
            say("a join that runs on this computer already takes it up")
            return ExitCode.DONE
        say(f"Ctrl-C ends what others run here; to go on: {command_line('machines', 'join')}")
        serve_pools(stop.wait, lambda line: say(visible(line)))
    return stop.code


def _pair(text: str, name: str, yes: bool) -> None:
    words, _, address = text.rpartition("@")
    with contextlib.suppress(BadInput):
        if not words and parse_code(address):
            hint = "type the address that share shows; it asks for the code then"
            raise MachinesNotReady("the address of the computer to join is missing", hint)
    code = parse_code(words or _asked_code(address))
    introduction = introduce(helper_identity().public, name=name)
    pool = pair(code, address, introduction, lambda pool: _agreed(pool, address, yes))
    say(f"joined {visible(pool.name)}; this computer is {visible(pool.known_as)} there")


def _asked_code(address: str) -> str:
    say(f"Code that {visible(address)} shows: ")
    with ctrl_c_heard():
        return sys.stdin.readline(_LONGEST_CODE)


def _agreed(pool: Introduction, address: str, yes: bool) -> bool:
    say(f"The code is right. {_described(pool)} at {visible(address)} wants to train on this computer.")
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
