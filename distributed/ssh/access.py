"""May we log in there, and if not: how far did it come, why, and what is to be done?

The way to a machine has four stages: *reach* (name, route, port, an SSH server that speaks), *host key* (is it who it
was?), *login* (a key that it accepts), *shell* (commands run). A report says at which of them it ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

from distributed.ssh.config import ResolvedHost, resolve
from distributed.ssh.connection import CONNECT_TIMEOUT, SshConnection, SshTarget, Trust
from distributed.ssh.errors import CommandTimeout, NoKeyAccepted, PasswordOnly, SshError, UnknownHostKey
from distributed.ssh.host_keys import HostKeyInfo
from profiles.errors import MusterError

_AT_ONCE = 32


class Stage(str, Enum):
    """A part of the way to a machine."""

    REACH = "reach"
    HOST_KEY = "host key"
    LOGIN = "login"
    SHELL = "shell"


@dataclass(frozen=True)
class AccessReport:
    """What came of the way to one machine."""

    machine: str
    where: str = ""
    """``host:port`` as SSH resolved it."""
    user: str = ""
    failed: Stage | None = None
    """Where it ended; ``None``: all stages passed."""
    cause: str = ""
    """Stable word for programs; see docs/access.md."""
    problem: str = ""
    fix: str = ""
    seconds: float = 0.0
    fingerprint: str = ""
    """Of the host key; empty where it was not seen."""
    authenticated_by: str = ""
    """The key's label."""
    system: str = ""
    """What ``uname -sm`` says there."""
    password_possible: bool = False
    """A password, given once, would let :func:`distributed.ssh.key_setup.install_key` put our key there."""
    unknown_key: HostKeyInfo | None = field(default=None, repr=False)
    """What a person is to compare, at the first meeting of this machine or of a jump host before it."""

    @property
    def ok(self) -> bool:
        return self.failed is None

    @property
    def stages(self) -> dict[Stage, bool | None]:
        """For each stage whether it passed; ``None`` where it was not tried."""
        order = list(Stage)
        end = len(order) if self.failed is None else order.index(self.failed)
        return {stage: True if place < end else (None if place > end else False) for place, stage in enumerate(order)}


def check_access(target: SshTarget, *, trust: Trust | None = None, timeout: float = CONNECT_TIMEOUT) -> AccessReport:
    """Go the whole way to a machine once, within ``timeout`` seconds for each machine on the way.

    Args:
        target: which machine.
        trust: asked for a machine never met before; ``None`` refuses it. A changed key is refused without asking.
        timeout: seconds.
    """
    begin = time.monotonic()
    host: ResolvedHost | None = None
    try:
        host = resolve(target)
        with SshConnection.connect(target, trust=trust, timeout=timeout) as connection:
            return AccessReport(
                machine=target.name,
                where=host.where,
                user=host.user,
                seconds=time.monotonic() - begin,
                fingerprint=connection.fingerprint,
                authenticated_by=connection.authenticated_by,
                system=connection.system,
            )
    except MusterError as error:
        return explain(target, host, error, time.monotonic() - begin)


def check_all(
    targets: Sequence[SshTarget], *, trust: Trust | None = None, timeout: float = CONNECT_TIMEOUT
) -> list[AccessReport]:
    """Check machines side by side; one report each, in their order."""
    with ThreadPoolExecutor(min(len(targets), _AT_ONCE) or 1) as pool:
        return list(pool.map(lambda target: check_access(target, trust=trust, timeout=timeout), targets))


def explain(target: SshTarget, host: ResolvedHost | None, error: MusterError, seconds: float = 0.0) -> AccessReport:
    """Return the report of a way that ended with ``error``."""
    ssh = error if isinstance(error, SshError) else None
    through = ssh is not None and ssh.machine != target.name  # a jump host on the way
    return AccessReport(
        machine=target.name,
        where=host.where if host else target.host,
        user=host.user if host else target.user,
        failed=Stage(ssh.stage) if ssh else Stage.REACH,
        cause=ssh.cause if ssh else "ssh_config",
        problem=error.beside(target.name),
        fix=_fix(error, host, through),
        seconds=seconds,
        fingerprint=ssh.fingerprint if isinstance(ssh, UnknownHostKey) else "",
        password_possible=isinstance(ssh, NoKeyAccepted) and ssh.password_possible and not through,
        unknown_key=ssh.key if isinstance(ssh, UnknownHostKey) else None,
    )


def _fix(error: MusterError, host: ResolvedHost | None, through: bool) -> str:
    """The hint of the error, where the ``access`` command knows no better way."""
    if isinstance(error, PasswordOnly):
        return "set PubkeyAuthentication yes in its /etc/ssh/sshd_config, restart its SSH server, and try again"
    if isinstance(error, CommandTimeout) and host is not None:
        return f"do the user's start files there wait for something? Try: ssh {host.user}@{host.hostname} true"
    if not isinstance(error, NoKeyAccepted) or host is None or through or error.hint.startswith("unlock"):
        return error.hint
    who = f"is '{host.user}' the right user there (it is your name here)? " if host.user_is_guess else ""
    if error.password_possible:
        return f"{who}run the access command for it on a terminal: its password, entered once, installs a key"
    return f"{who}it accepts no password: add a public key of yours to ~/.ssh/authorized_keys on that machine itself"
