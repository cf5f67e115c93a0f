"""Real SSH servers that each fail in a way of their own, as machines of the set-up."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from app.wizard.services.outside import Outside
from app.wizard.services.services import Services
from app.wizard.state.records import DiscoveredMachines, ItemStatus, MachineRow
from distributed.hosts.file import Machine
from distributed.ssh.access import AccessReport, check_access
from distributed.ssh.connection import SshTarget, Trust
from tests.lab.light import LightLab
from tests.lab.spec import HostSpec
from tests.wizard.fake_services import FakeWatch

FAILURES = (
    ("no-such-machine.invalid", "name_unknown", "give its IP address"),
    ("off", "port_closed", "systemctl enable --now ssh"),
    ("keyless", "no_key_accepted", "~/.ssh/authorized_keys"),
    ("thrown", "user_refused", "Allow access for"),
    ("shellless", "no_shell", "chsh -s /bin/sh"),
    ("renewed", "host_key_changed", "ssh-keygen -R"),
)
"""Host, cause, and a part of what is to be done. A server that stalls is :func:`silent_server`."""


@contextlib.contextmanager
def failing_lab() -> Iterator[LightLab]:
    """The hosts of :data:`FAILURES`, and ``fine``."""
    specs = (
        HostSpec("fine"),
        HostSpec("keyless", key=False),
        HostSpec("off", sshd=False),
        HostSpec("shellless", sshd_options=("ForceCommand /usr/sbin/nologin",)),
        HostSpec("thrown", sshd_options=("ForceCommand kill -9 $PPID",)),
        HostSpec("renewed"),
    )
    with LightLab(*specs) as built:
        built["renewed"].new_host_key()
        yield built


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


class Impatient(Outside):
    """Waits for one port a second only; others have the time that a busy machine takes."""

    def __init__(self, port: int) -> None:
        self._port = port

    def check_access(self, target: SshTarget, trust: Trust) -> AccessReport:
        return check_access(target, trust=trust, **({"timeout": 1.0} if target.port == self._port else {}))


def row(name: str, config: Path, address: str = "", port: int | None = None) -> MachineRow:
    entry = Machine(name=name, address=address, port=port)
    return MachineRow(name, name, status=ItemStatus.OK, entry=entry, ssh_config=str(config))


class InSight(Services):
    """The real world with just these machines in sight."""

    def __init__(self, *machines: MachineRow, outside: Outside | None = None) -> None:
        super().__init__(outside=outside)
        self._machines: Sequence[MachineRow] = machines

    def watch(self, see: Callable[[DiscoveredMachines], None]) -> FakeWatch:
        see(DiscoveredMachines(tuple(self._machines)))
        return FakeWatch(None)  # type: ignore[arg-type]  # nothing is typed
