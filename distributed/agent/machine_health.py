"""Reports a machine's hardware and system before a run: power, heat, memory, devices, connections to other machines.

Needs Python >= 3.9 with psutil for the facts, and torch for the devices if installed: part of
:mod:`distributed.agent.program`.

The parsers take text, so that they can be tested everywhere.
"""

from __future__ import annotations

import fcntl
import gc
import glob
import json
import platform
import re
import select
import socket
import struct
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

from distributed.agent.requests import Listen, MachineRequest, Reach
from distributed.system import keeper, output, read
from training.hardware.resources import memory_limit

LARGE = 9216
"""Bytes that exceed the packet size of any network card."""
LOSES_LARGE = "small packets pass, large ones do not"
CPU_SIZE, GPU_SIZE = 512, 2048
"""Side of the matrices of the smoke test; large enough to keep a GPU busy."""
SPEED_SECONDS = 0.1
CONNECT_SECONDS = 2.0
_MOST_PEERS = 64


def facts(root: Path, request: MachineRequest) -> dict[str, Any]:
    """Return all facts; one that cannot be read does not affect the others."""
    import psutil  # connections are tested where packages are missing too

    from training.hardware.sensors import processor_celsius

    mac = platform.system() == "Darwin"
    power = mac_power(output("pmset", "-g", "batt"), output("pmset", "-g")) if mac else linux_power(power_supplies())
    memory, slowdowns = psutil.virtual_memory(), heat_slowdowns()
    limit = memory_limit() or memory.total
    computed = devices()
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "hardware": hardware(),
        "memory": {"total": min(memory.total, limit), "free": min(memory.available, limit)},
        "power": power,
        "inhibitor": inhibitor(),
        "lid": "" if mac else lid_action(power["source"]),
        "mtu": {name: card.mtu for name, card in psutil.net_if_stats().items() if not name.startswith("lo")},
        "celsius": processor_celsius(),
        "throttled": mac_throttled(output("pmset", "-g", "therm")) if mac else heat_slowdowns() > slowdowns,
        "nvidia": nvidia(output("nvidia-smi", f"--query-gpu={_NVIDIA}", "--format=csv,noheader,nounits")),
        "devices": computed,
    }  # fmt: skip


def inhibitor() -> str:
    """Return the program that can keep this machine awake; an SSH session may be denied its use."""
    if keeper() != "systemd-inhibit":
        return keeper()
    for mode, name in (
        ("sleep:idle", "systemd-inhibit"),
        ("idle", "systemd-inhibit, which prevents idle sleep"),
    ):
        if output("systemd-inhibit", f"--what={mode}", "date"):
            return name
    return ""


def lid_action(source: str, top: str = "/proc/acpi/button/lid") -> str:
    """Return what systemd does when an open lid is closed, such as ``suspend``, which nobody may forbid over SSH;
    empty: there is no lid, or it is unknown.

    Args:
        source: of the power, as in :func:`linux_power`; the action may differ by it.
    """
    if not any("open" in read(state) for state in glob.glob(f"{top}/*/state")):
        return ""
    on_mains = ("HandleLidSwitchExternalPower",) if source == "ac" else ()
    names = ("HandleLidSwitchDocked",) if _login_property("Docked") == "b true" else (*on_mains, "HandleLidSwitch")
    actions = (re.search('"([a-z-]+)"', _login_property(name)) for name in names)
    return next((action[1] for action in actions if action), "")


def _login_property(name: str) -> str:
    """Return a property of systemd-logind as ``busctl`` writes it; with an external screen a machine is docked."""
    manager = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
    return output("busctl", "get-property", *manager, name).strip()


def heat_slowdowns(top: str = "/sys/devices/system/cpu") -> int:
    """Return how often heat has slowed a processor down since the system started, as Linux counts it."""
    counts = [read(path) for path in glob.glob(f"{top}/cpu*/thermal_throttle/package_throttle_count")]
    return sum(int(count) for count in counts if count.isdigit())


def hardware() -> str:
    """Return the architecture of the processor, which under Rosetta is not that of this Python."""
    if platform.system() == "Darwin" and output("sysctl", "-n", "hw.optional.arm64").strip() == "1":
        return "arm64"
    return platform.machine()


# ------------------------------------------------------------------------------------------------------------- parsers


def power_supplies(top: str = "/sys/class/power_supply") -> list[dict[str, str]]:
    names = ("type", "online", "status", "capacity", "scope")
    return [{name: read(f"{folder}/{name}") for name in names} for folder in sorted(glob.glob(f"{top}/*"))]


def linux_power(supplies: list[dict[str, str]]) -> dict[str, Any]:
    """Evaluate power supplies: ``{"source": "ac" | "battery" | "", "percent": ..., "saving": ...}``.

    A mouse has a battery too: its scope is ``Device``.
    """
    system_supplies = [supply for supply in supplies if supply.get("scope") != "Device"]
    batteries = [supply for supply in system_supplies if supply.get("type") == "Battery"]
    mains = [supply.get("online") for supply in system_supplies if supply.get("type") not in ("Battery", "", None)]
    percents = [int(b["capacity"]) for b in batteries if re.fullmatch("[0-9]{1,3}", b.get("capacity", ""))]
    drained = any(battery.get("status") == "Discharging" for battery in batteries) and "1" not in mains
    source = "" if not system_supplies else "battery" if drained else "ac"
    profile = read("/sys/firmware/acpi/platform_profile") if system_supplies else ""
    return {"source": source, "percent": min(percents, default=None), "saving": profile == "low-power"}


def mac_power(batt: str, settings: str) -> dict[str, Any]:
    """Parse ``pmset -g batt`` and ``pmset -g``."""
    drawing = re.search(r"Now drawing from '([^']*)'", batt)
    percent = re.search(r"([0-9]{1,3})%", batt)
    return {
        "source": "" if not drawing else "battery" if "Battery" in drawing[1] else "ac",
        "percent": int(percent[1]) if percent else None,
        "saving": bool(re.search(r"^\s*(?:lowpowermode|powermode)\s+1\s*$", settings, re.M)),
    }


def mac_throttled(text: str) -> bool:
    """Parse ``pmset -g therm``."""
    limit = re.search(r"CPU_Speed_Limit\s*=\s*([0-9]{1,3})", text)
    return limit is not None and int(limit[1]) < 100


_NVIDIA = "name,driver_version,memory.total,memory.free,temperature.gpu"


def nvidia(text: str) -> list[dict[str, Any]]:
    """Parse nvidia-smi's table; memory in bytes, unknown values are ``None``."""
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [
        {
            "name": row[0], "driver": row[1],
            "total": number(row[2], 2**20), "free": number(row[3], 2**20), "celsius": number(row[4]),
        }
        for row in rows if len(row) == 5
    ]  # fmt: skip


def number(text: str, unit: int = 1) -> int | None:
    return int(text) * unit if re.fullmatch("[0-9]{1,9}", text) else None


# ------------------------------------------------------------------------------------------------------------- devices


def devices() -> list[dict[str, Any]]:
    """Multiply matrices on every device; a wrong result or an error is a problem."""
    gc.disable()  # a fifth of the seconds that torch takes to import goes into looking for garbage
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation fails in any way; it becomes a finding
        return [{"device": "cpu", "problem": f"torch: {error}", "gflops": None}]
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        names.append("mps")
    return [smoke(torch, name) for name in names]


def smoke(torch: Any, name: str) -> dict[str, Any]:
    """Multiply once and compare, then measure the speed; the factors are small integers, so the product is exact."""
    size = CPU_SIZE if name == "cpu" else GPU_SIZE
    places = ((0, 0), (17, 300), (size - 1, size - 1))
    try:
        numbers = torch.arange(size * size).reshape(size, size)
        left, right = (numbers % 7), (numbers % 5)
        expected = [int(left[row] @ right[:, column]) for row, column in places]
        left, right = left.float().to(name), right.float().to(name)
        product = left @ right
        actual = [int(product[row, column].item()) for row, column in places]
        if actual != expected:
            return {"device": name, "problem": f"multiplies wrongly: {actual} instead of {expected}", "gflops": None}
        bf16 = name.startswith("cuda") and torch.cuda.get_device_capability(name) >= (8, 0)
        return {"device": name, "problem": "", "gflops": round(speed(left, right), 1), "bf16": bf16}
    except Exception as error:  # noqa: BLE001 - drivers fail in any way; it becomes a finding
        return {"device": name, "problem": (str(error) or type(error).__name__).splitlines()[0][:200], "gflops": None}


def speed(left: Any, right: Any) -> float:
    """Return GFLOP/s."""
    count, begin = 0, time.monotonic()
    while time.monotonic() - begin < SPEED_SECONDS:
        for _ in range(4):
            product = left @ right
        count += 4
        product[0, 0].item()  # waits for the device
    return 2.0 * len(left) ** 3 * count / (time.monotonic() - begin) / 1e9


# --------------------------------------------------------------------------------------------------------- connections


def listen(root: Path, request: Listen) -> None:
    """Name a free port, and accept every connection to it, without reading."""
    peers: list[socket.socket] = []
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        end = time.monotonic() + request.seconds
        while (left := end - time.monotonic()) > 0:
            for ready in select.select([server, sys.stdin], [], [], left)[0]:
                if ready is not server:
                    return
                peers = [*peers[-_MOST_PEERS:], server.accept()[0]]


def carries_large_packets(connection: socket.socket, seconds: float = 2.0) -> bool:
    """Send more than fits into one packet; return whether the remote kernel has acknowledged some of it. True where
    this system does not report that."""
    if not sys.platform.startswith("linux"):
        return True
    end = time.monotonic() + seconds
    connection.sendall(bytes(LARGE))
    while (left := unacknowledged(connection)) >= LARGE and time.monotonic() < end:
        time.sleep(0.01)
    return left < LARGE


def unacknowledged(connection: socket.socket) -> int:
    """Return the bytes that were sent and are not acknowledged yet (Linux)."""
    return int(struct.unpack("=i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


def reach(root: Path, request: Reach) -> dict[str, str]:
    """Try to connect to all at once; return the reason of each failure."""
    pairs = [(host, int(port)) for host, port in request.endpoints]
    results: dict[str, str] = {}

    def attempt(host: str, port: int) -> None:
        try:
            with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
                results[f"{host} {port}"] = "" if carries_large_packets(connection) else LOSES_LARGE
        except OSError as error:
            results[f"{host} {port}"] = error.strerror or str(error) or type(error).__name__

    threads = [threading.Thread(target=attempt, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CONNECT_SECONDS + 1)
    return {f"{host} {port}": results.get(f"{host} {port}", "no answer") for host, port in pairs}
