"""The pools that this computer has joined: who may drive it, and where their doors are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed.hosts.joined import identity_of, joining_folder, read_document
from distributed.joining.lending.terms import LendingTerms
from distributed.joining.pairing.keys import JoiningKey
from profiles.installation import user_folder
from training.records.run_files import explain_errors, private_folder, write_atomically


@dataclass(frozen=True)
class JoinedPool:
    """A computer that may run programs here."""

    name: str
    key: str
    """The key by which it proves who it is, and logs in: Ed25519 in SSH's wire format, base64."""
    addresses: tuple[str, ...]
    """``host:port`` of its door, the one that has worked first."""
    known_as: str = ""
    """Name of this computer there."""
    terms: LendingTerms = LendingTerms()
    """What it may run here, and when."""

    @property
    def identity(self) -> str:
        return identity_of(self.key)


def helper_identity() -> JoiningKey:
    """Return the key by which this computer proves who it is to those it has joined; made where there is none.

    Raises:
        BadInput: it cannot be read, or written.
    """
    return JoiningKey(joining_folder() / "helper_key")


def joined_pools() -> list[JoinedPool]:
    """Return the computers that this one has joined, by name; files that cannot be read are left out."""
    pools = (_pool(read_document(path)) for path in _folder().glob("*.json"))
    return sorted((pool for pool in pools if pool is not None), key=lambda pool: pool.name)


def _pool(document: dict[str, Any]) -> JoinedPool | None:
    terms = LendingTerms.parse(document.pop("terms", LendingTerms().document()))  # of before there were terms: all
    if document.keys() != {"name", "key", "addresses", "known_as"} or terms is None:
        return None
    is_list = isinstance(document["addresses"], list)
    return JoinedPool(**{**document, "addresses": tuple(document["addresses"])}, terms=terms) if is_list else None


def save_pool(pool: JoinedPool) -> None:
    """Remember a pool.

    Raises:
        BadInput: nothing can be written.
    """
    joining_folder()
    with explain_errors(_folder(), "the configuration folder"):
        write_atomically(private_folder(_folder()) / f"{pool.identity}.json", json.dumps(asdict(pool)).encode())


def is_forgotten(pool: JoinedPool) -> bool:
    """Whether a pool's file is gone. One that merely cannot be read now is not forgotten: leaving is for good."""
    try:
        (_folder() / f"{pool.identity}.json").lstat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def forget_pool(pool: JoinedPool) -> None:
    """Forget a pool: it may run nothing here any more. A process that serves it notices. Idempotent."""
    (_folder() / f"{pool.identity}.json").unlink(missing_ok=True)


def _folder() -> Path:
    return user_folder("config") / "joining" / "pools"
