"""Process 1 of a lab host: sets up mounts, network and sshd, then reaps child processes until its owner is gone.

Started by ``host.py`` inside new namespaces with the path of a JSON document; uses the standard library only. It exits
when its stdin closes, and the kernel then kills all other processes of the host, so a lab never outlives its owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_MS_BIND = 4096
_MS_REC = 16384
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def bind(source: Path, target: Path) -> None:
    mount(str(source), str(target), flags=_MS_BIND | _MS_REC)


def own_files(plan: dict[str, Any]) -> None:
    """Mount the host's own home, /tmp, /run and names; the interpreter and the checkout keep their paths."""
    folder = Path(plan["folder"])
    mount("proc", "/proc", "proc")
    kept = [(folder / "keep" / str(number), Path(path)) for number, path in enumerate(plan["keep"])]
    for aside, path in kept:
        aside.mkdir(parents=True, exist_ok=True)
        bind(path, aside)
    disk = folder / "disk"
    if plan["home_mb"]:
        mount("tmpfs", str(disk), "tmpfs", options=f"size={plan['home_mb']}m,mode=755")
        _copy(folder / "skeleton", disk / "root")
        (disk / "tmp").mkdir(mode=0o777)
    bind(disk / "root", Path("/root"))
    bind(disk / "tmp", Path("/tmp"))
    mount("tmpfs", "/run", "tmpfs", options="mode=755")
    mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")
    Path("/run/sshd").mkdir(mode=0o755)
    for aside, path in kept:
        path.mkdir(parents=True, exist_ok=True)
        bind(aside, path)
    for name in ("hosts", "hostname", "passwd", "shadow"):
        bind(folder / "etc" / name, Path("/etc") / name)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def hide(paths: list[str], nothing: Path) -> None:
    """Cover folders with an empty one, and files with one that cannot be executed."""
    for path in {os.path.realpath(path) for path in paths if os.path.exists(path)}:
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", options="mode=755,size=64k")
        else:
            bind(nothing, Path(path))


def network(plan: dict[str, Any]) -> None:
    commands = f"link set lo up\naddr add {plan['address']}/24 dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True, capture_output=True)
    with contextlib.suppress(OSError):  # the usual setting of desktop systems; this machine's may differ
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("cubic")


def start_sshd(plan: dict[str, Any]) -> None:
    """Start sshd, which forks into the background once it listens."""
    folder = Path(plan["folder"])
    command = [plan["sshd"], "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def serve() -> None:
    """Reap child processes until stdin closes."""
    wake, wakened = os.pipe()
    for descriptor in (wake, wakened):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        _bury()
        ready, _, _ = select.select([sys.stdin.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            return


def _bury() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    say("here")
    if sys.stdin.readline() != "go\n":
        return
    try:
        own_files(plan)
        socket.sethostname(plan["name"])
        network(plan)
        if plan["start_sshd"]:
            start_sshd(plan)
        hide(plan["hide"], Path(plan["folder"]) / "nothing")
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or b""
        say(f"{error} {output.decode(errors='replace') if isinstance(output, bytes) else output}".replace("\n", " "))
        return
    say("ready")
    serve()


if __name__ == "__main__":
    main()
