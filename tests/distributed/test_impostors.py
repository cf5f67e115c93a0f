"""Who answers under the name of a known machine with another host key is shown as that, and never as the machine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.wizard.services.discovery_watch import is_present
from app.wizard.services.machines import Naming
from app.wizard.state.records import ItemStatus
from distributed.discovery.known_machines import MachineCandidate, look_up, with_expected
from distributed.discovery.machine_identity import machines
from distributed.discovery.network_interfaces import Endpoint, Interfaces, PathKind
from distributed.discovery.reachability import PathWatch
from distributed.discovery.sightings import (
    Failed,
    Identified,
    Observation,
    PathState,
    Problem,
    Reachability,
    Sighting,
    SightingKey,
    SightingOrigin,
    State,
    Withdrawn,
    apply,
)
from distributed.hosts.schema import Hosts, Machine
from distributed.ssh.config import SshTarget
from distributed.ssh.keys.host_keys import Expected, HostKeyInfo, KnownHosts

PLACE = Endpoint("192.168.1.9", "en0", kind=PathKind.WIRED)
Read = Callable[..., "HostKeyInfo | Problem"]
KNOWN = Expected("studio.local", (("ssh-ed25519", "SHA256:studio"),))


def sighted(name: str, expected: Expected = KNOWN, origin: SightingOrigin = SightingOrigin.HOSTS_FILE) -> Sighting:
    return Sighting(SightingKey(origin, "", name), name, f"{name}.local", (PLACE,), expected=expected)


def folded(*observations: Sighting | Identified | Failed) -> State:
    state = State()
    for observation in observations:
        state = apply(state, observation)
    return state


def shows(fingerprint: str, key_type: str = "ssh-ed25519") -> Identified:
    return Identified(PLACE, fingerprint, (), ((key_type, fingerprint),))


def test_another_key_under_a_known_name_is_a_state_of_its_own_with_what_to_do() -> None:
    (found,) = machines(folded(sighted("studio"), shows("SHA256:evil")))
    assert found.status is Reachability.OTHER_KEY and found.status.value == "key does not match the known one"
    assert found.problem is not None and "SHA256:evil" in found.problem.message
    assert "ssh-keygen -R studio.local" in found.problem.hint
    (row,) = Naming((), ()).rows([found])
    assert row.status is ItemStatus.FAILED and row.cause == found.problem.message


@pytest.mark.parametrize(
    ("of_the_known_type", "status"),
    [("SHA256:studio", Reachability.ONLINE), ("SHA256:evil", Reachability.OTHER_KEY), ("", Reachability.OTHER_KEY)],
)
def test_who_shows_a_key_of_another_type_is_asked_for_one_of_the_known_type(
    of_the_known_type: str, status: Reachability
) -> None:
    """An impostor may have a key of another type; so may the machine itself, beside the known one."""
    asked: list[str] = []

    def read(endpoint: Endpoint, timeout: float = 1.0, kind: str = "") -> HostKeyInfo:
        asked.append(kind)
        known = kind and of_the_known_type
        return answer(of_the_known_type) if known else answer("SHA256:other", "ecdsa-sha2-nistp256")

    for first in (sighted("studio"), sighted("stranger", Expected())):  # its known name may be seen afterwards
        asked.clear()
        found = next(one for one in machines(watched(read, first, sighted("studio"))) if "studio" in one.names)
        assert found.status is status and asked[-1] == "ssh-ed25519"


def test_who_does_not_answer_when_asked_for_the_known_type_is_not_online() -> None:
    def read(endpoint: Endpoint, timeout: float = 1.0, kind: str = "") -> HostKeyInfo | Problem:
        return Problem("stalled", "no end") if kind else answer("SHA256:other", "ecdsa-sha2-nistp256")

    (found,) = machines(watched(read, sighted("studio")))
    assert found.status is Reachability.OFFLINE


class Shown(HostKeyInfo):
    """A key with a fingerprint that can be read."""

    @property
    def fingerprint(self) -> str:
        return self.blob.decode()


def answer(fingerprint: str, key_type: str = "ssh-ed25519") -> HostKeyInfo:
    return Shown("", "", key_type, fingerprint.encode())


def watched(read: Read, *seen: Sighting) -> State:
    """Return the state after these sightings, one after the other, with all looks that are due after each."""
    state = State()

    def observe(observation: Observation) -> None:
        nonlocal state
        state = apply(state, observation)

    async def look() -> None:
        watch = PathWatch(observe, {}, read)
        for sighting in seen:
            observe(sighting)
            for due in list(watch.due(state)):
                await due

    asyncio.run(look())
    return state


def test_who_was_never_looked_at_comes_before_who_is_due_again() -> None:
    """Else many silent addresses would hold up a machine for ever."""
    now, looked = 0.0, list[Endpoint]()

    def read(endpoint: Endpoint, timeout: float = 1.0, kind: str = "") -> Problem:
        looked.append(endpoint)
        return Problem("no_route", "nobody there")

    async def look() -> None:
        nonlocal now
        watch = PathWatch(lambda observation: None, {}, read, clock=lambda: now)
        while len(looked) < len(state.paths):
            for due in list(watch.due(state)):
                await due
            now += 3.0

    state = State(paths={Endpoint(f"10.0.0.{number}", "eth0"): PathState() for number in range(1, 101)})
    asyncio.run(look())
    assert set(looked[: len(state.paths)]) == set(state.paths)


@pytest.mark.slow
def test_who_answers_is_looked_at_before_many_that_are_new_and_silent() -> None:
    now, state, reached = 0.0, State(), list[Endpoint]()

    def observe(observation: Observation) -> None:
        nonlocal state
        state = apply(state, observation)

    def read(endpoint: Endpoint, timeout: float = 1.0, kind: str = "") -> HostKeyInfo | Problem:
        return answer("SHA256:studio") if endpoint == PLACE else Problem("no_route", "nobody there")

    def sign(endpoint: Endpoint) -> str:
        reached.append(endpoint)
        return "answers"

    def silent(number: int) -> Sighting:
        places = tuple(Endpoint(f"10.0.{number}.{last}", "en0") for last in range(1, 17))
        return Sighting(SightingKey(SightingOrigin.BONJOUR, "", str(number)), "x", "x.local", places)

    async def look() -> None:
        nonlocal now
        watch = PathWatch(observe, {}, read, clock=lambda: now, connect=lambda *_: None, probe_life=sign)
        for turn in range(10):
            now = 3.0 * turn
            for one in (sighted("studio"), *(silent(3 * turn + more) for more in range(3))):
                observe(one)
            for due in list(watch.due(state)):
                await due

    asyncio.run(look())
    assert len(reached) == 8  # at every turn but the first, when its key was read, and one at which it was connected to


@pytest.mark.parametrize(("sign", "connections"), [("answers to ping", 2), ("", 3)])
def test_a_machine_that_answers_is_seldom_connected_to(sign: str, connections: int) -> None:
    """``ufw limit`` refuses the sixth connection within 30 s, and a person's own count with these."""
    now, state, times = 0.0, State(), list[float]()

    def observe(observation: Observation) -> None:
        nonlocal state
        state = apply(state, observation)

    def read(endpoint: Endpoint, timeout: float = 1.0, kind: str = "") -> HostKeyInfo:
        times.append(now)
        return answer("SHA256:studio")

    async def look() -> None:
        nonlocal now
        watch = PathWatch(observe, {}, read, lambda *_: times.append(now), lambda: now, lambda endpoint: sign)
        observe(sighted("studio"))
        for tenth in range(300):
            now = tenth / 10
            for due in list(watch.due(state)):
                await due

    asyncio.run(look())
    assert len(times) <= connections


def test_who_refuses_right_after_an_answer_is_not_said_to_have_no_server() -> None:
    now, state = 0.0, State()

    def observe(observation: Observation) -> None:
        nonlocal state
        state = apply(state, observation)

    async def look() -> None:
        nonlocal now
        refused = Problem("port_closed", "no SSH server listens", "turn it on")
        watch = PathWatch(observe, {}, lambda *_, **__: answer("SHA256:studio"), lambda *_: refused, lambda: now,
                          lambda endpoint: "")  # fmt: skip
        observe(sighted("studio"))
        for second in (0.0, 5.0):
            now = second
            for due in list(watch.due(state)):
                await due

    asyncio.run(look())
    (found,) = machines(state)
    assert found.problem is not None and found.problem.cause == "port_closed"
    assert "answered 5 s ago" in found.problem.message and "ufw limit" in found.problem.hint
    assert "Remote Login" in found.problem.hint


def test_who_is_withdrawn_and_seen_again_between_two_looks_is_identified_anew() -> None:
    now, state = 0.0, State()

    def observe(observation: Observation) -> None:
        nonlocal state
        state = apply(state, observation)

    async def look() -> None:
        nonlocal now
        watch = PathWatch(observe, {}, lambda *_, **__: answer("SHA256:studio"), clock=lambda: now)
        seen = sighted("studio")
        for observations in ([seen], [Withdrawn(seen.key), seen]):
            for one in observations:
                observe(one)
            for due in list(watch.due(state)):
                await due
            now += 3.0

    asyncio.run(look())
    assert [path.status for path in state.paths.values()] == [Reachability.ONLINE]


def test_an_impostor_that_is_gone_is_offline() -> None:
    gone = Failed(PLACE, Problem("timeout", "no answer"))
    (found,) = machines(folded(sighted("studio"), shows("SHA256:evil"), gone))
    assert found.status is Reachability.OFFLINE


def test_a_machine_that_is_met_at_the_address_of_another_stays_itself() -> None:
    """An address given out anew: the machine that has it now is well, and the name that leads there is not."""
    pi = sighted("pi", Expected("pi.local", (("ssh-ed25519", "SHA256:pi"),)), SightingOrigin.SSH_CONFIG)
    found = machines(folded(sighted("studio"), pi, shows("SHA256:pi")))
    assert {machine.name: machine.status for machine in found} == {
        "studio": Reachability.OTHER_KEY,
        "pi": Reachability.ONLINE,
    }


@given(st.lists(st.sampled_from(["a", "b"]), max_size=3), st.lists(st.sampled_from(["s", "t"]), min_size=1))
def test_no_name_is_online_with_a_key_that_refutes_it(known: list[str], names: list[str]) -> None:
    expected = Expected("x", tuple(("ssh-ed25519", key) for key in known))
    found = machines(folded(*(sighted(name, expected) for name in names), shows("a")))
    assert all((machine.status is Reachability.ONLINE) == (not known or "a" in known) for machine in found)


def known_hosts(path: Path, name: str, blob: bytes) -> Path:
    path.write_text(f"{name} ssh-ed25519 {base64.b64encode(blob).decode()}\n")
    return path


def test_an_announced_name_that_is_known_brings_its_key_along(tmp_path: Path) -> None:
    """Of who announces itself nothing is believed: not that it is the machine of that name either."""
    file = known_hosts(tmp_path / "known_hosts", "studio.local", b"the key of the studio")
    announced = sighted("studio", Expected(), SightingOrigin.BONJOUR)
    seen = with_expected(announced, KnownHosts.read([file]).expected)
    (found,) = machines(folded(seen, shows("SHA256:evil")))
    assert found.status is Reachability.OTHER_KEY


def test_an_entry_of_a_file_is_expected_to_have_the_key_that_ssh_knows(tmp_path: Path) -> None:
    file = known_hosts(tmp_path / "known_hosts", "[127.0.0.1]:2222", b"another key")
    config = tmp_path / "config"
    config.write_text(f"Host box\n  HostName 127.0.0.1\n  Port 2222\n  UserKnownHostsFile {file}\n")
    target = SshTarget("box", "box", config_file=str(config))
    seen = look_up(MachineCandidate(SightingOrigin.SSH_CONFIG, target), Interfaces(()))
    assert seen is not None
    assert seen.expected == KnownHosts.read([file]).expected("[127.0.0.1]:2222")
    assert seen.expected.refutes((("ssh-ed25519", "SHA256:evil"),))


@pytest.mark.parametrize("answer", [shows("SHA256:evil"), shows("SHA256:studio")])
def test_a_saved_machine_is_only_present_with_its_own_key(answer: Identified) -> None:
    entry = Machine(name="studio")
    online = [one for one in machines(folded(sighted("studio"), answer)) if one.status is Reachability.ONLINE]
    assert is_present(entry, Hosts(machines=(entry,)), online) == (answer.fingerprint == "SHA256:studio")
