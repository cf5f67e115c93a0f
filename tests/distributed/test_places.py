"""Where the members of a run are: who is beside the coordinator, how it is dialled, who is missing at the start."""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar, Literal, NoReturn, cast

import pytest
from scripted_connection import undialled

from distributed.hosts.file import RUN_HOSTS, load_hosts, save_hosts
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import HereConnection, MachineLink
from distributed.preparation.members import plan_run
from distributed.run import run_machines
from distributed.run.machine_stages import MachineStages
from distributed.run.run_machines import MachineRoute, StartWatch, ensure_reachable
from distributed.ssh.errors import ForwardRefused, NoRoute
from distributed.ssh.forward import Forward
from distributed.workers.agent_records import Assignment
from distributed.workers.remote_worker import RemoteWorker
from distributed.workers.rendezvous import RendezvousUpdates
from profiles.files.resolve import profile_from_options
from tests.distributed.test_preflight import SOUND
from tests.waiting import until
from training.records.events import MemberEvent, ProgressEvent, RunEvent, TimingEvent, WarningEvent
from training.records.plan import DevicePlan
from training.run.orders import Command


def links(center: str = "") -> list[MachineLink]:
    hosts = {"here": "localhost", "a": "10.0.0.1", "b": "10.0.0.2"}
    return [undialled(name, address=host, carries_coordinator=name == center) for name, host in hosts.items()]


@pytest.mark.parametrize(
    ("engine", "coordinator", "local"),
    [("mesh", "", [True, False, False]), ("mesh", "a", [False, True, False]), ("nccl", "a", [False, True, False])],
)
def test_who_is_beside_the_coordinator(engine: Literal["mesh", "nccl"], coordinator: str, local: list[bool]) -> None:
    profile = profile_from_options("p", {"task": "custom", "model_path": "a.b:c", "engine": engine})
    plan = plan_run(profile, [(link, SOUND) for link in links(coordinator)])
    assert [plan.is_local(process) for process in plan.processes] == local
    assert plan.model_copy(update={"coordinator": "b"}).hash() == plan.hash()


def test_this_computer_dials_a_coordinator_on_another_machine_at_its_address() -> None:
    carrier = undialled("a", "10.0.0.1", address="10.0.0.1", carries_coordinator=True)
    here = undialled("here", "127.0.0.1", address="localhost")
    assert MachineRoute(here, DevicePlan(), carrier)("0.0.0.0:4000") == "10.0.0.1:4000"
    assert MachineRoute(carrier, DevicePlan(), carrier)("0.0.0.0:4000") == "127.0.0.1:4000"
    chosen = DevicePlan(coordinator_address="10.9.0.1")
    assert MachineRoute(here, chosen, carrier)("0.0.0.0:4000") == "10.9.0.1:4000"


def test_the_relay_of_a_launched_script_is_dialled_and_its_store_is_not() -> None:
    direct = MachineRoute(undialled("a", "10.0.0.1", address="10.0.0.1"), DevicePlan())
    assert direct("10.0.0.9:4000") == "10.0.0.9:4000"
    with pytest.raises(AssertionError, match="nobody is called"):  # it would be forwarded
        direct("127.0.0.1:4000")
    jumped = MachineRoute(undialled("b"), DevicePlan())
    with pytest.raises(AssertionError, match="nobody is called"):
        jumped("10.0.0.9:4000")
    here = MachineRoute(undialled("me", "127.0.0.1", address="localhost"), DevicePlan())
    assert here("0.0.0.0:4000") == "127.0.0.1:4000"
    assert here("[::]:4000") == "[::1]:4000"


class Forwarding(HereConnection):
    """Counts ports up from 5000 where it is asked for any; those of ``taken`` cannot be had."""

    taken: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        super().__init__("far")
        self.forwarded: dict[int, tuple[str, int]] = {}
        self.lives = True

    def forward_remote(self, local_address: tuple[str, int], remote_port: int = 0) -> Forward:
        port = remote_port or 5000 + len(self.forwarded) + len(self.taken)
        if port in self.taken:
            raise ForwardRefused("far", "in use")
        self.forwarded[port] = local_address
        return Forward(port, lambda: None)

    def alive(self) -> bool:
        return self.lives


def test_a_forward_is_made_again_on_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forwarding, "taken", set())
    dialled: list[Forwarding] = []

    def dial() -> Forwarding:
        dialled.append(Forwarding())
        return dialled[-1]

    link = MachineLink(Machine(name="far"), dial)
    assert [link.forward(("127.0.0.1", port))[-4:] for port in (1, 2, 1)] == ["5000", "5001", "5000"]
    dialled[-1].lives = False
    link.connection()
    assert dialled[-1].forwarded == {5000: ("127.0.0.1", 1), 5001: ("127.0.0.1", 2)}
    dialled[-1].lives = False
    Forwarding.taken.add(5001)  # the server has not noticed yet that the connection before is gone
    assert link.forward(("127.0.0.1", 2)) == "127.0.0.1:5002"


def test_who_cannot_dial_this_computer_is_sent_through_ssh() -> None:
    link = MachineLink(Machine(name="a"), Forwarding, "127.0.0.1")
    assert MachineRoute(link, DevicePlan())("0.0.0.0:4000") == "127.0.0.1:4000"
    assert MachineRoute(link, DevicePlan(through_ssh=True))("0.0.0.0:4000") == "127.0.0.1:5000"


def test_a_member_is_told_once_what_has_changed() -> None:
    link = MachineLink(Machine(name="a"), Forwarding, "10.0.0.1")
    rendezvous = RendezvousUpdates(MachineRoute(link, DevicePlan(coordinator_address="10.9.9.9")))
    assert rendezvous.update() == {}
    assert rendezvous.begin({"address": "0.0.0.0:4000", "relay": "0.0.0.0:4001"}) == {
        "address": "10.9.9.9:4000",
        "relay": "10.9.9.9:4001",
    }
    assert rendezvous.update() == {}
    assert rendezvous.replace_address("10.8.8.8:4000") == {}  # it has been told another one since
    changed = {"command": "redial", "address": "127.0.0.1:5000", "relay": "127.0.0.1:5001"}
    assert rendezvous.replace_address("10.9.9.9:4000") == changed
    assert Command.model_validate(changed).relay == "127.0.0.1:5001"
    assert rendezvous.update() == {}
    assert rendezvous.replace_address("127.0.0.1:5000") == {}  # there is no other way


def test_a_new_address_comes_before_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ["10.0.0.7", "10.0.0.8"]
    monkeypatch.setattr(run_machines, "address_towards", lambda host: ours[0])
    rendezvous = RendezvousUpdates(MachineRoute(MachineLink(Machine(name="a"), Forwarding, "10.0.0.1"), DevicePlan()))
    rendezvous.begin({"address": "0.0.0.0:4000"})
    ours.pop(0)
    assert rendezvous.replace_address("10.0.0.7:4000")["address"] == "10.0.0.8:4000"
    assert rendezvous.replace_address("10.0.0.8:4000")["address"] == "127.0.0.1:5000"


def test_a_machine_that_is_back_elsewhere_has_its_new_address() -> None:
    class Moved(Forwarding):
        peer = "10.0.0.9"

    connections = [Forwarding(), Moved()]
    link = MachineLink(Machine(name="a"), lambda: connections.pop(0), "studio.local")
    cast("Forwarding", link.connection()).lives = False
    link.connection()
    assert link.host == "10.0.0.9"


def test_a_worker_that_cannot_reach_the_coordinator_is_sent_through_ssh(tmp_path: Path) -> None:
    link = MachineLink(Machine(name="a"), Forwarding, "127.0.0.1")
    reach, nothing = MachineRoute(link, DevicePlan()), io.BytesIO()
    worker = RemoteWorker(link, Assignment("r", 0, b"{}", {}), nothing, tmp_path, tmp_path, reach)
    worker.send({"address": "0.0.0.0:4000"})
    warning = WarningEvent(message="a: cannot reach it", unreached="127.0.0.1:4000")
    worker.note_event(warning)
    until(lambda: worker._commands[-1].get("worker", {}).get("address") == "127.0.0.1:5000")


def test_an_address_of_this_computer_that_is_gone_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    link = MachineLink(Machine(name="a"), Forwarding, "127.0.0.1")
    ours = {"127.0.0.2": "wlan0"}
    monkeypatch.setattr(run_machines, "interface_at", lambda address: ours.get(address, ""))
    reach = MachineRoute(link, DevicePlan(coordinator_address="127.0.0.2"))
    assert reach("0.0.0.0:4000") == "127.0.0.2:4000"
    ours.clear()
    assert reach("0.0.0.0:4000") == "127.0.0.1:4000"


def test_every_missing_machine_and_its_reason() -> None:
    watch = StartWatch(["a", "b", "c", "d", "e"])
    for rank in (0, 1, 2, 4):
        watch(MemberEvent(member=rank, status="started"))
    watch(ProgressEvent(member=1, phase="features", done=3, total=10))
    watch(ProgressEvent(member=2, phase="features", done=10, total=10))
    watch(TimingEvent(member=2, part="worker: waits for the engine", seconds=0.1))
    watch(MemberEvent(member=0, status="joined"))
    warnings = watch.missing()
    b, c, d, e = (warning.message for warning in warnings)
    assert b == "waiting for b: it is preparing (features)"
    assert c.startswith("waiting for c: its worker runs and has not reached the coordinator")
    assert d == "waiting for d: its worker has not started yet"
    assert e == "waiting for e: its worker is still starting"
    assert [warning.awaited for warning in warnings] == ["b", "c", "d", "e"]
    watch(MemberEvent(member=3, status="started"))
    assert [warning.message for warning in watch.missing()] == ["waiting for d: its worker is still starting"]


def test_who_waits_for_a_machine_hears_its_stage() -> None:
    """From the first connection on: a worker whose imports take minutes is no worker that has not started."""
    watch, reports = StartWatch(["a", "b"]), list[ProgressEvent]()
    stages = MachineStages(MachineLink(Machine(name="b"), Forwarding, "127.0.0.1"), (1,), (watch, reports.append))
    watch(MemberEvent(member=0, status="joined"))
    stages.connecting()
    assert [warning.message for warning in watch.missing()] == ["waiting for b: it is preparing (connecting to b)"]
    stages.sent(1, 2)
    assert [warning.message for warning in watch.missing()] == ["waiting for b: its files are being sent"]
    stages.sent(2, 2)
    assert [warning.message for warning in watch.missing()] == [
        "waiting for b: it is preparing (checking the files on b)"
    ]
    stages.loading_program()
    assert [report.phase for report in reports[-3:]] == [
        "bytes to b",
        "checking the files on b",
        "loading the program on b",
    ]
    assert {report.member for report in reports} == {1}


def test_while_all_prepare_nobody_is_waited_for() -> None:
    watch = StartWatch(["a", "b"])
    for rank in (0, 1):
        watch(MemberEvent(member=rank, status="started"))
        watch(ProgressEvent(member=rank, phase="features", done=3, total=10))
    assert watch.missing() == []
    watch(MemberEvent(member=0, status="joined"))
    assert [warning.awaited for warning in watch.missing()] == ["b"]


def test_nobody_is_missing_once_the_run_has_begun() -> None:
    watch = StartWatch(["a"])
    assert not watch.begun
    watch(RunEvent(status="running"))
    assert watch.begun


def test_a_machine_that_is_back_elsewhere_is_reached_and_written_down(tmp_path: Path) -> None:
    hosts = Hosts(machines=(Machine(name="a", address="10.0.0.1"), Machine(name="b", address="10.0.0.2")))
    save_hosts(hosts, tmp_path / RUN_HOSTS)

    def gone() -> NoReturn:
        raise NoRoute("a", "no route to 10.0.0.1:22")

    def dial(machine: Machine, *_: object) -> MachineLink:
        return MachineLink(machine, lambda: HereConnection("a"), machine.found_at)

    link = MachineLink(hosts.machines[0], gone, "10.0.0.1")
    assert ensure_reachable(link, "", tmp_path, search=lambda *_: "10.0.0.77", dial=dial) == "10.0.0.77"
    assert link.connection().alive() and link.host == "10.0.0.77"
    assert [machine.found_at for machine in load_hosts(tmp_path / RUN_HOSTS).machines] == ["10.0.0.77", ""]
    assert ensure_reachable(link, "", tmp_path, search=lambda *_: "10.0.0.78", dial=dial) == ""  # where it is it stays


def test_a_machine_that_is_nowhere_is_refused_as_before(tmp_path: Path) -> None:
    def gone() -> NoReturn:
        raise NoRoute("a", "no route to 10.0.0.1:22")

    with pytest.raises(NoRoute):
        ensure_reachable(MachineLink(Machine(name="a"), gone), "", tmp_path, search=lambda *_: "")
