"""What listens is not what it should be: every case ends in time, in bounded memory, with its cause named."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko
import pytest
from scripted_connection import closed_port, serving, silent

from distributed.ssh.connection import SshConnection, SshTarget
from distributed.ssh.errors import (
    CommandTimeout,
    Dropped,
    NameUnknown,
    NoRoute,
    NotSsh,
    PortClosed,
    SshError,
    Stage,
    Stalled,
    remote_login,
)
from distributed.ssh.login_history import note_answer, seconds_since_answer
from tests.waiting import PATIENCE
from training.exchange.links.dialling import SMALL_SEGMENT

pytestmark = pytest.mark.slow

BANNER = b"SSH-2.0-OpenSSH_9.9\r\n"
TIMEOUT = 1.0


def endless(peer: socket.socket) -> None:
    while True:
        peer.sendall(b"\0" * 65536)


def says(data: bytes, then: Callable[[socket.socket], None] = silent) -> Callable[[socket.socket], None]:
    def play(peer: socket.socket) -> None:
        peer.sendall(data)
        then(peer)

    return play


def drips(peer: socket.socket) -> None:
    """One byte at a time, so that no single wait is too long."""
    while True:
        peer.sendall(b"x")
        time.sleep(0.02)


def leaves(peer: socket.socket) -> None:
    pass


def meet(tmp_path: Path, port: int, host: str = "127.0.0.1", timeout: float = TIMEOUT) -> SshError:
    config = tmp_path / "config"
    config.write_text("")
    with pytest.raises(SshError) as caught:
        SshConnection.connect(SshTarget("box", host, port, config_file=str(config)), timeout=timeout)
    message = str(caught.value)
    assert message.startswith("box: ") and message.isprintable()
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("play", "kind", "said"),
    [
        (silent, Stalled, "did not introduce itself"),
        (drips, Stalled, "did not introduce itself"),
        (leaves, Dropped, "closed the connection at once"),
        (says(b"HTTP/1.1 400 Bad Request\r\n\r\n", leaves), NotSsh, "HTTP/1.1 400"),
        (says(b"220 mail.example ESMTP\r\n"), Stalled, "did not introduce itself"),
        (says(b"\x1b[2J\x07\n" * 2000), NotSsh, "is not an SSH server"),
        (endless, NotSsh, "is not an SSH server"),
        (says(b"SSH-1.5-old\r\n"), NotSsh, "SSH-1.5-old"),
        (says(b"Not allowed at this time\r\n", leaves), Dropped, "lets nobody in from here for now"),
        (says(b"Exceeded MaxStartups\r\n", leaves), Dropped, "lets nobody in from here for now"),
        (says(BANNER), Stalled, "introduced itself, but the key exchange did not end"),
        (says(BANNER, leaves), Dropped, "closed the connection during the key exchange"),
        (says(BANNER, endless), NotSsh, "breaks the SSH protocol"),
        (says(BANNER + b"\xff" * 4096), NotSsh, "breaks the SSH protocol"),
        (says(BANNER + b"\x00\x00\x00\x1c\x0a" + b"\x14" + b"\xff" * 26), NotSsh, "no common encryption"),
    ],
)  # fmt: skip
def test_a_strange_server_is_named(
    tmp_path: Path, play: Callable[[socket.socket], None], kind: type[SshError], said: str
) -> None:
    for seconds in (TIMEOUT, 8.0, PATIENCE) if kind is Stalled else (PATIENCE,):  # a busy machine may need more
        with serving(play) as port:
            error = meet(tmp_path, port, timeout=seconds)
        if said in error.message:
            break
    assert type(error) is kind
    assert said in error.message


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the segments of a connection")
def test_both_ends_send_packets_that_pass_everywhere(tmp_path: Path) -> None:
    segments = []

    def looks(peer: socket.socket) -> None:
        segments.append(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))

    with serving(looks) as port:
        meet(tmp_path, port, timeout=PATIENCE)
    assert 0 < segments[0] <= SMALL_SEGMENT


def test_an_endless_server_costs_no_memory(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with serving(says(BANNER, lambda peer: peer.sendall(b"\x7f" * 200_000_000))) as port:
        meet(tmp_path, port)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 230_000  # kB; the sender itself needs 200 MB


def test_a_closed_port_tells_how_to_switch_remote_login_on(tmp_path: Path) -> None:
    with closed_port() as port:
        error = meet(tmp_path, port, timeout=PATIENCE)
    assert type(error) is PortClosed
    assert error.hint == remote_login("127.0.0.1")


def test_who_refuses_right_after_it_let_us_in_may_limit_connections(tmp_path: Path) -> None:
    """``ufw limit``: each command is a process of its own, so that is remembered in a file."""
    with closed_port() as port:
        note_answer("127.0.0.1", port)
        error = meet(tmp_path, port, timeout=PATIENCE)
    assert type(error) is PortClosed and re.search(r"answered \d+ s ago and refuses connections now", error.message)
    assert "ufw limit" in error.hint and error.hint.endswith(remote_login("127.0.0.1"))


def test_what_was_long_ago_is_not_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    note_answer("192.0.2.1", 22)
    assert seconds_since_answer("192.0.2.1", 2222) is None
    for now, is_recent in ((time.time() + 100, False), (0.0, True)):  # a clock that was set back makes nothing old
        monkeypatch.setattr("distributed.ssh.login_history.time.time", lambda now=now: now)
        assert (seconds_since_answer("192.0.2.1", 22) is not None) == is_recent


def test_an_unknown_name_is_named(tmp_path: Path) -> None:
    error = meet(tmp_path, 22, "no-such-machine.invalid")
    assert type(error) is NameUnknown
    assert "no-such-machine.invalid" in error.message


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    error = meet(tmp_path, 22, "fe80::1%nowhere0")
    assert type(error) is NameUnknown
    assert "this computer has no network interface 'nowhere0'" in error.message


def test_a_kind_of_address_that_this_computer_has_not_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_APPLETALK, socket.SOCK_STREAM, 6, "", ("box", 22))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert type(meet(tmp_path, 22, "box")) is NoRoute


def test_a_servers_words_neither_move_the_cursor_nor_fill_the_screen() -> None:
    error = SshError("box", "it said \x1b[2J" + "x" * 1_000_000, "first\nsecond")
    assert error.message.isprintable() and len(error.message) < 1100
    assert error.hint == "first second"


def test_a_name_service_that_does_not_answer_is_left_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(2 * PATIENCE))
    error = meet(tmp_path, 22, "slow.example")
    release.set()
    assert type(error) is NameUnknown
    assert "took more than" in error.message


@pytest.mark.parametrize("seed", range(6))
def test_random_bytes_after_the_greeting_end_in_an_error(tmp_path: Path, seed: int) -> None:
    data = random.Random(seed).randbytes(1 + seed * 97)
    with serving(says(BANNER + data, leaves)) as port:
        assert type(meet(tmp_path, port)) in (NotSsh, Dropped, Stalled), data


class Tarpit(paramiko.ServerInterface):
    """Lets everybody in and answers everything but the request to run a command."""

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_auth_none(self, username: str) -> int:
        return int(paramiko.common.AUTH_SUCCESSFUL)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.common.OPEN_SUCCEEDED)


def test_a_server_that_lets_us_in_and_then_runs_nothing_is_left_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = paramiko.Transport._channel_handler_table
    monkeypatch.setitem(handlers, paramiko.common.MSG_CHANNEL_REQUEST, lambda channel, message: None)
    for seconds in (2.0, 10.0, 40.0):  # a busy machine may need more for the log-in
        error = meet_server(tmp_path, lambda transport: Tarpit(), seconds)
        if type(error) is CommandTimeout:
            break
    assert str(error).startswith(f"box: its SSH server did not start a command within {seconds:.0f} s")


class BrowserCheck(paramiko.ServerInterface):
    """Shows an address at which a person confirms the log-in, and waits for that (Tailscale SSH)."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def check_auth_none(self, username: str) -> int:
        notice = paramiko.Message()
        notice.add_byte(bytes([paramiko.common.MSG_USERAUTH_BANNER]))
        notice.add_string("# To authenticate, visit:\n\thttps://login.example.com/a/l1234\n")
        notice.add_string("")
        self._transport._send_message(notice)
        while self._transport.is_active():
            time.sleep(0.05)
        return int(paramiko.common.AUTH_FAILED)


def test_what_a_server_asks_a_person_to_do_during_the_log_in_is_shown(tmp_path: Path) -> None:
    for seconds in (2.0, 10.0, 40.0):
        error = meet_server(tmp_path, BrowserCheck, seconds)
        if error.stage is Stage.LOGIN:
            break
    assert "it says: '# To authenticate, visit: https://login.example.com/a/l1234'" in error.message
    assert "open the address" in error.hint


def meet_server(tmp_path: Path, behaviour: Callable[[Any], paramiko.ServerInterface], seconds: float) -> SshError:
    """Meet an SSH server that is trusted."""
    key = paramiko.RSAKey.generate(1024)

    def serve(peer: socket.socket) -> None:
        with contextlib.suppress(paramiko.SSHException, EOFError):
            transport = paramiko.Transport(peer)
            transport.add_server_key(key)
            transport.start_server(server=behaviour(transport))
            while transport.is_active():
                transport.join(0.1)

    config, known = tmp_path / "config", tmp_path / f"known_hosts_{seconds}"
    config.write_text(f"UserKnownHostsFile {known}\nGlobalKnownHostsFile none\n")
    with serving(serve) as port:
        target = SshTarget("box", "127.0.0.1", port, config_file=str(config))
        with pytest.raises(SshError) as caught:
            SshConnection.connect(target, trust=lambda key: True, timeout=seconds)
    return caught.value
