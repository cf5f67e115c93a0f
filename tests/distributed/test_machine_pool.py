"""Log-ins to real sshd servers: how many a machine sees."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from scripted_connection import serving

from distributed.machine.link import link_to
from distributed.machine.pool import ConnectionPool
from distributed.ssh.access import check_access
from distributed.ssh.connection import SshConnection, SshTarget
from distributed.ssh.errors import SshError
from profiles.errors import BadInput
from tests.lab.light import LightLab
from tests.lab.spec import HostSpec
from tests.lab.ssh_setup import configured
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab() -> Iterator[LightLab]:
    with LightLab("a", "b", HostSpec("single", sshd_options=("MaxSessions 1",))) as built:
        yield built


@pytest.fixture
def pool() -> Iterator[ConnectionPool]:
    with ConnectionPool() as built:
        yield built


def test_all_that_is_asked_of_a_machine_takes_one_log_in(lab: LightLab, pool: ConnectionPool) -> None:
    before, hosts = lab["a"].logins, lab.hosts("a")
    target = SshTarget.of(hosts.master, hosts)
    assert check_access(target, connect=pool.using).ok
    links = [link_to(hosts.master, hosts, pool=pool) for _ in range(3)]
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda link: link.connection().run(["true"]).ok, links * 4))
    links[0].close()
    assert links[1].connection().run(["true"]).ok and pool.get(target).alive()
    assert lab["a"].logins - before == 1


def test_a_log_in_with_a_new_key_serves_on(lab: LightLab, pool: ConnectionPool) -> None:
    before, target = lab["b"].logins, lab.target("b")
    with pool.using(target, login=replace(target, key=str(lab.key))) as connection:
        assert connection is pool.get(target)
    assert lab["b"].logins - before == 1


def test_a_lost_connection_is_made_again_once(lab: LightLab, pool: ConnectionPool) -> None:
    before, hosts = lab["b"].logins, lab.hosts("b")
    dial = partial(link_to, pool=pool)
    links = [dial(hosts.master, hosts) for _ in range(2)]
    lost = links[0].connection()
    lost.close()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda link: link.connection().run(["true"]).ok, links)) == [True, True]
    assert links[0].connection() is links[1].connection() is not lost
    assert lab["b"].logins - before == 2


def test_who_closes_a_pool_does_not_wait_for_log_ins_under_way(lab: LightLab) -> None:
    arrived, leaving = threading.Event(), threading.Event()

    def stall(peer: socket.socket) -> None:
        arrived.set()
        leaving.wait(PATIENCE)

    with serving(stall) as port, ThreadPoolExecutor(1) as threads, ConnectionPool() as pool:
        target = lab.target("a", host="127.0.0.1", port=port)
        dialled = threads.submit(pool.get, target, None, 2 * PATIENCE)
        assert arrived.wait(PATIENCE)
        pool.close()
        assert not dialled.done()
        leaving.set()
        assert isinstance(dialled.exception(PATIENCE), SshError)


def test_a_jump_host_is_logged_into_once_for_all_behind_it(lab: LightLab, pool: ConnectionPool, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, "Host b single\n  ProxyJump a")
    before, behind = lab["a"].logins, [lab.target(name, config_file=config) for name in ("b", "single")]
    with ThreadPoolExecutor(2) as threads:
        assert all(connection.run(["true"]).ok for connection in threads.map(pool.get, behind))
    pool.get(behind[0]).close()
    assert pool.get(behind[1]).run(["true"]).ok and pool.get(behind[0]).run(["true"]).ok
    assert lab["a"].logins - before == 1


def test_a_jump_in_a_circle_is_named(lab: LightLab, pool: ConnectionPool, tmp_path: Path) -> None:
    config = configured(lab.ssh_config, tmp_path, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a")
    with pytest.raises(BadInput, match="its own jump host"):
        pool.get(lab.target("a", config_file=config))


def test_a_closed_link_takes_its_forwarded_ports_along(lab: LightLab, pool: ConnectionPool) -> None:
    hosts = lab.hosts("a")
    leaving, staying = (link_to(hosts.master, hosts, pool=pool) for _ in range(2))
    gone, kept = leaving.forward(("127.0.0.1", 9)), staying.forward(("127.0.0.1", 9))
    leaving.close()

    def listens(address: str) -> bool:
        host, _, port = address.partition(":")
        words = ["python3", "-c", f"import socket; socket.create_connection(({host!r}, {port}))"]
        return staying.connection().run(words).ok

    until(lambda: not listens(gone))
    assert listens(kept)


def test_a_server_with_one_session_a_connection_runs_several_commands(lab: LightLab) -> None:
    before = lab["single"].logins
    with SshConnection.connect(lab.target("single")) as connection, contextlib.ExitStack() as running:
        streams = [running.enter_context(connection.stream(["cat"])) for _ in range(2)]
        assert connection.run(["echo", "third"]).stdout == b"third\n"
        assert connection.run(["echo", "fourth"]).stdout == b"fourth\n"
        for number, stream in enumerate(streams):
            stream.write(b"%d\n" % number)
            assert stream.read_line(PATIENCE) == b"%d\n" % number
    assert lab["single"].logins - before == 3
