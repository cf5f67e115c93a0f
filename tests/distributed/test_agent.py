"""The agent on this machine, without SSH: its spool, its lease, and what it leaves behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.agent import daemon as agent
from distributed.agent import files as agent_files
from distributed.agent.daemon import Daemon
from distributed.agent.requests import Attach, ListRemains, MachineRequest, Start, frame
from distributed.agent.spool import Spool
from distributed.machine.packing import AGENT, program
from distributed.ssh.process import MAX_LINE
from tests.lab.processes import is_dead, line_of, signal_all
from tests.waiting import until
from training.records.events import MemberEvent, to_line

pytestmark = pytest.mark.slow

WORKER = """
import json, sys
print(json.dumps({"hello": 1}), flush=True)
print("to the log", file=sys.stderr, flush=True)
for line in sys.stdin:
    print(line.strip(), flush=True)
    if "stop" in line:
        sys.exit(130)
"""
DEAF = "import time; print('up', flush=True); time.sleep(600)"


class Agents:
    """Agents of one folder, and what they are told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "runs" / "run-1" / "0"
        self.program = root / AGENT
        self.program.write_bytes(program())

    def start(self, program: str = WORKER, lease: float = 20.0, grace: float = 1.0, **more: Any) -> None:
        order = {
            "argv": ["{python}", "-c", program],
            "env": {"PLACE": "{folder}"},
            "files": {"plan.json": "e30="},
            "links": {"inputs/code": str(self.root)},
            "lease": lease,
            "grace": grace,
            "defaults": {},
            **more,
        }
        request = Start("run-1", "0", **order)
        done = subprocess.run(self.command(request), input=frame(request), capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr

    def command(self, request: MachineRequest) -> list[str]:
        return [sys.executable, str(self.program), str(self.root), *request.title]

    def attach(self, after: int = 0) -> Attachment:
        request = Attach("run-1", "0", after, 20.0)
        return Attachment(self.command(request), frame(request).decode())

    def pids(self) -> list[int]:
        """Return the processes of agents and workers of this folder."""
        found = []
        for process in psutil.process_iter():
            try:
                words, place = " ".join(process.cmdline()), process.environ().get("PLACE", "")
            except (psutil.Error, OSError):
                continue
            if str(self.root) in words or str(self.root) in place:
                found.append(process.pid)
        return found


class Attachment:
    """One session with an agent."""

    def __init__(self, command: list[str], request: str) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._stdin.write(request)
        self._stdin.flush()

    def say(self, **message: Any) -> None:
        self._stdin.write(json.dumps(message) + "\n")

    def hear(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the next message that is wanted."""
        for line in self._stdout:
            message = dict(json.loads(line))
            if wanted(message):
                return message
        raise AssertionError("the agent said no more")

    def records(self, until: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Return the numbered records up to the one that ``until`` is true of."""
        found: list[dict[str, Any]] = []
        while not found or not until(found[-1]):
            found.append(self.hear(lambda message: "seq" in message))
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    signal_all(made.pids(), signal.SIGKILL)


def test_who_comes_back_gets_the_rest_and_nothing_twice(agents: Agents) -> None:
    agents.start()
    first = agents.attach()
    seen = first.records(lambda record: "event" in record)
    first.close()
    second = agents.attach(after=seen[-1]["seq"])
    second.say(n=1, worker={"command": "stop"})
    rest = second.records(lambda record: "end" in record)
    second.close()
    assert [record["seq"] for record in seen + rest] == list(range(1, len(seen + rest) + 1))
    texts = [record.get("event", record.get("log", "")) for record in seen + rest]
    assert texts.count('{"hello": 1}\n') == 1 and texts.count("to the log\n") == 1


def test_a_command_that_is_sent_twice_is_carried_out_once(agents: Agents) -> None:
    agents.start()
    attachment = agents.attach()
    for number in (1, 1, 2):
        attachment.say(n=number, worker={"number": number})
    attachment.say(n=3, worker={"command": "stop"})
    said = [record.get("event", "") for record in attachment.records(lambda record: "end" in record)]
    attachment.close()
    assert [text for text in said if "number" in text] == ['{"number": 1}\n', '{"number": 2}\n']
    again = agents.attach()
    assert again.hear(lambda message: "commands" in message) == {"commands": 3}
    again.close()


def test_the_exit_code_comes_last(agents: Agents) -> None:
    agents.start()
    attachment = agents.attach()
    attachment.say(n=1, worker={"command": "stop"})
    assert attachment.records(lambda record: "end" in record)[-1]["end"] == 130
    attachment.close()


def test_the_end_of_the_lease_stops_the_worker_and_the_agent(agents: Agents) -> None:
    agents.start(lease=1.0)
    until(lambda: agents.pids() == [])
    text = (agents.folder / "spool.1").read_text()
    assert "the machine that started the run has not been heard for 1 s" in text


def test_a_worker_that_does_not_listen_is_killed_after_the_grace(agents: Agents) -> None:
    agents.start(DEAF, lease=0.5, grace=0.5)
    until(lambda: agents.pids() == [])


SLOW = """
import pathlib, sys, time
print("up", flush=True)
sys.stdin.readline()
time.sleep(1)
pathlib.Path("kept").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["the lease ends", "the agent is killed"])
def test_a_worker_with_long_steps_has_the_grace_that_they_need(agents: Agents, killed: bool) -> None:
    heard = agents.folder / "secrets" / "heard"
    for lease in (60.0,) if killed else (2.0, 8.0, 32.0):  # a busy machine needs longer to attach
        agents.start(SLOW, lease=lease, grace=0.1)
        attachment = agents.attach()
        with contextlib.suppress(AssertionError, OSError, ValueError):  # the lease is over already
            attachment.hear(lambda message: message.get("event") == "up\n")
            attachment.say(beat=1, grace=30.0)
            attachment.say(n=1, files={"secrets/heard": ""})
        until(lambda: heard.exists() or not agents.pids())
        attachment.close()
        if killed:
            os.kill(json.loads((agents.folder / "agent.json").read_text())["agent"], signal.SIGKILL)
        until(lambda: agents.pids() == [])
        if (agents.folder / "kept").exists():
            break
        heard.unlink(missing_ok=True)
    assert (agents.folder / "kept").exists()


def test_a_killed_agent_takes_its_worker_along(agents: Agents) -> None:
    agents.start(DEAF, grace=0.3)
    state = agents.folder / "agent.json"
    until(state.exists)
    attachment = agents.attach()
    attachment.say(n=1, files={"secrets/key.pem": "e30="})
    until((agents.folder / "secrets" / "key.pem").exists)
    attachment.close()
    os.kill(json.loads(state.read_text())["agent"], signal.SIGKILL)
    until(lambda: agents.pids() == [])
    assert not (agents.folder / "secrets").exists()


@pytest.mark.slow
def test_what_is_left_of_a_killed_agent_spares_the_keys_of_the_next(agents: Agents) -> None:
    agents.start(DEAF, grace=1.5)
    attachment = agents.attach()
    attachment.hear(lambda message: "pid" in message)
    attachment.close()
    old = set(agents.pids())
    os.kill(json.loads((agents.folder / "agent.json").read_text())["agent"], signal.SIGKILL)
    agents.start()
    attachment = agents.attach()
    attachment.say(n=1, files={"secrets/key.pem": "e30="})
    until((agents.folder / "secrets" / "key.pem").exists)
    until(lambda: not old & set(agents.pids()))
    attachment.close()
    assert (agents.folder / "secrets" / "key.pem").exists()


def test_a_group_that_has_ended_is_not_signalled_again() -> None:
    """Its number may be that of another one by now."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        daemon = Daemon.__new__(Daemon)
        daemon._worker, daemon._over = stranger, True  # type: ignore[assignment]  # of any bytes
        daemon._signal(signal.SIGKILL)
        daemon._over = False
        daemon._signal(signal.SIGTERM)
        assert stranger.wait(60) == -signal.SIGTERM


def test_a_process_that_left_the_group_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "TIMEOUT", 0.05)
    leaves = "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    program = f"import subprocess, sys; {leaves}; sys.stdin.read()"
    daemon = Daemon.__new__(Daemon)
    daemon._spool, daemon._guard, daemon._why, daemon._over = Spool(tmp_path / "spool"), os.pipe()[1], "", False
    words, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as daemon._worker:
        follower = threading.Thread(target=daemon._follow)
        follower.start()
        until(lambda: daemon._spool.read(1, 0.0)[1])  # what it says is recorded before it ends
        daemon._worker.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        follower.join()
        first, last = (json.loads(daemon._spool.read(number, 0.0)[1]) for number in (1, 2))
        os.kill(int(first["event"]), signal.SIGKILL)
    assert last["end"] == 0


def test_who_can_go_on_without_a_starter_does_and_its_records_stay(agents: Agents) -> None:
    agents.start(lease=0.3, unattended="train")
    attachment = agents.attach()
    told = attachment.hear(lambda record: "unattended" in record.get("event", ""))
    attachment.say(n=1, worker={"command": "stop"})
    attachment.records(lambda record: "end" in record)
    attachment.close()
    until(lambda: agents.pids() == [])
    again = agents.attach(after=told["seq"] - 1)
    assert again.hear(lambda message: True)["commands"] == agent.NO_MORE_COMMANDS
    found = again.records(lambda record: "end" in record)
    assert [record["seq"] for record in found] == list(range(told["seq"], found[-1]["seq"] + 1))
    again.close()


@pytest.mark.parametrize("status", ["started", "ready"])
def test_a_worker_that_has_not_begun_does_not_go_on_without_its_starter(tmp_path: Path, status: Any) -> None:
    daemon = Daemon.__new__(Daemon)
    daemon._spool, daemon._over, daemon._is_told, daemon._is_ready = Spool(tmp_path / "spool"), False, True, False
    daemon._order = Start("run-1", "0", [], {}, {}, {}, 1.0, 1.0, {}, unattended="train")
    daemon._pump(io.BytesIO(to_line(MemberEvent(status=status, name="b")).encode() + b"\n"), "event")
    went_on = []
    for silence in (0.0, agent.START_SILENCE + 1.0):
        daemon._renewed = time.monotonic() - silence
        went_on.append(daemon._goes_on())
    assert went_on == [True, status == "ready"]


def test_good_bye_removes_everything_unless_it_is_to_be_kept(agents: Agents) -> None:
    for keep in (True, False):
        agents.start()
        attachment = agents.attach()
        attachment.say(n=1, files={"secrets/key.pem": "e30="})
        attachment.say(n=2, worker={"command": "stop"})
        attachment.records(lambda record: "end" in record)
        assert (agents.folder / "secrets" / "key.pem").stat().st_mode & 0o777 == 0o600
        attachment.say(n=3, bye=True, keep=keep)
        until(lambda: agents.pids() == [])
        attachment.close()
        assert (agents.folder / "plan.json").exists() is keep
        assert not (agents.folder / "secrets").exists()


def test_a_second_start_ends_the_agent_of_an_earlier_attempt(agents: Agents) -> None:
    agents.start(DEAF)
    before = set(agents.pids())
    agents.start()
    until(lambda: not before & set(agents.pids()))


def test_an_agent_that_is_stopped_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(agent.SOCKET)
        listener.listen(1)
        with pytest.raises(OSError, match="does not end"):
            agent.end_old_agent(timeout=0.3)


def test_a_line_without_end_comes_in_pieces(agents: Agents) -> None:
    size = agent.LONGEST_LINE + 1000
    agents.start(f"import sys; sys.stderr.buffer.write(b'\\xff' * {size}); print('over', flush=True)")
    attachment = agents.attach()
    found = attachment.records(lambda record: "end" in record)
    logs = [record["log"] for record in found if "log" in record]
    assert [len(log) for log in logs] == [agent.LONGEST_LINE, 1000]
    assert max(len(json.dumps(record)) for record in found) < MAX_LINE
    attachment.close()


def test_what_is_set_there_wins_over_the_defaults(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_THERE", "own")
    program = "import os; print(os.environ['SET_THERE'], os.environ['NOT_SET'], flush=True)"
    agents.start(program, defaults={"SET_THERE": "default", "NOT_SET": "default"})
    attachment = agents.attach()
    assert attachment.records(lambda record: "event" in record)[-1]["event"].split() == ["own", "default"]
    attachment.close()


def test_the_folder_belongs_to_its_user_alone(agents: Agents) -> None:
    agents.start()
    assert agents.folder.stat().st_mode & 0o777 == 0o700


def test_nobody_home_is_said(agents: Agents) -> None:
    attachment = agents.attach()
    assert attachment.hear(lambda message: True) == {"gone": True}
    attachment.close()


def guards(daemon: psutil.Process) -> list[psutil.Process]:
    return [one for one in daemon.children() if not is_dead(one.pid) and "agent.py" in line_of(one.pid)]


def test_no_key_stays_where_agent_and_guard_were_both_killed(agents: Agents) -> None:
    agents.start(files={"plan.json": "e30=", "secrets/member-0/key.pem": "e30="})
    state = agents.folder / "agent.json"
    until(lambda: state.exists() and state.read_text())
    daemon = psutil.Process(json.loads(state.read_text())["agent"])
    (alone,) = guards(daemon)
    alone.kill()
    until(lambda: guards(daemon) not in ([], [alone]))  # another one takes its place
    guard = guards(daemon)
    agent_files.forget(agents.root, "run-1", "0")
    assert (agents.folder / "secrets").exists()  # somebody is there who will
    signal_all([one.pid for one in (*guard, daemon)], signal.SIGKILL)
    until(lambda: not agents.pids())
    assert (agents.folder / "secrets").exists()
    assert agent_files.left(agents.root, ListRemains("run-1"))["processes"] == []
    assert not (agents.folder / "secrets").exists()
