"""A thorough look at all machines, side by side: what a run needs, what would slow it down, and every way between them.

Nothing is written on a machine; the programs that look travel in the command itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from pydantic import ValidationError

from distributed.checks.findings import (
    Finding,
    Health,
    judge_facts,
    judge_health,
    judge_host_keys,
    judge_mtu,
    judge_ways,
)
from distributed.checks.job import look_at_job
from distributed.hosts.schema import Hosts
from distributed.machine.link import Dial, MachineLink, Tell, address_towards, link_to, packed
from distributed.measuring.measure import here_link
from distributed.preparation.preflight import Readiness, check
from distributed.preparation.provision import provision_all
from distributed.ssh.connection import Trust
from distributed.ssh.forward import LOOPBACK
from profiles.errors import MusterError
from profiles.schema import Profile

_TIMEOUT = 60.0
_LISTEN_TIMEOUT = 30.0
_PROGRAM = ("distributed.system", "distributed.checks.machine_health")


@dataclass
class Examined:
    """One machine and all that was found."""

    readiness: Readiness
    findings: list[Finding] = field(default_factory=list)
    health: Health | None = None
    """``None``: it could not be looked at closely."""

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
) -> list[Examined]:
    """Look at all machines, and close the connections again; one entry a machine, in their order.

    Args:
        profile: also looks whether this job fits: memory, data, the coordinator's port.
    """
    found = [Examined(readiness) for readiness in check(hosts, task, trust, dial=dial)]
    try:
        for one in found:
            link, problem = one.readiness.link, one.readiness.problem
            one.findings += judge_facts(one.readiness.facts) if one.readiness.facts is not None else []
            if problem is not None:
                seen, safe = problem.beside(link.name), one.readiness.provisionable
                one.findings.append(Finding("ready", "problem", seen, "ready to train", problem.hint, safe))
        sound = [one for one in found if one.readiness.facts is not None and one.readiness.problem is None]
        keys = judge_host_keys({one.name: one.readiness.facts.fingerprint for one in sound if one.readiness.facts})
        for one in sound:
            one.findings += [keys[one.name]] if one.name in keys else []
        _look_closer([one for one in found if one.readiness.facts is not None], profile, dial)
    finally:
        for one in found:
            one.readiness.link.close()
    return found


def repair(found: Sequence[Examined], say: Tell, offline_wheels: bool = False) -> list[MusterError]:
    """Fix what is safe to fix without asking: install packages where they are missing. Return what failed."""
    lacking = [one.readiness.link for one in found if one.readiness.provisionable]
    try:
        return list(provision_all(lacking, say, offline_wheels).values())
    finally:
        for link in lacking:
            link.close()


def _look_closer(able: Sequence[Examined], profile: Profile | None, dial: Dial) -> None:
    """Add what machines that answer have to say, everything at the same time."""
    if not able:
        return
    with ThreadPoolExecutor(len(able) + 2) as pool:
        ways = pool.submit(_all_ways, [one.readiness for one in able], dial)
        ready = [one.readiness for one in able if one.readiness.problem is None]
        sound = [(one.link, one.facts) for one in ready if one.facts is not None]
        job = pool.submit(look_at_job, profile, sound) if profile is not None else None
        healths = list(pool.map(lambda one: _health(one.readiness), able))
    sizes = judge_mtu(_add_health(able, healths))
    for one, health in zip(able, healths):
        one.findings += ways.result().get(one.name, [])
        one.findings += [sizes[one.name]] if one.name in sizes else []
        if job is not None and one.readiness.problem is None:
            one.findings += job.result().of(one.name, health if isinstance(health, Health) else None)
    if job is not None:
        starter = next((one for one in able if one.readiness.link.machine.here), able[0])
        starter.findings += job.result().here


def _add_health(able: Sequence[Examined], healths: Sequence[Health | Finding]) -> dict[str, tuple[str, int]]:
    """Add what hardware and system have shown; return the interface in use and its packet size by machine."""
    mtus = {}
    for one, health in zip(able, healths):
        facts = one.readiness.facts
        if isinstance(health, Finding):
            one.findings.append(health)
            continue
        one.findings += judge_health(health)
        one.health = health
        if facts is not None and facts.interface in health.mtu:
            mtus[one.name] = (facts.interface, health.mtu[facts.interface])
    return mtus


def _health(one: Readiness) -> Health | Finding:
    if one.provisionable or (one.facts is not None and (one.facts.missing or one.facts.unloadable)):
        return Finding("health", "ok", "not checked: its packages are missing or cannot be loaded")
    try:
        words = [one.link.python, "-c", packed("training.sensors", *_PROGRAM), "facts"]
        done = one.link.connection().run(words, timeout=_TIMEOUT)
        return Health.model_validate_json(done.stdout)
    except ValidationError:
        return Finding("health", "warning", f"its hardware could not be read: {done.problem[:200]}")
    except MusterError as error:
        return Finding("health", "warning", f"its hardware could not be read: {error.beside(one.link.name)}")


# ---------------------------------------------------------------------------------------------------------------- ways


def _all_ways(machines: Sequence[Readiness], dial: Dial) -> dict[str, list[Finding]]:
    """Let every machine connect to every other, and to this one, where the coordinator of a run listens."""
    links = [one.link for one in machines]
    addresses = {one.link.name: one.facts.address for one in machines if one.facts and not one.link.machine.here}
    far = [link.host for link in links if link.host and not link.machine.here]
    own = [link.name for link in links if link.machine.here]
    if far and not own:
        links.append(here_link([link.name for link in links], dial))
    center = own[0] if own else links[-1].name
    addresses.update({name: address_towards(far[0]) for name in (*own, center) if far})
    known = {name: address for name, address in addresses.items() if address and "%" not in address}
    # ... else it names an interface of one machine, and means something else on the others
    with _listeners(links) as listening, ThreadPoolExecutor(max(len(links), 1)) as pool:
        places = {name: (known[name], port) for name, (port, _) in listening.items() if port and name in known}
        answers = list(pool.map(lambda link: _reasons(link, places), links))
        shut_out = [bool(told.get(center)) for told in answers]
        helped = pool.map(lambda link, out: out and _ssh_carries(link, listening[center][0]), links, shut_out)
        return {
            link.name: [listening[link.name][1], *judge_ways(told, [center] if link.host else [], carried)]
            for link, told, carried in zip(links, answers, helped, strict=True)
        }


def _ssh_carries(link: MachineLink, port: int) -> bool:
    """Whether a machine reaches a port of this computer through its SSH connection."""
    try:
        host, _, there = link.forward((LOOPBACK, port)).rpartition(":")
    except MusterError:
        return False
    return not _reasons(link, {"": (host, int(there))})[""]


@contextmanager
def _listeners(links: Sequence[MachineLink]) -> Iterator[dict[str, tuple[int, Finding]]]:
    """Have every machine listen on a port that is free there; by name, its number (0: there is none) and a finding."""
    with ExitStack() as stack:

        def start(link: MachineLink) -> tuple[int, Finding]:
            try:
                words = [link.python, "-c", packed(*_PROGRAM), "listen", str(_LISTEN_TIMEOUT)]
                process = stack.enter_context(link.connection().stream(words))
                port = int(process.read_line(_LISTEN_TIMEOUT))
            except (MusterError, TimeoutError, ValueError) as error:
                problem = error.message if isinstance(error, MusterError) else "it reported no port"
                return 0, Finding("ports", "warning", f"no port could be opened: {problem}", "a free port")
            return port, Finding("ports", "ok", f"port {port} was free", "a free port")

        with ThreadPoolExecutor(max(len(links), 1)) as pool:
            found = dict(zip((link.name for link in links), pool.map(start, links), strict=True))
        yield found


def _reasons(link: MachineLink, places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Connect from a machine to all others; by name: empty, or why it did not go."""
    others = {name: place for name, place in places.items() if name != link.name}
    if not others:
        return {}
    words = [str(part) for place in others.values() for part in place]
    try:
        done = link.connection().run([link.python, "-c", packed(*_PROGRAM), "reach", *words], timeout=_TIMEOUT)
        said = dict(json.loads(done.stdout))
    except (MusterError, ValueError, TypeError):
        return dict.fromkeys(others, "it could not be checked")
    return {name: str(said.get(f"{host} {port}", "no answer"))[:200] for name, (host, port) in others.items()}
