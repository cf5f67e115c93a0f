"""Which machines the system's neighbour table names, on the systems that have one."""

from __future__ import annotations

import ipaddress
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import DNSIncoming, DNSOutgoing, DNSPointer, const

from distributed.discovery.neighbour_names import label_of, neighbour_names
from distributed.discovery.neighbours import (
    SshNeighbour,
    accepting_ssh,
    addresses,
    addresses_in,
    home_networks,
    system_of,
)
from distributed.discovery.network_interfaces import Interface, Interfaces, PathKind
from tests.waiting import PATIENCE

IP = """192.168.1.7 dev eth0 lladdr 02:42:ac:11:00:02 REACHABLE
192.168.1.9 dev eth0 lladdr 02:42:ac:11:00:03 FAILED
192.168.1.11 dev eth0  FAILED
192.168.1.8 dev wlan0 lladdr 02:42:ac:11:00:04 STALE
8.8.8.8 dev eth0 lladdr 02:42:ac:11:00:05 STALE
"""
PROC = """IP address       HW type     Flags       HW address            Mask     Device
192.168.1.7      0x1         0x2         02:42:ac:11:00:02     *        eth0
192.168.1.9      0x1         0x0         00:00:00:00:00:00     *        eth0
192.168.1.8      0x1         0x2         02:42:ac:11:00:04     *        eth0
"""
MAC = """? (192.168.1.7) at 2:42:ac:11:0:2 on en0 ifscope [ethernet]
? (192.168.1.9) at (incomplete) on en0 ifscope [ethernet]
studio.lan (192.168.1.8) at 2:42:ac:11:0:4 on en0 ifscope [ethernet]
? (192.168.1.255) at ff:ff:ff:ff:ff:ff on en0 ifscope [ethernet]
? (224.0.0.251) at 1:0:5e:0:0:fb on en0 ifscope permanent [ethernet]
"""


@pytest.mark.parametrize("table", [IP, PROC, MAC])
def test_neighbours_that_answered_are_named_once(table: str) -> None:
    assert addresses(table + table) == ["192.168.1.7", "192.168.1.8"]


@given(st.text())
def test_any_text_is_a_table(table: str) -> None:
    assert isinstance(addresses(table), list)


@pytest.mark.parametrize(
    ("introduction", "accepts"),
    [(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n", True), (b"HTTP/1.1 400\r\n", False), (b"", False)],
)
def test_a_neighbour_accepts_ssh_if_it_says_so(introduction: bytes, accepts: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def introduce() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(introduction)

        answering = threading.Thread(target=introduce)
        answering.start()
        port = server.getsockname()[1]
        answers = accepting_ssh(["127.0.0.1"], port, PATIENCE, names=lambda asked: dict.fromkeys(asked, "attic"))
        assert answers == (1, [SshNeighbour("127.0.0.1", "Debian", "attic")] if accepts else [])
        answering.join()
    assert accepting_ssh(["127.0.0.1"], port).machines == []


def test_asking_a_network_ends_when_it_is_told_to_and_keeps_the_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def introduce() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-x\r\n")

        answering = threading.Thread(target=introduce)
        answering.start()
        addresses, is_ended = ["127.0.0.1", *(f"127.0.1.{number}" for number in range(200))], iter([False])
        answers = accepting_ssh(
            addresses, server.getsockname()[1], PATIENCE, lambda: next(is_ended, True), lambda asked: {}
        )
        assert answers == (1, [SshNeighbour("127.0.0.1")])
        answering.join()


@pytest.mark.parametrize(
    ("introduction", "system"),
    [
        ("SSH-2.0-OpenSSH_9.6p1 Ubuntu-3ubuntu13.5\r\n", "Ubuntu"),
        ("SSH-2.0-OpenSSH_7.9p1 Raspbian-10+deb10u2", "Raspberry Pi OS"),
        ("SSH-2.0-OpenSSH_for_Windows_9.5", "Windows"),
        ("SSH-2.0-OpenSSH_9.9", ""),  # a Mac, Fedora and Arch name nothing: nothing is made up
    ],
)
def test_the_system_is_what_an_ssh_server_names(introduction: str, system: str) -> None:
    assert system_of(introduction) == system


def test_a_machine_tells_its_name_by_multicast_dns_and_an_unknown_address_has_none() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as responder:
        responder.bind(("127.0.0.7", 0))
        responder.settimeout(PATIENCE)

        def respond() -> None:
            query, asker = responder.recvfrom(9000)
            (question,) = DNSIncoming(query).questions
            reply = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA, multicast=False)
            pointer = DNSPointer(question.name, const._TYPE_PTR, const._CLASS_IN, 10, "Studio-of-ada.local.")
            reply.add_answer_at_time(pointer, 0)
            responder.sendto(reply.packets()[0], asker)

        answering = threading.Thread(target=respond)
        answering.start()
        port = responder.getsockname()[1]
        assert neighbour_names(["127.0.0.7"], PATIENCE, port) == {"127.0.0.7": "Studio-of-ada"}
        answering.join()
    assert [label_of(name) for name in ("pi.fritz.box", "192.168.1.7", "localhost")] == ["pi", "", ""]


def test_only_private_networks_of_cables_and_wifi_may_be_asked_and_of_large_ones_a_part() -> None:
    def interface(name: str, address: str, kind: PathKind = PathKind.WIRED) -> Interface:
        return Interface(name, 1, (ipaddress.IPv4Interface(address),), kind, True)

    ours = Interfaces(
        (
            interface("en0", "192.168.1.20/24", PathKind.WIFI), interface("en1", "192.168.1.21/24"),
            interface("eth0", "10.3.4.5/8"), interface("eth1", "8.8.4.9/24"), interface("en5", "169.254.7.2/16"),
            interface("docker0", "172.17.0.1/16", PathKind.DOCKER), interface("tun0", "10.8.0.2/24", PathKind.VPN),
        )
    )  # fmt: skip
    assert home_networks(ours) == ["192.168.1.0/24", "10.3.4.0/24"]
    others = addresses_in(home_networks(ours), ours)
    assert len(others) == 254 - 2 + 254 - 1
    assert not {"192.168.1.20", "192.168.1.21", "10.3.4.5", "10.3.4.0", "10.3.4.255"} & {*others}
