"""Who gets in: certificates of this run, of the right rank, over TLS 1.3."""

from __future__ import annotations

import errno
import socket
import ssl
import stat
from pathlib import Path

import pytest
import torch
from coordinated_lab import RUN, Lab, lab

from profiles.errors import BadInput
from training.exchange.base import ExchangeError
from training.exchange.codecs import codec_by_name
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.coordinator_state import CoordinatorConfig
from training.exchange.group.join_config import JoinConfig
from training.exchange.links.certificates import COORDINATOR_NAME, issue_run_certificates
from training.exchange.mean.mesh_member import MeshMember


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> object:
    with lab(tmp_path_factory.mktemp("run"), 2, tls=True) as running:
        running.connect_all()
        yield running


def dial(running: Lab, certificates: Path, rank: int, timeout: float = 60) -> MeshMember:
    return MeshMember(JoinConfig(running.address, certificates, RUN, rank, 2, "x")).join(timeout)


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("training.exchange.links.certificates.private_folder", full)
    with pytest.raises(BadInput, match="the disk is full") as refused:
        issue_run_certificates(tmp_path / "c", RUN, [0], ["10.0.0.1"])
    assert refused.value.hint == "free some space, or choose another place with --output"


def test_files_are_private(tmp_path: Path) -> None:
    issue_run_certificates(tmp_path / "c", RUN, [0, 3], ["10.0.0.1", "fe80::1"])
    folders = sorted(p.name for p in (tmp_path / "c").iterdir())
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file()]
    assert folders == ["coordinator", "member-0", "member-3"] and len(files) == 12
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "c").iterdir()} == {0o700}


def test_members_exchange_over_tls(secure: Lab) -> None:
    a, b = secure.members[0], secure.members[1]
    pending = [m.start_mean("tls", torch.tensor([2.0 * m.rank]), 1.0, codec_by_name("fp32")) for m in (a, b)]
    assert [p.wait(60).mean.item() for p in pending] == [1.0, 1.0]


def shake_hands(running: Lab, own: Path | None) -> str | None:
    """TLS handshake and one read with the standard library; returns the version."""
    assert running.certificates is not None
    context = ssl.create_default_context(cafile=str(running.certificates / "coordinator" / "ca.pem"))
    if own is not None:
        context.load_cert_chain(own / "certificate.pem", own / "key.pem")
    host, port = running.address.split(":")
    plain = socket.create_connection((host, int(port)), timeout=60)
    with context.wrap_socket(plain, server_hostname=COORDINATOR_NAME) as secured:
        secured.sendall(b"rubbish\n" * 2)
        if not secured.recv(1):
            raise ConnectionResetError
        return secured.version()


def test_the_coordinator_speaks_tls_1_3(secure: Lab) -> None:
    assert secure.certificates is not None
    assert shake_hands(secure, secure.certificates / "member-0") == "TLSv1.3"


def test_without_a_certificate_nobody_gets_in(secure: Lab) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake_hands(secure, None)


@pytest.mark.slow
def test_a_certificate_of_another_run_is_refused_in_the_handshake(secure: Lab, tmp_path: Path) -> None:
    issue_run_certificates(tmp_path, RUN, [0], ["127.0.0.1"])
    with pytest.raises(ExchangeError, match="another run"):
        dial(secure, tmp_path / "member-0", 0)
    assert secure.certificates is not None
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("certificate.pem", "key.pem"):
        (mixed / name).write_bytes((tmp_path / "member-0" / name).read_bytes())
    (mixed / "ca.pem").write_bytes((secure.certificates / "coordinator" / "ca.pem").read_bytes())
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake_hands(secure, mixed)
    with pytest.raises(ExchangeError):
        dial(secure, mixed, 0, timeout=0.5)


def test_a_member_cannot_take_anothers_rank(secure: Lab) -> None:
    assert secure.certificates is not None
    with pytest.raises(ExchangeError, match="not that of rank 0"):
        dial(secure, secure.certificates / "member-1", 0)
    assert "lost" not in secure.statuses(0)


def test_a_members_certificate_cannot_play_the_coordinator(tmp_path: Path) -> None:
    issue_run_certificates(tmp_path, RUN, [0, 1], ["127.0.0.1"])
    false_coordinator = Coordinator(CoordinatorConfig(run_id=RUN, names=("a",), certificates=tmp_path / "member-1"))
    port = false_coordinator.start()
    with pytest.raises(ExchangeError, match="certificate does not match"):
        MeshMember(JoinConfig(f"127.0.0.1:{port}", tmp_path / "member-0", RUN, 0, 1, "x")).join(60)
    false_coordinator.stop()


def test_unreadable_or_impossible_input_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not an IP address"):
        issue_run_certificates(tmp_path, RUN, [0], ["my-mac.local"])
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="a file has the name of a folder"):
        issue_run_certificates(tmp_path / "file", RUN, [0], [])
