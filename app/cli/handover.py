"""A light core hands commands over to the environment that trains on this computer, and makes it where one needs it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from app.cli.commands import needs_packages
from app.console import say, say_error
from profiles.errors import MusterError
from profiles.installation import can_train, training_environment

_SIZE = "about 1.6 GB"


def hand_over(arguments: Sequence[str]) -> None:
    """Return if this Python carries the command out; else replace this process by the Python that can.

    Raises:
        SystemExit: the packages are needed and cannot be installed.
    """
    if can_train():
        return
    if not training_environment() and needs_packages(arguments):
        try:
            equip_here()
        except MusterError as error:
            say_error(error.message, error.hint)
            raise SystemExit(error.exit_code) from None
    if environment := training_environment():
        variables = {**os.environ, "PYTHONPATH": environment["code"], "PYTHONSAFEPATH": "1"}
        python = environment["python"]
        os.execve(python, [python, "-m", "muster", *arguments], variables)


def equip_here() -> None:
    """Install the packages that train into an environment of this computer.

    Raises:
        MusterError: they cannot be installed.
    """
    from distributed.machine.link import link_to, this_machine  # SSH: only where packages are missing
    from distributed.preparation.provision import find_environment, provision

    hosts = this_machine()
    with contextlib.closing(link_to(hosts.master, hosts)) as link:
        if not find_environment(link):  # else another version of Muster made it
            say(f"installing PyTorch and the other packages that train, once ({_SIZE}, into ~/.cache/muster)")
        provision(link, say)
