"""Machines between discovery, the set-up's rows, and the hosts file of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.wizard.engine import Wizard
from app.wizard.services.discovery_watch import is_present
from app.wizard.services.machines import HERE_KEY, Naming, ThisComputer, hosts_of, row_of, trust_in
from app.wizard.services.services import Services
from app.wizard.state import actions as do
from app.wizard.state.dependencies import apply, begin
from app.wizard.state.observations import origin_of, sighted
from app.wizard.state.records import DiscoveredMachines, ItemStatus, KnownProfile, MachineRow
from distributed.discovery.machine_identity import FoundMachine, FoundPath
from distributed.discovery.network_interfaces import Endpoint, PathKind
from distributed.discovery.sightings import Problem, Reachability, SightingOrigin
from distributed.hosts.file import Hosts, Machine, dump_hosts, parse_hosts
from distributed.hosts.past_logins import PastLogin
from distributed.ssh.keys.host_keys import HostKeyInfo
from profiles.files.resolve import ProfileEntry
from tests.waiting import until_state

PATH = FoundPath(Endpoint("192.168.1.7", "en0", 22, PathKind.WIRED), Reachability.ONLINE, None)
STUDIO = FoundMachine(
    "SHA256:x",
    "Studio",
    ("Studio", "studio.local"),
    Reachability.ONLINE,
    (SightingOrigin.BONJOUR,),
    (PATH,),
    "SHA256:x",
)


def test_a_machine_of_the_network_is_reached_by_name_at_its_address() -> None:
    (row,) = Naming((), ()).rows([STUDIO])
    assert (row.key, row.name, row.status, row.words) == ("SHA256:x", "Studio", ItemStatus.OK, "online")
    machine = row.entry
    assert (machine.address, machine.found_at) == ("studio.local", "192.168.1.7")
    assert row.paths == (PATH,)


def test_machines_of_a_profile_that_was_just_saved_are_online_where_they_are_listed() -> None:
    rows = Naming((), ()).rows([STUDIO])
    profile = KnownProfile(
        ProfileEntry("mine", "", Path("mine.ini")), saved=True, machines=(rows[0].entry, Machine(name="other"))
    )
    state = replace(begin(), machines=DiscoveredMachines(rows))
    assert [one.present for one in state.presence_of(profile)] == [True, None]


def test_a_machine_that_waits_for_an_approval_is_a_warning_and_not_absent() -> None:
    problem = Problem("bad_config", "its SSH configuration is not approved", "approve it")
    machine = FoundMachine(
        "x", "box", ("box",), Reachability.UNCHECKED, (SightingOrigin.HOSTS_FILE,), (), problem=problem
    )
    (row,) = Naming((), ()).rows([machine])
    assert (row.status, row.label, row.cause) == (ItemStatus.WARNING, "not tried yet", problem.message)
    box = Machine(name="box", address="nowhere.invalid")
    assert is_present(box, Hosts(machines=(box,)), (), [machine]) is None


def test_two_that_claim_one_name_are_reached_by_their_addresses() -> None:
    other = replace(PATH, endpoint=Endpoint("192.168.1.8", "en0"))
    twin = replace(STUDIO, id="SHA256:y", fingerprint="SHA256:y", paths=(other,))
    rows = Naming((), ()).rows([STUDIO, twin])
    assert [row.entry.address for row in rows] == ["192.168.1.7", "192.168.1.8"]
    assert [machine.name for machine in hosts_of(rows).machines] == ["Studio", "Studio-2"]


def test_what_was_typed_and_what_a_file_says_come_first() -> None:
    typed = replace(STUDIO, names=("studio.local",), found_by=(SightingOrigin.TYPED, SightingOrigin.BONJOUR))
    (row,) = Naming(["ada@studio.local:2222"], ()).rows([typed])
    assert (row.entry.host, row.entry.port, row.entry.user) == ("studio.local", 2222, "ada")
    assert "typed:ada@studio.local:2222" in row.aliases
    entry = Machine(name="Studio", address="10.9.9.9", python="/opt/py", user="eve")
    listed = replace(STUDIO, found_by=(SightingOrigin.HOSTS_FILE,))
    (row,) = Naming((), [Hosts(machines=(entry,), ssh_config="/etc/mine")]).rows([listed])
    hosts = hosts_of([row])
    assert hosts.machines == (entry,) and hosts.ssh_config == "/etc/mine"


@pytest.mark.parametrize("host", ["attic.lan", "192.168.1.3"])
def test_a_machine_used_before_has_its_name_and_user_at_its_present_address(host: str) -> None:
    login = PastLogin("attic", host, "192.168.1.3", 22, "ada", "SHA256:x")
    unnamed = replace(STUDIO, name="192.168.1.7", names=("192.168.1.7",), found_by=(SightingOrigin.KNOWN_HOSTS,))
    (row,) = Naming((), (), logins=[login]).rows([unnamed])
    assert (row.name, row.entry.user, row.found_by[-1]) == ("attic", "ada", "used before")
    assert (row.entry.found_at or row.entry.host) == "192.168.1.7"
    assert host != "attic.lan" or row.entry.host == host
    (other,) = Naming((), (), logins=[replace(login, fingerprint="SHA256:y")]).rows([unnamed])
    assert (other.name, other.entry.user) == ("192.168.1.7", "")


@pytest.mark.parametrize("paths", [(PATH,), ()])
def test_a_choice_made_before_the_host_key_was_seen_still_holds(paths: tuple[FoundPath, ...]) -> None:
    before = replace(STUDIO, id="unidentified:Studio", fingerprint="", status=Reachability.CHECKING, paths=paths)
    state = apply(begin(), sighted(DiscoveredMachines(Naming((), ()).rows([before]))))
    state = apply(
        apply(state, do.pick("unidentified:Studio")), sighted(DiscoveredMachines(Naming((), ()).rows([STUDIO])))
    )
    assert state.answers.picked == ("SHA256:x",)


def test_this_computer_trains_with_this_python() -> None:
    here = FoundMachine("x", "desk", ("desk",), Reachability.ONLINE, (SightingOrigin.HERE,), (), here=True)
    (row,) = Naming((), ()).rows([here])
    assert row.key == HERE_KEY and row.here and row.memory.endswith(" GB")
    machine = row.entry
    assert machine.is_local and "python" in machine.python


@pytest.mark.parametrize(
    "machine",
    [Machine(name="a", address="a.local", port=22, user="u", key="~/.ssh/k", devices=("cpu",)), Machine(name="b")],
)
def test_a_saved_machine_comes_back_as_it_was(machine: Machine) -> None:
    row = row_of(machine, ThisComputer("desk", "", "", ""))
    assert hosts_of([row]).machines == (machine,)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=80), st.text(max_size=80)), max_size=4),
    st.sampled_from(list(SightingOrigin)[1:]),
)
def test_names_of_the_network_always_make_a_hosts_file(names: list[tuple[str, str]], origin: SightingOrigin) -> None:
    found = [
        replace(STUDIO, id=str(number), name=name or "x", names=(name or "x", f"{host}.local"), found_by=(origin,))
        for number, (name, host) in enumerate(names)
    ]
    rows = Naming((), ()).rows(found)
    if rows:
        hosts = hosts_of(rows)
        assert parse_hosts(dump_hosts(hosts.model_copy(update={"machines": hosts.machines[:1]})), "test").machines
        assert len({machine.name.casefold() for machine in hosts.machines}) == len(rows)


@pytest.mark.slow
def test_a_typed_machine_is_looked_for_until_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wizard = Wizard(Services(tmp_path / "config.ini"))

    def named() -> list[str]:
        return [row.name for row in wizard.state.machines.rows if row.name == "no-such-host.invalid"]

    try:
        wizard.do(do.new_setup())
        until_state(wizard, lambda state: state.machines.seconds > 0)
        wizard.do(do.add_machine("ada@no-such-host.invalid"))
        until_state(wizard, lambda state: any(row.cause for row in state.machines.rows))
        assert named() == ["no-such-host.invalid"]
        wizard.do(do.remove_machine("ada@no-such-host.invalid"))
        seconds = wizard.state.machines.seconds
        until_state(wizard, lambda state: state.machines.seconds > seconds + 2 and not named())
        assert wizard.state.answers.picked == ("here",)
    finally:
        wizard.close()


def test_a_key_that_is_known_under_another_name_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [paramiko.ECDSAKey.generate() for _ in range(2)]
    (tmp_path / "known_hosts").write_text(f"b {keys[0].get_name()} {keys[0].get_base64()}\n")
    monkeypatch.setattr("app.wizard.services.machines.USER_KNOWN_HOSTS", (tmp_path / "known_hosts",))
    shown = [HostKeyInfo("x", "198.18.2.12", key.get_name(), key.asbytes()) for key in keys]
    assert [trust_in(())(key) for key in shown] == [True, False]
    assert trust_in((shown[1].fingerprint,))(shown[1])


@pytest.mark.parametrize(
    ("found_by", "origin"),
    [
        ((), ""),
        ((SightingOrigin.TYPED.value,), "added by you"),
        (("Bonjour", "hosts file"), "found by Bonjour and hosts file"),
        ((SightingOrigin.TYPED.value, "Bonjour"), "found by Bonjour, added by you"),
        (("Bonjour", SightingOrigin.PAST_LOGIN.value), "found by Bonjour, used before"),
    ],
)
def test_how_a_machine_came_into_the_list(found_by: tuple[str, ...], origin: str) -> None:
    assert origin_of(MachineRow("pi", "pi", entry=Machine(name="pi"), found_by=found_by)) == origin
