"""Process entry of one rank of a launched script: ``python -m training.workers.script_worker``, with the commands
and events of :mod:`training.workers.worker`.

The script is a separate process (``script_start.py``) in this one's process group: neither its modules nor its end
affect the watching process, and its children end with it. It has torchrun's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from profiles.errors import ExitCode, MusterError, RunFailed, exit_text
from training.exchange.links.dialling import interface_at
from training.hardware.giving_way import lower_priority
from training.hardware.machine_load import machine_events
from training.hardware.resources import count_gpus, whole_cores
from training.records.bounded_fields import LONGEST_LINE, LONGEST_TEXT
from training.records.event_log import EventSink
from training.records.events import ErrorEvent, Event, MemberEvent, RunEvent, from_line
from training.records.launched_script import LAUNCHED_FILES, LaunchedScript
from training.records.plan import RunPlan, read_plan
from training.run.orders import Command
from training.run.processes import RUN_VARIABLE, end_processes, thread_limits
from training.workers.worker import (
    Rendezvous,
    leave,
    listen_address,
    read_rendezvous,
    take_over_stdout,
    worker_arguments,
)

START = Path(__file__).parents[1] / "script" / "script_start.py"
_GRACE = 5.0
"""Seconds that the script has to end by itself when its supervisor is gone."""
_COPY_PATIENCE = 600.0
_POLL = 0.05


def environment(
    plan: RunPlan, launch: LaunchedScript, rank: int, rendezvous: Rendezvous, secrets: Path, run_dir: Path = Path()
) -> dict[str, str]:
    """Return torchrun's variables for a rank, those of the mesh and of a session, without those that only this process
    needs.

    Args:
        run_dir: folder of the run on this machine.

    Raises:
        RunFailed: the machine does not have the configured interface.
    """
    device = plan.members[rank].lead
    local_ranks = plan.ranks_on(device.machine)
    code = (str(START.parents[2]), str(Path.cwd() / "inputs" / "user"))
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in code]
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if "OMP_NUM_THREADS" not in inherited:
        inherited |= thread_limits(max(1, whole_cores() // len(local_ranks)))
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_RANK": local_ranks.index(rank),
        "LOCAL_WORLD_SIZE": len(local_ranks),
        "GROUP_RANK": plan.machines.index(device.machine),
        "GROUP_WORLD_SIZE": len(plan.machines),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": plan.world_size,
        "TORCHELASTIC_RESTART_COUNT": plan.attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": launch.restarts,
        "MASTER_PORT": 20_000 + sum(plan.run_id.encode()) * 31 % 12_000,
    }
    listen = listen_address(device)
    return {
        **interface_variables(listen, len(plan.machines)),
        **inherited,
        **({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
        **{name: str(number) for name, number in numbers.items()},
        "ROLE_NAME": "default",
        "MASTER_ADDR": plan.members[0].lead.addresses[0],
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "PYTHONUNBUFFERED": "1",
        RUN_VARIABLE: plan.run_id,
        "MUSTER_CERTIFICATES": str((secrets / f"member-{rank}").resolve()),
        "MUSTER_LISTEN": listen,
        "MUSTER_NAMES": ",".join(member.name for member in plan.members),
        "MUSTER_STORE": rendezvous.store,
        "MUSTER_RELAY": rendezvous.relay,
        "MUSTER_BACKEND": launch.backend,
        "MUSTER_RUN_DIR": str(run_dir.resolve()),
        # The same for all ranks, whatever devices the script hides from each of them.
        "MUSTER_NCCL": str(int(len(plan.machines) == 1 and count_gpus() >= len(local_ranks))),
    }


def interface_variables(address: str, machines: int) -> dict[str, str]:
    """Return the variables that name the interface of ``address`` to gloo, TensorPipe and, between machines, NCCL: left
    to themselves they look the host's own name up, which on Debian and Ubuntu is 127.0.1.1."""
    if not (interface := interface_at(address)):
        return {}
    between = {"NCCL_SOCKET_IFNAME": f"={interface}"} if machines > 1 else {}
    return {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface, **between}


def working_folder(plan: RunPlan, launch: LaunchedScript, run_dir: Path, rank: int) -> Path:
    """Return the folder that the script runs in: a copy that the ranks of a machine share, or the current folder.

    Raises:
        RunFailed: the first rank of the machine did not make the copy.
    """
    if not launch.folder:
        return Path.cwd()
    first_rank = plan.ranks_on(plan.members[rank].machine)[0]
    folder = run_dir.resolve().parent / str(first_rank) / "work"
    if rank == first_rank:
        unfinished = folder.with_suffix(".part")
        shutil.copytree(run_dir / launch.folder, unfinished, copy_function=shutil.copyfile)
        unfinished.rename(folder)
    end = time.monotonic() + _COPY_PATIENCE
    while not folder.is_dir():
        if time.monotonic() > end:
            raise RunFailed(f"{folder} was not created", "see the log of the machine's first rank")
        time.sleep(_POLL)
    return folder


class Guard:
    """A separate process that kills everything that a rank's script has started, even in other sessions, when this
    process is gone or killed. It keeps this process's output open until then."""

    def __init__(self, run_id: str, rank: int) -> None:
        read_end, self._write_end = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._write_end)
            os.setsid()
            os.read(read_end, 1)
            end_processes(run_id, rank)
            os._exit(0)
        os.close(read_end)

    def end(self) -> None:
        """Kill these processes now."""
        os.close(self._write_end)
        os.waitpid(self._pid, 0)


class Script:
    """The script's process, and its report of an uncaught error.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        name: str,
        launch: LaunchedScript,
        folder: Path,
        variables: Mapping[str, str],
        emit: Callable[[Event], object],
    ) -> None:
        self._name, self._is_remote = name, bool(launch.folder)
        self._emit, self._variables = emit, variables
        self._stop_requested = threading.Event()
        self._has_reported = self._in_session = False
        self._guard = Guard(variables[RUN_VARIABLE], int(variables["RANK"]))
        ours, theirs = socket.socketpair()
        words = [variables[RUN_VARIABLE], "module" if launch.module else "file", launch.script, *launch.arguments]
        self._commands = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(START), *words], stdin=theirs.fileno(), stdout=2, env=dict(variables), cwd=folder
            )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read_report, args=(ours,), daemon=True)
        self._reader.start()

    def obey(self) -> None:
        """Carry out commands until their source is closed."""
        for line in iter(lambda: sys.stdin.buffer.readline(LONGEST_LINE), b""):
            with contextlib.suppress(ValueError):
                self._carry_out(json.loads(line))
        self._carry_out({"command": "stop", "reason": "the process that started this worker is gone"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
            return
        print("the process that watched this script is gone: ending it", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGKILL)

    def end(self) -> ExitCode:
        """Wait for the end of the script; report a failure that it has not reported itself."""
        code = self._process.wait()
        self._guard.end()
        self._reader.join(_GRACE)
        if self._stop_requested.is_set() and (code or not self._in_session):
            return ExitCode.STOPPED
        if code and not self._has_reported:
            self._fail(f"the script {exit_text(code)}")
        return ExitCode.RUN_FAILED if code else ExitCode.DONE

    def _carry_out(self, command: Mapping[str, Any]) -> None:
        """Stop the script; one in a session takes every command itself, but the end after another rank's failure."""
        ends = command.get("command") == "stop"
        if ends:
            self._stop_requested.set()
        if self._in_session and command.get("snapshot", True):
            with contextlib.suppress(OSError):
                self._commands.sendall(json.dumps(command).encode() + b"\n")
        elif ends and self._process.poll() is None:
            self._process.terminate()

    def _read_report(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    self._take(line)

    def _take(self, line: bytes) -> None:
        """Take what the script's process reports: its uncaught error, or an event of its session."""
        report = json.loads(line)
        if "error" in report:
            self._has_reported = True
            return self._fail(str(report["error"]), str(report["traceback"])[-LONGEST_TEXT:])
        event = from_line(line)
        self._in_session |= isinstance(event, RunEvent)
        self._emit(event)

    def _fail(self, message: str, traceback: str = "") -> None:
        name = self._name
        error = ErrorEvent(message=f"{name}: {message}", traceback=traceback, hint=f"its whole output is in {name}.log")
        self._emit(error.model_copy(update={"machine": name}) if self._is_remote else error)


def file_stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every plain file below a folder, by its relative path, without Python's
    caches and files whose names are not portable."""
    stamp_by_path = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in (Path(folder, name) for name in files):
            relative = path.relative_to(root).as_posix()
            if path.is_file() and not path.is_symlink() and relative.isprintable() and not {":", "\\"} & set(relative):
                stamp_by_path[relative] = (path.stat().st_size, path.stat().st_mtime_ns)
    return stamp_by_path


def move_changed_files(folder: Path, before: Mapping[str, tuple[int, int]], target: Path) -> None:
    """Move new and changed files of a folder to ``target``."""
    for relative, stamp in file_stamps(folder).items():
        if before.get(relative) != stamp:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).rename(target / relative)


def run_script(plan: RunPlan, arguments: argparse.Namespace, rendezvous: Rendezvous, emit: EventSink) -> ExitCode:
    """Run the script as one rank; every failure becomes one ``error`` event.

    Args:
        arguments: of this process, see :func:`training.workers.worker.worker_arguments`.
    """
    rank, run_dir, secrets = arguments.rank, arguments.run_dir, arguments.secrets
    name, launch = plan.all_members[rank].name, plan.launch
    assert launch is not None
    if plan.process(rank).device.be_polite:
        lower_priority()
    emit(MemberEvent(status="started", name=name, message=f"pid {os.getpid()}"))
    try:
        folder = working_folder(plan, launch, run_dir, rank)
        before = file_stamps(folder) if launch.folder and rank == 0 else {}
        variables = environment(plan, launch, rank, rendezvous, secrets, run_dir)
        script = Script(name, launch, folder, variables | {"MUSTER_PLAN": str(arguments.plan.resolve())}, emit)
    except (MusterError, OSError) as error:
        emit(ErrorEvent(message=f"{name}: {error}"))
        return ExitCode.RUN_FAILED
    emit(RunEvent(status="running"))
    emit(MemberEvent(status="joined", name=name))
    threading.Thread(target=script.obey, daemon=True).start()
    with machine_events(emit, None, secrets, run_id=plan.run_id, process=script.pid):
        code = script.end()
    if launch.folder and rank == 0:
        move_changed_files(folder, before, run_dir / LAUNCHED_FILES)
    if code is ExitCode.DONE:
        emit(MemberEvent(status="done", name=name))
    return code


def main() -> int:
    arguments = worker_arguments("training.workers.script_worker")
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal that is ignored would be ignored by the script too
        signal.signal(number, lambda *_: None)
    emit = EventSink(take_over_stdout(), arguments.rank)
    try:
        plan = read_plan(arguments.plan)
    except MusterError as error:
        emit(ErrorEvent.of(error))
        return int(error.exit_code)
    commands: list[Command] = []
    try:
        rendezvous = read_rendezvous(sys.stdin.buffer, commands.append)
    except RunFailed:
        return int(ExitCode.STOPPED)
    if any(command.command == "stop" for command in commands):
        return int(ExitCode.STOPPED)
    return int(run_script(plan, arguments, rendezvous, emit))


if __name__ == "__main__":
    leave(main())
