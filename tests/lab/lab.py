"""Real hosts on one Linux machine: network namespaces with sshd, names, home folders, cables and CPU quotas.

::

    with Lab("a", "b", HostSpec("c", cores=0.5, mbit=100)) as lab:
        SshConnection.connect(lab.target("a"))
        lab["b"].cut()

Each host has its own network, process, mount, UTS and IPC namespaces, host key, /root, /tmp, /run and /etc/hosts; the
rest of the file system is shared with this machine. The hosts are 198.18.N.11 and up (a range reserved for
benchmarks, RFC 2544); this machine is 198.18.N.1 on the same bridge and so takes part in the network.

A host lives as long as the process that built it: its process 1 exits when the owner does, and the kernel kills all
its other processes. What remains (a bridge, cgroups, a folder) is removed by the next lab or by ``clean``.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from distributed.hosts.file import Hosts, Machine, save_hosts
from distributed.ssh.connection import SshTarget
from tests.lab import network, ssh_setup
from tests.lab.host import LabHost
from tests.lab.reaper import claim_slot, reap
from tests.lab.spec import HostSpec


class Lab:
    """Hosts on one bridge. Use it as a context manager, or call :meth:`close`.

    Args:
        hosts: names or :class:`~tests.lab.spec.HostSpec`.

    Raises:
        LabUnavailable: this machine cannot build it; the text names what is missing.
    """

    def __init__(self, *hosts: str | HostSpec) -> None:
        network.need_root_and_tools()
        ssh_setup.sshd_program()
        reap()
        self.slot, self.folder = claim_slot()
        self.bridge = f"muster{self.slot}"
        self.address = f"198.18.{self.slot}.1"
        """This machine's address in the lab's network."""
        self.key = self.folder / "id_ed25519"
        self.ssh_config = self.folder / "ssh_config"
        self.hosts_file = self.folder / "hosts.json"
        self._hosts: dict[str, LabHost] = {}
        self._owner = os.getpid()
        """A forked child must not remove its parent's lab."""
        atexit.register(self.close)
        try:
            self._build([HostSpec(host) if isinstance(host, str) else host for host in hosts])
        except BaseException:
            self.close()
            raise

    def _build(self, specs: list[HostSpec]) -> None:
        network.make_bridge(self.bridge, self.address)
        ssh_setup.make_key(self.key)
        self._hosts = {spec.name: LabHost(self, number, spec) for number, spec in enumerate(specs)}
        ssh_setup.client_config(self.folder, [host.place for host in self], self.key)
        save_hosts(self.hosts(), self.hosts_file)
        for host in self:
            self._hand_out_names(host)
        for host in self:
            host.start()
        for host in self:
            host.finish_start()
        self._write_state()

    def _hand_out_names(self, host: LabHost) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost", f"{self.address} controller"]
        lines += [f"{other.address} {other.name}" for other in self]
        (host.folder / "etc" / "hosts").write_text("\n".join(lines) + "\n")
        (host.folder / "etc" / "hostname").write_text(host.name + "\n")
        if host.spec.person:
            own = host.files / ".ssh"
            shutil.copy(self.key, own / "id_ed25519")
            shutil.copy(self.folder / "known_hosts", own / "known_hosts")
            text = self.ssh_config.read_text()
            for path, seen in ((self.key, "id_ed25519"), (self.folder / "known_hosts", "known_hosts")):
                text = text.replace(str(path), f"/root/.ssh/{seen}")
            (own / "config").write_text(text)
        shutil.copytree(host.files, host.folder / "skeleton", dirs_exist_ok=True)

    def _write_state(self) -> None:
        hosts = [{"name": host.name, "pid": host.pid, "address": host.address} for host in self]
        (self.folder / "hosts.state").write_text(json.dumps(hosts))

    def __iter__(self) -> Iterator[LabHost]:
        return iter(self._hosts.values())

    def __getitem__(self, name: str) -> LabHost:
        return self._hosts[name]

    def hosts(self, *names: str, **fields: Any) -> Hosts:
        """Return hosts-file entries of these hosts (default: all), with this Python and extra ``fields`` for each."""
        chosen = [self._hosts[name] for name in names] if names else list(self)
        given = {"python": sys.executable, **fields}
        machines = tuple(Machine(name=host.name, address=host.address, **given) for host in chosen)
        return Hosts(machines=machines, ssh_config=str(self.ssh_config))

    def target(self, name: str, **fields: Any) -> SshTarget:
        """Return the SSH target of a host, with ``fields`` replaced."""
        return replace(SshTarget(name, name, config_file=str(self.ssh_config)), **fields)

    def close(self) -> None:
        """Remove all hosts, the bridge and the files. May be called twice."""
        if os.getpid() != self._owner or not self.folder.exists():
            return
        for host in self:
            host.remove()
        network.ip("link", "del", self.bridge, check=False)
        shutil.rmtree(self.folder)
        atexit.unregister(self.close)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
