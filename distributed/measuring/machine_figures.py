"""Training speed of each machine on the actual task: a short run on it alone, with the real code and data."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from distributed.machine.link import HereConnection, MachineLink, Tell
from distributed.planning.documents.cluster import ClusterMachine, Document, Measurement
from distributed.planning.documents.document import Workload
from distributed.preparation.code_sync import CODE_FOLDERS, Inputs
from distributed.preparation.preflight import Facts, Ready
from distributed.preparation.transfer import send_trees
from distributed.ssh.errors import SshError, one_line
from distributed.workers.agent_records import assigned
from distributed.workers.remote_worker import RemoteWorker
from profiles.quantities import bytes_text, left_text
from training.hardware.resources import free_cores
from training.records.bounded_fields import parse_object
from training.records.plan import MemberPlan

MODULE = "training.trial.short_run_start"
LONGEST = 1800.0
"""Seconds of a short run at most; computing features of a large data set for the first time takes most of it."""
_MOST_LINES = 10_000
_SKIP_POLL, _SKIP_GRACE = 0.2, 1.5
"""Seconds between looks at whether measuring is to be skipped, and in which machines that are about as fast as the
first may still report."""
_PHASE_INTERVAL, _PROGRESS_INTERVAL = 0.5, 5.0
"""Least seconds between two progress lines of a short run: of different phases, and of the same one."""
_ANNOUNCED_BYTES = 1_000_000
"""Missing bytes above which a transfer is announced."""
_MACHINE_FACTS = ("system", "device", "cores", "memory_total", "memory_free", "bf16", "on_mains")
_WORKLOAD_FACTS = ("trainable", "total", "layers", "samples", "evaluated")


class SpeedFigures(Document):
    """Figures of one member: its machine or device as the planner expects it, and the workload as seen there."""

    machine: ClusterMachine
    workload: Workload

    def of(self, member: MemberPlan) -> SpeedFigures:
        """Return the figures under the current names of a member and its machine."""
        names = {"name": member.name, "machine": member.machine}
        return self.model_copy(update={"machine": self.machine.model_copy(update=names)})


@dataclass(frozen=True)
class Placement:
    """One device of a machine, and the member that runs on it."""

    link: MachineLink
    facts: Facts
    member: MemberPlan


def bring(
    link: MachineLink,
    inputs: Inputs,
    tell: Tell = lambda line: None,
    is_abandoned: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    has_code: Callable[[], object] = lambda: None,
) -> None:
    """Send code, then data and model to a machine; ``tell`` hears how far a large transfer is, paced by ``clock``.

    Args:
        has_code: called once the code is there: its programs can start, and import while the rest is sent.
        is_abandoned: polled during the transfer; true once the caller no longer waits for it.

    Raises:
        SshError: the machine cannot receive them.
        BadInput: a file cannot be read, or the transfer was abandoned.
    """
    announced_at, began = float("-inf"), float("nan")

    def report_progress(done: int, total: int) -> None:
        nonlocal announced_at, began
        if is_abandoned():
            raise OSError(None, "it took too long to receive them")
        now = clock()
        began = now if math.isnan(began) else began
        if total - done > _ANNOUNCED_BYTES and now - announced_at >= _PROGRESS_INTERVAL:
            announced_at = now
            left = (total - done) * (now - began) / done if done and now > began else None
            work = f"receiving code, data and model, {bytes_text(done)} of {bytes_text(total)}"
            tell(MeasuringProgress(link.name, work, left))

    link.put_agent()
    code = [tree for folder, tree in inputs.trees.items() if folder in CODE_FOLDERS]
    send_trees(link, code, lambda done, total: report_progress(done, done))
    has_code()
    send_trees(link, [tree for tree in inputs.trees.values() if tree not in code], report_progress)
    if announced_at >= 0:
        tell(MeasuringProgress(link.name, "starting the program for the short run there"))


def coordinator_candidate(name: str) -> ClusterMachine:
    """Return the entry of this machine where it does not train: it may still carry the coordinator."""
    system = "darwin" if sys.platform == "darwin" else "linux"
    return ClusterMachine(
        name=name,
        identity=HereConnection.fingerprint,
        system=system,
        trains=False,
        cores=free_cores(),
    )


class StartBarrier:
    """Holds short runs back while their files are sent and links are measured; they load their imports meanwhile."""

    def __init__(self) -> None:
        self.brought = threading.Event()
        """Set once all machines have their code and data: nothing more is sent."""
        self.given_up = threading.Event()
        """Set once the measurement is abandoned."""
        self.measured = threading.Event()
        """Set once a machine has figures."""
        self.is_decided = threading.Event()
        """Set once the short runs may compute, or are to end."""
        self._lock = threading.Lock()
        self._workers: list[RemoteWorker] = []
        self._excluded = set[MachineLink]()
        self._action: Callable[[RemoteWorker], None] | None = None

    def admit(self, worker: RemoteWorker) -> None:
        """Add a short run to those that wait."""
        with self._lock:
            self._workers.append(worker)
            if self.given_up.is_set() or worker.link in self._excluded:
                worker.signal(signal.SIGKILL)
            elif self._action is not None:
                self._action(worker)

    def open(self) -> None:
        """Let all short runs compute, including those admitted later."""
        if not self.given_up.is_set():
            self._apply(lambda worker: worker.send({"go": True}))

    def give_up(self) -> None:
        """End all short runs, including those admitted later, and the transfers to their machines."""
        self.given_up.set()
        self._apply(lambda worker: worker.signal(signal.SIGKILL))

    def exclude(self, link: MachineLink) -> None:
        """End the short runs on a machine that cannot be sent their files, including those admitted later."""
        with self._lock:
            self._excluded.add(link)
            for worker in self._workers:
                if worker.link is link:
                    worker.signal(signal.SIGKILL)

    def _apply(self, action: Callable[[RemoteWorker], None]) -> None:
        with self._lock:
            self._action = action
            self.is_decided.set()
            for worker in self._workers:
                action(worker)


@contextlib.contextmanager
def ended_by(skip: threading.Event, barrier: StartBarrier) -> Iterator[None]:
    """End the short runs of a measurement when it is to be skipped, as soon as one machine has figures."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(_SKIP_POLL):
            if skip.is_set() and barrier.measured.is_set():
                if not finished.wait(_SKIP_GRACE):
                    barrier.give_up()
                return

    watcher = threading.Thread(target=watch, name="skip measuring", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def measure_member(placement: Placement, inputs: Inputs, barrier: StartBarrier, tell: Tell) -> SpeedFigures:
    """Run the task briefly on a machine that has code and data.

    Args:
        barrier: holds it back, or ends it early.
        tell: called with its progress every few seconds, a :class:`MeasuringProgress`.

    Raises:
        MusterError: it cannot be run there; the message names the machine.
    """
    others = [member for member in inputs.plan.members if member.rank != placement.member.rank]
    in_front = enumerate((placement.member, *others))
    members = tuple(member.model_copy(update={"rank": rank}) for rank, member in in_front)
    plan = inputs.plan.model_copy(update={"members": members})
    assignment = assigned(plan, inputs.links, placement.member.rank, placement.member.lead.threads, MODULE)
    with tempfile.TemporaryDirectory(prefix="muster-measure-") as folder, tempfile.TemporaryFile() as log:
        worker = RemoteWorker(placement.link, assignment, log, Path(folder), Path(folder))
        barrier.admit(worker)
        ended = threading.Event()

        def limit() -> None:
            barrier.is_decided.wait()  # its files may take hours to arrive
            if not ended.wait(LONGEST):
                worker.signal(signal.SIGKILL)

        threading.Thread(target=limit, name="limit of a short run", daemon=True).start()
        try:
            return figures_of(placement, inputs, _noted(worker.lines(), barrier.measured), tell)
        finally:
            ended.set()
            worker.signal(signal.SIGKILL)


def _noted(lines: Iterator[bytes], measured: threading.Event) -> Iterator[bytes]:
    """Yield the lines of a short run; set ``measured`` after the line that follows its first figures."""
    for line in lines:
        yield line
        if b'"kind": "workload"' in line:
            measured.set()


def estimated(placement: Placement, measured: Sequence[SpeedFigures]) -> SpeedFigures:
    """Return figures of a member that was not measured: those of the slowest machine that was, of its kind if any."""
    member = placement.member
    alike = [figures for figures in measured if figures.machine.device == member.lead.kind] or measured
    slowest = min(alike, key=lambda figures: figures.machine.speed)
    machine = slowest.machine.model_copy(
        update={"identity": placement.facts.machine_key, "system": placement.facts.system.lower(), "estimated": True}
    )
    return slowest.model_copy(update={"machine": machine}).of(member)


class MeasuringProgress(str):
    """A line about one machine that is being measured: ``desk: measuring steps of 8 samples, about 0:12 left``."""

    machine: str
    work: str
    """What it does."""
    left: float | None
    """Seconds that its work, and what follows as far as it is known, probably takes; ``None``: not known."""

    def __new__(cls, machine: str, work: str, left: float | None = None) -> MeasuringProgress:
        name = "this computer" if machine == "localhost" else machine
        progress = super().__new__(cls, f"{name}: {work}{left_text(left)}")
        progress.machine, progress.work, progress.left = machine, work, left
        return progress


class _ProgressAnnouncer:
    """Announces the progress of a short run: each new phase, and how far it is every few seconds."""

    def __init__(self, placement: Placement, tell: Tell, clock: Callable[[], float]) -> None:
        self._name, self._tell, self._clock = placement.member.name, tell, clock
        self._phase, self._began = "", 0.0
        self._announced_at = float("-inf")

    def __call__(self, report: dict[str, Any]) -> None:
        phase, now = one_line(str(report.get("phase", "")))[:80], self._clock()
        if phase != self._phase:
            self._began = now
        if now - self._announced_at < (_PHASE_INTERVAL if phase != self._phase else _PROGRESS_INTERVAL):
            return
        self._phase, self._announced_at = phase, now
        done, total = report.get("done"), report.get("total")
        amount, left = "", report.get("left")
        if type(done) is type(total) is int and 0 < done <= total:
            amount, left = f" {done} of {total}", (total - done) * (now - self._began) / done
        is_number = isinstance(left, float) and math.isfinite(left)
        self._tell(MeasuringProgress(self._name, f"{phase}{amount}", left if is_number else None))


def figures_of(
    placement: Placement,
    inputs: Inputs,
    lines: Iterator[bytes],
    tell: Tell = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> SpeedFigures:
    """Read the figures of a short run from its output lines; ``clock`` paces the progress lines.

    Raises:
        SshError: it failed, or reported incomplete or impossible figures.
    """
    name, latest_by_kind, measurements = placement.link.name, dict[str, dict[str, Any]](), list[dict[str, Any]]()
    announcer = _ProgressAnnouncer(placement, tell, clock)
    for number, line in enumerate(lines):
        report: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            report = parse_object(line)
        kind = str(report.get("kind"))
        if kind == "progress":
            announcer(report)
        if kind == "measurement" and len(measurements) < 16:
            measurements.append({key: report[key] for key in Measurement.model_fields if key in report})
        latest_by_kind[kind] = report
        if len(latest_by_kind) > 16 or number > _MOST_LINES:
            break
    failure = latest_by_kind.get("failure") or latest_by_kind.get("error") or {}
    blocks = latest_by_kind.get("blocks", {}).get("seconds", ())
    if failure and not measurements:
        raise SshError(name, f"could not run the task ({failure.get('message', '')})", str(failure.get("hint", "")))
    if not (measurements or blocks) or "facts" not in latest_by_kind or "workload" not in latest_by_kind:
        raise SshError(name, "the short run there ended without figures", "try the task on that machine")
    facts, model = latest_by_kind["facts"], latest_by_kind["workload"]
    tuning = inputs.plan.profile.model.tuning
    counts = {key: model[key] for key in _WORKLOAD_FACTS if key in model}
    try:
        machine = ClusterMachine(
            name=placement.member.name,
            machine=placement.member.machine,
            identity=placement.facts.machine_key,
            measurements=tuple(Measurement(**measurement) for measurement in measurements),
            blocks=blocks,
            evaluation=latest_by_kind.get("evaluation", {}).get("seconds", 0.0),
            **{key: facts[key] for key in _MACHINE_FACTS if key in facts},
        )
        lora = counts.get("trainable", 0) if tuning == "lora" else 0
        return SpeedFigures(machine=machine, workload=Workload(tuning=tuning, lora_trainable=lora, **counts))
    except (ValidationError, TypeError) as error:
        raise SshError(name, f"impossible figures ({str(error).splitlines()[0]:.100})", "measure again") from None


def placements_of(machines: Sequence[Ready], members: tuple[MemberPlan, ...]) -> list[Placement]:
    """Return the placement of every member on its machine."""
    ready_by_name = {link.name: (link, facts) for link, facts in machines}
    return [Placement(*ready_by_name[member.machine], member) for member in members]
