"""Examines all machines concurrently: what a run needs, what would slow it down, and the connections between them.

Nothing is written on a machine; the examining programs are passed in the command itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from pydantic import ValidationError

from distributed.agent.requests import Listen, Reach, ReadHealth
from distributed.checks.findings import (
    Finding,
    Health,
    judge_connections,
    judge_facts,
    judge_health,
    judge_host_keys,
    judge_mtu,
)
from distributed.checks.job import check_job
from distributed.hosts.schema import Hosts
from distributed.machine.link import Dial, MachineLink, Tell, address_towards, document, link_to
from distributed.measuring.measure import local_link
from distributed.preparation.preflight import Readiness, check
from distributed.preparation.provision import environment_size, provision_all
from distributed.ssh.connection import Trust
from distributed.ssh.forward import LOOPBACK
from profiles.errors import MusterError
from profiles.schema import Profile

_TIMEOUT = 60.0
_LISTEN_TIMEOUT = 30.0


@dataclass
class MachineExamination:
    """One machine and all findings about it."""

    readiness: Readiness
    findings: list[Finding] = field(default_factory=list)
    health: Health | None = None
    """``None``: its hardware could not be examined."""

    @property
    def name(self) -> str:
        return self.readiness.link.name

    @property
    def ready(self) -> bool:
        return self.readiness.problem is None and all(finding.level != "problem" for finding in self.findings)


def examine(
    hosts: Hosts,
    task: str = "",
    trust: Trust | None = None,
    profile: Profile | None = None,
    dial: Dial = link_to,
) -> list[MachineExamination]:
    """Examine all machines, and close the connections; one entry per machine, in their order.

    Args:
        profile: also check whether this job fits: memory, data, the coordinator's port.
    """
    examined = [MachineExamination(readiness) for readiness in check(hosts, task, trust, dial=dial)]
    try:
        for machine in examined:
            link, problem = machine.readiness.link, machine.readiness.problem
            machine.findings += judge_facts(machine.readiness.facts) if machine.readiness.facts is not None else []
            if problem is not None:
                seen, safe = problem.message_for(link.name), machine.readiness.provisionable
                facts = machine.readiness.facts
                size = environment_size(None if facts is None else facts.gpus) if safe else ""
                machine.findings.append(Finding("ready", "problem", seen, "ready to train", problem.hint, safe, size))
        ready = [m for m in examined if m.readiness.facts is not None and m.readiness.problem is None]
        keys = judge_host_keys({m.name: m.readiness.facts.fingerprint for m in ready if m.readiness.facts})
        for machine in ready:
            machine.findings += [keys[machine.name]] if machine.name in keys else []
        _examine_closely([m for m in examined if m.readiness.facts is not None], profile, dial)
    finally:
        for machine in examined:
            machine.readiness.link.close()
    return examined


def repair(examined: Sequence[MachineExamination], say: Tell, offline_wheels: bool = False) -> list[MusterError]:
    """Fix what is safe to fix without asking: install missing packages. Return the errors."""
    lacking = [machine.readiness.link for machine in examined if machine.readiness.provisionable]
    try:
        return list(provision_all(lacking, say, offline_wheels).values())
    finally:
        for link in lacking:
            link.close()


def _examine_closely(machines: Sequence[MachineExamination], profile: Profile | None, dial: Dial) -> None:
    """Add detailed findings of the machines that answer, all checks concurrently."""
    if not machines:
        return
    with ThreadPoolExecutor(len(machines) + 2) as pool:
        connections = pool.submit(_check_connections, [machine.readiness for machine in machines], dial)
        ready = [machine.readiness for machine in machines if machine.readiness.problem is None]
        ready_machines = [(r.link, r.facts) for r in ready if r.facts is not None]
        job = pool.submit(check_job, profile, ready_machines) if profile is not None else None
        list(pool.map(_add_health, machines))
    sizes = judge_mtu(_packet_sizes(machines))
    for machine in machines:
        machine.findings += connections.result().get(machine.name, [])
        machine.findings += [sizes[machine.name]] if machine.name in sizes else []
        if job is not None and machine.readiness.problem is None:
            machine.findings += job.result().of(machine.name, machine.health)
    if job is not None:
        starter = next((machine for machine in machines if machine.readiness.link.machine.is_local), machines[0])
        starter.findings += job.result().local


def _add_health(machine: MachineExamination) -> None:
    """Add the findings about hardware and system."""
    health = _health(machine.readiness)
    if isinstance(health, Finding):
        machine.findings.append(health)
    else:
        machine.findings += judge_health(health)
        machine.health = health


def _packet_sizes(machines: Sequence[MachineExamination]) -> dict[str, tuple[str, int]]:
    """Return the interface in use and its packet size by machine."""
    mtus = {}
    for machine in machines:
        facts, health = machine.readiness.facts, machine.health
        if facts is not None and health is not None and facts.interface in health.mtu:
            mtus[machine.name] = (facts.interface, health.mtu[facts.interface])
    return mtus


def _health(readiness: Readiness) -> Health | Finding:
    if readiness.provisionable or (
        readiness.facts is not None and (readiness.facts.missing or readiness.facts.unloadable)
    ):
        return Finding("health", "ok", "not checked: its packages are missing or cannot be loaded")
    try:
        done = readiness.link.run(ReadHealth(), timeout=_TIMEOUT)
        return Health.model_validate_json(done.stdout)
    except ValidationError:
        return Finding("health", "warning", f"its hardware could not be read: {done.problem[:200]}")
    except MusterError as error:
        return Finding("health", "warning", f"its hardware could not be read: {error.message_for(readiness.link.name)}")


# ---------------------------------------------------------------------------------------------------------------- ways


def _check_connections(machines: Sequence[Readiness], dial: Dial) -> dict[str, list[Finding]]:
    """Make every machine connect to every other, and to this one, where the coordinator of a run listens."""
    links = [r.link for r in machines]
    addresses = {r.link.name: r.facts.address for r in machines if r.facts and not r.link.machine.is_local}
    remote_hosts = [link.host for link in links if link.host and not link.machine.is_local]
    local_names = [link.name for link in links if link.machine.is_local]
    if remote_hosts and not local_names:
        links.append(local_link([link.name for link in links], dial))
    coordinator = local_names[0] if local_names else links[-1].name
    addresses.update({name: address_towards(remote_hosts[0]) for name in (*local_names, coordinator) if remote_hosts})
    dialable = {name: address for name, address in addresses.items() if address and "%" not in address}
    # An address with "%" names an interface of one machine, which other machines do not share.
    with _listeners(links) as listening, ThreadPoolExecutor(max(len(links), 1)) as pool:
        endpoints = {name: (dialable[name], port) for name, (port, _) in listening.items() if port and name in dialable}

        def examine(link: MachineLink) -> list[Finding]:
            reasons = _reasons(link, endpoints)
            is_carried = bool(reasons.get(coordinator)) and _ssh_carries(link, listening[coordinator][0])
            needed = [coordinator] if link.host else []
            return [listening[link.name][1], *judge_connections(reasons, needed, is_carried)]

        findings = {link.name: pool.submit(examine, link) for link in links}
        return {name: finding.result() for name, finding in findings.items()}


def _ssh_carries(link: MachineLink, port: int) -> bool:
    """Whether a machine reaches a port of this computer through its SSH connection."""
    try:
        host, _, forwarded_port = link.forward((LOOPBACK, port)).rpartition(":")
    except MusterError:
        return False
    return not _reasons(link, {"": (host, int(forwarded_port))})[""]


@contextmanager
def _listeners(links: Sequence[MachineLink]) -> Iterator[dict[str, tuple[int, Finding]]]:
    """Make every machine listen on a free port; yields by name its number (0: none) and a finding."""
    with ExitStack() as stack:

        def start(link: MachineLink) -> tuple[int, Finding]:
            try:
                process = stack.enter_context(link.stream(Listen(_LISTEN_TIMEOUT)))
                port = int(document(link.name, process.read_line(_LISTEN_TIMEOUT))["port"])
            except (MusterError, TimeoutError, ValueError, KeyError, TypeError) as error:
                problem = error.message if isinstance(error, MusterError) else "it reported no port"
                return 0, Finding("ports", "warning", f"no port could be opened: {problem}", "a free port")
            return port, Finding("ports", "ok", f"port {port} was free", "a free port")

        with ThreadPoolExecutor(max(len(links), 1)) as pool:
            listeners = dict(zip((link.name for link in links), pool.map(start, links), strict=True))
        yield listeners


def _reasons(link: MachineLink, endpoints: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Connect from a machine to all others; return by name the reason of each failure, empty for success."""
    others = {name: endpoint for name, endpoint in endpoints.items() if name != link.name}
    if not others:
        return {}
    try:
        replies = link.ask(Reach(list(others.values())), timeout=_TIMEOUT)
    except MusterError:
        return dict.fromkeys(others, "it could not be checked")
    return {name: str(replies.get(f"{host} {port}", "no answer"))[:200] for name, (host, port) in others.items()}
