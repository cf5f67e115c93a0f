"""Machines of this computer's own private networks: the peers that Tailscale and WireGuard know.

Only what an ordinary user may ask is asked; a program that is not there, refuses or hangs names nobody.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
from collections.abc import Iterator

from distributed.discovery.sightings import LONGEST_NAME, SightingOrigin
from distributed.ssh.config import SshTarget
from distributed.system import output

_TIMEOUT = 2.0
_MOST = 64
_WITH_SSH = ("linux", "macos", "freebsd", "")
"""Systems on which an SSH server may be; telephones are peers too."""
_TAILSCALE = ("tailscale", "/Applications/Tailscale.app/Contents/MacOS/Tailscale")


def peers(config_file: str = "") -> list[tuple[SightingOrigin, SshTarget]]:
    """Return the machines, each by a literal address of the private network; may take seconds.

    Args:
        config_file: OpenSSH configuration instead of the user's.
    """
    found = [
        (SightingOrigin.TAILSCALE, *one) for one in tailscale_peers(_said(*_TAILSCALE, words=("status", "--json")))
    ]
    # Not "dump": that prints private keys.
    found += [
        (SightingOrigin.WIREGUARD, *one) for one in wireguard_peers(_said("wg", words=("show", "all", "allowed-ips")))
    ]
    return [(origin, SshTarget(name, address, config_file=config_file)) for origin, name, address in found[:_MOST]]


def tailscale_peers(said: str) -> Iterator[tuple[str, str]]:
    """Yield name and address of the peers in ``tailscale status --json``."""
    try:
        known = json.loads(said)["Peer"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    for peer in known:
        if isinstance(peer, dict) and str(peer.get("OS", "")).lower() in _WITH_SSH:
            addresses = peer.get("TailscaleIPs")
            address = next(filter(None, map(_literal, addresses if isinstance(addresses, list) else ())), "")
            name = str(peer.get("HostName") or address)[:LONGEST_NAME]
            if address:
                yield name, address


def wireguard_peers(said: str) -> Iterator[tuple[str, str]]:
    """Yield name and address of the peers in ``wg show all allowed-ips``: those that are one machine, not a network."""
    for line in said.splitlines():
        for place in line.split("\t")[2:3]:
            single = (text.rpartition("/") for text in place.split() if text.endswith(("/32", "/128")))
            if address := next(filter(None, (_literal(host) for host, _, _ in single)), ""):
                yield address, address


def _literal(text: object) -> str:
    try:
        return str(ipaddress.ip_address(str(text)))
    except ValueError:
        return ""


def _said(*programs: str, words: tuple[str, ...]) -> str:
    """Return what the first of these programs that is there writes; nothing where none is, or it fails."""
    program = next(filter(None, map(shutil.which, programs)), None)
    return output(program, *words, timeout=_TIMEOUT) if program else ""
