"""``share``, ``join`` and ``leave``: machines that dial this computer, with a code for the first time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from app.cli.arguments import Yes
from app.cli.machines.discover import until_signal
from app.cli.terminal import confirmed, somebody
from app.console import answered_yes, command_line, ctrl_c_heard, say, show_json, show_line, visible
from distributed.hosts.joined import (
    DEFAULT_PORT,
    NotConnected,
    ask_door,
    forget_joined,
    joined_machines,
    joining_folder,
)
from distributed.hosts.lending import CLASSES, PERMITS, LendClass
from distributed.joining.dialling import Meeting
from distributed.joining.helper import leave as leave_pool
from distributed.joining.helper import serve_pools
from distributed.joining.lending.box import NoBox
from distributed.joining.lending.box_check import require_box
from distributed.joining.lending.ledger import ended_loans, running_loans
from distributed.joining.lending.resting import require_limits
from distributed.joining.lending.terms import LendingTerms, parse_hours, parse_memory
from distributed.joining.nearby import meet_nearby
from distributed.joining.pairing.codes import Code, parse_code
from distributed.joining.pairing.exchange import Introduction
from distributed.joining.pairing.introductions import introduce
from distributed.joining.pools import helper_identity, joined_pools, save_pool
from distributed.joining.share_client import (
    TRUST,
    Applicant,
    Joined,
    OpenShare,
    WrongTry,
    described,
    door_addresses,
    lent_line,
)
from distributed.ssh.connection import SshConnection, SshTarget
from profiles.errors import BadInput, ExitCode, MachinesNotReady
from profiles.quantities import span_text

_LONGEST_CODE = 200
_SHOWN = 100
_WHILE = "It can do so while this command runs. Ctrl-C ends what it runs here; leave also ends the permission."
_TRUST_THERE: dict[LendClass, tuple[str, ...]] = {
    "tasks": (
        "It can train with this computer's own Muster: it sends data and weights, and no program of it ever runs here.",
        "All of that happens in a box, without your files and your network. GPU drivers are shared with it.",
        _WHILE,
    ),
    "friend": (
        "It can run its programs here in a box: they see their own folder, not your files and not your network.",
        "Join only a computer of somebody whom you know: GPU drivers are shared with the box, and may have gaps.",
        _WHILE,
    ),
    "own": (
        "It can run any program here with your rights, and read all your files, as somebody who logs in as you.",
        "Join only a computer of yours, or of somebody to whom you would give your password.",
        _WHILE,
    ),
}


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
    for line in (lent_line(introduction), *TRUST):
        say(f"  {visible(line)}")
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
    lend: Annotated[
        str,
        typer.Option(
            metavar="CLASS",
            help="What it may run here: tasks (no code of others), friend (programs, in a box), own (everything); "
            "default: tasks where this computer has a box, else own.",
        ),
    ] = "",
    while_idle: Annotated[bool, typer.Option("--while-idle", help="Only while nobody uses this computer.")] = False,
    hours: Annotated[str, typer.Option(metavar="FROM-TO", help="Only at these hours, such as 22-7.")] = "",
    on_mains: Annotated[bool, typer.Option("--on-mains", help="Only while it is plugged in.")] = False,
    memory: Annotated[str, typer.Option(metavar="AMOUNT", help="At most so much memory, such as 8GB.")] = "",
    cores: Annotated[int, typer.Option(min=0, help="At most so many cores; 0: all.")] = 0,
    yes: Yes = False,
) -> ExitCode:
    """Join a computer that shares a code, and be driven by it until Ctrl-C; alone, by those joined before.

    Other users of this computer may see a code on the command line while it is open, but not one that is asked for.
    """
    typed, lent = " ".join(code or ()), LentOptions(lend, while_idle, hours, on_mains, memory, cores)
    if typed or at:
        _pair(typed, at, name, yes, lent)
    elif not joined_pools():
        if not somebody():
            raise BadInput("this computer has joined nothing yet", "type the code that share shows on the other one")
        _pair("", "", name, yes, lent)
    elif lent != LentOptions():
        _change_terms(lent.terms(), yes)
    with until_signal() as stop, _only_one() as is_only:
        if not is_only:
            say("a join that runs on this computer already takes it up")
            return ExitCode.DONE
        say(f"Ctrl-C ends what others run here; to go on: {command_line('machines', 'join')}")
        serve_pools(stop.wait, lambda line: say(visible(line)))
    return stop.code


@dataclass(frozen=True)
class LentOptions:
    """The options of ``join`` about what others may run here, as they were typed."""

    lend: str = ""
    while_idle: bool = False
    hours: str = ""
    on_mains: bool = False
    memory: str = ""
    cores: int = 0

    def terms(self) -> LendingTerms:
        """Return the terms, whose box has been tested; without a class the strictest one that works here.

        Raises:
            BadInput: an option has no meaning, or its class does not work here.
        """
        if self.lend not in ("", *CLASSES):
            raise BadInput(f"--lend {self.lend!r} is no class", f"one of {', '.join(CLASSES)}")
        lend: LendClass = next((known for known in CLASSES if known == self.lend), CLASSES[0])
        span, memory = parse_hours(self.hours) if self.hours else None, parse_memory(self.memory) if self.memory else 0
        terms = LendingTerms(lend, self.while_idle, span, self.on_mains, memory, self.cores)
        require_limits(terms)
        try:
            require_box(terms)
        except NoBox as missing:
            if self.lend:
                raise
            say(f"only class own works here: {missing.message}")
            say(f"  {missing.hint}")
            return replace(terms, lend="own")
        return terms


def _change_terms(terms: LendingTerms, yes: bool) -> None:
    """Lend this computer on other terms to all that it has joined."""
    for pool in joined_pools():
        _show_terms(terms)
        if not (yes or confirmed(f"Lend it so to {visible(pool.name)}?", "another class gives other rights")):
            raise BadInput("nothing was changed", "")
        save_pool(replace(pool, terms=terms))


def _show_terms(terms: LendingTerms) -> None:
    say(f"This computer is lent as class {terms.lend}{f', {terms.limits}' if terms.limits else ''}.")
    for line in _TRUST_THERE[terms.lend]:
        say(f"  {line}")


def _pair(typed: str, address: str, name: str, yes: bool, lent: LentOptions) -> None:
    identity = helper_identity()
    code = _parsed(typed or _asked_code(address))
    terms = lent.terms()
    introduction = introduce(identity.public, name=name, lend=terms.lend, limits=terms.limits)
    if address:
        meeting = Meeting(code, address, identity, introduction)
    else:
        say("looking for the computer that shares it on this network")
        meeting = meet_nearby(code, identity, introduction)
    with contextlib.closing(meeting):
        pool = meeting.agree(lambda pool: _agreed(pool, meeting.door, yes, terms), terms)
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


def _agreed(pool: Introduction, address: str, yes: bool, terms: LendingTerms) -> bool:
    say(f"The code is right. {_shown(pool)} at {visible(address)} wants to train on this computer.")
    _show_terms(terms)
    is_willing = yes or confirmed(f"Join {pool.name}?", "joining lets another computer train on this one")
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


def lent(
    as_json: Annotated[bool, typer.Option("--json", help="The same as a JSON list.")] = False,
) -> ExitCode:
    """Show what has run on this computer for those that it has joined, and how long."""
    pools = joined_pools()
    running = running_loans({pool.identity: (pool.name, pool.terms.lend) for pool in pools})
    loans = [*ended_loans()[-_SHOWN:], *running]
    if as_json:
        show_json([asdict(loan) for loan in loans])
        return ExitCode.DONE
    for pool in pools:
        limits = f", {pool.terms.limits}" if pool.terms.limits else ""
        show_line(f"lent to {visible(pool.name)} as class {pool.terms.lend}{limits}: {PERMITS[pool.terms.lend]}")
    if not loans:
        show_line("nothing has run here for others")
    for loan in loans:
        state = "runs" if loan.is_running else "ran"
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(loan.began))
        spent = f"{span_text(loan.seconds)}, {span_text(loan.computed)} of processor time"
        show_line(f"{began}  {visible(loan.pool)} ({loan.lend})  {loan.run} member {loan.rank}: {state} {spent}")
    return ExitCode.DONE


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
