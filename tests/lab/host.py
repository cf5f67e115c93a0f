"""One host of a lab: starting, killing, cutting its link, limiting its speed, and running commands in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.lab import network, processes, ssh_setup
from tests.lab.network import Traffic
from tests.lab.spec import HostSpec, LabUnavailable

REPOSITORY = Path(__file__).resolve().parents[2]
_COVERED = ("/root", "/tmp", "/run", "/dev/shm")


class Surroundings(Protocol):
    """Attributes of a lab that its hosts use."""

    slot: int
    folder: Path
    bridge: str
    key: Path


class LabHost:
    """One host of a :class:`~tests.lab.lab.Lab`."""

    port = 22
    user = "root"

    def __init__(self, lab: Surroundings, number: int, spec: HostSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.address = f"198.18.{lab.slot}.{11 + number}"
        self.folder = lab.folder / spec.name
        self.files = self.folder / "disk" / "root"
        """Its home folder as a path on this machine (not with ``home_mb``)."""
        self.pid = 0
        """PID of its process 1 on this machine; 0 while it is off."""
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
    def logins(self) -> int:
        """How many log-ins its sshd has accepted."""
        return ssh_setup.accepted_logins(self.folder)

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
        """Start it without waiting; :meth:`finish_start` waits."""
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
        """Connect its network cable and wait until sshd listens."""
        self._expect("here")
        assert self._process is not None and self._process.stdin is not None
        self.pid = processes.only_child(self._process.pid)
        network.plug_in(self._lab.bridge, self._cable, self.pid)
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._expect("ready")
        if self.spec.sshd:
            network.wait_until_listening(self.pid, self.port)
        network.shape(self._cable, self.pid, self._mbit)

    def _expect(self, word: str) -> None:
        assert self._process is not None and self._process.stdout is not None and self._process.stderr is not None
        said = processes.read_line(self._process.stdout)
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
        """Start it again; its disk and keys are unchanged."""
        self.start()
        self.finish_start()

    def command(self, argv: Sequence[str], cwd: str | Path = "/root") -> list[str]:
        """Return the command line that runs ``argv`` as root inside the host when started on this machine."""
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
        """Run a command inside the host, not over SSH, and wait for it."""
        words = self.command(argv, cwd)
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)

    def popen(self, argv: Sequence[str], cwd: str | Path = "/root", **options: Any) -> subprocess.Popen[Any]:
        """Start a command inside the host. It ends with the host; to end it earlier, signal its :meth:`pids`."""
        return subprocess.Popen(self.command(argv, cwd), **options)

    def cut(self) -> None:
        """Disconnect its network cable."""
        network.ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Reconnect its network cable."""
        network.ip("link", "set", self._cable, "up")

    def cut_one_way(self, inwards: bool) -> None:
        """Lose all that is sent to it (``inwards``), or all that it sends, until ``set_rate(None)``."""
        network.drop_packets(self._cable, self.pid, inwards)

    def set_rate(self, mbit: float | None) -> None:
        """Limit its link to ``mbit`` in both directions while it runs; ``None`` lifts the limit."""
        self._mbit = mbit
        network.shape(self._cable, self.pid, mbit)

    def set_cores(self, cores: float) -> None:
        """Change the CPU quota of a host that was built with one."""
        if self._quota is None:
            raise LabUnavailable(f"host {self.name} was built without a quota: give cores")
        network.set_quota(self._quota, cores)

    def traffic(self) -> Traffic:
        """Return the bytes at its network interface so far."""
        return network.traffic(self.pid)

    def pids(self, *texts: str) -> list[int]:
        """Return the PIDs, on this machine, of its processes except process 1 whose command line contains one of
        ``texts``; without any, of all."""
        return processes.in_namespace(self.pid, texts)

    def new_host_key(self) -> None:
        """Give it another host key, like a reinstalled machine."""
        ssh_setup.make_key(self.folder / "host_key")
        for pid in self.pids("sshd_config"):
            processes.end(pid)
        self.start_sshd()

    def stop_sshd(self) -> None:
        """Stop its sshd; open sessions continue."""
        for pid in self.pids("sshd_config"):
            processes.end(pid)

    def start_sshd(self) -> None:
        config, log = self.folder / "sshd_config", self.folder / "sshd.log"
        self.run([ssh_setup.sshd_program(), "-f", str(config), "-E", str(log)], check=True)
        network.wait_until_listening(self.pid, self.port)

    def kill(self) -> None:
        """Kill it without closing its connections, and wait until all its processes are gone."""
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
