"""Inspects key files: the public key of one, or why it is no private key and what to do."""

from __future__ import annotations

import base64
import contextlib
import shlex
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    load_ssh_public_identity,
)

from distributed.hosts.schema import nearest

_HEAD = 400
"""Bytes at the start of a file that identify its format."""
_DEFAULT_NAMES = (
    "id_rsa",
    "id_ecdsa",
    "id_ecdsa_sk",
    "id_ed25519",
    "id_ed25519_sk",
    "id_xmss",
    "id_dsa",
    "muster_ed25519",
)
"""Names of keys that are tried by default."""


def is_default(path: Path) -> bool:
    """Whether this is a default key, whose absence is not reported."""
    return path.name in _DEFAULT_NAMES and path.parent.name == ".ssh"


def public_blob(path: Path) -> bytes:
    """Return the public key of a key file, from its ``.pub`` file or from itself; empty if there is none.

    With an agent the public key is enough, as for ``ssh``.
    """
    for file in (f"{path}.pub", str(path)):
        with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
            return bytes(paramiko.pkey.PublicBlob.from_file(file).key_blob)
    return b""


def certificate_of(path: Path, blob: bytes) -> Any:
    """Return the certificate in a file in paramiko's type; ``None``: it is not one for the public key ``blob``."""
    with contextlib.suppress(OSError, ValueError, UnsupportedAlgorithm):
        text = path.read_text()
        identity = load_ssh_public_identity(text.encode())
        if isinstance(identity, SSHCertificate):
            line = identity.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            return paramiko.pkey.PublicBlob.from_string(text) if base64.b64decode(line.split()[1]) == blob else None
    return None


def explain_key(path: Path, error: Exception) -> tuple[str, str]:
    """Return why a file is no usable private key, and what to do; ``error`` is from reading it."""
    if not path.exists():
        return "there is no such file", _alternatives_hint(path)
    if path.is_dir():
        return "a folder", f"name the file of the private key in it: {_alternatives_hint(path / 'key')}"
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD).decode("ascii", "replace").lstrip("\ufeff \n")
    except OSError as problem:
        return f"cannot be read: {problem.strerror}", f"make it readable for you: sudo chown $USER {_quoted(path)}"
    if head.startswith("PuTTY-User-Key-File"):
        target = _quoted(path.with_name(f"{path.stem}_openssh"))
        return (
            "a key of PuTTY",
            f"convert it, and name the new file: puttygen {_quoted(path)} -O private-openssh -o {target}",
        )
    if "-cert-v01@openssh.com" in head.split(" ")[0]:
        return "a certificate", "name the private key instead; a certificate beside it (-cert.pub) is taken along"
    if head.startswith(("ssh-", "ecdsa-", "sk-")) or "PUBLIC KEY" in head:
        private = path.with_suffix("") if path.suffix == ".pub" else path
        hint = f"name {_quoted(private)} instead" if private != path and private.exists() else "name the private half"
        return "the public half of a key", f"{hint}, or add the private half to your agent with ssh-add"
    if head.startswith("---- BEGIN SSH2"):
        return (
            "a key in the format of ssh.com",
            f"convert it: ssh-keygen -i -f {_quoted(path)} > {_quoted(path)}.openssh",
        )
    if "PRIVATE KEY" not in head:
        return "no private key" if head else "empty", _alternatives_hint(path)
    return f"cannot be read: {str(error)[:120]}", f"is it whole? ssh-keygen -y -f {_quoted(path)} reads it"


def _alternatives_hint(path: Path) -> str:
    """Return what to do about a wrong file name: suggest the keys beside it, or how to create one."""
    with contextlib.suppress(OSError):
        siblings = [public.with_suffix("").name for public in sorted(path.parent.glob("*.pub"))]
        siblings += [file.name for file in sorted(path.parent.iterdir()) if _is_private(file)]
        if names := list(dict.fromkeys(name for name in siblings if name != path.name)):
            return f"correct 'key' in the hosts file, or IdentityFile: {nearest(path.name, names)}"
    return f"correct 'key' in the hosts file, or make one: ssh-keygen -t ed25519 -f {_quoted(path)}"


def _is_private(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as stream:
                return b"PRIVATE KEY-----" in stream.read(_HEAD)
    return False


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
