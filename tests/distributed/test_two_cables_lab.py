"""Two cables between the same two machines: the fast one is found, and what a run exchanges goes over it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.schema import Hosts, Machine
from distributed.launcher import DistributedLauncher, PlanOptions, choose
from distributed.measuring.link_figures import PairFigures
from distributed.measuring.machine_figures import SpeedFigures
from distributed.measuring.measure import MeasurementResult
from distributed.planning.documents.cluster import ClusterMachine, Measurement
from distributed.planning.documents.document import Planning, Workload
from distributed.preparation.prepare import PrepareOptions, prepare
from profiles.files.resolve import load_profile
from profiles.schema import Profile
from tests.distributed.muster_runs import PATIENCE, Muster
from tests.lab import network
from tests.lab.fixtures import MakeLab
from tests.lab.host import LabHost
from tests.waiting import until
from training.records.run_files import is_live

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]

SLOW, FAST = 20.0, 200.0
"""Mbit/s of the cable that SSH uses, and of the other."""
NEAR, FAR = "198.19.77.1", "198.19.77.2"
"""Addresses at the ends of the fast cable."""
WEIGHTS, STEPS = 100_000, 20
PAYLOAD = STEPS * WEIGHTS * 4 * 2
"""Bytes of the run's exchanges, up and down."""


@dataclass(frozen=True)
class Cables:
    """This machine and a host, and what the two ends of the slow and of the fast cable are called."""

    far: LabHost
    hosts: Hosts
    slow: tuple[str, str]
    fast: tuple[str, str]

    def moved(self) -> tuple[int, int]:
        """Return the bytes that passed the slow and the fast cable so far."""
        lines = Path(f"/proc/{self.far.pid}/net/dev").read_text().splitlines()[2:]
        rows = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        slow, fast = (int(rows[one][0]) + int(rows[one][8]) for one in (self.slow[1], self.fast[1]))
        return slow, fast

    def with_coordinator_on(self, name: str) -> Hosts:
        carrying = ((one, {"carries_coordinator": one.name == name}) for one in self.hosts.machines)
        machines = tuple(one.model_copy(update=change) for one, change in carrying)
        return self.hosts.model_copy(update={"machines": machines})


@pytest.fixture
def cables(make_lab: MakeLab) -> Iterator[Cables]:
    lab = make_lab("far")
    far, port = lab["far"], f"mu{lab.slot}x"
    far.set_rate(SLOW)
    network.ip("link", "add", port, "type", "veth", "peer", "name", "eth1", "netns", str(far.pid))
    try:
        network.ip("addr", "add", f"{NEAR}/24", "dev", port)
        network.ip("link", "set", port, "up")
        far.run(["ip", "addr", "add", f"{FAR}/24", "dev", "eth1"], check=True)
        far.run(["ip", "link", "set", "eth1", "up"], check=True)
        network.shape(port, far.pid, FAST, "eth1")
        near = Machine(name="near", address="localhost", python=sys.executable)
        hosts = lab.hosts().model_copy(update={"machines": (near, *lab.hosts().machines)})
        yield Cables(far, hosts, (lab.bridge, "eth0"), (port, "eth1"))
    finally:
        network.unplug(port)


def measured(muster: Muster, profile: Profile, cables: Cables) -> PairFigures:
    save_hosts(cables.hosts, muster.hosts_file)
    task = ["nanogpt", "--set", "task=custom", "--set", f"model_path={profile.model.model_path}"]
    for _ in range(3):  # a processor that others use makes a fast link look slow
        done = muster.run("measure", *task, "--hosts", str(muster.hosts_file), "--links", "--max-age", "0", "--json")
        assert done.returncode == 0, done.stderr
        (pair,) = json.loads(done.stdout)["links"]
        pair.pop("busy")
        found = PairFigures.model_validate(pair)
        if found.link.mbit > 0.5 * FAST:
            break
    return found


def planned(hosts: Hosts, pair: PairFigures, profile: Profile) -> Planning:
    """Return what the planner makes of the links that were measured and of two machines that are equally slow."""
    workload = Workload(trainable=WEIGHTS, total=WEIGHTS, samples=600)
    steps = tuple(Measurement(batch=size, seconds=size / 16) for size in (4, 8))
    speeds = [
        SpeedFigures(machine=ClusterMachine(name=one.name, measurements=steps), workload=workload)
        for one in hosts.machines
    ]
    found = MeasurementResult([one.name for one in hosts.machines], [pair], speeds, local_name="near",
                     model_path=profile.model.model_path)  # fmt: skip
    machines = prepare(hosts, profile.model.task, PrepareOptions())
    try:
        return choose(found, machines, profile, PlanOptions())
    finally:
        for link, _ in machines:
            link.close()


def exchanged(cables: Cables, carrier: str, pair: PairFigures, profile: Profile) -> tuple[int, int]:
    """Train as planned, and return the bytes that passed the slow and the fast cable meanwhile."""
    hosts = cables.with_coordinator_on(carrier)
    planning = planned(hosts, pair, profile)
    assert planning.settings is not None
    assert (planning.settings.coordinator, len(planning.settings.members)) == (carrier, 2)
    before = cables.moved()
    launcher = DistributedLauncher(hosts, profile, plan_options=PlanOptions(planning=planning))
    folder = launcher.start(launcher.plan(), sys.argv)
    until(lambda: not is_live(folder), PATIENCE)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["lost_members"] == []
    slow, fast = cables.moved()
    return slow - before[0], fast - before[1]


def test_the_fast_cable_is_found_and_carries_the_exchanges(cables: Cables, tmp_path: Path) -> None:
    model = f"nn.Sequential(nn.Linear(2, {WEIGHTS // 5}), nn.Linear({WEIGHTS // 5}, 2))"
    muster = Muster(tmp_path, tmp_path / "hosts.json", model=model)
    options = {
        "task": "custom", "model_path": f"{muster.job}:build", "batch_size": "8", "threads": "1", "strategy": "auto",
        "codec": "fp32", "max_steps": str(STEPS), "eval_interval": "0", "eval_before": "false",
        "snapshot_interval": "0", "output_dir": str(tmp_path / "runs"),
    }  # fmt: skip
    pair = measured(muster, load_profile("nanogpt", options).profile, cables)
    found = pair.figures
    assert found is not None
    assert {(here, there) for _, here, there, _ in found.paths} == {cables.slow, cables.fast}
    assert (found.address, found.interface, found.interface_back) == (FAR, *cables.fast)
    for coordinator in ("near", "far"):
        profile = load_profile("nanogpt", options | {"engine": "mesh"}).profile
        slow, fast = exchanged(cables, coordinator, pair, profile)
        assert fast > 0.95 * PAYLOAD, coordinator
        assert slow < 0.2 * PAYLOAD, coordinator
