"""The coordinator as a process: its lines, its end, its errors, and what members see when it dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.waiting import until
from training.exchange.base import ExchangeError
from training.exchange.codecs import codec_by_name
from training.exchange.group.coordinator_main import main
from training.exchange.group.join_config import JoinConfig
from training.exchange.mean.mesh_member import MeshMember
from training.records.events import MemberEvent, from_line

CONFIG = {"run_id": "r", "names": ["a"]}


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "coordinator.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    program = "training.exchange.group.coordinator_main"
    command = [sys.executable, "-m", program, "--config", str(write_config(tmp_path))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield process
        if process.poll() is None:
            process.kill()


def connect(process: subprocess.Popen[str], **named: float) -> MeshMember:
    assert process.stdout is not None
    port = json.loads(process.stdout.readline())["port"]
    return MeshMember(JoinConfig(f"127.0.0.1:{port}", None, "r", 0, 1, "a", **named)).join(60)


@pytest.mark.slow
def test_it_says_its_port_then_events_and_ends_with_its_members(
    coordinator: subprocess.Popen[str],
) -> None:
    member = connect(coordinator)
    member.close()
    output, _ = coordinator.communicate('{"command": "of an agent"}\n', timeout=60)
    events = [from_line(line) for line in output.splitlines()]
    assert [e.status for e in events if isinstance(e, MemberEvent)] == ["joined", "left"]
    assert coordinator.returncode == 0


@pytest.mark.slow
def test_it_serves_its_members_when_whoever_started_it_is_gone(coordinator: subprocess.Popen[str]) -> None:
    member = connect(coordinator)
    assert coordinator.stdin is not None and coordinator.stdout is not None
    coordinator.stdin.close()
    coordinator.stdout.close()
    for _ in range(2):  # of which it has something to say, to nobody
        with pytest.raises(ExchangeError, match="another run"):
            MeshMember(JoinConfig(str(member._client.address), None, "another", 0, 1, "a")).join(60)
    assert member.mean("x", torch.ones(1), 1.0, codec_by_name("fp32")).mean.item() == 1.0
    member.close()
    assert coordinator.wait(60) == 0


@pytest.mark.slow
def test_it_bans_who_it_is_told_to(coordinator: subprocess.Popen[str]) -> None:
    member = connect(coordinator)
    assert coordinator.stdin is not None
    coordinator.stdin.write('{"ban": 0}\n')
    coordinator.stdin.flush()
    with pytest.raises(ExchangeError, match="dropped from the run"):  # it exchanges until the coordinator has read that
        until(lambda: member.start_gather("again", b"").wait(60) is None)
    member.close()


@pytest.mark.slow
def test_it_ends_on_sigterm(coordinator: subprocess.Popen[str]) -> None:
    assert coordinator.stdout is not None and coordinator.stdout.readline()
    coordinator.terminate()
    assert coordinator.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_members_notice_a_dead_or_frozen_coordinator(coordinator: subprocess.Popen[str], end: signal.Signals) -> None:
    """For a while they go on without it."""
    member = connect(coordinator, lease=1.5)
    coordinator.send_signal(end)
    assert member.mean("x", torch.ones(1), 1.0, codec_by_name("fp32")).mean.item() == 1.0
    client = member._client
    client._redial_for, client._deadline = 1.0, time.monotonic() + 1.0  # as if most of it were over
    with pytest.raises(ExchangeError, match="has lost the machine that holds the run together"):
        until(lambda: member.start_gather("again", b"").wait(60) is None)
    member.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"port": 70000}, "port"), ({"colour": 1}, "colour"), ({"address": "10.255.255.1"}, "loopback")],
)
def test_bad_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    assert main(["--config", str(write_config(tmp_path, **changes))]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_configuration_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


_EARLY = """
import sys
import threading
import training.exchange.group.coordinator_main as entry
from training.records.events import MemberEvent

class Early:
    group = type("Group", (), {"relay": 0, "all_left": True})

    def __init__(self, config, log):
        self.log = log
        entry.print = self.announce

    def start(self):
        for _ in range(300):
            self.log(MemberEvent(status="lost", name="m0"))
        return 7

    def announce(self, line, flush):
        threading.Thread(target=self.log, args=[MemberEvent(status="joined", name="m0")]).start()
        print(line, flush=flush)

    def stop(self):
        pass

entry.Coordinator = Early
entry.main(["--config", sys.argv[1]])
"""


@pytest.mark.slow
def test_it_says_its_port_before_what_its_members_do(tmp_path: Path) -> None:
    """Those of one that is started again are there at once; and all that they do is told in its order."""
    (tmp_path / "config.json").write_text(json.dumps({"run_id": "r", "names": ["m0"]}))
    command = [sys.executable, "-c", _EARLY, str(tmp_path / "config.json")]
    said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    first, *events = map(json.loads, said.stdout.splitlines())
    assert first == {"port": 7, "relay": 0}, said.stderr
    assert [event["status"] for event in events] == [*["lost"] * 300, "joined"]
