"""Keys, server configuration and client configuration of lab hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from distributed.ssh.config import accept
from tests.lab.spec import HostSpec, LabUnavailable

FAKETIME = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
)
_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/sftp-server", "/usr/libexec/openssh/sftp-server")


@dataclass(frozen=True)
class Place:
    """How a client reaches a host, and the host's public key line (type and base64)."""

    name: str
    address: str
    port: int
    user: str
    public_key: str


@lru_cache
def sshd_program() -> str:
    """Return the absolute path of sshd, which refuses to start by a relative one.

    Raises:
        LabUnavailable: it is not installed.
    """
    path = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
    if path is None or shutil.which("ssh-keygen") is None:
        raise LabUnavailable("sshd is not installed (Debian, Ubuntu: apt install openssh-server)")
    return path


def make_key(path: Path, kind: str = "ed25519") -> None:
    """Write a key pair without passphrase, replacing an older one."""
    path.unlink(missing_ok=True)
    bits = ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *bits, "-N", "", "-C", "lab", "-f", str(path)], check=True)


def public_key(path: Path) -> str:
    """Return type and base64 of a key's public half."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def server_config(folder: Path, spec: HostSpec, listen: str, port: int, environment: dict[str, str]) -> Path:
    """Write the sshd_config of one host; its host key and log are in the same folder."""
    lines = [
        *spec.sshd_options,
        f"Port {port}",
        f"ListenAddress {listen}",
        f"HostKey {folder / 'host_key'}",
        "PidFile none",
        "UsePAM no",
        "UseDNS no",
        "PrintMotd no",
        "PrintLastLog no",
        "StrictModes no",
        "MaxStartups 500",
        "AcceptEnv LANG LC_*",
        f"PermitRootLogin {'yes' if spec.password else 'prohibit-password'}",
        f"PasswordAuthentication {'yes' if spec.password else 'no'}",
        "KbdInteractiveAuthentication no",
        *_subsystem(),
        *_penalties(),
    ]
    if environment:
        lines.append("SetEnv " + " ".join(f'"{key}={value}"' for key, value in environment.items()))
    path = folder / "sshd_config"
    path.write_text("\n".join(lines) + "\n")
    return path


def _subsystem() -> list[str]:
    server = next((path for path in _SFTP_SERVERS if os.path.exists(path)), None)
    return [f"Subsystem sftp {server}"] if server else []


@lru_cache
def _penalties() -> tuple[str, ...]:
    """Return the option that disables bans after failed logins, if sshd supports it: tests fail logins on purpose."""
    options = ["-T", "-f", "/dev/null", "-o", "PerSourcePenalties=no"]
    found = subprocess.run([sshd_program(), *options], capture_output=True, text=True)
    return () if "Bad configuration option" in found.stderr else ("PerSourcePenalties no",)


def client_config(folder: Path, places: Iterable[Place], key: Path) -> Path:
    """Write ``ssh_config`` and ``known_hosts`` for these hosts into ``folder``."""
    known, blocks = [], []
    for place in places:
        names = [place.name, place.address] if place.port == 22 else [f"[{place.address}]:{place.port}"]
        known.append(f"{','.join(names)} {place.public_key}")
        patterns = f"{place.name} {place.address}" if place.port == 22 else place.name
        blocks.append(
            f"Host {patterns}\n  HostName {place.address}\n  Port {place.port}\n  User {place.user}\n"
            f"  IdentityFile {key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {folder / 'known_hosts'}\n  GlobalKnownHostsFile none\n"
            "  HashKnownHosts no\n  StrictHostKeyChecking yes\n"
        )
    (folder / "known_hosts").write_text("\n".join(known) + "\n")
    path = folder / "ssh_config"
    path.write_text("\n".join(blocks))
    accept(str(path))
    return path


def accepted_logins(folder: Path) -> int:
    """Return how many log-ins the sshd of one host has accepted, by its log."""
    return (folder / "sshd.log").read_text(errors="replace").count("\nAccepted ")


def configured(config: Path, folder: Path, text: str) -> str:
    """Write an SSH configuration in which ``text`` precedes ``config`` and so overrides it; return its path."""
    path = folder / "ssh_config"
    path.write_text(f"{text}\nMatch all\nInclude {config}\n")
    return str(path)


def session_environment(spec: HostSpec) -> dict[str, str]:
    """Return the environment variables of every session on the host.

    Raises:
        LabUnavailable: a clock offset is specified and libfaketime is missing.
    """
    if not spec.clock_offset:
        return {}
    library = next((path for path in FAKETIME if os.path.exists(path)), None)
    if library is None:
        raise LabUnavailable("a clock offset needs libfaketime (Debian, Ubuntu: apt install libfaketime)")
    offset = f"{spec.clock_offset:+.3f}s"
    return {"LD_PRELOAD": library, "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
