"""Checks whether machines are ready, and gives each its ranks in a run.

All are asked side by side; each problem is one line that names the machine and the fix. Those that are ready become
members: ranks, devices, batch sizes, and the memory that they have.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from pydantic.dataclasses import dataclass as checked_dataclass

from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import Dial, MachineLink, address_towards, link_to
from distributed.planning.fitting import MemoryBudget
from distributed.preparation.dial_back import DialBack
from distributed.preparation.provision import find_environment
from distributed.preparation.this_computer import train_with
from distributed.ssh.connection import Trust
from distributed.ssh.errors import SshError
from distributed.system import interface_of
from profiles.declarations import Trait, trait_of
from profiles.errors import ExitCode, MusterError
from profiles.installation import program, training_python
from profiles.schema import Profile
from training.local_plan import own_data, plan_local_run
from training.plan import MemberPlan, RunPlan
from training.resources import count_gpus, gpu_memory, gpus_have_bf16, total_memory

OLDEST_PYTHON = (3, 10)
CLOCK_TOLERANCE = 60.0
"""Seconds a clock may be off: times of events are compared across machines."""
FREE_BYTES = 200_000_000
PROVISION = program("distributed-check", "--fix installs what is missing, into Muster's own folder there")
FREE_FILES = 5_000
"""Inodes: code and tokenizer are a thousand files, data may be more."""
_BY_HAND = "try on that machine: python3 -c 'import sys; print(sys.version)'"
_NEEDED = ("torch", "numpy", "pydantic", "safetensors", "psutil", "cryptography")
_OF_TRAIT: dict[Trait | None, tuple[str, ...]] = {
    "speech": ("transformers", "av", "soundfile"),
    "texts": ("transformers",),
}


@checked_dataclass(frozen=True)
class Facts:
    """A machine's report on itself; it is validated, because it comes from another machine."""

    python: tuple[int, ...]
    torch: str
    """Version; empty where there is none."""
    missing: tuple[str, ...]
    """Packages a worker needs and does not find."""
    clock_ahead: float
    """Seconds its clock is ahead of this machine's."""
    free: int
    """Bytes of disk."""
    writable: bool
    root: str
    """Muster's folder there."""
    system: str
    gpus: int
    interface: str
    """Network interface over which it was reached."""
    fingerprint: str
    """Of its host key."""
    address: str = ""
    """Under which it was reached, as a literal."""
    memory: int = 0
    """Bytes of memory, or of what its container may use; 0: unknown."""
    gpu_memory: int = 0
    """Bytes of its smallest GPU."""
    gpu_bf16: bool = False
    """Whether all its GPUs multiply bf16 in hardware."""
    dials_here: bool = True
    """Whether it can connect to this computer; where it is reached through another one, nobody tries."""
    free_files: int = -1
    """How many files may still be made; -1: there is no limit to them but the space."""
    identity: tuple[str, ...] = ()
    """Host name, number of the system, and boot: what tells machines with one host key apart."""
    unloadable: str = ""
    """The first package that is there and cannot be loaded, and why."""
    cloned: bool = False
    """Whether another machine was seen with its host key."""

    @property
    def machine_key(self) -> str:
        """What figures of the machine are kept by."""
        return f"{self.fingerprint} of {self.identity[0]}" if self.cloned and self.identity else self.fingerprint


Ready = tuple[MachineLink, Facts]
"""A machine that can take part, connected."""


@dataclass
class Readiness:
    """One machine: what it is, or why it cannot take part."""

    link: MachineLink
    facts: Facts | None = None
    problem: MusterError | None = None
    provisionable: bool = False
    """Whether the problem goes away with an environment that Muster makes."""


class NotReady(MusterError):
    """Machines that cannot take part; ``problems`` has one error for each."""

    exit_code = ExitCode.NOT_READY

    def __init__(self, problems: Sequence[MusterError], hint: str = "") -> None:
        words = [problem.hint for problem in problems] + [hint]
        hints = dict.fromkeys(word for word in words if word)  # what many need is said once
        super().__init__("; ".join(problem.message for problem in problems), "; ".join(hints))
        self.problems = tuple(problems)


def check(
    hosts: Hosts,
    task: str = "",
    trust: Trust | None = None,
    room: int = 0,
    known: Sequence[Readiness] = (),
    dial: Dial = link_to,
) -> list[Readiness]:
    """Ask all machines, and compare them.

    Args:
        task: kind of the job; decides which packages are needed.
        trust: asked for the key of a machine never met before.
        room: bytes that the run brings along.
        known: machines that were asked already; those without a problem are not asked again.

    Returns:
        One entry a machine, in their order. The links stay connected where there is no problem.
    """
    modules = [*_NEEDED, *_OF_TRAIT.get(trait_of(task), ())]
    sound = {one.link.machine: one for one in known if one.problem is None}

    def ask(machine: Machine) -> Readiness:
        return sound.get(machine) or _ask(dial(machine, hosts, trust), modules, dial_back)

    for one in known:
        if one.problem is not None:
            one.link.close()
    with DialBack() as dial_back, ThreadPoolExecutor(len(hosts.machines)) as pool:
        found = list(pool.map(ask, hosts.machines))
    for one in found:
        if one.facts is not None:
            one.problem = _own_problem(one.link, one.facts, room)
    _compare(found)
    return found


def ready(found: Sequence[Readiness], hint: str = "") -> list[Ready]:
    """Return links and facts of all machines.

    Args:
        hint: what helps beside the fixes of the problems.

    Raises:
        NotReady: some have a problem; all connections are closed.
    """
    problems = [one.problem for one in found if one.problem is not None]
    if problems:
        for one in found:
            one.link.close()
        raise NotReady(problems, hint)
    return [(one.link, one.facts) for one in found if one.facts is not None]


def _ask(link: MachineLink, modules: Sequence[str], dial_back: DialBack) -> Readiness:
    """Ask with the Python of the hosts file; where it names none, with ``python3``, else with our environment there."""
    try:
        asked = _ask_python(link, modules, dial_back)
        bare = link.machine.here and _is_plain(link) and not training_python()
        if not asked.provisionable and not bare:
            return asked
        link.python = find_environment(link) or link.python
        if _is_plain(link):
            facts = asked.facts and replace(asked.facts, missing=("torch",))  # what its python3 has, no run here uses
            return replace(asked, facts=facts, provisionable=True) if bare else asked
        if bare:
            train_with(link.python)
        return _ask_python(link, modules, dial_back)
    except MusterError as error:
        return Readiness(link, problem=error)


def _ask_python(link: MachineLink, modules: Sequence[str], dial_back: DialBack) -> Readiness:
    """Ask with the Python that the link has; note whether a run has to go through SSH.

    Raises:
        MusterError: the machine cannot be asked.
    """
    fingerprint = link.connection().fingerprint
    begin = time.time()
    try:
        said = link.probe(modules, address := dial_back.address_for(link))
        ahead = said["time"] - time.time() if said["time"] > time.time() else min(said["time"] - begin, 0.0)
        dials = not address or dial_back.came_through(said)
        facts = Facts(**{**said, "clock_ahead": ahead, "fingerprint": fingerprint, "dials_here": dials})
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SshError(link.name, "its report on itself cannot be read", _BY_HAND) from None
    except SshError as error:
        if error.cause != SshError.cause or not _is_plain(link):
            raise
        return Readiness(link, problem=SshError(link.name, error.beside(link.name), PROVISION), provisionable=True)
    if facts.dials_here == link.machine.through_ssh:
        link.machine = link.machine.model_copy(update={"through_ssh": not facts.dials_here})
    unfit = facts.python[:2] < OLDEST_PYTHON or bool(facts.missing)
    return Readiness(link, facts, provisionable=unfit and _is_plain(link))


def _is_plain(link: MachineLink) -> bool:
    """Whether nobody has chosen a Python for it yet, neither a person nor :func:`_ask`."""
    return not link.machine.python and link.python == "python3"


def _own_problem(link: MachineLink, facts: Facts, room: int) -> SshError | None:
    name = link.name
    if facts.python[:2] < OLDEST_PYTHON:
        found = ".".join(str(part) for part in facts.python)
        hint = "install Python 3.10 or newer there, and name it with 'python' in the hosts file"
        hint = PROVISION if _is_plain(link) else hint
        return SshError(name, f"{link.python} is Python {found}, needed is 3.10 or newer", hint)
    if facts.missing:
        if link.machine.here and _is_plain(link):
            return SshError(name, "PyTorch and the other packages that train are not installed here yet", PROVISION)
        words = " ".join(facts.missing)
        hint = f"install there: {link.python} -m pip install {words} (or name another 'python' in the hosts file)"
        hint = PROVISION if _is_plain(link) else hint
        return SshError(name, f"{link.python} has no {', '.join(facts.missing)}", hint)
    if facts.unloadable:
        return SshError(name, f"{link.python} cannot load {facts.unloadable}", _load_hint(link, facts.unloadable))
    if not facts.writable:
        return SshError(name, f"{facts.root} cannot be written there", "set 'project_path' in the hosts file")
    if facts.free < FREE_BYTES + room:
        need = (FREE_BYTES + room) // 1_000_000
        return SshError(
            name, f"its disk is full: {facts.free // 1_000_000} MB free at {facts.root}, needed are {need} MB",
            "free some space there, or set 'project_path' to another disk",
        )  # fmt: skip
    if 0 <= facts.free_files < FREE_FILES:
        problem = f"its disk has no more files to give: {facts.free_files} inodes free at {facts.root}"
        hint = "remove many small files there (df -i shows the inodes), or set 'project_path' to another disk"
        return SshError(name, problem, hint)
    if abs(facts.clock_ahead) > CLOCK_TOLERANCE:
        word = "ahead of" if facts.clock_ahead > 0 else "behind"
        problem = f"its clock is {abs(facts.clock_ahead):.0f} s {word} this machine's"
        return SshError(name, problem, "let the network set it (timedatectl set-ntp true; on a Mac: Date & Time)")
    return None


def _load_hint(link: MachineLink, unloadable: str) -> str:
    """Return what to do about a package that cannot be loaded, by the loader's words."""
    by_cause = {
        "failed to map segment": "its disk is mounted noexec: name a 'python' in the hosts file that lies elsewhere",
        "Operation not permitted": "its disk is mounted noexec: name a 'python' in the hosts file that lies elsewhere",
        "GLIBC": "the system there is older than the packages: a newer system, or packages built for it",
        "killed by signal 4": "it was built for another processor: install a build of torch for this one",
        "wrong ELF class": "it was built for another processor: install a build of torch for this one",
        "incompatible architecture": "it was built for another processor: install a build of torch for this one",
    }
    package = unloadable.partition(":")[0]
    usual = f"install what it lacks, or the package anew; try there: {link.python} -c 'import {package}'"
    return next((hint for words, hint in by_cause.items() if words in unloadable), usual)


def _compare(found: Sequence[Readiness]) -> None:
    """Find what only several machines together show: one machine twice, or different versions of torch."""
    sound = [(one, one.facts) for one in found if one.facts is not None and one.problem is None]
    keys: dict[tuple[str, ...], str] = {}
    for one, facts in sound:
        first = keys.setdefault((facts.fingerprint, *facts.identity), one.link.name)
        if first != one.link.name:
            problem = f"is the same machine as {first} (host key {facts.fingerprint})"
            one.problem = SshError(one.link.name, problem, "remove one of the two from the hosts file")
    shown = Counter(fingerprint for fingerprint, *_ in keys)
    for one, facts in sound:
        one.facts = replace(facts, cloned=shown[facts.fingerprint] > 1)
    versions = [facts.torch.partition("+")[0] for _, facts in sound]
    usual = max(versions, key=versions.count, default="")
    for (one, _), version in zip(sound, versions):
        if version != usual and one.problem is None:
            others = ", ".join(other.link.name for (other, _), v in zip(sound, versions) if v == usual)
            problem = f"has torch {version}, but {others} {'have' if ',' in others else 'has'} {usual}"
            hint = f"install the same there: {one.link.python} -m pip install torch=={usual}"
            one.problem = SshError(one.link.name, problem, hint)


_HERE = "this computer"


def plan_run(profile: Profile, machines: Sequence[Ready]) -> RunPlan:
    """Give ranks, devices and batch sizes to the machines, in their order.

    Raises:
        BadInput: the profile does not fit that many members.
    """
    seats = [(link.machine, facts, device) for link, facts in machines for device in link.machine.devices or ("",)]
    local = plan_local_run(profile, len(seats), here=False)
    engine = "nccl" if _wants_nccl(profile, seats) else "mesh"
    network = len({machine.name for machine, *_ in seats}) > 1
    far = [link.host for link, _ in machines if link.host and not link.machine.here]
    members = []
    for (machine, facts, device), planned in zip(seats, local.members, strict=True):
        seen = facts.interface
        if machine.here and far:  # it was reached over loopback; the others reach it over the way to them
            seen = interface_of(address_towards(far[0]))
        interface = (machine.interface or (seen if engine == "nccl" else "")) if network else ""
        members.append(member_of(machine, device, planned.rank, profile, planned.batch_size, interface))
    return local.model_copy(update={"members": tuple(members), "engine": engine, "own_folders": True})


def member_of(
    machine: Machine, device: str, rank: int, profile: Profile, batch_size: int = 0, interface: str = ""
) -> MemberPlan:
    """Return the member that a device of a machine becomes; by default with the profile's batch size."""
    kind, _, index = (device or profile.training.device).partition(":")
    return MemberPlan(
        rank=rank,
        name=_seat_name(machine, device),
        device=kind,
        device_index=int(index or 0),
        batch_size=batch_size or profile.training.batch_size,
        threads=profile.training.threads,
        interface=interface,
        machine=machine.name if profile.data.local_data else "",
        data=own_data(profile, rank, machine.data),
    )


def seat_names(machines: Sequence[Ready]) -> list[str]:
    """Return the names of the members that :func:`plan_run` gives these machines, in the order of their ranks."""
    return [_seat_name(link.machine, device) for link, _ in machines for device in link.machine.devices or ("",)]


def _seat_name(machine: Machine, device: str) -> str:
    return f"{machine.name}:{device}" if len(machine.devices) > 1 else machine.name


def _wants_nccl(profile: Profile, seats: Sequence[tuple[Machine, Facts, str]]) -> bool:
    """Whether nccl is asked for, or is faster and safe: on one machine that has a CUDA device for each.

    Its data plane is not encrypted, so over a network only a person chooses it.
    """
    if profile.strategy.engine != "auto":
        return profile.strategy.engine == "nccl"
    one_machine = len({machine.name for machine, *_ in seats}) < 2
    if len(seats) < 2 or not one_machine or profile.training.device not in ("auto", "cuda"):
        return False
    return all((facts.gpus and "+cpu" not in facts.torch and device in ("", "auto")) or device.startswith("cuda")
               for _, facts, device in seats)  # fmt: skip


def room_here(profile: Profile, workers: int) -> list[MemoryBudget]:
    """Return the memory that this computer has for workers."""
    device = profile.training.device
    gpus = count_gpus() if device in ("auto", "cuda") and "+cpu" not in importlib.metadata.version("torch") else 0
    if gpus:
        return [MemoryBudget(_HERE, gpu_memory(), "cuda", -(-workers // gpus), bf16=gpus_have_bf16())]
    total, limited = total_memory()
    return [MemoryBudget(_HERE, total, _shared(device, sys.platform == "darwin"), workers, limited)]


def rooms_of(profile: Profile, machines: Sequence[Ready]) -> list[MemoryBudget]:
    """Return the memory of machines and of their GPUs, each with the members that would share it."""
    found = []
    for link, facts in machines:
        kinds = Counter(_kind(device or profile.training.device, facts) for device in link.machine.devices or ("",))
        for kind, members in kinds.items():
            if kind.startswith("cuda"):
                found.append(MemoryBudget(link.name, facts.gpu_memory, "cuda", members, bf16=facts.gpu_bf16))
            elif link.machine.here:
                total, limited = total_memory()
                found.append(MemoryBudget(link.name, total, kind, members, limited))
            else:
                found.append(MemoryBudget(link.name, facts.memory, kind, members))
    return found


def _kind(device: str, facts: Facts) -> str:
    """Return what a member computes on: ``cpu``, ``mps``, or a GPU with its number."""
    if device.startswith("cuda") or (device == "auto" and facts.gpus and "+cpu" not in facts.torch):
        return device if device.startswith("cuda") else "cuda"
    return _shared(device, facts.system == "Darwin")


def _shared(device: str, mac: bool) -> str:
    return "mps" if device == "mps" or (device == "auto" and mac) else "cpu"
