"""Everything that can go wrong between this machine and another one over SSH, each with its cause and its fix.

::

    SshError                     one machine, one line, one hint; exit code 3
    ├── NameUnknown              its name has no address
    ├── NoRoute                  there is no way to its address
    ├── ConnectTimeout           nothing answers at its address
    ├── PortClosed               it answers, but no SSH server listens
    ├── NotSsh                   what listens is not an SSH server, or speaks garbage
    ├── Stalled                  it accepted the connection and then said nothing
    ├── UnknownHostKey           never met before, and nobody vouched for it
    ├── HostKeyChanged           another key than the known one: refused, always
    ├── UserRefused              the user may not log in there
    ├── NoKeyAccepted            none of our keys fits
    ├── PasswordOnly             it takes no keys at all
    ├── PasswordRefused          the password was wrong
    ├── NoShell                  logged in, but commands do not run
    ├── Dropped                  the connection was lost in the middle
    ├── CommandTimeout           a command there did not end in time
    ├── ForwardRefused           its SSH server does not forward ports
    └── RemoteFileError          a file could not be written or read there
"""

from __future__ import annotations

from typing import ClassVar

from distributed.ssh.host_keys import HostKeyInfo
from profiles.errors import MachinesNotReady

REMOTE_LOGIN = (
    "on a Mac turn on System Settings > General > Sharing > Remote Login; "
    "on Linux: sudo apt install openssh-server && sudo systemctl enable --now ssh"
)


_LONGEST = 1000
"""Characters of a message or hint; ours are shorter, but a server's last words may be in them."""


class SshError(MachinesNotReady):
    """A machine cannot be reached or used over SSH.

    Args:
        machine: its name in the hosts file.
        problem: what is wrong, in plain words.
        hint: what to do about it.
    """

    cause: ClassVar[str] = "ssh"
    """Stable word for programs (``--json``)."""
    stage: str = "shell"
    """How far it came: the failure is on the way to ``reach``, ``host key``, ``login`` or ``shell``."""

    def __init__(self, machine: str, problem: str, hint: str = "") -> None:
        super().__init__(_one_line(problem), _one_line(hint), machine=machine)


class NameUnknown(SshError):
    cause = "name_unknown"
    stage = "reach"


class NoRoute(SshError):
    cause = "no_route"
    stage = "reach"


class ConnectTimeout(SshError):
    cause = "timeout"
    stage = "reach"


class PortClosed(SshError):
    cause = "port_closed"
    stage = "reach"


class NotSsh(SshError):
    cause = "not_ssh"
    stage = "reach"


class Stalled(SshError):
    cause = "stalled"
    stage = "reach"


class UnknownHostKey(SshError):
    """The machine was never met before; ``key`` is what a person compares."""

    cause = "unknown_host_key"
    stage = "host key"

    def __init__(self, key: HostKeyInfo) -> None:
        super().__init__(
            key.machine,
            f"first contact: its {key.key_type} host key has the fingerprint {key.fingerprint}",
            f"compare it on that machine with: {key.compare_command}; then accept it with --trust-new",
        )
        self.key = key

    @property
    def fingerprint(self) -> str:
        return self.key.fingerprint


class HostKeyChanged(SshError):
    """The machine shows another key than the known one. No option of ours goes round this."""

    cause = "host_key_changed"
    stage = "host key"


class UserRefused(SshError):
    cause = "user_refused"
    stage = "login"


class NoKeyAccepted(SshError):
    """None of our keys fits; ``password_possible`` tells whether the server would take a password."""

    cause = "no_key_accepted"
    stage = "login"

    def __init__(self, machine: str, problem: str, hint: str = "", password_possible: bool = False) -> None:
        super().__init__(machine, problem, hint)
        self.password_possible = password_possible


class PasswordOnly(SshError):
    cause = "password_only"
    stage = "login"


class PasswordRefused(SshError):
    cause = "password_refused"
    stage = "login"


class NoShell(SshError):
    cause = "no_shell"


class Dropped(SshError):
    cause = "dropped"
    stage = "reach"


class CommandTimeout(SshError):
    cause = "command_timeout"


class ForwardRefused(SshError):
    cause = "forward_refused"
    stage = "reach"


class RemoteFileError(SshError):
    cause = "remote_file"


def _one_line(text: str) -> str:
    """Text from a far machine is untrusted: no control characters reach the terminal, and no page of it either."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * _LONGEST]).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
