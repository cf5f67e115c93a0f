"""Handover from the light core to this computer's training environment, which is created on demand."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from app.console import say
from profiles.bootstrap import held_keys
from profiles.errors import BadInput
from profiles.installation import can_train, setup_line, training_environment


def hand_over(arguments: Sequence[str]) -> None:
    """Replace this process by the training environment's Python, if this one cannot train and there is one; else
    return."""
    if not can_train() and (environment := training_environment()):
        variables = {**os.environ, "PYTHONPATH": environment["code"], "PYTHONSAFEPATH": "1", **held_keys()}
        python = environment["python"]
        os.execve(python, [python, "-m", "muster", *arguments], variables)


def handed_over(command: Callable[..., Any], uses_model: bool) -> Callable[..., Any]:
    """Wrap a command so that it first installs the packages it needs, unless its options show that it would fail.

    Args:
        uses_model: whether its ``model`` is a trained one.
    """

    @functools.wraps(command)  # with its options
    def equip_and_hand_over(**options: Any) -> NoReturn:
        _refuse_missing(options, uses_model)
        install_and_hand_over()

    return equip_and_hand_over


def install_and_hand_over() -> NoReturn:
    """Install the training environment of this computer, and replace this process by its Python.

    Raises:
        MusterError: it cannot be installed, or not be used.
    """
    equip_here()
    hand_over(sys.argv[1:])
    raise BadInput("the environment that trains cannot be used", f"repeat: {setup_line()}")


def _refuse_missing(options: Mapping[str, Any], uses_model: bool) -> None:
    """Check that the profile and the model exist.

    Raises:
        BadInput: one of them does not.
    """
    from profiles.files.resolve import load_profile  # pydantic, which a first paint does without
    from training.records.model_folders import find_usable_model

    if options.get("profile"):
        load_profile(options["profile"], complete=False)
    if uses_model and "model" in options:
        reference = options["model"]
        left_out = Path(reference).is_file() or any(map(str.isspace, reference))  # it is a recording, or a prompt
        if not reference or not Path(reference).is_dir():
            find_usable_model(options["output"], "" if left_out else reference)


def equip_here() -> None:
    """Install the training packages into an environment on this computer.

    Raises:
        MusterError: they cannot be installed.
    """
    from distributed.machine.link import link_to, this_machine  # SSH: only where packages are missing
    from distributed.preparation.provision import environment_size, find_environment, provision
    from training.hardware.resources import count_gpus

    hosts = this_machine()
    with contextlib.closing(link_to(hosts.master, hosts)) as link:
        if not find_environment(link):  # else another version of Muster made it
            size = environment_size(count_gpus())
            say(f"installing PyTorch and the other packages that train, once, into ~/.cache/muster ({size})")
        provision(link, say)
