"""Peers of private networks as sources of machines, with programs on PATH that write what the real ones do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.discovery.known_machines import KnownKeys, Sources, candidates, tailscale_peers, wireguard_peers
from distributed.discovery.sightings import SightingOrigin

STATUS = {
    "BackendState": "Running",
    "Self": {"HostName": "desk", "TailscaleIPs": ["100.64.0.1"], "OS": "linux"},
    "Peer": {
        "nodekey:1": {"HostName": "studio", "TailscaleIPs": ["100.64.0.2", "fd7a:115c:a1e0::2"], "OS": "macOS"},
        "nodekey:2": {"HostName": "phone", "TailscaleIPs": ["100.64.0.3"], "OS": "iOS"},
        "nodekey:3": {"HostName": "broken", "TailscaleIPs": ["-oProxyCommand=x"], "OS": "linux"},
    },
}
ALLOWED = "wg0\tAbC=\t10.8.0.2/32 fd00::2/128\nwg0\tDeF=\t10.9.0.0/16\nwg0\tGhI=\t(none)\n"


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def named(tmp_path: Path) -> list[tuple[SightingOrigin, str, str]]:
    found = candidates(Sources(ssh_config=tmp_path / "none", known_hosts=()), KnownKeys())
    return [(one.origin, one.target.name, one.target.host) for one in found]


def test_peers_are_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    (tmp_path / "allowed").write_text(ALLOWED)
    program(tmp_path, "tailscale", f'[ "$*" = "status --json" ] && exec /bin/cat {tmp_path}/status.json')
    program(tmp_path, "wg", f'[ "$*" = "show all allowed-ips" ] && exec /bin/cat {tmp_path}/allowed')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert named(tmp_path) == [
        (SightingOrigin.TAILSCALE, "studio", "100.64.0.2"),
        (SightingOrigin.WIREGUARD, "10.8.0.2", "10.8.0.2"),
    ]
    assert candidates(Sources(ssh_config=tmp_path / "none", peers=False), KnownKeys()) == []


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "kill -9 $$", "echo []"])
def test_a_program_that_refuses_names_nobody(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tailscale", "wg"):
        program(tmp_path, name, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert named(tmp_path) == []


@pytest.mark.parametrize(
    "said", ["", "[" * 100_000, "null", '{"Peer": []}', '{"Peer": {"a": 1, "b": {"TailscaleIPs": 1}}}']
)
def test_nonsense_is_passed_over(said: str) -> None:
    assert list(tailscale_peers(said)) == [] == list(wireguard_peers(said))
