from __future__ import annotations

import ast
import contextlib
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_connection import closed_port

from distributed.agent import link_probe, link_transfer
from distributed.agent.link_probe import ProbeServer, measure, together
from distributed.agent.link_transfer import is_settled, median_rate
from distributed.agent.requests import ListAddresses, StopListening, frame
from distributed.machine.packing import program, sources
from distributed.measuring.link_figures import LinkFigures, Together
from distributed.ssh.process import LIMIT, encode
from distributed.system import parse_addresses, parse_ports
from tests.waiting import PATIENCE, until

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def listener() -> Iterator[ProbeServer]:
    found = ProbeServer(TOKEN)
    yield found
    found.close()


def refused(port: int, said: bytes) -> bool:
    """Whether the listener closes the connection without a word."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as peer:
        peer.settimeout(PATIENCE)
        peer.sendall(said)
        with contextlib.suppress(ConnectionError):
            return peer.recv(1) == b""
    return True


@pytest.mark.slow
def test_two_ends_of_loopback(listener: ProbeServer) -> None:
    figures = LinkFigures.model_validate(measure(["127.0.0.1"], listener.port, TOKEN))
    assert min(figures.mbit, figures.mbit_back) > 10
    assert 0 < figures.rtt_ms < 1000
    assert listener.refused == 0


@pytest.mark.slow
def test_where_large_packets_are_lost_small_ones_are_measured(
    listener: ProbeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_probe, "carries_large", lambda lines: False)
    figures = LinkFigures.model_validate(measure(["127.0.0.1"], listener.port, TOKEN))
    assert figures.loses_large and min(figures.mbit, figures.mbit_back) > 10


@pytest.mark.slow
def test_several_peers_at_once(listener: ProbeServer) -> None:
    other = ProbeServer(TOKEN)
    try:
        peers = [{"addresses": ["127.0.0.1"], "port": one.port, "token": TOKEN, "ends": ["lo", "lo"]}
                 for one in (listener, other)]  # fmt: skip
        found = Together.model_validate(together(peers))
        with pytest.raises(OSError, match="fewer than two peers answer"):
            together(peers[:1])
    finally:
        other.close()
    assert min(found.mbit, found.mbit_back) > 10


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n", b"\0" * 33, b"f" * 32 + b"c"])
def test_rubbish_is_refused(listener: ProbeServer, said: bytes) -> None:
    assert refused(listener.port, said)
    assert listener.refused == 1


def test_the_token_alone_asks_for_nothing(listener: ProbeServer) -> None:
    assert refused(listener.port, TOKEN.encode() + b"x")


@pytest.mark.slow
def test_a_silent_peer_is_let_go(listener: ProbeServer) -> None:
    assert refused(listener.port, b"0")


def test_more_greetings_than_are_heard_at_a_time(listener: ProbeServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(link_probe.MOST_GREETINGS):
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE))
        assert refused(listener.port, b"")


@pytest.mark.parametrize("answer", [b"rubbish\n", b"[]\n", b'{"interface": 3}\n', b"x" * 200_000])
def test_a_listener_that_says_something_else(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger on the probe's port; the measurer ends in bounded time with an error that is expected."""
    monkeypatch.setattr(link_probe, "GREETING", 0.1)

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
                connection.settimeout(5)
                while connection.recv(4096):
                    continue

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        with pytest.raises((OSError, ValueError, KeyError, TypeError)):
            measure(["127.0.0.1"], server.getsockname()[1], TOKEN)


def test_nobody_listens() -> None:
    with closed_port() as port, pytest.raises(OSError, match=r"127\.0\.0\.1: .*refused"):
        measure(["127.0.0.1"], port, TOKEN)


def test_the_program_travels_as_one_argument_and_ends_with_its_input() -> None:
    source = program(ListAddresses().module).decode()
    assert len(encode([source])) < LIMIT
    command = [sys.executable, "-I", "-c", source, "/nowhere"]
    given = frame(ListAddresses()) + frame(StopListening())
    done = subprocess.run(command, input=given, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("source", sources().values(), ids=sources())
def test_an_old_python_understands_it(source: str) -> None:
    ast.parse(source, feature_version=(3, 9))


@given(
    st.lists(st.tuples(st.floats(0.001, 0.05), st.integers(0, 10**6)), min_size=2, max_size=60),
    st.floats(0.1, 1.0),
)
def test_a_rate_lies_between_the_slowest_and_the_fastest_moment(gaps: list[tuple[float, int]], begin: float) -> None:
    marks = [(begin, 0)]
    for seconds, count in gaps:
        marks.append((marks[-1][0] + seconds, marks[-1][1] + count))
    rates = [count / seconds for seconds, count in gaps]
    assert min(rates) * 0.99 - 1 <= median_rate(marks) <= max(rates) * 1.01 + 1


def test_a_stall_moves_bytes_and_not_the_rate() -> None:
    steady = [(0.01 * number, 1000 * number) for number in range(61)]
    stalled = [one for one in steady if not 0.2 < one[0] < 0.35]
    held_back = [(t, total - 9000 if 0.2 < t < 0.3 else total) for t, total in steady if not 0.2 < t < 0.29]
    assert median_rate(steady) == pytest.approx(100_000)
    assert median_rate(stalled) == pytest.approx(100_000)
    assert median_rate(held_back) == pytest.approx(100_000)
    assert median_rate(steady[:1]) == 0


def rising_and_falling(share: float) -> list[tuple[float, int]]:
    """Return a transfer of a quarter of a second whose rate goes up and down by a share of 100 MB/s."""
    marks = [(0.0, 0)]
    for number in range(250):
        rate = 1e8 * (1 + share * math.sin(number / 9))
        marks.append((marks[-1][0] + 0.001, marks[-1][1] + round(rate * 0.001)))
    return marks


def test_a_steady_rate_is_known_soon_and_a_wavering_one_is_not() -> None:
    assert is_settled(rising_and_falling(0.01))
    assert not is_settled(rising_and_falling(0.2))
    few = [(at, total // 10) for at, total in rising_and_falling(0.0)]
    assert not is_settled(few)


def test_a_transfer_ends_when_its_rate_is_known_but_no_sooner_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(link_transfer, "is_settled", lambda marks: asked.append(marks[-1][0]) or True)
    monkeypatch.setattr(link_transfer, "WARM_UP", 0.01)
    source, sink = socket.socketpair()
    sender = threading.Thread(target=link_transfer.send_data, args=([source], PATIENCE))
    sender.start()
    with source, sink:
        begin = time.monotonic()
        assert link_transfer.receive_data([sink], PATIENCE, 0.05)["mbit"] > 0
        sink.close()
        sender.join()
    (at,) = asked
    assert at > begin + 0.05


IP = """1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
42: eth0@if43    inet 198.18.1.11/24 scope global eth0\\       valid_lft forever
42: eth0@if43    inet6 fe80::1:2/64 scope link \\       valid_lft forever
"""
IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en0: flags=8863<UP> mtu 1500
\tether aa:bb:cc:dd:ee:ff
\tinet6 fe80::1%en0 prefixlen 64 secured scopeid 0x4
\tinet 192.168.1.7 netmask 0xffffff00 broadcast 192.168.1.255
"""


def test_addresses_of_both_systems() -> None:
    assert parse_addresses(IP) == [("lo", "127.0.0.1"), ("eth0", "198.18.1.11"), ("eth0", "fe80::1:2")]
    assert parse_addresses(IFCONFIG) == [("lo0", "127.0.0.1"), ("en0", "fe80::1"), ("en0", "192.168.1.7")]


@given(st.text())
def test_whatever_a_system_prints(text: str) -> None:
    assert all(isinstance(name, str) and address for name, address in parse_addresses(text))
    assert all(parse_ports(text))


def test_what_passes_an_interface_is_counted() -> None:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    before = link_probe.counted(loopback)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2]) as one:
        one.sendall(bytes(100_000))
        assert until(lambda: link_probe.counted(loopback) >= before + 100_000)
    assert link_probe.counted("no such interface") == 0


def test_rates_of_cards_are_positive() -> None:
    assert all(rate > 0 for rate in link_probe.card_rates().values())
