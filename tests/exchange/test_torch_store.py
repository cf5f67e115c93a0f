"""The rendezvous store: what torch asks of it, and what strangers may send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.exchange.base import ExchangeError
from training.exchange.store_server import MAX_LINE, StoreServer, serve_store
from training.exchange.torch_store import StoreClient, StoreTimeout


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    server, _ = serve_store()
    yield server
    server.close()


@pytest.fixture
def client(server: StoreServer, request: pytest.FixtureRequest) -> Iterator[StoreClient]:
    client = StoreClient(f"127.0.0.1:{server.port}", 5.0, prefix=f"{request.node.name}/")
    yield client
    client.close()


def test_it_listens_on_loopback_only(server: StoreServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_taken_port_is_an_os_error(server: StoreServer) -> None:
    with pytest.raises(OSError, match="in use"):
        StoreServer(server.port)


def test_values_of_any_bytes_come_back(client: StoreClient) -> None:
    client.set("key", bytes(range(256)))
    assert client.get("key") == bytes(range(256))
    assert client.read(["key", "none"]) == [bytes(range(256)), None]
    assert client.check(["key"])
    assert not client.check(["key", "none"])


def test_add_counts_and_starts_at_zero(client: StoreClient) -> None:
    assert [client.add("n", 2), client.add("n", -5)] == [2, -3]
    assert client.get("n") == b"-3"


def test_compare_set_lets_the_first_one_win(client: StoreClient) -> None:
    assert client.compare_set("who", "", "first") == b"first"
    assert client.compare_set("who", "", "second") == b"first"
    assert client.compare_set("who", "first", "third") == b"third"


def test_delete_and_count(client: StoreClient) -> None:
    before = client.num_keys()
    client.set("gone", "1")
    assert client.num_keys() == before + 1
    assert [client.delete_key("gone"), client.delete_key("gone")] == [True, False]


def test_a_get_waits_for_another_client(client: StoreClient) -> None:
    other = client.clone()
    timer = threading.Timer(0.05, other.set, ("late", "x"))
    timer.start()
    assert client.get("late") == b"x"
    timer.join()


def test_a_missing_key_is_named(client: StoreClient) -> None:
    client.set("here", "1")
    with pytest.raises(StoreTimeout, match="had no there within") as caught:
        client.get_all(["here", "there"], 0.05)
    assert caught.value.missing == ["there"]


def test_clients_of_different_prefixes_do_not_meet(server: StoreServer) -> None:
    one, other = (StoreClient(f"127.0.0.1:{server.port}", 5.0, prefix) for prefix in ("a/", "b/"))
    one.set("key", "1")
    assert other.read(["key"]) == [None]
    one.close()
    other.close()


@given(
    st.binary(max_size=200) | st.sampled_from([b"[]", b"{}", b'{"op": "get"}', b'{"op": "add", "key": "k"}', b"null"])
)
def test_no_bytes_harm_the_store(server: StoreServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(data + b"\n")
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(60)
        while stranger.recv(4096):
            pass
    client = StoreClient(f"127.0.0.1:{server.port}", 5.0)
    assert client.add("alive", 1) > 0
    client.close()


def test_a_line_without_end_is_cut_off(server: StoreServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(60)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stranger.sendall(b"x" * (64 * MAX_LINE))


def test_a_store_that_goes_away_is_one_line() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = StoreClient(f"127.0.0.1:{server.getsockname()[1]}", 5.0)
    connection, _ = server.accept()
    connection.close()
    server.close()
    with pytest.raises(ExchangeError, match="is gone"):
        client.get("key")
    client.close()
