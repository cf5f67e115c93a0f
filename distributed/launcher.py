"""From a profile and a hosts file to a run that goes on by itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from distributed.agent_files import interface_of
from distributed.code_sync import REPOSITORY
from distributed.hosts import Hosts, save_hosts
from distributed.hosts_schema import Machine
from distributed.link import Link, address_towards
from distributed.preflight import Facts, check, hosts_with_pythons, ready
from distributed.ssh import Trust
from profiles.errors import RunFailed
from profiles.schema import Profile
from training.events import TimingEvent
from training.local_plan import plan_local_run
from training.plan import MemberPlan, RunPlan
from training.processes import environment
from training.run_files import is_live
from training.run_folder import RunFolder
from training.timing import Laps

HOSTS = "hosts.json"
"""The machines of a run, in its folder."""
_START_PATIENCE = 20.0


class DistributedLauncher:
    """Plans a run on several machines and starts its supervisor.

    Args:
        hosts: the machines.
        profile: what to train.
        trust: asked for the key of a machine never met before.
        whole_process: the time of the start begins with this process, not with this object.
    """

    def __init__(self, hosts: Hosts, profile: Profile, trust: Trust | None = None, whole_process: bool = False) -> None:
        self._hosts = hosts
        self._profile = profile
        self._trust = trust
        self._timings: list[TimingEvent] = []
        self._laps = Laps(self._timings.append, whole_process)
        self._stand_by: StandBy | None = None

    def plan(self) -> RunPlan:
        """Check all machines and return the plan of a run on them.

        Raises:
            NotReady: some machine cannot take part.
            BadInput: the profile does not fit that many members.
        """
        self._laps.end("command: program")
        self._stand_by = StandBy()
        try:
            machines = ready(check(self._hosts, self._profile.model.task, self._trust))
            for link, _ in machines:
                link.close()
            self._hosts = hosts_with_pythons(self._hosts, [link for link, _ in machines])
            self._laps.end("machines: checked")
            return plan_run(self._profile, machines)
        except BaseException:
            self._stand_by.dismiss()
            self._stand_by = None
            raise

    def start(self, plan: RunPlan, command: Sequence[str], fill: Callable[[Path], None] = lambda folder: None) -> Path:
        """Make the run folder, let ``fill`` put more into it, start the supervisor, and return the folder.

        Raises:
            BadInput: the folder cannot be made.
            RunFailed: the supervisor did not start.
        """
        supervisor, self._stand_by = self._stand_by or StandBy(), None
        try:
            path = self._folder(plan, command)
            fill(path)
        except BaseException:
            supervisor.dismiss()
            raise
        supervisor.start(path)
        return path

    def _folder(self, plan: RunPlan, command: Sequence[str]) -> Path:
        output = Path(self._profile.run.output_dir)
        folder = RunFolder.create(output, plan, list(command), run_type="distributed")
        save_hosts(self._hosts, folder.path / HOSTS)
        self._laps.end("command: plan")
        for timing in self._timings:
            folder.append(timing)
        folder.close()
        return folder.path


def plan_run(profile: Profile, machines: Sequence[tuple[Link, Facts]]) -> RunPlan:
    """Give ranks, devices and batch sizes to the machines, in their order.

    Raises:
        BadInput: the profile does not fit that many members.
    """
    far = [link.host for link, _ in machines if link.host and not link.machine.here]
    seats = [
        (link.machine, _as_seen(facts, link.machine, far), device)
        for link, facts in machines
        for device in link.machine.devices or ("",)
    ]
    local = plan_local_run(profile, len(seats))
    engine = "torch" if _wants_torch(profile, seats) else "hub"
    members = tuple(
        _member(rank, machine, facts, device, local.members[rank].batch_size, profile, engine)
        for rank, (machine, facts, device) in enumerate(seats)
    )
    return local.model_copy(update={"members": members, "engine": engine})


def _as_seen(facts: Facts, machine: Machine, far: Sequence[str]) -> Facts:
    """This machine was reached over loopback; the others reach it over the interface that leads to them."""
    return replace(facts, interface=interface_of(address_towards(far[0]))) if machine.here and far else facts


def _member(
    rank: int, machine: Machine, facts: Facts, device: str, batch_size: int, profile: Profile, engine: str
) -> MemberPlan:
    kind, _, index = (device or profile.training.device).partition(":")
    return MemberPlan(
        rank=rank,
        name=f"{machine.name}:{device}" if len(machine.devices) > 1 else machine.name,
        device=kind,
        device_index=int(index or 0),
        batch_size=batch_size,
        threads=profile.training.threads,
        interface=machine.interface or facts.interface if engine == "torch" else "",
    )


def _wants_torch(profile: Profile, seats: Sequence[tuple[Machine, Facts, str]]) -> bool:
    """The hub joins everything; NCCL is faster where every member has a CUDA device of its own."""
    if profile.strategy.engine != "auto":
        return profile.strategy.engine == "torch"
    if len(seats) < 2 or profile.training.device not in ("auto", "cuda"):
        return False
    return all((facts.gpus and "+cpu" not in facts.torch and device in ("", "auto")) or device.startswith("cuda")
               for _, facts, device in seats)  # fmt: skip


class StandBy:
    """The process of a supervisor, started before anybody knows its run: it imports while the machines are asked.

    It ends by itself when this process ends before :meth:`start`.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by dismiss() and start()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distributed.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**environment(0), "PYTHONPATH": environment(0)["PYTHONPATH"] or str(REPOSITORY)},
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End it: there is nothing to supervise. Idempotent."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def start(self, run_dir: Path) -> None:
        """Give it its run; it outlives this process and its terminal.

        Raises:
            RunFailed: it ended at once.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as words:
            words.write(os.fsencode(run_dir.resolve()))
        threading.Thread(target=self._process.wait, daemon=True).start()  # no zombie, where this process goes on
        end = time.monotonic() + _START_PATIENCE
        with self._errors:
            while not is_live(run_dir):
                if not run_dir.is_dir() or self._process.poll() == 0:
                    return  # it was very quick: the folder tells how it ended
                if self._process.poll() is not None or time.monotonic() > end:
                    log = run_dir / "logs" / "supervisor.log"
                    self._errors.seek(0)
                    log.write_bytes(self._errors.read())
                    raise RunFailed("the supervisor did not start", f"see {log}")
                time.sleep(0.01)


def start_supervisor(run_dir: Path) -> None:
    """Start the background process of a prepared run; it outlives this process and its terminal.

    Raises:
        RunFailed: it ended at once.
    """
    StandBy().start(run_dir)
