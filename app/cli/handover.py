"""A light core hands commands over to the environment that trains on this computer, and makes it where one needs it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from app.console import say
from profiles.errors import BadInput
from profiles.installation import SETUP, can_train, training_environment
from profiles.resolve import load_profile
from training.model_folders import find_usable_model

_SIZE = "about 1.6 GB"


def hand_over(arguments: Sequence[str]) -> None:
    """Return if this Python carries the command out, or finds out first that it needs the packages that train; else
    replace this process by the Python that can."""
    if not can_train() and (environment := training_environment()):
        variables = {**os.environ, "PYTHONPATH": environment["code"], "PYTHONSAFEPATH": "1"}
        python = environment["python"]
        os.execve(python, [python, "-m", "muster", *arguments], variables)


def handed_over(command: Callable[..., Any], uses_model: bool) -> Callable[..., Any]:
    """Return a command that installs what it needs to be carried out, unless its options say that it would fail.

    Args:
        uses_model: whether its ``model`` is a trained one.
    """

    @functools.wraps(command)  # with its options
    def equip_and_hand_over(**options: Any) -> NoReturn:
        _refuse_missing(options, uses_model)
        install_and_hand_over()

    return equip_and_hand_over


def install_and_hand_over() -> NoReturn:
    """Install what trains on this computer, and replace this process by the Python that has it.

    Raises:
        MusterError: it cannot be installed, or not be used.
    """
    equip_here()
    hand_over(sys.argv[1:])
    raise BadInput("the environment that trains cannot be used", f"repeat: {SETUP}")


def _refuse_missing(options: Mapping[str, Any], uses_model: bool) -> None:
    """Refuse a profile or a model that is not there.

    Raises:
        BadInput: there is none of that name, or none that could be meant.
    """
    if options.get("profile"):
        load_profile(options["profile"], complete=False)
    if uses_model and "model" in options:
        reference = options["model"]
        left_out = Path(reference).is_file() or any(map(str.isspace, reference))  # it is a recording, or a prompt
        if not reference or not Path(reference).is_dir():
            find_usable_model(options["output"], "" if left_out else reference)


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
