"""Errors between this machine and another one over SSH, each with its cause and its fix."""

from __future__ import annotations

import sys
from enum import Enum

from distributed.ssh.keys.host_keys import HostKeyInfo
from profiles.errors import MachinesNotReady
from profiles.installation import program
from profiles.quantities import span_text

_ON_A_MAC = "turn on System Settings > General > Sharing > Remote Login"
_ON_LINUX = "sudo apt install openssh-server && sudo systemctl enable --now ssh"

CONNECTION_LIMIT = "its firewall may limit new connections (ufw limit: five in 30 s): wait 30 s and try again"
WENT_SILENT = f"is it asleep, off, or its cable out? If not, {CONNECTION_LIMIT}"
"""Hint where a machine that answered a moment ago does not."""


def remote_login(address: str, system: str = sys.platform) -> str:
    """Return how an SSH server is started at an address: of this computer, whose system is known, or of another."""
    if address == "localhost" or address == "::1" or address.startswith("127."):
        return f"on this computer: {_ON_A_MAC if system == 'darwin' else _ON_LINUX}"
    return f"on a Mac {_ON_A_MAC}; on Linux: {_ON_LINUX}"


def refused_again(endpoint: str, address: str, seconds: float) -> tuple[str, str]:
    """Return problem and hint where an endpoint refuses connections that answered so many seconds ago."""
    problem = f"{endpoint} answered {span_text(round(seconds))} ago and refuses connections now"
    return problem, f"{CONNECTION_LIMIT}; or its SSH server was stopped: {remote_login(address)}"


_LONGEST = 1000
"""Maximum characters of a message or hint; ours are shorter, but may quote a server's message."""


class Stage(str, Enum):
    """A stage of connecting to a machine."""

    REACH = "reach"
    HOST_KEY = "host key"
    LOGIN = "login"
    SHELL = "shell"


class SshError(MachinesNotReady):
    """A machine cannot be reached or used over SSH: one machine, one line, one hint.

    Args:
        machine: its name in the hosts file.
        problem: what is wrong.
        hint: what to do about it.
    """

    cause = "ssh"
    stage = Stage.SHELL
    """The stage that failed."""

    def __init_subclass__(cls, *, cause: str, stage: Stage = Stage.SHELL) -> None:
        cls.cause, cls.stage = cause, stage

    def __init__(self, machine: str, problem: str, hint: str = "") -> None:
        super().__init__(one_line(problem), one_line(hint), machine=machine)


class NameUnknown(SshError, cause="name_unknown", stage=Stage.REACH):
    """Its name has no address."""


class NoRoute(SshError, cause="no_route", stage=Stage.REACH):
    """There is no route to its address."""


class ConnectTimeout(SshError, cause="timeout", stage=Stage.REACH):
    """Nothing answers at its address."""


class PortClosed(SshError, cause="port_closed", stage=Stage.REACH):
    """It answers, but no SSH server listens."""


class NotSsh(SshError, cause="not_ssh", stage=Stage.REACH):
    """What listens is not an SSH server, or speaks garbage."""


class Stalled(SshError, cause="stalled", stage=Stage.REACH):
    """It accepted the connection and then sent nothing."""


class UnknownHostKey(SshError, cause="unknown_host_key", stage=Stage.HOST_KEY):
    """The machine is unknown, and its key was not accepted; ``key`` is for the user to compare."""

    def __init__(self, key: HostKeyInfo) -> None:
        super().__init__(
            key.machine,
            f"first contact: its {key.key_type} host key has the fingerprint {key.fingerprint}",
            f"compare it on that machine with: {key.compare_command}; then accept it with --trust-new",
        )
        self.key = key


class HostKeyChanged(SshError, cause="host_key_changed", stage=Stage.HOST_KEY):
    """The machine shows another key than the known one. No option overrides this."""


class UserRefused(SshError, cause="user_refused", stage=Stage.LOGIN):
    """The user may not log in there."""


class NoKeyAccepted(SshError, cause="no_key_accepted", stage=Stage.LOGIN):
    """None of our keys is accepted; ``password_possible``: the server would accept a password; ``mendable``: a key
    could not be tried, and the hint says how to fix that."""

    def __init__(
        self, machine: str, problem: str, hint: str = "", password_possible: bool = False, mendable: bool = False
    ) -> None:
        super().__init__(machine, problem, hint)
        self.password_possible, self.mendable = password_possible, mendable


class PasswordOnly(SshError, cause="password_only", stage=Stage.LOGIN):
    """The server accepts no keys at all."""


class PasswordRefused(SshError, cause="password_refused", stage=Stage.LOGIN):
    """The password was wrong."""


class NoShell(SshError, cause="no_shell"):
    """Logged in, but commands do not run."""


class Dropped(SshError, cause="dropped", stage=Stage.REACH):
    """The connection was lost."""


class CommandTimeout(SshError, cause="command_timeout"):
    """A command there did not end in time."""


class ForwardRefused(SshError, cause="forward_refused", stage=Stage.REACH):
    """Its SSH server does not forward ports."""


class RemoteFileError(SshError, cause="remote_file"):
    """A file could not be written or read there."""


class Unequipped(SshError, cause="unequipped"):
    """It lacks packages that Muster can install there."""

    def __init__(self, machine: str, problem: str) -> None:
        hint = program("distributed-check", "--fix installs what is missing, into Muster's own folder there")
        super().__init__(machine, problem, hint)


def space_hint(output: str) -> str:
    """Return what to do if a machine's output says that its disk or quota is full; empty otherwise."""
    if "quota" in output:
        return "free some of the disk quota there (quota -s shows it; small files count, too)"
    return "free some space there, or inodes where df -i shows that these are used up" if "No space" in output else ""


def one_line(text: str) -> str:
    """Return text from a remote machine as one short line without control characters, safe for the terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _LONGEST]).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
