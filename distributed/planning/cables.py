"""What cables would gain: the job is planned again with the figures of Wi-Fi links replaced by those of a cable.

The figures of a cable are those of the fastest one between the measured machines, else those of gigabit Ethernet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from distributed.planning.documents.cluster import Cluster, Link
from distributed.planning.documents.document import Planning, Reason
from distributed.planning.exchange_cost import LEAST_GAIN

MOST_CABLES = 2
"""Largest number of suggested cables, those that gain most first."""
_MOST_TRIED = 3
"""Machines for which a plan with a cable is made, those with the slowest links first."""
GIGABIT = Link(source="a", target="b", mbit=940, mbit_back=940, rtt_ms=0.4, medium="ethernet")
CABLES = ("cable-to", "cable-between", "cables-to")
"""Codes of reasons that suggest a cable."""


def cable_reasons(cluster: Cluster, planning: Planning, replan: Callable[[Cluster], Planning]) -> Iterator[Reason]:
    """Yield suggestions of cables whose gain is larger than the error of predictions.

    Args:
        planning: the plan for the cluster as it is.
        replan: plans the same job for another cluster.
    """
    current = planning.best
    if current is None or not current.predicted or not current.useful_speed_up:
        return
    cable = _fastest_cable(cluster) or GIGABIT
    reasons: list[Reason] = []
    best_speed_up = current.useful_speed_up
    for code, subject, peer, hosts in _cable_options(cluster):
        speed_up_to_beat = best_speed_up if code == "cables-to" else current.useful_speed_up
        wired = replan(with_cables(cluster, hosts, cable)).best
        if wired is not None and wired.predicted and wired.useful_speed_up > LEAST_GAIN * speed_up_to_beat:
            best_speed_up = max(best_speed_up, wired.useful_speed_up)
            mbit = min(cable.mbit, cable.mbit_back)
            numbers = {"useful": current.useful_speed_up, "wired": wired.useful_speed_up, "mbit": mbit}
            reasons.append(Reason.of(code, subject, peer, **numbers))
    yield from sorted(reasons, key=lambda reason: -reason.numbers["wired"])[:MOST_CABLES]


def with_cables(cluster: Cluster, hosts: Sequence[str], cable: Link) -> Cluster:
    """Return the cluster with cables at some machines; a link whose other end stays on Wi-Fi keeps its figures.

    Args:
        hosts: :attr:`distributed.planning.documents.cluster.ClusterMachine.host` of each machine that gets a cable.
        cable: the figures of a cable.
    """
    cable_mbit = min(cable.mbit, cable.mbit_back)
    machines = tuple(
        machine.model_copy(update={"wifi": False, "interface_mbit": max(machine.interface_mbit, cable_mbit)})
        if machine.host in hosts
        else machine
        for machine in cluster.machines
    )
    on_wifi = {machine.name for machine in machines if machine.wifi}
    cable_figures = {**cable.model_dump(exclude={"source", "target"}), "medium": "ethernet", "air": ""}
    links = tuple(
        link.model_copy(update=cable_figures) if link.air and not {link.source, link.target} & on_wifi else link
        for link in cluster.links
    )
    return Cluster(machines=machines, links=links, here=cluster.here)


def _cable_options(cluster: Cluster) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield code, machine, its peer, and the hosts that get a cable."""
    wifi_names = {name for link in cluster.links if link.air and link.usable for name in (link.source, link.target)}
    hosts = {machine.host: machine for machine in reversed(cluster.machines)}
    wireless = [machine for host, machine in hosts.items() if machine.wifi and machine.name in wifi_names]
    wireless.sort(key=lambda machine: (cluster.interface(machine.name), machine.name))
    if len(wireless) < len(hosts):
        yield from (("cable-to", machine.name, "", (machine.host,)) for machine in wireless[:_MOST_TRIED])
    elif len(wireless) == 2:
        first_name, second_name = sorted(machine.name for machine in wireless)
        yield "cable-between", first_name, second_name, tuple(hosts)
    if len(wireless) > 1 and len(hosts) > 2:
        yield "cables-to", ", ".join(sorted(machine.name for machine in wireless)), "", tuple(m.host for m in wireless)


def _fastest_cable(cluster: Cluster) -> Link | None:
    """Return the fastest measured cable between two of the machines; ``None`` if there is none."""
    wired = (link for link in cluster.links if link.medium == "ethernet" and not link.air and link.usable)
    return max(wired, key=lambda link: min(link.mbit, link.mbit_back), default=None)
