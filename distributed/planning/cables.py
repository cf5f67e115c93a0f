"""What a cable would give: the planner asked once more, with the figures of Wi-Fi links replaced by those of a cable.

A cable carries what the fastest cable between the measured machines carries, else what gigabit Ethernet does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from distributed.planning.cluster import Cluster, Link
from distributed.planning.document import Planning, Reason
from distributed.planning.exchange_cost import WORTH

MOST = 2
"""Cables that are named, those that give most first."""
_TRIED = 3
"""Machines for which the planner is asked, those with the slowest links first."""
GIGABIT = Link(source="a", target="b", mbit=940, mbit_back=940, rtt_ms=0.4, medium="ethernet")
CABLES = ("cable-to", "cable-between", "cables-to")
"""Codes that tell what a cable would give."""


def cable_reasons(cluster: Cluster, planning: Planning, again: Callable[[Cluster], Planning]) -> Iterator[Reason]:
    """Yield what cables would give, where that is more than predictions can tell apart.

    Args:
        planning: of the cluster as it is.
        again: asks the planner the same of another cluster.
    """
    now = planning.best
    if now is None or not now.predicted or not now.useful_speed_up:
        return
    usual = _measured(cluster) or GIGABIT
    found: list[Reason] = []
    reached = now.useful_speed_up
    for code, subject, other, hosts in _ideas(cluster):
        least = reached if code == "cables-to" else now.useful_speed_up
        then = again(with_cables(cluster, hosts, usual)).best
        if then is not None and then.predicted and then.useful_speed_up > WORTH * least:
            reached = max(reached, then.useful_speed_up)
            mbit = min(usual.mbit, usual.mbit_back)
            numbers = {"useful": now.useful_speed_up, "wired": then.useful_speed_up, "mbit": mbit}
            found.append(Reason.of(code, subject, other, **numbers))
    yield from sorted(found, key=lambda reason: -reason.numbers["wired"])[:MOST]


def with_cables(cluster: Cluster, hosts: Sequence[str], usual: Link) -> Cluster:
    """Return the cluster with machines that have a cable; a link whose other end stays on Wi-Fi keeps its figures.

    Args:
        hosts: :attr:`distributed.planning.cluster.ClusterMachine.host` of each.
        usual: what a cable carries.
    """
    wired = min(usual.mbit, usual.mbit_back)
    machines = tuple(
        machine.model_copy(update={"wifi": False, "interface_mbit": max(machine.interface_mbit, wired)})
        if machine.host in hosts
        else machine
        for machine in cluster.machines
    )
    on_air = {machine.name for machine in machines if machine.wifi}
    figures = {**usual.model_dump(exclude={"source", "target"}), "medium": "ethernet", "air": ""}
    links = tuple(
        link.model_copy(update=figures) if link.air and not {link.source, link.target} & on_air else link
        for link in cluster.links
    )
    return Cluster(machines=machines, links=links, here=cluster.here)


def _ideas(cluster: Cluster) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield code, machine, the other one, and the hosts that get a cable."""
    over_air = {name for link in cluster.links if link.air and link.usable for name in (link.source, link.target)}
    hosts = {machine.host: machine for machine in reversed(cluster.machines)}
    wireless = [machine for host, machine in hosts.items() if machine.wifi and machine.name in over_air]
    wireless.sort(key=lambda machine: (cluster.interface(machine.name), machine.name))
    if len(wireless) < len(hosts):
        yield from (("cable-to", machine.name, "", (machine.host,)) for machine in wireless[:_TRIED])
    elif len(wireless) == 2:
        one, other = sorted(machine.name for machine in wireless)
        yield "cable-between", one, other, tuple(hosts)
    if len(wireless) > 1 and len(hosts) > 2:
        yield "cables-to", ", ".join(sorted(machine.name for machine in wireless)), "", tuple(m.host for m in wireless)


def _measured(cluster: Cluster) -> Link | None:
    """Return the fastest cable between two of the machines."""
    wired = (link for link in cluster.links if link.medium == "ethernet" and not link.air and link.usable)
    return max(wired, key=lambda link: min(link.mbit, link.mbit_back), default=None)
