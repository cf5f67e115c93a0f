"""Specification of a lab host."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


class LabUnavailable(pytest.skip.Exception):
    """The machine lacks what a lab needs; the text names it. The test is skipped."""


@dataclass(frozen=True)
class HostSpec:
    """One host to build."""

    name: str
    cores: float | None = None
    """CPU quota in cores; ``None``: unlimited."""
    mbit: float | None = None
    """Rate of its link in both directions, Mbit/s; ``None``: unlimited."""
    password: str | None = None
    """Password with which root may log in; ``None``: none."""
    shadow_ages: str = "19000:0:99999:7::"
    """Fields of root's shadow entry: day of the last change (0: change at login) to the day the account expires. Only
    with PAM does sshd look at them for a key."""
    key: bool = True
    """Whether the lab's key may log in."""
    person: bool = False
    """Whether it holds the lab's private key, known_hosts and SSH configuration, like the machine a user works on."""
    sshd: bool = True
    """Whether its sshd runs."""
    shell: str = "/bin/bash"
    """Root's login shell."""
    home_mb: int | None = None
    """Size in MB of the disk with the home folder and /tmp; ``None``: no separate disk."""
    clock_offset: float = 0.0
    """Seconds by which its clock is ahead."""
    hide: tuple[str, ...] = ()
    """Files and folders of this machine that are hidden from it."""
    sshd_options: tuple[str, ...] = ()
    """Additional lines at the start of its sshd_config, which take precedence."""
