"""What this computer says of itself to one that it pairs with."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket

from distributed.discovery.announce import describe_this_machine
from distributed.discovery.network_interfaces import PathKind, list_interfaces
from distributed.hosts.lending import LendClass
from distributed.joining.pairing.exchange import Introduction

_LONGEST_LABEL = 40
_MOST_ADDRESSES = 16
_UNLIKELY = (PathKind.DOCKER, PathKind.VIRTUAL)
"""Kinds of interfaces that lead to this computer's own guests."""


def introduce(key: str, port: int = 0, name: str = "", lend: LendClass = "own", limits: str = "") -> Introduction:
    """Return this computer's introduction.

    Args:
        key: its public key, in SSH's wire format, base64.
        port: of its door, if it has one.
        name: what it is to be called; empty: its host name.
        lend, limits: what it lets the other one run, and when, in words.
    """
    about = describe_this_machine()
    return Introduction(
        name=label_of(name or socket.gethostname()),
        key=key,
        user=_user_name()[:120],
        system=about["model"][:120],
        devices=about["devices"][:120],
        memory=int(about["memory"]),
        lend=lend,
        limits=limits[:120],
        addresses=tuple(address_text(host, port) for host in own_addresses()) if port else (),
    )


def _user_name() -> str:
    """Return the name of this user; empty for a number without a name, as in some containers."""
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return ""


def own_addresses() -> list[str]:
    """Return the addresses of this computer that others may dial, the likeliest first."""
    ranked = [
        (interface.kind in _UNLIKELY, interface.kind.rank, address.ip.version, str(address.ip))
        for interface in list_interfaces().all
        for address in interface.addresses
        if not (address.ip.is_loopback or address.ip.is_link_local)
    ]
    return [text for *_, text in sorted(ranked)][:_MOST_ADDRESSES]


def address_text(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def label_of(name: str) -> str:
    """Return a name as a label of letters, digits and hyphens."""
    label = re.sub(r"[^a-z0-9]+", "-", name.partition(".")[0].casefold())[:_LONGEST_LABEL].strip("-")
    return label or "machine"
