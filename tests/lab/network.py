"""Bridges, links, rate limits and CPU quotas: thin wrappers of ip, tc and cgroups."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab.spec import LabUnavailable
from tests.waiting import PATIENCE

CPU_CGROUP = Path("/sys/fs/cgroup/cpu")
_PERIOD = 100_000
"""Period of a CPU quota in microseconds."""
_BURST = 64 * 1024
"""Smallest burst of a shaped link in bytes; less would stall segmentation offload."""
_BURST_SECONDS = 0.004
"""Burst of a fast link in seconds, by which it catches up after a late wake-up by the kernel."""


@dataclass(frozen=True)
class Traffic:
    """Bytes at a host's network interface since it was built, frame headers included."""

    received: int
    sent: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.received - other.received, self.sent - other.sent)


def ip(*words: str, check: bool = True) -> None:
    _call(["ip", *words], check)


def _call(command: list[str], check: bool) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if check and result.returncode != 0:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")


def make_bridge(name: str, address: str) -> None:
    with contextlib.suppress(OSError):  # namespaces may only use algorithms allowed here
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
        if "cubic" not in (names := allowed.read_text().split()):
            allowed.write_text(" ".join([*names, "cubic"]))
    ip("link", "add", name, "type", "bridge", "forward_delay", "0")
    ip("addr", "add", f"{address}/24", "dev", name)
    ip("link", "set", name, "up")


def plug_in(bridge: str, port: str, pid: int) -> None:
    """Connect the bridge and the network namespace of a process by a cable, whose end there is named eth0."""
    ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    ip("link", "set", port, "master", bridge, "up")


def unplug(port: str) -> None:
    ip("link", "del", port, check=False)


def shape(port: str, pid: int, mbit: float | None, end: str = "eth0") -> None:
    """Limit a cable's rate in both directions, or lift the limit; open connections continue.

    Args:
        port: name of the cable's end on this machine.
        pid: a process in the network namespace of the other end.
        mbit: rate in Mbit/s; ``None``: unlimited.
        end: name of the cable's end in that namespace.
    """
    inside = ["nsenter", "-t", str(pid), "-n", "tc"]
    for tc, device in ((["tc"], port), (inside, end)):
        if mbit is None:
            _call([*tc, "qdisc", "del", "dev", device, "root"], check=False)
        else:
            rate = f"{round(mbit * 1e6)}bit"
            burst = max(_BURST, round(mbit * 1e6 / 8 * _BURST_SECONDS))
            words = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
            _call([*tc, "qdisc", "replace", "dev", device, *words], check=True)


def drop_packets(port: str, pid: int, inwards: bool, end: str = "eth0") -> None:
    """Let no packet pass a cable in one direction, until :func:`shape` lifts that: the bucket is too small for any.

    Args:
        inwards: whether nothing reaches the namespace of ``pid``, or nothing leaves it.
    """
    tc = ["tc"] if inwards else ["nsenter", "-t", str(pid), "-n", "tc"]
    words = ["root", "tbf", "rate", "8bit", "burst", "1", "latency", "1ms"]
    _call([*tc, "qdisc", "replace", "dev", port if inwards else end, *words], check=True)


def traffic(pid: int) -> Traffic:
    """Return the counters of eth0 in the network namespace of a process."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            fields = numbers.split()
            return Traffic(int(fields[0]), int(fields[8]))
    raise OSError("the host has no eth0")


def wait_until_listening(pid: int, port: int, patience: float = PATIENCE) -> None:
    """Wait until a TCP port is open in the namespace of a process; sshd forks into the background before it listens.

    Raises:
        LabUnavailable: it did not open within ``patience`` seconds.
    """
    end = time.monotonic() + patience
    while not any(_listening_ports(Path(f"/proc/{pid}/net/tcp"), port)):
        if time.monotonic() > end:
            raise LabUnavailable(f"nothing listens on port {port} of the host after {patience:.0f} s")
        time.sleep(0.005)


def _listening_ports(table: Path, port: int) -> Iterator[bool]:
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        yield fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port


def make_quota(name: str) -> Path:
    """Create a cgroup for CPU quotas.

    Raises:
        LabUnavailable: this machine has no cgroup v1 CPU controller.
    """
    if not (CPU_CGROUP / "cpu.cfs_quota_us").exists():
        raise LabUnavailable(f"CPU quotas need cgroup v1 at {CPU_CGROUP} with cpu.cfs_quota_us")
    folder = CPU_CGROUP / name
    try:
        folder.mkdir(exist_ok=True)
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
    except OSError as error:
        raise LabUnavailable(f"CPU quotas: {folder}: {error.strerror}") from None
    return folder


def set_quota(folder: Path, cores: float | None) -> None:
    quota = -1 if cores is None else max(round(cores * _PERIOD), 1000)
    (folder / "cpu.cfs_quota_us").write_text(str(quota))


def within_quota(folder: Path | None, command: list[str]) -> list[str]:
    """Return the command line that runs a command under a quota."""
    return command if folder is None else ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "tasks"), *command]


def remove_quota(folder: Path, patience: float = PATIENCE) -> None:
    """Remove a cgroup once the kernel has released its last process."""
    end = time.monotonic() + patience
    while folder.exists():
        try:
            os.rmdir(folder)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def need_root_and_tools() -> None:
    """Check that namespaces can be built here.

    Raises:
        LabUnavailable: this machine or this user cannot build network namespaces.
    """
    if not os.path.isdir("/proc/self/ns"):
        raise LabUnavailable("needs Linux")
    if os.geteuid() != 0:
        raise LabUnavailable("needs root")
    for program in ("ip", "tc", "unshare", "nsenter"):
        if not any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.get_exec_path()):
            raise LabUnavailable(f"{program} is not installed (Debian, Ubuntu: apt install iproute2 util-linux)")
