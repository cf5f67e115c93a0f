"""Hosts without root: one sshd per host on a loopback port, with the interface of :class:`tests.lab.lab.Lab`.

Each host has its own port, host key and HOME; user, processes and the rest of the file system are shared. A link is
cut by stopping the host's sshd processes, so its peer falls silent as with a disconnected cable. There are no rates,
quotas or traffic counters.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from getpass import getuser
from pathlib import Path
from typing import Any

import psutil

from distributed.hosts.file import Hosts, Machine, save_hosts
from distributed.ssh.connection import SshTarget
from tests.lab import keeper, ssh_setup
from tests.lab.keeper import MARK
from tests.lab.processes import has_one
from tests.lab.spec import HostSpec, LabUnavailable
from tests.waiting import PATIENCE

_ENTER = """#!/bin/sh
cd "$HOME"
command=$SSH_ORIGINAL_COMMAND
unset SSH_ORIGINAL_COMMAND
exec "$SHELL" -c "$command"
"""
"""sshd starts every command in the account's real home folder; this changes to the host's own."""
_PORTS = range(10_000, 32_000)


class LightHost:
    """One host of a :class:`LightLab`."""

    address = "127.0.0.1"

    def __init__(self, lab: LightLab, spec: HostSpec) -> None:
        if spec.cores or spec.mbit or spec.home_mb or spec.hide or spec.password:
            raise LabUnavailable("a light host has no quota, rate, disk, hidden files or password: use Lab")
        self.spec = spec
        self.name = spec.name
        self.user = getuser()
        self.folder = lab.folder / spec.name
        self.files = self.folder / "home"
        """Its home folder."""
        self._port_holder = _bound_to_free_port()
        self.port = int(self._port_holder.getsockname()[1])
        self._mark = f"{lab.folder.name}-{spec.name}."
        self._process: subprocess.Popen[bytes] | None = None
        self._prepare(lab)

    def _prepare(self, lab: LightLab) -> None:
        (self.files / ".ssh").mkdir(parents=True, mode=0o700)
        ssh_setup.make_key(self.folder / "host_key")
        keys = self.folder / "authorized_keys"
        keys.write_text(ssh_setup.public_key(lab.key) + "\n" if self.spec.key else "")
        enter = self.folder / "enter"
        enter.write_text(_ENTER)
        enter.chmod(0o755)
        environment = {"HOME": str(self.files), MARK: self._mark, **ssh_setup.session_environment(self.spec)}
        more = (*self.spec.sshd_options, f"AuthorizedKeysFile {keys}", f"ForceCommand {enter}")
        spec = replace(self.spec, sshd_options=more)
        self._config = ssh_setup.server_config(self.folder, spec, self.address, self.port, environment)

    @property
    def host_key(self) -> str:
        return ssh_setup.public_key(self.folder / "host_key")

    @property
    def place(self) -> ssh_setup.Place:
        return ssh_setup.Place(self.name, self.address, self.port, self.user, self.host_key)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def logins(self) -> int:
        """How many log-ins its sshd has accepted."""
        return ssh_setup.accepted_logins(self.folder)

    def boot(self) -> None:
        """Start its sshd and wait until it listens."""
        self.release_port()
        with open(self.folder / "sshd.log", "ab") as log:
            command = [ssh_setup.sshd_program(), "-D", "-e", "-f", str(self._config)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + PATIENCE
        while not _listens(self.address, self.port):
            if not self.running or time.monotonic() > end:
                raise LabUnavailable(f"sshd does not start: {(self.folder / 'sshd.log').read_text().strip()}")
            time.sleep(0.01)

    def release_port(self) -> None:
        """Give up the port, which nobody else was given meanwhile: no other host of the lab either."""
        self._port_holder.close()

    def start_sshd(self) -> None:
        self.boot()

    def stop_sshd(self) -> None:
        """Stop its sshd; open sessions continue."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def new_host_key(self) -> None:
        """Give it another host key, like a reinstalled machine."""
        ssh_setup.make_key(self.folder / "host_key")
        self.stop_sshd()
        self.start_sshd()

    def run(self, argv: Sequence[str], timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as if inside the host: in its home folder, marked as one of its processes."""
        environment = {**os.environ, "HOME": str(self.files), MARK: self._mark}
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, env=environment, cwd=self.files, **options
        )

    def pids(self, *texts: str) -> list[int]:
        """Return the PIDs of its sshd and of processes started on it, if their command line contains one of ``texts``;
        without any, of all."""
        found = (*keeper.marked(self._mark), *keeper.servers(str(self._config)))
        return sorted({process.pid for process in found if has_one(keeper.command_line(process), texts)})

    def cut(self) -> None:
        """Make it fall silent without closing any connection."""
        self._signal(signal.SIGSTOP)

    def mend(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in keeper.servers(str(self._config)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all its processes."""
        keeper.end(str(self._config), self._mark)
        self.stop_sshd()


class LightLab:
    """Hosts on loopback ports. Use it as a context manager, or call :meth:`close`.

    Raises:
        LabUnavailable: sshd is missing or does not start; the text has the reason.
    """

    def __init__(self, *hosts: str | HostSpec) -> None:
        if os.geteuid() == 0 and ssh_setup.sshd_program():
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="muster-light-lab-")).resolve()
        self.key = self.folder / "id_ed25519"
        self.ssh_config = self.folder / "ssh_config"
        self.hosts_file = self.folder / "hosts.json"
        self._hosts: dict[str, LightHost] = {}
        self._owner = os.getpid()
        command = [sys.executable, str(Path(keeper.__file__)), str(self.folder)]
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        atexit.register(self.close)
        try:
            self._build([HostSpec(host) if isinstance(host, str) else host for host in hosts])
        except BaseException:
            self.close()
            raise

    def _build(self, specs: list[HostSpec]) -> None:
        ssh_setup.make_key(self.key)
        self._hosts = {spec.name: LightHost(self, spec) for spec in specs}
        for host in self:
            if host.spec.sshd:
                host.boot()
        ssh_setup.client_config(self.folder, [host.place for host in self], self.key)
        save_hosts(self.hosts(), self.hosts_file)

    def __iter__(self) -> Iterator[LightHost]:
        return iter(self._hosts.values())

    def __getitem__(self, name: str) -> LightHost:
        return self._hosts[name]

    def hosts(self, *names: str, **fields: Any) -> Hosts:
        """Return hosts-file entries of these hosts (default: all), with this Python and extra ``fields`` for each.

        The coordinator listens on loopback, as this machine's other addresses may belong to labs that end earlier.
        """
        chosen = [self._hosts[name] for name in names] if names else list(self)
        given = {"python": sys.executable, "coordinator_at": LightHost.address, **fields}
        return Hosts(machines=tuple(Machine(name=h.name, **given) for h in chosen), ssh_config=str(self.ssh_config))

    def target(self, name: str, **fields: Any) -> SshTarget:
        """Return the SSH target of a host, with ``fields`` replaced."""
        return replace(SshTarget(name, name, config_file=str(self.ssh_config)), **fields)

    def close(self) -> None:
        """End all processes and remove all files. May be called twice."""
        if os.getpid() != self._owner or not self.folder.exists():
            return
        keeper.end_lab(self.folder)
        self._keeper.communicate()
        for host in self:
            host.stop_sshd()
            host.release_port()
        atexit.unregister(self.close)

    def __enter__(self) -> LightLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bound_to_free_port() -> socket.socket:
    """Return a socket with a port below the ephemeral range, which no connection takes while sshd is not running."""
    while True:
        holder = socket.socket()
        try:
            holder.bind((LightHost.address, _PORTS[secrets.randbelow(len(_PORTS))]))
        except OSError:  # it is taken
            holder.close()
        else:
            return holder


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address, port)) == 0
