"""A coordinator that is sent rubbish refuses it, says one line, and goes on with the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from coordinated_lab import RUN, Lab, lab, means
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import PATIENCE, until
from training.exchange.base import ExchangeError
from training.exchange.coordinator_protocol import (
    MAX_LINE,
    PROTOCOL_VERSION,
    GroupStatus,
    Hello,
    Report,
    encode_line,
    parse,
)
from training.exchange.group import coordinator_server
from training.exchange.group.join_config import JoinConfig
from training.exchange.mean.mesh_member import MeshMember

pytestmark = pytest.mark.slow


@contextmanager
def two_of_three(folder: Path, **named: Any) -> Iterator[Lab]:
    with lab(folder, 3, lease=100.0, **named) as one:
        one.connect_all()
        one.members[2].close()
        until(lambda: "left" in one.statuses(2))
        yield one


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Lab]:
    with two_of_three(tmp_path) as one:
        yield one


def serves(running: Lab) -> bool:
    members = [running.members[0], running.members[1]]
    results = means(members, "after", [torch.tensor([float(m.rank)]) for m in members], "fp32", 1.0)
    return [result.mean.item() for result in results] == [0.5, 0.5]


def dial(running: Lab, *lines: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE)
    connection.sendall(b"".join(lines))
    return connection


def answer(connection: socket.socket) -> str:
    """Why the coordinator ended a connection; empty: without a word."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except OSError:
        pass
    connection.close()
    return parse(GroupStatus, found.splitlines()[-1]).failed if found else ""


def hello(rank: int, **changes: object) -> bytes:
    said = {"version": PROTOCOL_VERSION, "run_id": RUN, "rank": rank, "world_size": 3, "name": "x", "port": 1}
    return encode_line(Hello.model_validate({**said, "incarnation": "i", **changes}))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=3))
def test_any_bytes_of_a_stranger_are_refused(parts: list[bytes]) -> None:
    with lab(None, 1) as one:
        connection = dial(one, *(part + b"\n" for part in parts), b"\n\n")
        assert "not a message" in answer(connection)
        one.connect(0)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([b"x" * (MAX_LINE + 1)], "too long"),
        ([hello(2), b"y" * (MAX_LINE + 1)], "too long"),
        ([hello(2), encode_line(Report(epoch=1 << 50, mesh=0))], "has not been"),
        ([hello(2), b'{"full": 1e300}\n'], "not a message"),
        ([hello(2), encode_line(Report(full=3, dropped=9))], "contradicts"),
        ([hello(7), encode_line(Report())], "rank 7 of 3"),
        ([hello(2, run_id="other"), encode_line(Report())], "another run"),
        ([hello(2), b'{"lost": 2}\n'], "contradicts"),
    ],
)
def test_who_breaks_the_rules_is_refused(running: Lab, lines: list[bytes], reason: str) -> None:
    assert reason in answer(dial(running, *lines))
    assert serves(running)


@pytest.mark.parametrize(
    ("news", "reason"),
    [
        (b'{"epoch": 99}\n', "has not been"),
        (b'{"colour": 1}\n', "not a message"),
        (b"z" * (MAX_LINE + 1), "too long"),
        (hello(2), "not a message"),
    ],
)
def test_a_member_that_talks_rubbish_loses_its_own_place(running: Lab, news: bytes, reason: str) -> None:
    connection = dial(running, hello(2), encode_line(Report()))
    until(lambda: running.statuses(2)[-1] == "joined")
    connection.sendall(news)
    assert reason in answer(connection)
    assert running.statuses(2)[-1] == "lost" and serves(running)


def test_who_says_nothing_is_hung_up_on_and_takes_no_memory(tmp_path: Path) -> None:
    with two_of_three(tmp_path, handshake=0.5) as one:
        before = psutil.Process().memory_info().rss
        quiet = [dial(one, b"{" * (MAX_LINE // 2)) for _ in range(80)]
        assert [answer(connection) for connection in quiet] == [""] * 80
        assert psutil.Process().memory_info().rss - before < 60 << 20
        assert serves(one)


def test_who_comes_and_goes_without_end_is_kept_out_for_a_while(running: Lab) -> None:
    for number in range(coordinator_server.MAX_HELLOS_PER_MINUTE):
        dial(running, hello(2, incarnation=str(number)), encode_line(Report())).close()
    until(lambda: "reconnects too often" in answer(dial(running, hello(2), encode_line(Report()))))
    assert serves(running) and len(running.events) < 4 * coordinator_server.MAX_HELLOS_PER_MINUTE


def test_a_certificate_speaks_for_its_own_rank_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    with lab(tmp_path_factory.mktemp("tls"), 2, tls=True) as one:
        assert one.certificates is not None
        one.connect_all()
        with pytest.raises(ExchangeError, match="not that of rank 1"):
            MeshMember(JoinConfig(one.address, one.certificates / "member-0", RUN, 1, 2, "x")).join(PATIENCE)
