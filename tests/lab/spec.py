"""What a lab's host is to be like."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


class LabUnavailable(pytest.skip.Exception):
    """This machine cannot give what was asked for; the text says what is missing. A test that wants it is skipped."""


@dataclass(frozen=True)
class HostSpec:
    """One host to build."""

    name: str
    cores: float | None = None
    """CPU quota in cores; ``None``: unlimited."""
    mbit: float | None = None
    """Rate of its link in both directions, Mbit/s; ``None``: unlimited."""
    password: str | None = None
    """Lets root log in by it."""
    key: bool = True
    """The lab's key may log in."""
    person: bool = False
    """Holds the lab's private key, known_hosts and ssh configuration: a machine somebody sits at."""
    sshd: bool = True
    """Whether Remote Login is on."""
    shell: str = "/bin/bash"
    """Root's login shell."""
    home_mb: int | None = None
    """Size of the disk that holds the home folder and /tmp, MB; ``None``: no limit of its own."""
    clock_offset: float = 0.0
    """Seconds its clock is ahead."""
    hide: tuple[str, ...] = ()
    """Files and folders of this machine that it must not have."""
    sshd_options: tuple[str, ...] = ()
    """More lines for its sshd_config; they win."""
