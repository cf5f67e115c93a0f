"""The scripted figures as the planner reads them: a cluster of machines and links, and the job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from app.demo.job import SAMPLES, TOTAL, TRAINABLE
from app.demo.machines import ScriptedMachine
from distributed.planning.cluster import Cluster, Link, Machine, Measurement
from distributed.planning.job import Job, Preference, Workload, job_of
from profiles.schema import Profile

AIR = "demo-wifi"
_PER_SAMPLE, _FIXED = 260_000_000, 1_900_000_000


def cluster_of(machines: Sequence[ScriptedMachine]) -> Cluster:
    """Return machines and links as measuring them would have."""
    links = tuple(link_between(one, other) for one, other in combinations(machines, 2))
    return Cluster(machines=tuple(map(_machine, machines)), links=links, here=machines[0].name)


def link_between(one: ScriptedMachine, other: ScriptedMachine) -> Link:
    """Return the link of two machines: as fast in each direction as the slower end allows."""
    wifi = one.wifi or other.wifi
    return Link(
        source=one.name,
        target=other.name,
        mbit=min(one.mbit_up, other.mbit),
        mbit_back=min(other.mbit_up, one.mbit),
        rtt_ms=4.8 if wifi else 0.5,
        jitter_ms=2.1 if wifi else 0.1,
        medium="wifi" if wifi else "ethernet",
        air=AIR if wifi else "",
    )


def job_for(profile: Profile, preference: Preference) -> Job:
    """Return the scripted job with the options of ``profile``."""
    workload = Workload(
        tuning=profile.model.tuning, trainable=TRAINABLE, total=TOTAL, lora_trainable=TRAINABLE, samples=SAMPLES
    )
    return job_of(profile, workload, preference)


def _machine(machine: ScriptedMachine) -> Machine:
    memory = machine.device_memory or machine.memory
    batches = (2, 4, 8)
    return Machine(
        name=machine.name,
        identity=machine.fingerprint,
        system=machine.system,
        device=machine.device,
        measurements=tuple(
            Measurement(
                batch=batch,
                seconds=machine.overhead + batch / machine.speed,
                peak=_FIXED + batch * _PER_SAMPLE,
            )
            for batch in batches
        ),
        memory_total=memory,
        memory_free=memory * 7 // 10,
        cores=machine.cores - 1,
        wifi=machine.wifi,
        on_mains=machine.on_mains,
    )
