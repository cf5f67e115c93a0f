"""Remote workers over connections that break, with this machine in the place of the far one."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from distributed.hosts.schema import Machine
from distributed.machine.link import HereConnection, HereProcess, MachineLink
from distributed.ssh.errors import ConnectTimeout, ForwardRefused
from distributed.ssh.process import Process
from distributed.supervision import Supervisor
from distributed.workers.agent_records import AgentTimeouts, Assignment, Record
from distributed.workers.remote_worker import LOST, RemoteWorker
from profiles.errors import ExitCode
from tests.app.app_events import step
from tests.waiting import until
from training.records.events import ErrorEvent, MemberEvent, StepEvent, WarningEvent, from_line
from training.run.processes import NumberedLine

pytestmark = pytest.mark.slow

WORKER = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
def say(**event):
    print(json.dumps(event), flush=True)
address = json.loads(sys.stdin.readline())["address"]
say(kind="member", status="joined", name=address)
for step in range(1, 41):
    if step % 10 == 0:
        sys.stdin.readline()
    say(kind="step", step=step, epoch=0, loss=1, learning_rate=1, samples=1, weight=1, compute=0, wait=0, transfer=0)
print("all done", file=sys.stderr, flush=True)
(folder / "model").mkdir()
(folder / "model" / "weights").write_bytes(b"w" * 100000)
"""


STEADY = AgentTimeouts(lease=20.0, grace=0.5, beat=0.2)


def near(address: str) -> str:
    return f"near {address}"


class Machines:
    """The far machine: this one, with connections that can be made to break."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reachable = True
        self.instead: list[str] = []
        """A command that runs in place of the agent's ``attach``."""
        self.processes: list[HereProcess] = []
        machine = Machine(name="far", python=sys.executable, project_path=str(root / "muster"))
        self.link = MachineLink(machine, self._dial)
        (root / "code").mkdir()
        (root / "code" / "job.py").write_text(WORKER)

    def _dial(self) -> HereConnection:
        machines = self

        class Connection(HereConnection):
            def stream(self, argv: list[str]) -> HereProcess:  # type: ignore[override]  # a list is enough
                if not machines.reachable:
                    raise ConnectTimeout("far", "does not answer")
                machines.processes.append(cast(HereProcess, super().stream(machines.instead or argv)))
                return machines.processes[-1]

        return Connection("far")

    def cut(self) -> None:
        """End the newest session without a good-bye."""
        self.processes[-1].process.kill()

    def worker(self, timeouts: AgentTimeouts = STEADY, reach: Callable[[str], str] = near) -> RemoteWorker:
        self.link.put_agent()
        links = {"inputs/code": str(self.root / "code")}
        assignment = Assignment("run-1", 0, b"{}", links, module="job")
        self.log = io.BytesIO()
        secrets = self.root / "secrets"
        (secrets / "member-0").mkdir(parents=True)
        (secrets / "member-0" / "key.pem").write_text("secret")
        return RemoteWorker(self.link, assignment, self.log, self.root, secrets, reach, timeouts)

    @property
    def folder(self) -> Path:
        return self.root / "muster" / "runs" / "run-1" / "0"


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def go_on(worker: RemoteWorker, times: int) -> None:
    for _ in range(times):
        worker.send({"command": "go on"})


def test_events_come_once_and_in_order_over_broken_connections(machines: Machines) -> None:
    worker = machines.worker()
    worker.send({"address": "coordinator:1"})
    steps, warnings = [], []
    for line in worker.lines():
        event = from_line(line)
        if isinstance(event, MemberEvent):
            assert event.name == "near coordinator:1"
            go_on(worker, 1)
        elif isinstance(event, WarningEvent):
            warnings.append(event.message)
        elif isinstance(event, StepEvent):
            steps.append(event.step)
            if event.step % 10 == 5:
                machines.cut()
                go_on(worker, 1)
    assert steps == list(range(1, 41))
    assert worker.exit_code() == 0
    assert any("reconnected" in warning for warning in warnings)
    assert machines.log.getvalue() == b"all done\n"


def test_another_supervisor_gets_the_rest_of_the_events_and_gives_the_next_commands(machines: Machines) -> None:
    worker = machines.worker()
    worker.send({"address": "coordinator:1"})
    go_on(worker, 1)
    steps, lines = [], worker.lines()
    for line in lines:
        event = from_line(line)
        if isinstance(event, StepEvent):
            steps.append(event.step)
        if len(steps) == 15:
            break
    machines.cut()  # its supervisor is killed
    assert isinstance(line, NumberedLine) and line.number is not None
    following = replace(worker, adopted=line.number)
    following.send({"address": "coordinator:1"})
    go_on(following, 2)
    steps += [event.step for event in map(from_line, following.lines()) if isinstance(event, StepEvent)]
    assert steps == list(range(1, 41))
    assert following.exit_code() == 0 and not machines.folder.exists()


def train_to_the_end(worker: RemoteWorker) -> None:
    worker.send({"address": "coordinator:1"})
    go_on(worker, 4)
    assert sum(1 for _ in worker.lines()) == 41


def test_the_model_is_fetched_and_the_machine_keeps_nothing(machines: Machines) -> None:
    train_to_the_end(machines.worker())
    assert (machines.root / "model" / "weights").stat().st_size == 100000
    assert not machines.folder.exists()


@pytest.mark.parametrize("needed", [False, True])
def test_what_is_there_stays_until_it_is_known_what_becomes_of_the_run(machines: Machines, needed: bool) -> None:
    worker = machines.worker()
    worker.keep = Future()
    train_to_the_end(worker)
    assert worker.exit_code() == 0 and worker.ended
    until(lambda: machines.processes[-1].process.poll() is None)  # attached, so that the lease goes on
    assert not worker.wait(0.5) and machines.folder.exists()
    worker.keep.set_result(needed)
    assert worker.wait(60)
    until(lambda: machines.folder.exists() is needed)
    assert not (machines.folder / "agent.sock").exists()


def test_a_model_that_is_not_the_runs_is_not_fetched(machines: Machines) -> None:
    worker = machines.worker()
    worker.await_model_choice = lambda: False
    train_to_the_end(worker)
    assert worker.exit_code() == 0 and not (machines.root / "model").exists()


@pytest.mark.parametrize(
    ("lost", "done", "there", "delivers"),
    [
        (set(), {0, 1}, True, False),  # the lowest has brought it
        (set(), {0, 1}, False, True),  # the lowest has ended without one
        ({0}, {1}, False, True),  # the lowest is lost: nobody waits for it
    ],
)
def test_the_lowest_rank_that_counts_delivers_the_model(
    tmp_path: Path, lost: set[int], done: set[int], there: bool, delivers: bool
) -> None:
    (tmp_path / "model").mkdir() if there else None
    lowest = SimpleNamespace(exit_code=None)
    members = SimpleNamespace(workers={0: lowest, 1: SimpleNamespace(exit_code=None)}, detached=lost, done=done)
    supervisor = SimpleNamespace(
        _run=SimpleNamespace(members=members), _folder=SimpleNamespace(model=tmp_path / "model")
    )
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(Supervisor._await_model_choice, supervisor, 1)
        if not lost:
            assert not answer.done()
            lowest.exit_code = 0
        assert answer.result(60) is delivers


def test_the_certificates_travel_with_the_address(machines: Machines) -> None:
    worker = machines.worker()
    worker.send({"address": "coordinator:1"})
    lines = worker.lines()
    next(lines)
    key = machines.folder / "secrets" / "member-0" / "key.pem"
    assert key.read_text() == "secret" and key.stat().st_mode & 0o777 == 0o600
    worker.signal(signal.SIGKILL)
    list(lines)
    assert worker.exit_code() == -signal.SIGKILL
    assert not key.exists()


def test_a_machine_that_stays_away_is_lost(machines: Machines) -> None:
    worker = machines.worker(AgentTimeouts(lease=0.5, grace=0.2, beat=0.1, silence=0.5, margin=0.3))
    machines.reachable = False
    said = [json.loads(line) for line in worker.lines()]
    assert [event["kind"] for event in said] == ["warning"]
    assert worker.exit_code() == LOST
    assert worker.end_reason.startswith("could not be reached for")


def test_at_the_end_a_machine_that_is_away_is_not_waited_for(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = machines.worker(AgentTimeouts(lease=0.5, grace=0.2, beat=0.1, silence=0.5, margin=60.0))
    machines.reachable, over = False, threading.Event()
    lines = worker.lines()
    assert from_line(next(lines)).kind == "warning"
    monkeypatch.setattr(machines.link, "connection", lambda: over.wait(60.0))  # dialling takes long
    worker.signal(signal.SIGKILL)
    assert [*lines] == [] and worker.exit_code() == LOST and not over.is_set()
    over.set()


HELLO = '{"commands": 0}\n'


@pytest.mark.parametrize(
    "said",
    [
        "",
        "rubbish",
        "[]",
        '{"commands": []}',
        '{"commands": 1e999}',
        HELLO + '{"end": "1", "why": [], "seq": 1}',
        HELLO + '{"pid": Infinity, "seq": 1}',
        HELLO + '{"end": 1' + "0" * 400 + ', "why": "", "seq": 1}',
        HELLO + '{"log": "\\ud800", "seq": 1}',
        HELLO + "[" * 10_000,
    ],
)
def test_a_machine_that_talks_nonsense_is_lost(machines: Machines, said: str) -> None:
    worker = machines.worker(AgentTimeouts(lease=0.5, grace=0.2, beat=0.1, silence=0.5, margin=0.3))
    machines.instead = ["printf", "%s\\n", said] if said else ["true"]
    assert {json.loads(line)["kind"] for line in worker.lines()} <= {"warning"}
    assert worker.exit_code() == LOST


def test_a_log_without_end_is_kept_up_to_a_bound_and_says_so(machines: Machines) -> None:
    worker = machines.worker()
    worker.log_budget = 1 << 20
    for number in range(1, 300):
        worker.take(Record(seq=number, log="x" * 9_999 + "\n"))
    kept = machines.log.getvalue()
    assert len(kept) < (1 << 20) + 100 and kept.endswith(b"... more than 1.0 MB of log: the rest is not kept\n")


def test_an_agent_that_claims_more_commands_than_were_sent_gets_beats_only(machines: Machines) -> None:
    worker, written, stop = machines.worker(AgentTimeouts(beat=0.05)), list[bytes](), threading.Event()

    class Taking:
        def write(self, data: bytes) -> None:
            written.append(data)
            if len(written) == 3:
                stop.set()

    begin = time.monotonic()
    worker._write(cast(Process, Taking()), 9, stop)
    assert [json.loads(line)["beat"] for line in written] == [1] * 3 and time.monotonic() - begin >= 0.15


def test_a_machine_that_does_not_start_it_names_itself(machines: Machines) -> None:
    worker = machines.worker()
    (machines.root / "muster" / "runs").write_text("in the way")
    (event,) = [json.loads(line) for line in worker.lines()]
    assert event["kind"] == "error" and event["exit_code"] == 3
    assert event["message"].startswith("far: ")


def test_an_error_of_a_worker_names_its_machine_once_and_slow_steps_make_patient(machines: Machines) -> None:
    worker = machines.worker()
    said = worker.note_event(ErrorEvent(member=0, message="far too little memory"))
    assert isinstance(said, ErrorEvent) and said.message == "far: far too little memory"
    assert worker.note_event(said) == said
    for named in ("far: lost the coordinator", "far:cuda:1: lost the coordinator"):
        assert worker.note_event(ErrorEvent(member=0, message=named)).message == named  # type: ignore[union-attr]
    before = worker.timeouts.grace
    worker.note_event(step(1, compute=1000.0))
    assert worker.timeouts.grace > before


def test_a_run_that_ends_does_not_wait_for_files_under_way(machines: Machines) -> None:
    worker = machines.worker()
    worker.ready = Future()  # never done: an upload that takes long
    worker.signal(signal.SIGKILL)
    assert list(worker.lines()) == []
    assert worker.exit_code() == LOST
    assert not machines.folder.exists()


def test_a_machine_that_cannot_be_made_ready_is_the_workers_error(machines: Machines) -> None:
    worker = machines.worker()
    worker.ready = Future()
    worker.ready.set_exception(ConnectTimeout("far", "its disk is full"))
    (said,) = [from_line(line) for line in worker.lines()]
    assert isinstance(said, ErrorEvent)
    assert "its disk is full" in said.message
    assert worker.exit_code() == ExitCode.NOT_READY


@pytest.mark.parametrize("started", [False, True])
def test_a_machine_without_a_way_to_the_others_says_why_it_has_none(machines: Machines, started: bool) -> None:
    """Its worker is killed for it, and "killed by signal 9" sent people to look for memory."""

    def refuse(address: str) -> str:
        raise ForwardRefused("far", "its SSH server does not forward ports for us", "AllowTcpForwarding yes")

    worker = machines.worker(reach=refuse)
    if not started:
        worker.send({"address": "coordinator:1"})
    lines = worker.lines()
    if started:
        reader = ThreadPoolExecutor(1).submit(list, lines)
        until(lambda: worker.pid > 0)
        worker.send({"address": "coordinator:1"})
        lines = iter(reader.result())
    event = [from_line(line) for line in lines][-1]
    assert isinstance(event, ErrorEvent) and "does not forward ports" in event.message
    assert event.hint == "AllowTcpForwarding yes" and worker.exit_code() == ExitCode.NOT_READY
    assert bool(worker.end_reason) is not started  # no process of it is known to have ended: it may vote
