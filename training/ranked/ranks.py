"""The processes of an engine as the workers of a run: the first rank controls it and trains, the others train.

The first rank listens with a certificate made for this; the engine's store tells the others its address, that
certificate's authority and a token. Whoever can read that store can take a rank's part in the run, as with torchrun
itself. Over these connections go plan, keys, commands and events, a JSON object a line.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import BadInput, ExitCode, RunFailed, counted
from training.exchange.links.certificates import COORDINATOR_NAME, issue_run_certificates
from training.hardware.resources import count_gpus, whole_cores
from training.ranked.engine_process import EngineProcess, EngineStore
from training.records.bounded_fields import LONGEST_LINE
from training.records.events import Event
from training.records.plan import MemberPlan, RunPlan
from training.records.run_files import private_folder
from training.records.run_folder import RunFolder
from training.run.local_workers import StartWorker, local_starter
from training.run.processes import SubprocessWorker, Worker

_WORKER = "training.workers.worker"
_COMING_SECONDS = 600.0
"""Until all ranks must have come."""
_END_SECONDS = 20.0
"""For a worker to end after the first rank is gone: a step and a snapshot."""


class RankReport(BaseModel):
    """What a rank says of itself when it comes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str
    rank: int = Field(ge=0)
    local_rank: int = Field(ge=0)
    machine: str
    gpus: int = Field(ge=0)
    cores: int = Field(ge=1)
    pid: int = Field(ge=1)

    @classmethod
    def of(cls, process: EngineProcess, token: str) -> RankReport:
        rank, local_rank = process.rank, process.local_rank
        return cls(token=token, rank=rank, local_rank=local_rank, machine=process.machine, gpus=count_gpus(),
                   cores=whole_cores(), pid=os.getpid())  # fmt: skip


class _Line:
    """One connection: JSON objects, one a line, in both directions."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self.local, self.peer = connection.getsockname()[0], connection.getpeername()[0]
        self.connection, self._input = connection, connection.makefile("rb")
        self._gate = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one that is gone is not an error here."""
        with self._gate, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what comes, until the other side is gone."""
        with contextlib.suppress(OSError, ValueError):
            while line := self._input.readline(8 * LONGEST_LINE):
                yield json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._input.close()
        self.connection.close()


class Ranks:
    """All ranks of a run, seen from the first: a context, at whose end the others end too.

    Raises:
        RunFailed: a rank has not come, or the engine's store does not answer.
    """

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._folder = tempfile.TemporaryDirectory(prefix="muster-ranks-")
        self._lines: dict[int, _Line] = {}
        self.reports = {0: RankReport.of(process, "")}
        self.code = ExitCode.RUN_FAILED
        """With which the other ranks end."""
        try:
            self._gather()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for line in self._lines.values():
            line.send({"end": int(self.code)})
            line.close()
        self._folder.cleanup()

    def _gather(self) -> None:
        token, folder = secrets.token_urlsafe(32), Path(self._folder.name)
        issue_run_certificates(folder, "ranks", [], [])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "coordinator" / "certificate.pem", folder / "coordinator" / "key.pem")
        end = time.monotonic() + _COMING_SECONDS
        with _listening(self._process.world_size) as server:
            authority = (folder / "coordinator" / "ca.pem").read_text()
            port = server.getsockname()[1]
            self._store = EngineStore(self._process)  # unless torchrun serves it, it lives in this process
            self._store.publish({"port": port, "authority": authority, "token": token})
            while len(self._lines) < self._process.world_size - 1:
                server.settimeout(max(end - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                except TimeoutError as error:
                    raise RunFailed(f"{self._missing()} not come", "see the output of these ranks") from error
                self._take(connection, context, token)

    def _take(self, connection: socket.socket, context: ssl.SSLContext, token: str) -> None:
        """Take in a rank; a stranger is hung up on."""
        connection.settimeout(10)
        try:
            line = _Line(context.wrap_socket(connection, server_side=True))
        except OSError:
            connection.close()
            return
        try:
            report = RankReport.model_validate(next(line.messages(), {}))
            is_ours = hmac.compare_digest(report.token.encode(), token.encode())
        except ValidationError:
            is_ours = False
        if not is_ours or report.rank in self.reports or report.rank >= self._process.world_size:
            line.close()
            return
        line.connection.settimeout(None)
        self.reports[report.rank], self._lines[report.rank] = report, line

    def _missing(self) -> str:
        """Return ``rank 1 has`` or ``ranks 1, 2 have``, of those that have not come."""
        missing = [str(rank) for rank in range(self._process.world_size) if rank not in self.reports]
        noun, verb = ("rank", "has") if len(missing) == 1 else ("ranks", "have")
        return f"{noun} {', '.join(missing)} {verb}"

    @property
    def machines(self) -> list[str]:
        """Names of the machines of the ranks, by rank."""
        return [self.reports[rank].machine for rank in range(self._process.world_size)]

    @property
    def address(self) -> str:
        """Address at which the others reach this machine."""
        far = [line.local for rank, line in self._lines.items() if self.machines[rank] != self.machines[0]]
        return far[0].removeprefix("::ffff:") if far else "127.0.0.1"

    def placed(self, plan: RunPlan) -> RunPlan:
        """Return the plan with each member on the device of its rank.

        Raises:
            BadInput: it has another number of members.
        """
        if plan.world_size != self._process.world_size or plan.is_staged:
            message = f"the run has {counted(plan.world_size, 'member')}, and the engine has started "
            hint = "start as many processes; a model on several devices is for muster train --hosts"
            raise BadInput(f"{message}{counted(self._process.world_size, 'process', 'processes')}", hint)
        members = [member.on_device(**self._device(member.rank)) for member in plan.members]
        if len({*self.machines}) == 1:
            return plan.model_copy(update={"members": (*members,)})
        apart = [self._on_its_machine(member) for member in members]
        return plan.model_copy(update={"members": (*apart,), "coordinator": self.machines[0]})

    def _device(self, rank: int) -> dict[str, Any]:
        """Return GPU and threads of a rank."""
        report = self.reports[rank]
        threads = max(1, report.cores // self.machines.count(report.machine))
        return {"index": report.local_rank % report.gpus if report.gpus else 0, "threads": threads}

    def _on_its_machine(self, member: MemberPlan) -> MemberPlan:
        """Return a member with the name and the address of the machine of its rank."""
        report, line = self.reports[member.rank], self._lines.get(member.rank)
        address = line.peer.removeprefix("::ffff:") if line else self.address
        member = member.on_device(machine=report.machine, addresses=(address,))
        return member.model_copy(update={"name": f"{report.machine}-{report.local_rank}"})

    def starter(self, plan: RunPlan, folder: RunFolder) -> StartWorker:
        """Return what starts the workers of a plan: the first here, each other where its rank is."""
        here = local_starter(plan, folder, _WORKER)

        def start(rank: int, log: BinaryIO) -> Worker:
            if rank == 0:
                return here(rank, log)
            log.write(b"the log of this rank is in the output of the engine that started it\n")
            return _RankWorker(self._lines[rank], self.reports[rank].pid, rank, plan, folder)

        return start


class _RankWorker:
    """A worker that another rank has started, seen from the first."""

    end_reason = ""

    def __init__(self, line: _Line, pid: int, rank: int, plan: RunPlan, folder: RunFolder) -> None:
        self.pid, self._line = pid, line
        self._secrets = folder.secrets / f"member-{rank}"
        self._code: int | None = None
        self._ended = threading.Event()
        run_dir = folder.path.resolve() / f"rank-{rank}" if plan.own_folders else folder.path.resolve()
        line.send({"plan": plan.model_dump(mode="json"), "run_dir": str(run_dir)})

    def send(self, message: dict[str, Any]) -> None:
        if "command" not in message:  # the first addresses: by now the run's certificates are there
            files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in self._secrets.iterdir()}
            self._line.send({"secrets": files})
        self._line.send({"input": message})

    def lines(self) -> Iterator[bytes]:
        try:
            for message in self._line.messages():
                if "line" in message:
                    yield str(message["line"]).encode()
                elif "exit" in message:
                    self._code = int(message["exit"])
                    return
        finally:
            if self._code is None:
                self._code, self.end_reason = int(ExitCode.RUN_FAILED), "its process is gone: see the engine's output"
            self._ended.set()

    def note_event(self, event: Event) -> Event:
        return event

    def exit_code(self) -> int:
        self._ended.wait()
        assert self._code is not None
        return self._code

    def signal(self, number: int) -> None:
        self._line.send({"signal": number})


def serve(process: EngineProcess) -> ExitCode:
    """Train as one of the other ranks, until the first says with which exit code to end.

    Raises:
        RunFailed: the first rank cannot be reached.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank gets it, too, and stops all with a snapshot
        signal.signal(number, signal.SIG_IGN)
    meeting = EngineStore(process).meeting()
    line = _dial(os.environ["MASTER_ADDR"], meeting)
    line.send(RankReport.of(process, meeting["token"]).model_dump())
    messages = line.messages()
    first = next(messages, {})
    if "plan" not in first:
        return ExitCode(first.get("end", ExitCode.RUN_FAILED))
    with tempfile.TemporaryDirectory(prefix="muster-rank-") as private:
        plan, run_dir = RunPlan.model_validate(first["plan"]), Path(first["run_dir"])
        (Path(private) / "plan.json").write_text(plan.model_dump_json())
        run_dir.mkdir(parents=True, exist_ok=True)
        words = {"--plan": f"{private}/plan.json", "--rank": process.rank, "--run-dir": run_dir, "--secrets": private}
        arguments = [str(word) for pair in words.items() for word in pair]
        worker = SubprocessWorker(_WORKER, arguments, plan.process(process.rank).device.threads, sys.stderr.buffer)
        reporter = threading.Thread(target=_report, args=(worker, line), daemon=True)
        reporter.start()
        code = _follow(worker, messages, Path(private) / f"member-{process.rank}")
        _end(worker, reporter)
    return code


def _report(worker: SubprocessWorker, line: _Line) -> None:
    for text in worker.lines():
        line.send({"line": text.decode(errors="replace")})
    line.send({"exit": worker.exit_code()})


def _follow(worker: SubprocessWorker, messages: Iterator[dict[str, Any]], keys: Path) -> ExitCode:
    """Do what the first rank says, until it says the end, or is gone."""
    for message in messages:
        if "secrets" in message:
            private_folder(keys)
            for name, text in message["secrets"].items():
                (keys / Path(name).name).write_bytes(base64.b64decode(text))
        elif "input" in message:
            worker.send(message["input"])
        elif "signal" in message:
            worker.signal(int(message["signal"]))
        elif "end" in message:
            return ExitCode(message["end"])
    print("the first rank is gone: this one ends", file=sys.stderr)
    return ExitCode.RUN_FAILED


def _end(worker: SubprocessWorker, reporter: threading.Thread) -> None:
    """End the worker, and wait for it."""
    if reporter.is_alive():
        worker.signal(signal.SIGTERM)
        reporter.join(_END_SECONDS)
    worker.signal(signal.SIGKILL)
    reporter.join()


def _listening(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _dial(host: str, meeting: dict[str, Any]) -> _Line:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=meeting["authority"])
    try:
        connection = socket.create_connection((host, meeting["port"]), timeout=30)
        connection.settimeout(None)
        return _Line(context.wrap_socket(connection, server_hostname=COORDINATOR_NAME))
    except OSError as error:
        hint = f"let the firewall of {host} accept connections from the other nodes"
        raise RunFailed(f"the first rank at {host}:{meeting['port']} cannot be reached: {error}", hint) from error
