"""Approval of files that can run commands or code here: the user names them, or is asked once, before anything runs.

What is agreed to is remembered by its content; a change asks again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.console import answered_yes, command_line, say, visible
from distributed.hosts.file import Hosts, accept_pythons, load_hosts, names_machines, python_demands
from profiles.errors import BadInput, counted
from profiles.files.resolve import Resolved
from profiles.installation import USUAL_HOSTS
from profiles.schema import Profile

if TYPE_CHECKING:
    from distributed.preparation.custom_code import CustomCode


def read_hosts(file: Path, *, named: bool, person: bool) -> Hosts:
    """Read a hosts file, if the user has approved what it may run here: an SSH configuration, an interpreter.

    Args:
        named: the person has named this file; one that only lies here, or that another file names, is asked about.
        person: whether somebody can be asked.

    Raises:
        BadInput: it cannot be used, or nobody stands behind it.
    """
    hosts = load_hosts(file)
    is_file = not names_machines(file)  # who names machines has not named the usual file, which may say more of them
    approve_hosts(hosts, file if is_file else USUAL_HOSTS, named=named and is_file, person=person)
    return hosts


def approve_hosts(hosts: Hosts, file: Path, *, named: bool, person: bool) -> None:
    """Check that the user has approved what a hosts file may run here, or ask; see :func:`read_hosts`.

    Raises:
        BadInput: nobody does.
    """
    from distributed.ssh.config import accept, demands_of

    if named:
        accept(hosts.ssh_config)
        accept_pythons(hosts)
    demands = [*demands_of(hosts.ssh_config), *python_demands(hosts)]
    if not demands:
        return
    if person:
        say(f"{visible(file)} may run programs on this computer:")
        for line in demands:
            say(f"  {visible(line)}")
        if answered_yes("Use it?"):
            accept(hosts.ssh_config)
            accept_pythons(hosts)
            return
    message = f"{file} can run commands on this computer and is not approved: {demands[0]}"
    raise BadInput(message, f"read it, then approve it: {command_line('machines', 'access', '--hosts', str(file))}")


def approve_profile(resolved: Resolved, *, trusted: bool, person: bool) -> None:
    """Check that a profile's own Python code was approved by a person, or ask for it.

    Args:
        trusted: the person has approved it already, on the command line.
        person: whether somebody can be asked.

    Raises:
        BadInput: nobody does.
    """
    for option in resolved.profile.user_code:
        file = resolved.origins[option].file
        _approve_code(resolved.profile, option, file or "the command line", trusted or file is None, person)


def approve_user_code(
    profile: Profile, source: object, *, named: bool, person: bool, approval_step: str = "add --trust-code"
) -> None:
    """Check the user code of a profile as :func:`approve_profile` does.

    Args:
        source: the file that names the code.
        named: whether the person named the code on the command line, which approves it.
        approval_step: what to type to approve it.
    """
    for option in profile.user_code:
        _approve_code(profile, option, source, named, person, approval_step)


def _approve_code(
    profile: Profile, option: str, source: object, named: bool, person: bool, approval_step: str = "add --trust-code"
) -> None:
    from distributed.preparation.custom_code import check_code

    ask = _asked if person else None
    check_code(profile, source, f"read it, then {approval_step}", is_named=named, ask=ask, option=option)


def _asked(code: CustomCode, source: str) -> bool:
    imported_files = len(set(code.importable) - {code.file})
    changed_note = ", which has changed since it was approved" if code.changed else ""
    say(f"{visible(source)} asks to run Python code on this computer{changed_note}:")
    imports_note = f", and {counted(imported_files, 'file')} beside it that it imports" if imported_files else ""
    say(f"  {visible(code.file)}{imports_note}")
    return answered_yes("Run it?")
