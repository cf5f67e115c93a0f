"""Finding machines on a real network: real multicast, real sshd, real cables."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed.discovery.discovery import Discovery, Sources
from distributed.discovery.machine_identity import FoundMachine, machines
from distributed.discovery.sightings import MOST_PER_SOURCE, Reachability, SightingOrigin
from profiles.errors import ExitCode
from tests.lab import network, processes
from tests.lab.host import REPOSITORY, LabHost
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.lab
SPEAKER = Path(__file__).with_name("mdns_speaker.py")
CLI = REPOSITORY / "cli_typer.py"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(
        HostSpec("a", sshd_options=("ListenAddress [::]:22",)),
        "b",
        "c",
        "twin1",
        "twin2",
        "loud",
        HostSpec("bare", sshd=False),
    ) as built:
        yield built


@pytest.fixture
def found(lab: Lab) -> Iterator[Discovery]:
    with Discovery(sources(lab)) as discovery:
        yield discovery


def sources(lab: Lab, *typed: str) -> Sources:
    nothing = lab.folder / "nothing"
    return Sources(typed, ssh_config=nothing, known_hosts=(nothing,))


def at(discovery: Discovery, *addresses: str) -> list[FoundMachine]:
    """The machines that have one of these addresses."""
    return [m for m in machines(discovery.state) if {p.endpoint.address for p in m.paths} & set(addresses)]


def online(discovery: Discovery, host: LabHost) -> list[FoundMachine]:
    return [machine for machine in at(discovery, host.address) if machine.status is Reachability.ONLINE]


def by_link_local(discovery: Discovery, host: LabHost) -> str:
    """The interface through which a machine answers at its IPv6 link-local address."""
    answering = (p for m in online(discovery, host) for p in m.paths if p.status is Reachability.ONLINE)
    return next((p.endpoint.interface for p in answering if p.endpoint.address.startswith("fe80:")), "")


def announce(host: LabHost) -> subprocess.Popen[str]:
    process = host.popen([sys.executable, str(CLI), "announce"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert processes.read_line(process.stderr).startswith(f"announced as '{host.name}' on eth0")
    return process


def serve(host: LabHost, name: str, address: str = "") -> subprocess.Popen[str]:
    words = [sys.executable, str(SPEAKER), "serve", name, address or host.address]
    process = host.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert processes.read_line(process.stdout) == "ready"
    return process


def end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    process.wait(PATIENCE)


def finish(host: LabHost, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
    """Signal the announcing process inside the host."""
    processes.signal_all(host.pids("announce"), number)
    end(process)


def fingerprint(host: LabHost) -> str:
    words = ["ssh-keygen", "-lf", str(host.folder / "host_key.pub")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]


def test_an_announcer_shows_and_its_good_bye_removes_it(lab: Lab, found: Discovery) -> None:
    host = lab["a"]
    process = announce(host)
    until(lambda: at(found, host.address))
    until(lambda: online(found, host))
    (machine,) = at(found, host.address)
    assert machine.fingerprint == fingerprint(host)
    assert machine.name == "a" and machine.found_by == (SightingOrigin.BONJOUR,)
    assert machine.paths[0].endpoint.interface == lab.bridge
    assert int(machine.details["memory"]) > 0 and "cpu" in machine.details["devices"]
    until(lambda: by_link_local(found, host) == lab.bridge)
    finish(host, process)
    assert process.returncode == 0
    until(lambda: not at(found, host.address))


def test_one_that_was_announced_before_shows(lab: Lab) -> None:
    process = serve(lab["a"], "studio")
    with Discovery(sources(lab)) as discovery:
        until(lambda: at(discovery, lab["a"].address))
        assert at(discovery, lab["a"].address)[0].names == ("studio", "studio.local")
        end(process)
        until(lambda: not at(discovery, lab["a"].address))


def test_a_killed_one_is_offline(lab: Lab, found: Discovery) -> None:
    host = lab["b"]
    process = announce(host)
    until(lambda: online(found, host))
    finish(host, process, signal.SIGKILL)
    host.stop_sshd()
    try:
        until(lambda: not online(found, host))
        (machine,) = at(found, host.address)
        assert machine.status is Reachability.OFFLINE and machine.problem is not None
        assert machine.problem.cause == "port_closed" and "Remote Login" in machine.problem.hint
    finally:
        host.start_sshd()


def test_a_machine_without_power_is_offline(make_lab: Callable[..., Lab]) -> None:
    own = make_lab("gone")
    with Discovery(sources(own)) as discovery:
        process = announce(own["gone"])
        until(lambda: online(discovery, own["gone"]))
        own["gone"].kill()
        until(lambda: not online(discovery, own["gone"]))
        (machine,) = at(discovery, own["gone"].address)
        assert machine.problem is not None and machine.problem.cause in ("timeout", "no_route")
        end(process)


@contextlib.contextmanager
def second_cable(lab: Lab, host: LabHost) -> Iterator[tuple[str, str]]:
    """A direct cable from this machine to a host: its interface here, and the link-local address there."""
    port, net = f"mucable{lab.slot}", f"169.254.{lab.slot + 1}"  # its own: labs run side by side
    network.ip("link", "add", port, "type", "veth", "peer", "name", "eth1", "netns", str(host.pid))
    try:
        network.ip("addr", "add", f"{net}.1/24", "dev", port)
        network.ip("link", "set", port, "up")
        for words in (["addr", "add", f"{net}.2/24", "dev", "eth1"], ["link", "set", "eth1", "up"]):
            host.run(["ip", *words], check=True)
        yield port, f"{net}.2"
    finally:
        network.ip("link", "del", port)


def test_one_machine_is_one_entry_also_when_a_second_cable_is_plugged_in(lab: Lab, found: Discovery) -> None:
    host = lab["c"]
    process = announce(host)
    with second_cable(lab, host) as (port, direct):

        def answering() -> set[tuple[str, str, str]]:
            paths = [path for machine in at(found, host.address) for path in machine.paths]
            return {
                (path.endpoint.address, path.endpoint.interface, path.endpoint.kind.value)
                for path in paths
                if path.status is Reachability.ONLINE
            }

        both = {(host.address, lab.bridge, "wired"), (direct, port, "link-local")}
        until(lambda: both <= answering())
        (machine,) = at(found, host.address, direct)
        assert machine.paths[0].endpoint.address == host.address
    finish(host, process)


def test_two_machines_with_one_name_are_two(lab: Lab, found: Discovery) -> None:
    hosts = [lab["twin1"], lab["twin2"]]
    speakers = [serve(host, "mac") for host in hosts]
    until(lambda: all(online(found, host) for host in hosts))
    both = at(found, *(host.address for host in hosts))
    assert [machine.name for machine in both] == ["mac", "mac"]
    assert {machine.fingerprint for machine in both} == {fingerprint(host) for host in hosts}
    for process in speakers:
        end(process)


def test_a_flood_of_ten_thousand_names_is_bounded_and_hides_nobody(lab: Lab, found: Discovery) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = [sys.executable, str(SPEAKER), "flood", "10000", lab["loud"].address]
    flood = lab["loud"].popen(words, stdout=subprocess.PIPE, text=True)
    honest = serve(lab["a"], "honest")
    until(lambda: online(found, lab["a"]))
    flood.wait(PATIENCE)
    until(lambda: found.state.ignored > 100)
    end(honest)
    end(flood)
    assert len(found.state.sightings) <= MOST_PER_SOURCE + 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000  # kB
    assert found.state.ignored_from == lab["loud"].address
    assert any(machine.name == "\x1b[31mevil\x07" for machine in machines(found.state))


def test_a_firewall_is_told_from_an_absent_machine(lab: Lab) -> None:
    fill = (
        "import socket, sys\n"
        "s = socket.socket(); s.bind(('', 2022)); s.listen(0)\n"
        "kept = []\n"
        "for _ in range(4):\n"
        "    c = socket.socket(); c.setblocking(False); c.connect_ex(('127.0.0.1', 2022)); kept.append(c)\n"
        "print('full', flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", fill]
    process = lab["bare"].popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and processes.read_line(process.stdout) == "full"
    dropping, absent = f"{lab['bare'].address}:2022", f"198.18.{lab.slot}.250"

    def causes() -> dict[str, str]:
        found = [m for m in machines(discovery.state) if m.problem]
        return {m.paths[0].endpoint.address: m.problem.cause for m in found if m.paths and m.problem}

    with Discovery(sources(lab, dropping, absent), browse=False) as discovery:
        until(lambda: causes().get(lab["bare"].address) == "firewall")
        until(lambda: causes().get(absent) in ("timeout", "no_route"))
    end(process)


def test_the_command_lists_and_watches(lab: Lab) -> None:
    person = lab["b"]
    speaker = serve(lab["a"], "studio")
    for seconds in (3, 10, 40):  # a busy machine may need more
        words = [sys.executable, str(CLI), "discover", "--json", "--timeout", str(seconds), lab["twin1"].address]
        document = json.loads(person.run(words, check=True).stdout)
        by_name = {machine["name"]: machine for machine in document["machines"]}
        if "studio" in by_name and by_name["studio"]["status"] == "online":
            break
    assert by_name["studio"]["status"] == "online"
    assert by_name["studio"]["fingerprint"] == fingerprint(lab["a"])
    assert by_name["b"]["here"] and document["browsed"]["interfaces"] == ["eth0"]
    assert by_name[lab["twin1"].address]["found_by"] == ["typed"]
    end(speaker)


def test_watching_prints_what_changes(lab: Lab) -> None:
    words = [sys.executable, str(CLI), "discover", "--watch"]
    watch = lab["b"].popen(words, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    assert processes.read_line(watch.stdout).startswith("found: b online")
    speaker = serve(lab["a"], "studio")
    assert next(line for line in watch.stdout if "studio online at" in line)
    end(speaker)
    assert next(line for line in watch.stdout if line.startswith("gone: studio"))
    processes.signal_all(lab["b"].pids("--watch"), signal.SIGINT)
    end(watch)
    assert watch.returncode == ExitCode.STOPPED
