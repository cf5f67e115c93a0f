"""The Ed25519 keys of this user: one as a pool, which others join, and one as a helper, which joins others.

A pool's key proves who the door is, and logs in to the helpers. A signature for the one is none for the other: what SSH
signs begins with the length of a session's identifier, what a door signs with the word ``muster``.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from profiles.errors import BadInput
from training.records.run_files import explain_errors, write_atomically


class JoiningKey:
    """A private key in a file that only this user can read; it is made where there is none.

    Raises:
        BadInput: the file cannot be read, or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_errors(path, "the configuration folder"):
            if not path.exists():
                _make_key(path)
            text = path.read_bytes()
        try:
            key = load_ssh_private_key(text, None)
        except ValueError as error:
            raise BadInput("no private key", "remove it, and let machines join again", file=path) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise BadInput("not an Ed25519 key", "remove it, and let machines join again", file=path)
        self._key = key
        line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        self.public = line.split()[1].decode()
        """The public half in SSH's wire format, base64."""

    def sign(self, message: bytes) -> str:
        """Return the signature of a message, base64."""
        return base64.b64encode(self._key.sign(message)).decode()


def _make_key(path: Path) -> None:
    """Write a new key; where another process is quicker, its key stays."""
    made = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_atomically(temporary, made)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def is_signed(public: str, message: bytes, signature: object) -> bool:
    """Whether the holder of a public key, base64 of its wire format, has signed a message."""
    with contextlib.suppress(InvalidSignature, ValueError):
        key = load_ssh_public_key(f"ssh-ed25519 {public}".encode())
        if isinstance(key, Ed25519PublicKey) and isinstance(signature, str):
            key.verify(base64.b64decode(signature, validate=True), message)
            return True
    return False


def line_message(door_key: str, identity: str, challenge: str) -> bytes:
    """Return what a helper signs to prove who it is: its answer is good for this door and this challenge alone."""
    return f"muster line 1 {door_key} {identity} {challenge}".encode()


def door_message(identity: str, challenge: str, status: str) -> bytes:
    """Return what a door signs to prove who it is, and what it answers."""
    return f"muster door 1 {identity} {challenge} {status}".encode()


def leave_message(door_key: str, identity: str, challenge: str) -> bytes:
    """Return what a helper signs where it leaves for good."""
    return f"muster leave 1 {door_key} {identity} {challenge}".encode()
