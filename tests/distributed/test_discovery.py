"""Discovery without a network: parsers, merging by identity, and servers that misbehave."""

from __future__ import annotations

import base64
import errno
import ipaddress
import itertools
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mdns_speaker import announcement, encoded, record, response
from scripted_connection import garbage, serving, silent

from app.cli.machines.check import clean
from distributed.discovery.discovery import Discovery, Sources
from distributed.discovery.known_machines import (
    KnownKeys,
    MachineCandidate,
    candidates,
    config_names,
    locate,
    look_up,
    read_known_keys,
)
from distributed.discovery.machine_identity import FoundMachine, machines
from distributed.discovery.mdns_browser import Browser, explain_browsing
from distributed.discovery.mdns_records import RecordBook, parse_txt
from distributed.discovery.network_interfaces import (
    Endpoint,
    Interface,
    Interfaces,
    PathKind,
    interface_kind,
    list_interfaces,
)
from distributed.discovery.reachability import explain, explain_silence, read_host_key
from distributed.discovery.sightings import (
    LONGEST_NAME,
    MOST_ENDPOINTS,
    MOST_PER_SOURCE,
    MOST_SIGHTINGS,
    Failed,
    Identified,
    Ignored,
    Observation,
    Problem,
    Reachability,
    Sighting,
    SightingKey,
    SightingOrigin,
    State,
    Withdrawn,
    apply,
)
from distributed.hosts.past_logins import forget_login, past_logins
from distributed.ssh.access import check_access
from distributed.ssh.config import OWN_KEY, ResolvedHost, SshTarget
from distributed.ssh.keys.host_keys import Expected, HostKeyInfo, fingerprint
from distributed.ssh.login_history import note_login
from distributed.system import parse_ports
from profiles.errors import BadInput, ExitCode
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

EN0 = Interface("en0", 4, (ipaddress.ip_interface("192.168.1.2/24"),), PathKind.WIFI, True)
EN5 = Interface("en5", 9, (ipaddress.ip_interface("169.254.3.3/16"),), PathKind.WIRED, True)
UTUN = Interface("utun3", 12, (ipaddress.ip_interface("100.64.0.7/10"),), PathKind.VPN, True)
DOCKER = Interface("docker0", 13, (ipaddress.ip_interface("172.17.0.1/16"),), PathKind.DOCKER, True)
OURS = Interfaces((EN0, EN5, UTUN, DOCKER))


def folded(*observations: Observation) -> State:
    state = State()
    for observation in observations:
        state = apply(state, observation)
    return state


def sighting(
    name: str, *endpoints: Endpoint, origin: SightingOrigin = SightingOrigin.BONJOUR, source: str = "s"
) -> Sighting:
    return Sighting(SightingKey(origin, "_ssh._tcp", name, "en0", source), name, f"{name}.local", endpoints)


def endpoint(number: int, interface: str = "en0") -> Endpoint:
    return Endpoint(f"192.168.1.{number}", interface)


def hear(data: bytes, source: str = "192.168.1.9", book: RecordBook | None = None) -> list[Observation]:
    return (book or RecordBook()).hear(data, OURS, "en0", source, 0.0)


# ------------------------------------------------------------------------------------------------------------ records


def test_an_announcement_becomes_a_sighting() -> None:
    (seen,) = hear(announcement("studio", "192.168.1.9", b"\x0bmodel=Mac14"))
    assert isinstance(seen, Sighting)
    assert seen.name == "studio" and seen.details == (("model", "Mac14"),)
    assert seen.endpoints == (Endpoint("192.168.1.9", "en0"),)


def test_a_good_bye_withdraws_only_what_its_sender_announced() -> None:
    book = RecordBook()
    hear(announcement("studio", "192.168.1.9"), book=book)
    bye = response([record("_ssh._tcp.local", 12, encoded("studio._ssh._tcp.local"), ttl=0)])
    assert hear(bye, "192.168.1.66", book) == []
    (gone,) = hear(bye, book=book)
    assert isinstance(gone, Withdrawn) and gone.key.name == "studio"


def test_what_is_not_repeated_expires() -> None:
    book = RecordBook()
    hear(announcement("studio", "192.168.1.9"), book=book)
    assert book.expire(100.0) == []
    assert [type(one) for one in book.expire(200.0)] == [Withdrawn]
    assert book.questions("en0") == []


def test_records_that_come_apart_are_asked_for_and_put_together() -> None:
    book = RecordBook()
    name = "my mac._ssh._tcp.local"
    assert hear(response([record("_ssh._tcp.local", 12, encoded(name))]), book=book) == []
    assert (f"{name}.", 33) in book.questions("en0")
    hear(response([record(name, 33, struct.pack(">3H", 0, 0, 2222) + encoded("mac.local"))]), book=book)
    assert ("mac.local.", 1) in book.questions("en0")
    model = response([record("my mac._device-info._tcp.local", 16, b"\x0dmodel=Mac15,9")])
    hear(response([record("mac.local", 1, socket.inet_aton("192.168.1.9"))]), book=book)
    (seen,) = hear(model, book=book)
    assert isinstance(seen, Sighting) and seen.endpoints[0].port == 2222
    assert dict(seen.details) == {"model": "Mac15,9"}


def test_a_docker_address_that_is_also_ours_is_no_path() -> None:
    assert hear(announcement("studio", "172.17.0.1")) == []


def test_one_sender_cannot_announce_without_end() -> None:
    book, state = RecordBook(), State()
    for number in range(10_000):
        for observation in hear(announcement(f"m{number}", "192.168.1.9"), book=book):
            state = apply(state, observation)
    assert len(state.sightings) == MOST_PER_SOURCE
    assert state.ignored == 10_000 - MOST_PER_SOURCE


class Ear:
    """A socket in which packets wait, each with its sender."""

    def __init__(self, *packets: tuple[bytes, str]) -> None:
        self._waiting = list(packets)

    def receive(self, size: int) -> tuple[bytes, str, int] | None:
        return (*self._waiting.pop(0), EN0.index) if self._waiting else None


class Silent:
    """A socket that only notes what is sent."""

    def __init__(self, sent: list[bytes]) -> None:
        self.send = sent.append


class Clock:
    """Stands for ``time``: nothing takes wall time, and every packet a 32nd second of work."""

    def __init__(self) -> None:
        self.now, self._worked = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        self._worked += 1 / 32
        return self._worked


def test_packets_that_cost_much_work_are_read_in_measure() -> None:
    clock, told = Clock(), list[Observation]()
    browser = Browser(told.append, clock, OURS)

    def read(*senders: str) -> int:
        told.clear()
        browser.hear(Ear(*((announcement(f"m{n}", sender), sender) for n, sender in enumerate(senders))))
        unread = sum(one.count for one in told if isinstance(one, Ignored))
        return len(senders) - unread

    loud = "192.168.1.9"
    assert read(*[loud] * 60) == 4
    assert read(loud, "192.168.1.8") == 1, "who has said little is heard beside"
    assert read(*(f"192.168.1.{n}" for n in range(20, 80))) == 5
    clock.now += 1.0
    assert read(loud, "192.168.1.8") == 2


def test_whoever_invents_names_is_not_asked_for_all_of_them() -> None:
    asked: list[bytes] = []
    browser = Browser(lambda observation: None, interfaces=OURS)
    browser._sockets = {("en0", 4): Silent(asked)}
    for number in range(100):
        invented = [record("_ssh._tcp.local", 12, encoded(f"n{number}x{n}._ssh._tcp.local")) for n in range(20)]
        gone = [record("_ssh._tcp.local", 12, encoded(f"n{number - 1}x{n}._ssh._tcp.local"), ttl=0) for n in range(20)]
        browser.hear(Ear((response(invented + gone), "192.168.1.9")))
    assert 0 < len(asked) < 100
    assert sum(map(len, browser._asked.values())) <= 512


@given(st.binary(max_size=2000))
def test_any_txt_parses_into_short_texts(data: bytes) -> None:
    found = parse_txt(data)
    assert set(found) <= {"version", "devices", "memory", "model"}
    assert all(len(value) <= 80 for value in found.values())


@given(st.dictionaries(st.sampled_from(["version", "devices", "memory", "model"]), st.text(max_size=20)))
def test_a_txt_comes_back_as_it_was(values: dict[str, str]) -> None:
    entries = [f"{key}={value}".encode() for key, value in values.items()]
    assert parse_txt(b"".join(bytes([len(entry)]) + entry for entry in entries)) == values


@given(st.binary(max_size=600))
def test_any_packet_is_survived(data: bytes) -> None:
    hear(data)
    hear(struct.pack(">6H", 0, 0x8400, 0, 3, 0, 0) + data)


@given(st.lists(st.tuples(st.integers(0, 250), st.integers(0, 255)), min_size=1, max_size=12))
def test_any_damaged_announcement_is_survived_and_bounded(changes: list[tuple[int, int]]) -> None:
    packet = bytearray(announcement("studio", "192.168.1.9", b"\x20" + b"model=" + b"x" * 26))
    for place, value in changes:
        packet[place % len(packet)] = value
    state = folded(*hear(bytes(packet)))
    assert len(state.sightings) <= 2
    for machine in machines(state):
        assert len(machine.name) <= LONGEST_NAME


# ------------------------------------------------------------------------------------------------------------ merging


def test_one_key_under_two_names_is_one_machine() -> None:
    first, second = endpoint(9), Endpoint("169.254.7.7", "en5", kind=PathKind.LINK_LOCAL)
    state = folded(
        sighting("studio", first),
        sighting("typed", second, origin=SightingOrigin.TYPED),
        Identified(first, "SHA256:k"),
        Identified(second, "SHA256:k"),
    )
    (machine,) = machines(state)
    assert machine.id == "SHA256:k" and machine.name == "typed"
    assert machine.names == ("typed", "typed.local", "studio", "studio.local")
    assert [path.endpoint for path in machine.paths] == [first, second]


def test_a_typed_address_takes_no_machine_s_name() -> None:
    place = endpoint(9)
    typed = replace(sighting("192.168.1.9", place, origin=SightingOrigin.TYPED), host="192.168.1.9")
    (machine,) = machines(folded(sighting("c", place), typed, Identified(place, "SHA256:k")))
    assert machine.name == "c"


def test_a_machine_used_before_is_the_one_that_is_announced_at_another_address() -> None:
    expected = Expected("192.168.1.9", (("ssh-ed25519", "SHA256:k"),))
    before = replace(sighting("attic", endpoint(9), origin=SightingOrigin.PAST_LOGIN), expected=expected)
    gone = folded(before, Failed(endpoint(9), Problem("timeout", "no answer")))
    assert machines(gone) == ()
    stranger = Identified(endpoint(9), "SHA256:other", keys=(("ssh-ed25519", "SHA256:other"),))
    (machine,) = machines(folded(before, stranger))
    assert machine.status is Reachability.OTHER_KEY
    announced = sighting("attic", endpoint(12)), Identified(endpoint(12), "SHA256:k")
    (machine,) = machines(folded(before, stranger, *announced))
    assert (machine.found_by, machine.status) == ((SightingOrigin.BONJOUR,), Reachability.ONLINE)
    two_names = replace(before, key=before.key._replace(name="loft"), name="loft")
    (machine,) = machines(folded(before, two_names, Identified(endpoint(9), "SHA256:k")))
    assert machine.found_by == (SightingOrigin.PAST_LOGIN,) and {"attic", "loft"} <= set(machine.names)


@pytest.mark.parametrize("origin", [SightingOrigin.TYPED, SightingOrigin.HOSTS_FILE, SightingOrigin.BONJOUR])
def test_clones_with_one_key_are_two_machines_that_say_so(origin: SightingOrigin) -> None:
    both = [sighting(name, endpoint(n), origin=origin) for name, n in (("a", 9), ("b", 10))]
    remembered = [sighting(f"192.168.1.{n}", endpoint(n), origin=SightingOrigin.KNOWN_HOSTS) for n in (10, 9)]
    state = folded(*both, *remembered, Identified(endpoint(9), "k"), Identified(endpoint(10), "k"))
    found = machines(state)
    assert [(machine.name, len(machine.paths), machine.status) for machine in found] == [
        ("a", 1, Reachability.ONLINE),
        ("b", 1, Reachability.ONLINE),
    ]
    problems = [machine.problem for machine in found]
    assert [problem.cause for problem in problems if problem] == ["same_host_key"] * 2
    assert problems[0] is not None and "same host key as b" in problems[0].message
    assert "ssh-keygen -A" in problems[0].hint


def test_two_names_of_a_list_are_one_machine_where_an_announcement_joins_their_addresses() -> None:
    wifi, cable = endpoint(9), endpoint(10)
    listed = [sighting(name, end, origin=SightingOrigin.TYPED) for name, end in (("a-wifi", wifi), ("a", cable))]
    (machine,) = machines(folded(*listed, sighting("a", wifi, cable), Identified(wifi, "k"), Identified(cable, "k")))
    assert len(machine.paths) == 2 and machine.problem is None


def test_a_clone_of_this_computer_is_another_machine() -> None:
    state = folded(
        sighting("me", endpoint(9), origin=SightingOrigin.HERE),
        sighting("b", endpoint(10), origin=SightingOrigin.TYPED),
        Identified(endpoint(9), "k"),
        Identified(endpoint(10), "k"),
    )
    assert [(machine.name, machine.here) for machine in machines(state)] == [("me", True), ("b", False)]


def test_one_name_with_two_keys_is_two_machines_even_if_announced_as_one() -> None:
    first, second = endpoint(9), endpoint(10)
    state = folded(sighting("mac", first, second), Identified(first, "a"), Identified(second, "b"))
    assert [(m.name, m.id, len(m.paths)) for m in machines(state)] == [("mac", "a", 1), ("mac", "b", 1)]


def test_one_name_from_two_senders_is_two_before_any_key_is_known() -> None:
    both = [sighting("mac", endpoint(n), source=f"192.168.1.{n}") for n in (9, 10)]
    assert len(machines(folded(*both))) == 2


def test_a_hosts_file_name_that_only_mdns_knows_joins_its_machine() -> None:
    listed = Sighting(
        SightingKey(SightingOrigin.HOSTS_FILE, "", "s"), "s", "studio.local", problem=Problem("name_unknown", "")
    )
    state = folded(sighting("studio", endpoint(9)), listed, Identified(endpoint(9), "a"))
    (machine,) = machines(state)
    assert machine.found_by == (SightingOrigin.HOSTS_FILE, SightingOrigin.BONJOUR)


def test_a_name_only_known_hosts_remembers_is_listed_once_it_answers() -> None:
    state = folded(sighting("old", endpoint(9), origin=SightingOrigin.KNOWN_HOSTS))
    assert machines(state) == ()
    assert len(machines(apply(state, Identified(endpoint(9), "a")))) == 1


def test_a_lost_machine_keeps_its_identity_and_says_why() -> None:
    lost = Problem("timeout", "no answer")
    state = folded(sighting("mac", endpoint(9)), Identified(endpoint(9), "a"), Failed(endpoint(9), lost))
    (machine,) = machines(state)
    assert (machine.id, machine.status, machine.problem) == ("a", Reachability.OFFLINE, lost)


def test_docker_and_vpn_paths_come_last() -> None:
    kinds = [PathKind.DOCKER, PathKind.VPN, PathKind.WIFI, PathKind.LINK_LOCAL, PathKind.WIRED]
    paths = [Endpoint(f"10.0.0.{n}", "x", kind=kind) for n, kind in enumerate(kinds)]
    (machine,) = machines(folded(sighting("mac", *paths), *(Identified(path, "a") for path in paths)))
    assert [path.endpoint.kind for path in machine.paths] == kinds[::-1]


names, keys = st.sampled_from(["mac", "studio", "box"]), st.sampled_from(["a", "b", "c"])
ends = st.integers(1, 6).map(endpoint)
sightings = st.builds(
    lambda name, found, origin, source: sighting(name, *found, origin=origin, source=source),
    names, st.lists(ends, max_size=3), st.sampled_from(list(SightingOrigin)), st.sampled_from(["x", "y"]),
)  # fmt: skip
observations = st.one_of(
    sightings,
    sightings.map(lambda one: Withdrawn(one.key)),
    st.builds(Identified, ends, keys),
    st.builds(Failed, ends, st.just(Problem("timeout", "no answer"))),
    st.builds(Ignored, st.just("x")),
)


@settings(max_examples=60)
@given(st.lists(observations, max_size=25))
def test_identity_holds_whatever_is_observed(events: list[Observation]) -> None:
    state = folded(*events)
    found = machines(state)
    assert len({machine.id for machine in found}) == len(found)
    for machine in found:
        alone = [other.fingerprint for other in found].count(machine.fingerprint) == 1
        assert alone or not machine.fingerprint or machine.problem is not None  # a clone, and said so
    for machine in found:
        keys_shown = {state.paths[path.endpoint].fingerprint for path in machine.paths} - {""}
        assert keys_shown <= {machine.fingerprint}
    named = {e for one in state.sightings.values() for e in one.endpoints}
    assert set(state.paths) == named
    answering = {e for e, path in state.paths.items() if path.status is Reachability.ONLINE}
    assert answering == {p.endpoint for m in found for p in m.paths if p.status is Reachability.ONLINE}


@pytest.mark.slow
def test_memory_is_bounded_whatever_is_announced() -> None:
    state = State()
    for number in range(700):
        flood = [Endpoint(f"10.0.{number % 256}.{n}", "en0") for n in range(40)]
        state = apply(state, sighting("x" * 500, *flood, source=f"s{number}"))
    assert len(state.sightings) == MOST_SIGHTINGS and state.ignored == 700 - MOST_SIGHTINGS
    assert len(state.paths) <= MOST_SIGHTINGS * MOST_ENDPOINTS
    assert all(len(one.name) == LONGEST_NAME for one in state.sightings.values())


def test_a_newcomer_takes_the_place_of_one_that_never_answered() -> None:
    claims = [sighting(f"m{n}", Endpoint(f"10.0.{n // 250}.{n % 250}", "en0"), source=f"s{n // 30}")
              for n in range(MOST_SIGHTINGS)]  # fmt: skip
    state = folded(*claims)
    honest = sighting("honest", endpoint(9), source="h")
    assert honest.key not in apply(state, honest).sightings
    state = apply(state, Failed(claims[7].endpoints[0], Problem("timeout", "no answer")))
    state = apply(state, honest)
    assert honest.key in state.sightings and claims[7].key not in state.sightings
    assert len(state.sightings) == MOST_SIGHTINGS


# --------------------------------------------------------------------------------------------------------- interfaces


@pytest.mark.parametrize(
    ("address", "seen_on", "interface", "kind"),
    [
        ("192.168.1.9", "en5", "en0", PathKind.WIFI),
        ("169.254.9.9", "en5", "en5", PathKind.LINK_LOCAL),
        ("100.101.2.3", "utun3", "utun3", PathKind.VPN),
        ("172.17.0.9", "docker0", "docker0", PathKind.DOCKER),
        ("10.9.9.9", "en0", "", PathKind.ROUTED),
        ("192.168.1.2", "en0", "en0", PathKind.HERE),
        ("fe80::1", "en5", "en5", PathKind.WIRED),
        ("fe80::1%12", "", "utun3", PathKind.VPN),
        ("::ffff:192.168.1.2", "en0", "en0", PathKind.HERE),
        ("::ffff:127.0.0.1", "en0", "lo", PathKind.HERE),
        ("::ffff:192.168.1.9", "en5", "en0", PathKind.WIFI),
    ],
)
def test_an_address_is_placed_where_it_can_be_reached(
    address: str, seen_on: str, interface: str, kind: PathKind
) -> None:
    placed = OURS.endpoint_for(address, 22, seen_on)
    assert placed is not None and (placed.interface, placed.kind) == (interface, kind)


@pytest.mark.parametrize("text", ["fe80::1", "169.254.9.9", "224.0.0.251", "0.0.0.0", "::", "nonsense", ""])
def test_what_nobody_can_connect_to_is_no_path(text: str) -> None:
    assert OURS.endpoint_for(text, 22) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("docker0", PathKind.DOCKER), ("br-0a1b2c3d", PathKind.DOCKER), ("veth12", PathKind.DOCKER),
        ("bridge100", PathKind.VIRTUAL), ("bridge0", PathKind.WIRED), ("virbr0", PathKind.VIRTUAL),
        ("utun4", PathKind.VPN), ("tailscale0", PathKind.VPN), ("wg0", PathKind.VPN), ("tun0", PathKind.VPN),
        ("wlp3s0", PathKind.WIFI), ("en0", PathKind.WIRED), ("enp3s0", PathKind.WIRED),
    ],
)  # fmt: skip
def test_interfaces_are_told_apart(name: str, kind: PathKind) -> None:
    assert interface_kind(name) is kind


def test_wireless_ports_of_a_mac() -> None:
    said = "\nHardware Port: Wi-Fi\nDevice: en1\nEthernet Address: 00:00\n\nHardware Port: Ethernet\nDevice: en0\n"
    assert parse_ports(said) == {"en1"}


def test_this_computers_interfaces_are_seen() -> None:
    assert all(interface.addresses and interface.name != "lo" for interface in list_interfaces().all)


# ------------------------------------------------------------------------------------------------------ what is known

KEY = base64.b64encode(b"\0\0\0\x0bssh-ed25519" + b"k" * 32).decode()


def test_known_hosts_are_read_plain_and_hashed(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(
        f"studio.local,192.168.1.9 ssh-ed25519 {KEY}\n|1|c2FsdA==|aGFzaA== ssh-ed25519 {KEY}\n"
        f"[box]:2222 ssh-ed25519 {KEY}\ngithub.com,140.82.1.1 ssh-ed25519 {KEY}\n*.lan ssh-ed25519 {KEY}\nrubbish\n"
    )
    known = read_known_keys([file, tmp_path / "missing"])
    assert known.hashed == 1
    assert known.local == ("studio.local", "192.168.1.9", "[box]:2222")
    (known_names,) = known.names.values()
    assert known_names[:2] == ("studio.local", "192.168.1.9") and f"a hashed name ({file}:2)" in known_names
    assert set(known.names) == {fingerprint(base64.b64decode(KEY))}


@given(st.text(max_size=300))
def test_any_known_hosts_and_config_are_survived(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed"
    file.write_text(text, encoding="utf-8", errors="replace")
    read_known_keys([file])
    assert all(name and not name.startswith("-") for name in config_names(file))


def test_config_names_follow_include_and_leave_patterns_out(tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text('Host box "quoted"\nHost=equal\n')
    config = tmp_path / "config"
    config.write_text(f"Include {tmp_path}/mo*\nInclude {config}\nHost studio *.lan !not # Host no\nHOST  b\tc\n")
    assert config_names(config) == ["box", "quoted", "equal", "studio", "b", "c"]


def test_files_that_include_one_another_are_read_once(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / name).write_text(f"Include {tmp_path}/*\nHost {name}\n")
    assert sorted(config_names(tmp_path / "a")) == list("abcdefgh")


def test_candidates_are_looked_up_by_ssh(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host box\n  HostName 192.168.1.9\n  Port 2222\nHost far\n  ProxyJump box\nHost gh\n  User git\n"
        "Host nobody\n  HostName nobody.invalid\n"
    )
    found = candidates(Sources(("192.168.1.77",), ssh_config=config), KnownKeys())
    seen = {one.target.name: look_up(one, OURS) for one in found}
    assert seen["gh"] is None
    box, far, nobody, typed = (seen[name] for name in ("box", "far", "nobody", "192.168.1.77"))
    assert box is not None and box.endpoints == (Endpoint("192.168.1.9", "en0", 2222),)
    assert far is not None and (far.endpoints, far.through) == ((), "box")
    assert nobody is not None and nobody.problem is not None and nobody.problem.cause == "name_unknown"
    assert typed is not None and typed.key.origin is SightingOrigin.TYPED


@pytest.mark.parametrize("cause", ["config_not_read", "bad_config"])
def test_who_was_not_asked_is_not_offline(cause: str) -> None:
    key = SightingKey(SightingOrigin.HOSTS_FILE, "box", "box")
    problem = Problem(cause, "its SSH configuration is not approved")
    (machine,) = machines(apply(State(), Sighting(key, "box", problem=problem)))
    assert (machine.status, machine.problem) == (Reachability.UNCHECKED, problem)


def test_a_long_name_may_be_typed() -> None:
    (found,) = candidates(
        Sources((f"ada@{'a' * 100}.example:23",), ssh_config=Path("/dev/null"), peers=False), KnownKeys()
    )
    assert (found.target.host, found.target.port, found.target.user) == ("a" * 100 + ".example", 23, "ada")


def logged_in(name: str, host: str, address: str, host_key: str = "SHA256:k", host_name: str = "") -> None:
    note_login(SshTarget(name, host), ResolvedHost(name, host, 22, "ada"), address, host_key, host_name)


@pytest.fixture
def logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the machines that let Muster in."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "muster" / "logins"


def test_who_let_us_in_is_looked_up_by_name_and_else_where_it_was(logins: Path) -> None:
    logged_in("attic", "attic.invalid", "192.168.1.9")
    logged_in("ada@192.168.1.10", "192.168.1.10", "192.168.1.10", host_name="porch")
    found = candidates(Sources(ssh_config=Path("/dev/null"), known_hosts=(), peers=False), KnownKeys())
    assert {(one.target.name, one.target.user) for one in found} == {("attic", "ada"), ("porch", "ada")}
    seen = [look_up(one, OURS) for one in found]
    assert {one.endpoints for one in seen if one} == {(endpoint(9),), (endpoint(10),)}
    assert candidates(Sources(ssh_config=Path("/dev/null"), past_logins=False, peers=False), KnownKeys()) == []


@pytest.mark.parametrize("text", ["", "[" * 5000, "null", '{"name": "a"}', '{"host": "-oProxyCommand=x"}', "\xff"])
def test_a_damaged_note_of_a_log_in_costs_that_machine_alone(logins: Path, text: str) -> None:
    logged_in("attic", "attic.local", "192.168.1.9")
    (file,) = logins.iterdir()
    file.write_text(text)
    logged_in("porch", "porch.local", "192.168.1.10", "SHA256:p")
    assert [login.host for login in past_logins()] == ["porch.local"]
    logged_in("attic", "attic.local", "192.168.1.9")
    assert {login.host for login in past_logins()} == {"porch.local", "attic.local"}


def test_where_nothing_can_be_written_no_log_in_fails(logins: Path) -> None:
    logins.parent.mkdir()
    logins.write_text("not a folder")
    logged_in("attic", "attic.local", "192.168.1.9")
    forget_login("attic.local", None)
    assert past_logins() == []


def test_processes_that_log_in_at_the_same_time_lose_no_machine(logins: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: logged_in(f"m{n}", f"m{n}.local", "192.168.1.9", f"SHA256:{n}"), range(40)))
    assert len(past_logins()) == 40
    logged_in("again", "again.local", "192.168.1.9", "SHA256:7")  # another name of m7
    forget_login("M7.local", None)
    assert {"m7.local", "again.local"}.isdisjoint(login.host for login in past_logins())
    assert len(past_logins()) == 39


@pytest.mark.parametrize("text", ["", "-oProxyCommand=x", "@", "ada@"])
def test_what_is_no_machine_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not a machine"):
        candidates(Sources((text,), ssh_config=Path("/dev/null")), KnownKeys())


def test_a_machine_is_located_by_the_key_known_under_its_name(tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"[192.168.1.9]:2222 ssh-ed25519 {KEY}\n")
    config = tmp_path / "config"
    config.write_text(f"Host box\n  HostName 192.168.1.9\n  Port 2222\n  UserKnownHostsFile {known}\n")
    key = fingerprint(base64.b64decode(KEY))
    moved = folded(sighting("x", endpoint(77)), Identified(endpoint(77), key))
    target = SshTarget("box", "box", config_file=str(config))
    (machine,) = machines(moved)
    assert locate(target, machines(moved)) == machine
    assert locate(target, machines(folded(sighting("x", endpoint(77))))) is None


def test_of_clones_the_one_with_the_name_is_located(tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("a,b,c ssh-ed25519 " + base64.b64encode(b"one image").decode() + "\n")
    config = tmp_path / "config"
    config.write_text(f"UserKnownHostsFile {known}\nGlobalKnownHostsFile none\n")
    shown = fingerprint(b"one image")
    places = {"a": endpoint(9), "b": endpoint(10)}
    both = [sighting(name, place, origin=SightingOrigin.TYPED) for name, place in places.items()]
    found = machines(folded(*both, *(Identified(place, shown) for place in places.values())))
    located = [locate(SshTarget(name, name, config_file=str(config)), found) for name in "abc"]
    assert [machine and machine.name for machine in located] == ["a", "b", None]


def test_many_claims_to_one_address_cost_no_time() -> None:
    claims = [sighting(f"m{n}", endpoint(9), source=f"s{n // 30}") for n in range(MOST_SIGHTINGS)]
    state = folded(*claims)
    begin = time.thread_time()
    assert len(machines(state)) == 1
    assert time.thread_time() - begin < 0.5


# --------------------------------------------------------------------------------------------------- explaining


@pytest.mark.parametrize(
    ("number", "seconds", "platform", "cause", "fix"),
    [
        (errno.ECONNREFUSED, 0.0, "linux", "port_closed", "Remote Login"),
        (errno.EHOSTUNREACH, 0.01, "darwin", "local_network_permission", "Privacy & Security > Local Network"),
        (errno.EHOSTUNREACH, 3.0, "darwin", "no_route", "is it on"),
        (errno.EHOSTUNREACH, 0.01, "linux", "no_route", "is it on"),
        (errno.ETIMEDOUT, 1.5, "linux", "timeout", "awake"),
        (errno.EPERM, 0.0, "linux", "firewall", "its own firewall"),
    ],
)
def test_causes_are_told_apart(number: int, seconds: float, platform: str, cause: str, fix: str) -> None:
    problem = explain(OSError(number, "text"), seconds, endpoint(9), platform)
    assert problem.cause == cause and fix in problem.hint
    assert "\n" not in problem.message + problem.hint


def test_a_firewall_names_the_port_and_the_sign_of_life() -> None:
    problem = explain_silence(endpoint(9), "answers to ping")
    assert problem.message == "192.168.1.9 answers to ping but drops SSH connections: a firewall is in the way"


@pytest.mark.parametrize(
    ("number", "platform", "cause"),
    [
        (errno.EHOSTUNREACH, "darwin", "local_network_permission"),
        (errno.EADDRINUSE, "linux", "port_in_use"),
        (errno.EPERM, "linux", "firewall"),
        (errno.ENODEV, "linux", "no_multicast"),
    ],
)
def test_why_browsing_fails_is_told(number: int, platform: str, cause: str) -> None:
    problem = explain_browsing("en0", OSError(number, "text"), platform)
    assert problem.cause == cause and problem.hint


# ----------------------------------------------------------------------------------------- servers that misbehave


def test_garbage_and_silence_are_rows_with_their_cause(tmp_path: Path) -> None:
    with serving(garbage) as loud, serving(silent) as still:
        typed = (f"127.0.0.1:{loud}", f"127.0.0.1:{still}")
        sources = Sources(typed, ssh_config=tmp_path / "none", known_hosts=())
        with Discovery(sources, browse=False) as discovery:
            causes: set[str] = set()
            version, end = 0, time.monotonic() + PATIENCE
            while causes != {"not_ssh", "stalled"} and time.monotonic() < end:
                version = discovery.wait(version, 1.0)
                causes = {m.problem.cause for m in machines(discovery.state) if m.problem}
    assert causes == {"not_ssh", "stalled"}


def test_a_server_that_hangs_up_is_a_problem_in_one_line() -> None:
    with serving(lambda peer: None) as port:
        seen = read_host_key(Endpoint("127.0.0.1", "lo", port, PathKind.HERE))
    assert isinstance(seen, Problem) and seen.cause == "dropped" and seen.message.isprintable()


def test_a_real_server_shows_its_key_and_is_listed_again_after_a_log_in(
    make_light_lab: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.lab.light import LightLab

    lab = make_light_lab("a")
    assert isinstance(lab, LightLab)
    host = lab["a"]
    seen = read_host_key(Endpoint("127.0.0.1", "lo", host.port, PathKind.HERE))
    assert isinstance(seen, HostKeyInfo)
    assert f"{seen.key_type} {base64.b64encode(seen.blob).decode()}" == host.host_key

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir(mode=0o700)
    shutil.copy(lab.key, Path(OWN_KEY).expanduser())
    target = SshTarget("attic", "127.0.0.1", host.port)
    assert check_access(target, trust=lambda key: key.fingerprint == seen.fingerprint).ok
    (written,) = (tmp_path / "muster" / "logins").iterdir()
    assert written.stat().st_mode & 0o077 == 0
    sources = Sources(ssh_config=Path("/dev/null"), known_hosts=(), peers=False)  # as where known_hosts is hashed
    with Discovery(sources, browse=False) as discovery:
        until(lambda: [m.found_by for m in machines(discovery.state) if m.name == "attic" and m.paths[0].online])
    assert [m.found_by for m in machines(discovery.state) if not m.here] == [(SightingOrigin.PAST_LOGIN,)]
    assert clean([f"127.0.0.1:{host.port}"], yes=True) is ExitCode.DONE
    assert past_logins() == []


def test_closing_is_quick_and_may_be_done_twice(tmp_path: Path) -> None:
    discovery = Discovery(Sources(ssh_config=tmp_path / "none", known_hosts=()))
    with discovery:
        assert discovery.wait(0, PATIENCE) > 0
        (machine,) = [one for one in machines(discovery.state) if one.here]
        assert isinstance(machine, FoundMachine) and machine.status is Reachability.ONLINE
    discovery.close()


def test_interfaces_that_come_and_go_do_not_pile_up_look_ups(tmp_path: Path) -> None:
    changes, looks, answer = itertools.count(), itertools.count(), threading.Event()
    seen: dict[str, int] = {}

    def interfaces() -> Interfaces:
        seen["changes"] = next(changes)
        return Interfaces((EN0,) if seen["changes"] % 2 else ())

    def look_up(candidate: MachineCandidate, interfaces: Interfaces) -> None:
        seen["looks"] = next(looks) + 1
        answer.wait(PATIENCE)

    sources = Sources(typed=("box",), ssh_config=tmp_path / "none", known_hosts=())
    with Discovery(sources, browse=False, interfaces=interfaces, interfaces_interval=0.0, look=look_up):
        until(lambda: "looks" in seen)
        first = seen["changes"]
        until(lambda: seen["changes"] > first + 4)
        assert seen["looks"] == 1
        answer.set()
        until(lambda: seen["looks"] > 1)


def test_what_could_not_be_looked_up_is_tried_again() -> None:
    answers = iter([Problem("bad_config", "not approved", "approve it"), None])

    def answer(candidate: MachineCandidate, _: object) -> Sighting:
        return Sighting(candidate.key, candidate.target.name, problem=next(answers))

    sources = Sources(typed=("box",), ssh_config=Path("/dev/null"), known_hosts=())
    with Discovery(sources, browse=False, look=answer, retry_interval=0.05) as looking:
        until(lambda: [one.problem for one in looking.state.sightings.values() if one.name == "box"] == [None])
