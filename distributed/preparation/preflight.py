"""Checks whether machines are ready, and what memory they have.

All machines are asked concurrently; each problem is one line that names the machine and the fix.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from pydantic.dataclasses import dataclass as checked_dataclass

from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import Dial, MachineLink, link_to
from distributed.planning.memory.fitting import MemoryBudget
from distributed.preparation.dial_back import DialBack
from distributed.preparation.provision import find_environment
from distributed.preparation.this_computer import train_with
from distributed.ssh.connection import Trust
from distributed.ssh.errors import SshError, Unequipped
from profiles.errors import ExitCode, MusterError
from profiles.installation import training_python
from profiles.quantities import bytes_text, span_text
from profiles.schema import Profile
from training.hardware.resources import count_gpus, gpu_memory, gpus_are_alike, gpus_have_bf16, total_memory
from training.tasks.registry import inputs_of

OLDEST_PYTHON = (3, 10)
CLOCK_TOLERANCE = 60.0
"""Tolerated clock offset in seconds: times of events are compared across machines."""
FREE_BYTES = 200_000_000
FREE_FILES = 5_000
"""Required free inodes: code and tokenizer are a thousand files, data may be more."""
_BY_HAND = "try on that machine: python3 -c 'import sys; print(sys.version)'"
_NEEDED = ("torch", "numpy", "pydantic", "safetensors", "psutil", "cryptography")


@checked_dataclass(frozen=True)
class Facts:
    """A machine's report on itself; validated, because it comes from another machine."""

    python: tuple[int, ...]
    torch: str
    """Version; empty where it is not installed."""
    missing: tuple[str, ...]
    """Packages that a worker needs and that are not installed."""
    clock_ahead: float
    """Seconds its clock is ahead of this machine's."""
    free: int
    """Free bytes on disk."""
    writable: bool
    root: str
    """Muster's folder there."""
    system: str
    gpus: int
    interface: str
    """Network interface over which it was reached."""
    fingerprint: str
    """Fingerprint of its host key."""
    address: str = ""
    """Literal address under which it was reached."""
    memory: int = 0
    """Bytes of memory, or its container's limit; 0: unknown."""
    gpu_memory: int = 0
    """Bytes of its smallest GPU."""
    gpu_bf16: bool = False
    """Whether all its GPUs multiply bf16 in hardware."""
    gpus_alike: bool = False
    """Whether it has several GPUs, all of one kind."""
    dials_here: bool = True
    """Whether it can connect to this computer; not tested where it is reached through another machine."""
    free_files: int = -1
    """Free inodes; -1: the file system does not limit them."""
    identity: tuple[str, ...] = ()
    """Host name, system id and boot id: they tell machines apart that share a host key."""
    unloadable: str = ""
    """The first package that is installed but cannot be loaded, and why."""
    cloned: bool = False
    """Whether another machine shares its host key."""

    @property
    def machine_key(self) -> str:
        """Identity of the machine in cache keys of its figures."""
        return f"{self.fingerprint} of {self.identity[0]}" if self.cloned and self.identity else self.fingerprint


Ready = tuple[MachineLink, Facts]
"""A machine that can take part, connected."""


@dataclass
class Readiness:
    """Outcome of the check of one machine: its facts, or why it cannot take part."""

    link: MachineLink
    facts: Facts | None = None
    problem: MusterError | None = None
    provisionable: bool = False
    """Whether an environment installed by Muster would solve the problem."""


class NotReady(MusterError):
    """Some machines cannot take part; ``problems`` has one error for each, ``cause`` is what they have in common."""

    exit_code = ExitCode.NOT_READY

    def __init__(self, problems: Sequence[MusterError], hint: str = "") -> None:
        words = [problem.hint for problem in problems] + [hint]
        hints = dict.fromkeys(word for word in words if word)  # the same hint only once
        by_cause: dict[str, list[str]] = {}
        for problem in problems:
            cause = problem.problem if problem.machine else problem.message
            by_cause.setdefault(cause, []).extend([problem.machine] if problem.machine else [])
        texts = (f"{', '.join(sorted(names))}: {cause}" if names else cause for cause, names in by_cause.items())
        super().__init__("; ".join(texts), "; ".join(hints).replace("?;", "?"))
        self.problems, causes = tuple(problems), {problem.cause for problem in problems}
        self.cause = causes.pop() if len(causes) == 1 else ""


def check(
    hosts: Hosts,
    task: str = "",
    trust: Trust | None = None,
    required_bytes: int = 0,
    previous: Sequence[Readiness] = (),
    dial: Dial = link_to,
) -> list[Readiness]:
    """Ask all machines, and compare them.

    Args:
        task: kind of the job; decides which packages are needed.
        trust: asked about the host key of an unknown machine.
        required_bytes: bytes that the run sends to each machine.
        previous: results of an earlier check; machines without a problem are not asked again.

    Returns:
        One entry per machine, in their order. The links stay connected where there is no problem.
    """
    modules = [*_NEEDED, *inputs_of(task).packages]
    previous_by_machine = {readiness.link.machine: readiness for readiness in previous}

    def ask(machine: Machine) -> Readiness:
        earlier = previous_by_machine.get(machine)
        if earlier is not None and earlier.problem is None:
            return earlier
        return _ask(dial(machine, hosts, trust).taking_over(earlier.link if earlier else None), modules, dial_back)

    with DialBack() as dial_back, ThreadPoolExecutor(len(hosts.machines)) as pool:
        machines = list(pool.map(ask, hosts.machines))
    for readiness in machines:
        if readiness.facts is not None:
            readiness.problem = _own_problem(readiness.link, readiness.facts, required_bytes)
    _compare(machines)
    return machines


def ready(machines: Sequence[Readiness], hint: str = "") -> list[Ready]:
    """Return links and facts of all machines.

    Args:
        hint: additional advice, besides the fixes of the problems.

    Raises:
        NotReady: some have a problem; all connections are closed.
    """
    problems = [machine.problem for machine in machines if machine.problem is not None]
    if problems:
        for machine in machines:
            machine.link.close()
        raise NotReady(problems, hint)
    return [(machine.link, machine.facts) for machine in machines if machine.facts is not None]


def _ask(link: MachineLink, modules: Sequence[str], dial_back: DialBack) -> Readiness:
    """Ask with the Python of the hosts file; where it names none, with ``python3``, then with our environment there."""
    try:
        readiness = _ask_python(link, modules, dial_back)
        lacks_environment = link.machine.is_local and _is_plain(link) and not training_python()
        if not readiness.provisionable and not lacks_environment:
            return readiness
        link.python = find_environment(link) or link.python
        if _is_plain(link):
            # A run here does not use the packages of its python3.
            facts = readiness.facts and replace(readiness.facts, missing=("torch",))
            return replace(readiness, facts=facts, provisionable=True) if lacks_environment else readiness
        if lacks_environment:
            train_with(link.python)
        return _ask_python(link, modules, dial_back)
    except MusterError as error:
        return Readiness(link, problem=error)


def _ask_python(link: MachineLink, modules: Sequence[str], dial_back: DialBack) -> Readiness:
    """Ask with the link's Python.

    Raises:
        MusterError: the machine cannot be asked.
    """
    fingerprint = link.connection().fingerprint
    begin = time.time()
    try:
        report = link.probe(modules, address := dial_back.address_for(link))
        clock_ahead = report["time"] - time.time() if report["time"] > time.time() else min(report["time"] - begin, 0.0)
        dials_here = not address or dial_back.came_through(report)
        facts = Facts(**{**report, "clock_ahead": clock_ahead, "fingerprint": fingerprint, "dials_here": dials_here})
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SshError(link.name, "its report on itself cannot be read", _BY_HAND) from None
    except SshError as error:
        if error.cause != SshError.cause or not _is_plain(link):
            raise
        return Readiness(link, problem=Unequipped(link.name, error.message_for(link.name)), provisionable=True)
    lacks_packages = facts.python[:2] < OLDEST_PYTHON or bool(facts.missing)
    return Readiness(link, facts, provisionable=lacks_packages and _is_plain(link))


def _is_plain(link: MachineLink) -> bool:
    """Whether its Python is still the default, chosen neither in the hosts file nor by :func:`_ask`."""
    return not link.machine.python and link.python == "python3" and not link.runs_own_program


def _own_problem(link: MachineLink, facts: Facts, required_bytes: int) -> SshError | None:
    name = link.name
    if link.runs_own_program and (facts.missing or facts.unloadable):
        problem = f"its own Muster, which is lent, lacks {', '.join(facts.missing) or facts.unloadable}"
        return SshError(name, problem, "install what trains there: muster machines setup")
    if facts.python[:2] < OLDEST_PYTHON:
        version = ".".join(str(part) for part in facts.python)
        problem = f"{link.python} is Python {version}, needed is 3.10 or newer"
        hint = "install Python 3.10 or newer there, and name it with 'python' in the hosts file"
        return Unequipped(name, problem) if _is_plain(link) else SshError(name, problem, hint)
    if facts.missing:
        if link.machine.is_local and _is_plain(link):
            return Unequipped(name, "PyTorch and the other packages that train are not installed here yet")
        if "torch" in facts.missing and _is_plain(link):
            return Unequipped(name, "nothing is installed there yet")
        problem, packages = f"{link.python} has no {', '.join(facts.missing)}", " ".join(facts.missing)
        hint = f"install there: {link.python} -m pip install {packages} (or name another 'python' in the hosts file)"
        return Unequipped(name, problem) if _is_plain(link) else SshError(name, problem, hint)
    if facts.unloadable:
        return SshError(name, f"{link.python} cannot load {facts.unloadable}", _load_hint(link, facts.unloadable))
    if not facts.writable:
        return SshError(name, f"{facts.root} cannot be written there", "set 'project_path' in the hosts file")
    if facts.free < FREE_BYTES + required_bytes:
        need = bytes_text(FREE_BYTES + required_bytes)
        return SshError(
            name, f"its disk is full: {bytes_text(facts.free)} free at {facts.root}, needed are {need}",
            "free some space there, or set 'project_path' to another disk",
        )  # fmt: skip
    if 0 <= facts.free_files < FREE_FILES:
        problem = f"its disk has no more files to give: {facts.free_files} inodes free at {facts.root}"
        hint = "remove many small files there (df -i shows the inodes), or set 'project_path' to another disk"
        return SshError(name, problem, hint)
    if abs(facts.clock_ahead) > CLOCK_TOLERANCE:
        direction = "ahead of" if facts.clock_ahead > 0 else "behind"
        problem = f"its clock is {span_text(round(abs(facts.clock_ahead)))} {direction} this machine's"
        return SshError(name, problem, "let the network set it (timedatectl set-ntp true; on a Mac: Date & Time)")
    return None


def _load_hint(link: MachineLink, unloadable: str) -> str:
    """Return what to do about a package that cannot be loaded, from the loader's message."""
    by_cause = {
        "failed to map segment": "its disk is mounted noexec: name a 'python' in the hosts file that lies elsewhere",
        "Operation not permitted": "its disk is mounted noexec: name a 'python' in the hosts file that lies elsewhere",
        "GLIBC": "the system there is older than the packages: a newer system, or packages built for it",
        "killed by signal 4": "it was built for another processor: install a build of torch for this one",
        "wrong ELF class": "it was built for another processor: install a build of torch for this one",
        "incompatible architecture": "it was built for another processor: install a build of torch for this one",
    }
    package = unloadable.partition(":")[0]
    default = f"install what it lacks, or the package anew; try there: {link.python} -c 'import {package}'"
    return next((hint for words, hint in by_cause.items() if words in unloadable), default)


def _compare(machines: Sequence[Readiness]) -> None:
    """Set problems that only a comparison shows: one machine listed twice, or different versions of torch."""
    ready_machines = [(m, m.facts) for m in machines if m.facts is not None and m.problem is None]
    name_by_identity: dict[tuple[str, ...], str] = {}
    for machine, facts in ready_machines:
        name = name_by_identity.setdefault((facts.fingerprint, *facts.identity), machine.link.name)
        if name != machine.link.name:
            problem = f"is the same machine as {name} (host key {facts.fingerprint})"
            machine.problem = SshError(machine.link.name, problem, "remove one of the two from the hosts file")
    host_key_counts = Counter(fingerprint for fingerprint, *_ in name_by_identity)
    for machine, facts in ready_machines:
        machine.facts = replace(facts, cloned=host_key_counts[facts.fingerprint] > 1)
    versions = {machine.link.name: facts.torch.partition("+")[0] for machine, facts in ready_machines}
    common_version = max(versions.values(), key=[*versions.values()].count, default="")
    for machine, _ in ready_machines:
        version = versions[machine.link.name]
        if version != common_version and machine.problem is None:
            others = ", ".join(name for name, other in versions.items() if other == common_version)
            problem = f"has torch {version}, but {others} {'have' if ',' in others else 'has'} {common_version}"
            hint = f"install the same there: {machine.link.python} -m pip install torch=={common_version}"
            machine.problem = SshError(machine.link.name, problem, hint)


_HERE = "this computer"


def local_memory_budgets(profile: Profile, workers: int) -> list[MemoryBudget]:
    """Return the memory budget of workers on this computer."""
    device, gpus = profile.training.device, _usable_gpus(profile)
    if gpus:
        return [MemoryBudget(_HERE, gpu_memory(), "cuda", -(-workers // gpus), bf16=gpus_have_bf16())]
    total, limited = total_memory()
    return [MemoryBudget(_HERE, total, _shared(device, sys.platform == "darwin"), workers, limited)]


def _usable_gpus(profile: Profile) -> int:
    """Return the number of GPUs of this computer on which a run of the profile can train."""
    is_wanted = profile.training.device in ("auto", "cuda") and "+cpu" not in importlib.metadata.version("torch")
    return count_gpus() if is_wanted else 0


def _is_open(profile: Profile) -> bool:
    """Whether a machine may have several members: nobody has divided batches or data among the machines."""
    return not (profile.run.shares or profile.data.local_data)


def with_every_gpu_here(profile: Profile, tell: Callable[[str], None]) -> Profile:
    """Return the profile with a worker on each GPU of this computer, unless somebody has set how many workers it has;
    of GPUs that differ the best one trains, as the slowest one would hold up the others."""
    run = profile.run
    if "workers" in run.model_fields_set or run.simulate or run.cluster or not _is_open(profile):
        return profile
    gpus = _usable_gpus(profile)
    if gpus < 2 or not gpus_are_alike():
        return profile
    tell(f"{gpus} workers, one on each GPU of this computer (--local 1: on one of them)")
    return profile.model_copy(update={"run": run.model_copy(update={"workers": gpus})})


def take_every_gpu(profile: Profile, machines: Sequence[Ready], named: Collection[str] = ()) -> None:
    """Let each GPU of a machine train that has several of one kind, unless its hosts file says which devices do.

    Args:
        named: members of an earlier plan; a machine that is one of them stays one.
    """
    if profile.training.device not in ("auto", "cuda") or not _is_open(profile):
        return
    for link, facts in machines:
        is_open = not link.machine.devices and link.name not in named
        if is_open and facts.gpus > 1 and facts.gpus_alike and "+cpu" not in facts.torch:
            devices = tuple(f"cuda:{index}" for index in range(facts.gpus))
            link.machine = link.machine.model_copy(update={"devices": devices})


def memory_budgets(profile: Profile, machines: Sequence[Ready]) -> list[MemoryBudget]:
    """Return the memory budgets of machines and of their GPUs, each with the number of members that share it."""
    budgets = []
    for link, facts in machines:
        kinds = Counter(_kind(device or profile.training.device, facts) for device in link.machine.devices or ("",))
        for kind, members in kinds.items():
            if kind.startswith("cuda"):
                budgets.append(MemoryBudget(link.name, facts.gpu_memory, "cuda", members, bf16=facts.gpu_bf16))
            elif link.machine.is_local:
                total, limited = total_memory()
                budgets.append(MemoryBudget(link.name, total, kind, members, limited))
            else:
                budgets.append(MemoryBudget(link.name, facts.memory, kind, members))
    return budgets


def _kind(device: str, facts: Facts) -> str:
    """Return the kind of device a member computes on: ``cpu``, ``mps``, or a GPU with its index."""
    if device.startswith("cuda") or (device == "auto" and facts.gpus and "+cpu" not in facts.torch):
        return device if device.startswith("cuda") else "cuda"
    return _shared(device, facts.system == "Darwin")


def _shared(device: str, mac: bool) -> str:
    return "mps" if device == "mps" or (device == "auto" and mac) else "cpu"
