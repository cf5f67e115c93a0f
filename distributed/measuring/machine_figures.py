"""How fast each machine trains the actual task: a short run there, alone, with the code and the data of the real
run."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from distributed.machine.link import MachineLink, Tell
from distributed.planning.cluster import ClusterMachine, Document, Measurement
from distributed.planning.document import Workload
from distributed.preparation.code_sync import Inputs
from distributed.preparation.preflight import Facts, Ready
from distributed.preparation.transfer import send_trees
from distributed.ssh.errors import SshError, one_line
from distributed.workers.agent_records import assigned
from distributed.workers.remote_worker import RemoteWorker
from training.bounded import parse_object
from training.plan import MemberPlan

MODULE = "training.short_run_start"
LONGEST = 1800.0
"""Seconds of a short run at most; computing features of a large data set for the first time takes most of it."""
_MOST_LINES = 10_000
_SOON, _LATER = 0.5, 5.0
"""Seconds at least between two words about what a short run is at: about another phase, and about the same."""
_WORTH_A_WORD = 1_000_000
"""Bytes that a machine lacks."""
_MACHINE_FACTS = ("system", "device", "cores", "memory_total", "memory_free", "bf16", "on_mains")
_WORKLOAD_FACTS = ("trainable", "total", "layers", "samples")


class SpeedFigures(Document):
    """One member: the machine or the device as the planner takes it, and the workload as it was seen there."""

    machine: ClusterMachine
    workload: Workload

    def of(self, name: str) -> SpeedFigures:
        """Return figures from an earlier time under the name that the machine has now."""
        return self.model_copy(update={"machine": self.machine.model_copy(update={"name": name})})


@dataclass(frozen=True)
class Placement:
    """One device of a machine, and what it is to run."""

    link: MachineLink
    facts: Facts
    member: MemberPlan


def bring(
    link: MachineLink, inputs: Inputs, tell: Tell = lambda line: None, given_up: Callable[[], bool] = lambda: False
) -> None:
    """Send code and data to a machine; ``tell`` is called where that takes a while.

    Args:
        given_up: asked now and then whether nobody waits for it any more.

    Raises:
        SshError: it cannot take them.
        BadInput: a file cannot be read, or nobody waits for it any more.
    """
    told = False

    def say(done: int, total: int) -> None:
        nonlocal told
        if given_up():
            raise OSError(None, "it took too long to receive them")
        if total - done > _WORTH_A_WORD and not told:
            told = True
            tell(f"{link.name}: receiving code, data and model, {(total - done) / 1e6:.0f} MB")

    link.put_agent()
    send_trees(link, inputs.trees.values(), say)


class StartBarrier:
    """Holds short runs back before they compute, while links are measured: what they import is loaded meanwhile."""

    def __init__(self) -> None:
        self.brought = threading.Event()
        """All machines have their code and data: nothing more is sent."""
        self.given_up = threading.Event()
        """Nobody waits for any of it."""
        self._lock = threading.Lock()
        self._workers: list[RemoteWorker] = []
        self._act: Callable[[RemoteWorker], None] | None = None

    def admit(self, worker: RemoteWorker) -> None:
        """Let a short run wait with the others."""
        with self._lock:
            self._workers.append(worker)
            if self._act is not None:
                self._act(worker)

    def open(self) -> None:
        """Let all of them compute, those too that come later."""
        self._all(lambda worker: worker.send({"go": True}))

    def give_up(self) -> None:
        """End all of them, those too that come later, and what is being sent to their machines."""
        self.given_up.set()
        self._all(lambda worker: worker.signal(signal.SIGKILL))

    def _all(self, act: Callable[[RemoteWorker], None]) -> None:
        with self._lock:
            self._act = act
            for worker in self._workers:
                act(worker)


def measure_member(placed: Placement, inputs: Inputs, gate: StartBarrier, tell: Tell) -> SpeedFigures:
    """Run the task briefly on a machine that has code and data.

    Args:
        gate: holds it back, or ends it early.
        tell: hears what it is at, now and then.

    Raises:
        MusterError: it cannot be run there; the message names the machine.
    """
    others = [member for member in inputs.plan.members if member.rank != placed.member.rank]
    plan = inputs.plan.model_copy(update={"members": (placed.member.model_copy(update={"rank": 0}), *others)})
    assignment = assigned(plan, inputs.links, placed.member.rank, placed.member.threads, MODULE)
    with tempfile.TemporaryDirectory(prefix="muster-measure-") as folder, tempfile.TemporaryFile() as log:
        worker = RemoteWorker(placed.link, assignment, log, Path(folder), Path(folder))
        gate.admit(worker)
        late = threading.Timer(LONGEST, worker.signal, [signal.SIGKILL])
        late.start()
        try:
            return figures_of(placed, inputs, worker.lines(), tell)
        finally:
            late.cancel()
            worker.signal(signal.SIGKILL)


class _Aloud:
    """Says what a short run is at: each new phase, and how far it is every few seconds."""

    def __init__(self, placed: Placement, tell: Tell, clock: Callable[[], float]) -> None:
        self._name, self._tell, self._clock = placed.member.name, tell, clock
        self._phase = ""
        self._said = float("-inf")

    def __call__(self, said: dict[str, Any]) -> None:
        phase, now = one_line(str(said.get("phase", "")))[:80], self._clock()
        if now - self._said < (_SOON if phase != self._phase else _LATER):
            return
        self._phase, self._said = phase, now
        done, total = said.get("done"), said.get("total")
        far = f" {done} of {total}" if done and type(done) is type(total) is int else ""
        self._tell(f"{self._name}: {phase}{far}")


def figures_of(
    placed: Placement,
    inputs: Inputs,
    lines: Iterator[bytes],
    tell: Tell = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> SpeedFigures:
    """Read the figures of a short run; ``clock`` gives the seconds between two words on what it is at.

    Raises:
        SshError: it failed, or said too little or something that cannot be.
    """
    name, found, measurements = placed.link.name, dict[str, dict[str, Any]](), list[dict[str, Any]]()
    aloud = _Aloud(placed, tell, clock)
    for number, line in enumerate(lines):
        said: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            said = parse_object(line)
        kind = str(said.get("kind"))
        if kind == "progress":
            aloud(said)
        if kind == "measurement" and len(measurements) < 16:
            measurements.append({key: said[key] for key in Measurement.model_fields if key in said})
        found[kind] = said
        if len(found) > 16 or number > _MOST_LINES:
            break
    failure = found.get("failure") or found.get("error") or {}
    if failure and not measurements:
        raise SshError(name, f"could not run the task ({failure.get('message', '')})", str(failure.get("hint", "")))
    if not measurements or "facts" not in found or "workload" not in found:
        raise SshError(name, "the short run there ended without figures", "try the task on that machine")
    facts, model = found["facts"], found["workload"]
    tuning = inputs.plan.profile.model.tuning
    counts = {key: model[key] for key in _WORKLOAD_FACTS if key in model}
    try:
        machine = ClusterMachine(
            name=placed.member.name,
            identity=placed.facts.machine_key,
            measurements=tuple(Measurement(**one) for one in measurements),
            **{key: facts[key] for key in _MACHINE_FACTS if key in facts},
        )
        lora = counts.get("trainable", 0) if tuning == "lora" else 0
        return SpeedFigures(machine=machine, workload=Workload(tuning=tuning, lora_trainable=lora, **counts))
    except (ValidationError, TypeError) as error:
        raise SshError(name, f"impossible figures ({str(error).splitlines()[0]:.100})", "measure again") from None


def placements_of(machines: Sequence[Ready], members: tuple[MemberPlan, ...]) -> list[Placement]:
    """Return where every member runs: one for each device of each machine, in the order of the plan's members."""
    owners = [one for one in machines for _ in one[0].machine.devices or ("",)]
    return [Placement(link, facts, member) for (link, facts), member in zip(owners, members, strict=True)]
