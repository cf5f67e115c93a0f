"""Real hosts on one Linux machine: network namespaces with sshd, names, home folders, cables and CPU quotas.

::

    with Lab("a", "b", HostSpec("c", cores=0.5, mbit=100)) as lab:
        SshConnection.connect(lab.target("a"))
        lab["b"].cut()

Each host has network, process, mount, UTS and IPC namespaces of its own, its own host key, /root, /tmp, /run and
/etc/hosts; the rest of the file system is this machine's. The hosts are 198.18.N.11 and up (a range reserved for
benchmarks, RFC 2544), this machine is 198.18.N.1 on the same bridge and so takes part in the network.

A host lives as long as the process that built it: its process 1 ends when the owner does, and the kernel ends all the
others with it. What then is left (a bridge, cgroups, a folder) is removed by the next lab or by ``clean``.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed.hosts import Hosts, Machine, save_hosts
from distributed.ssh import SshTarget
from tests.lab import network, processes, ssh_setup
from tests.lab.network import Traffic
from tests.lab.reaper import claim_slot, reap
from tests.lab.spec import HostSpec, LabUnavailable

REPOSITORY = Path(__file__).resolve().parents[2]
_COVERED = ("/root", "/tmp", "/run", "/dev/shm")
_BOOT_PATIENCE = 20.0


class LabHost:
    """One host of a :class:`Lab`."""

    port = 22
    user = "root"

    def __init__(self, lab: Lab, number: int, spec: HostSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.address = f"198.18.{lab.slot}.{11 + number}"
        self.folder = lab.folder / spec.name
        self.files = self.folder / "disk" / "root"
        """Its home folder, seen from here (not with ``home_mb``)."""
        self.pid = 0
        """Its process 1 as this machine counts; 0 while it is off."""
        self._lab = lab
        self._cable = f"mu{lab.slot}h{number}"
        self._quota_name = f"muster-lab-{lab.slot}-{number}"
        self._mbit = spec.mbit
        self._process: subprocess.Popen[str] | None = None
        self._environment = ssh_setup.session_environment(spec)
        self._prepare()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def host_key(self) -> str:
        return ssh_setup.public_key(self.folder / "host_key")

    @property
    def place(self) -> ssh_setup.Place:
        return ssh_setup.Place(self.name, self.address, self.port, self.user, self.host_key)

    def _prepare(self) -> None:
        for part in ("etc", "disk/root/.ssh", "disk/tmp", "skeleton", "keep"):
            (self.folder / part).mkdir(parents=True)
        (self.folder / "disk" / "tmp").chmod(0o1777)
        (self.files / ".ssh").chmod(0o700)
        nothing = self.folder / "nothing"
        nothing.touch(mode=0o000)
        ssh_setup.make_key(self.folder / "host_key")
        if self.spec.key:
            (self.files / ".ssh" / "authorized_keys").write_text(ssh_setup.public_key(self._lab.key) + "\n")
        ssh_setup.server_config(self.folder, self.spec, "0.0.0.0", self.port, self._environment)
        processes.write_accounts(self.folder / "etc", self.spec)

    def start(self) -> None:
        """Begin to switch it on; :meth:`finish_start` waits."""
        command = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        command += [sys.executable, "-I", "-S", str(Path(__file__).with_name("init.py")), str(self._plan())]
        if self.spec.cores is not None:
            network.set_quota(network.make_quota(self._quota_name), self.spec.cores)
        self._process = subprocess.Popen(
            network.within_quota(self._quota, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def finish_start(self) -> None:
        """Plug in the cable and wait until sshd listens."""
        self._expect("here")
        assert self._process is not None and self._process.stdin is not None
        self.pid = processes.only_child(self._process.pid)
        network.plug_in(self._lab.bridge, self._cable, self.pid)
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._expect("ready")
        network.shape(self._cable, self.pid, self._mbit)

    def _expect(self, word: str) -> None:
        assert self._process is not None and self._process.stdout is not None and self._process.stderr is not None
        said = processes.read_line(self._process.stdout, _BOOT_PATIENCE)
        if said != word:
            log = self.folder / "sshd.log"
            more = log.read_text() if log.exists() else ""
            raise LabUnavailable(f"host {self.name}: {said or self._process.stderr.read()} {more}".strip())

    def _plan(self) -> Path:
        needed = {str(REPOSITORY), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}
        plan = {
            "name": self.name,
            "folder": str(self.folder),
            "address": self.address,
            "home_mb": self.spec.home_mb,
            "keep": sorted(path for path in needed if path.startswith(tuple(f"{top}/" for top in _COVERED))),
            "hide": self.spec.hide,
            "sshd": ssh_setup.sshd_program(),
            "start_sshd": self.spec.sshd,
        }
        path = self.folder / "plan.json"
        path.write_text(json.dumps(plan))
        return path

    def boot(self) -> None:
        """Switch it on again; disk and keys are as they were."""
        self.start()
        self.finish_start()

    def command(self, argv: Sequence[str], cwd: str | Path = "/root") -> list[str]:
        """Return the command line, for this machine, that runs ``argv`` inside the host as root."""
        variables = {"HOME": "/root", "USER": "root", **self._environment}
        words = [f"{key}={value}" for key, value in variables.items()]
        words = ["nsenter", "-t", str(self.pid), "-a", "--", "env", "-u", "TMPDIR", "-C", str(cwd), *words, *argv]
        return network.within_quota(self._quota, words)

    @property
    def _quota(self) -> Path | None:
        return network.CPU_CGROUP / self._quota_name if self.spec.cores is not None else None

    def run(
        self, argv: Sequence[str], timeout: float = 60.0, cwd: str | Path = "/root", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside and wait for it; not over SSH."""
        words = self.command(argv, cwd)
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)

    def popen(self, argv: Sequence[str], cwd: str | Path = "/root", **options: Any) -> subprocess.Popen[Any]:
        """Start a command inside. It ends with the host; to end it earlier signal its :meth:`pids`, not the handle."""
        return subprocess.Popen(self.command(argv, cwd), **options)

    def cut(self) -> None:
        """Pull its network cable."""
        network.ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Put the cable back."""
        network.ip("link", "set", self._cable, "up")

    def set_rate(self, mbit: float | None) -> None:
        """Shape its link in both directions while it runs; ``None`` lifts the limit."""
        self._mbit = mbit
        network.shape(self._cable, self.pid, mbit)

    def set_cores(self, cores: float) -> None:
        """Change the CPU quota of a host that was built with one."""
        if self._quota is None:
            raise LabUnavailable(f"host {self.name} was built without a quota: give cores")
        network.set_quota(self._quota, cores)

    def traffic(self) -> Traffic:
        """Return what went through its interface so far."""
        return network.traffic(self.pid)

    def pids(self, text: str = "") -> list[int]:
        """Return its processes whose command line holds ``text``, process 1 left out, as this machine counts."""
        return processes.in_namespace(self.pid, text)

    def new_host_key(self) -> None:
        """Give it another host key, as a machine has that was set up anew."""
        ssh_setup.make_key(self.folder / "host_key")
        for pid in self.pids("sshd_config"):
            processes.end(pid)
        self.start_sshd()

    def stop_sshd(self) -> None:
        """Switch Remote Login off; sessions that run go on."""
        for pid in self.pids("sshd_config"):
            processes.end(pid)

    def start_sshd(self) -> None:
        config, log = self.folder / "sshd_config", self.folder / "sshd.log"
        self.run([ssh_setup.sshd_program(), "-f", str(config), "-E", str(log)], check=True)

    def kill(self) -> None:
        """Pull the plug: no good-bye on the wire, and nothing of it runs any more."""
        if self._process is None:
            return
        if self.pid:
            network.ip("link", "set", self._cable, "down", check=False)
            processes.kill_now(self.pid)
            self.pid = 0
        processes.bury(self._process)
        network.unplug(self._cable)
        self._process = None

    def remove(self) -> None:
        self.kill()
        network.remove_quota(network.CPU_CGROUP / self._quota_name)


class Lab:
    """Hosts on one bridge. Use it as a context manager, or call :meth:`close`.

    Args:
        hosts: names or :class:`~tests.lab.spec.HostSpec`.

    Raises:
        LabUnavailable: this machine cannot build it; the text says what is missing.
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
        """A forked child must not take down what is not its own."""
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
        """Return the hosts-file entries of these hosts, or of all, with this Python and more ``fields`` for each."""
        chosen = [self._hosts[name] for name in names] if names else list(self)
        given = {"python": sys.executable, **fields}
        machines = tuple(Machine(name=host.name, address=host.address, **given) for host in chosen)
        return Hosts(machines=machines, ssh_config=str(self.ssh_config))

    def target(self, name: str, **fields: Any) -> SshTarget:
        """Return the SSH target of a host, with other ``fields`` in place of the usual ones."""
        return replace(SshTarget(name, name, config_file=str(self.ssh_config)), **fields)

    def close(self) -> None:
        """Take everything down. May be called twice."""
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


def wait_for_port(address: str, port: int, patience: float = 5.0) -> None:
    """Wait until something listens.

    Raises:
        TimeoutError: nothing did in time.
    """
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise TimeoutError(f"nothing listens at {address}:{port}") from None
            time.sleep(0.02)
