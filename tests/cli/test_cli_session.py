"""``launch`` of scripts with a loop of their own in a session."""

from __future__ import annotations

import difflib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.main import main
from tests.waiting import until
from training.records.events import Event, StepEvent, SyncEvent
from training.records.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "session"
LOOP = """
import muster, torch
session = muster.session("diloco", sync_interval=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
model, optimizer, data = session.prepare(model, optimizer, data)
last = session.completed_steps + 5 if session.completed_steps else 10**9
while session.completed_steps < last:
    for batch in data:
        optimizer.zero_grad()
        session.backward(model(batch).square().mean())
        session.step()
session.finish()
"""


def test_nanogpts_loop_needs_eight_changed_lines_and_has_what_a_run_has(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    loops = [(EXAMPLES / name).read_text().splitlines()[1:] for name in ("gpt_alone.py", "gpt.py")]
    changes = [line for line in difflib.ndiff(*loops) if line.startswith("+") and line[1:].strip()]
    assert len(changes) <= 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["launch", "--local", "2", "--", str(EXAMPLES / "gpt.py"), "--steps", "21"]) == 0
    told = capfd.readouterr()
    assert "rank-0: step 0: val loss" in told.out and "step 1/21, loss" in told.err
    (path,) = Path("output").iterdir()
    run, events = RunFolder.open(path), list(RunFolder.open(path).events())
    assert (run.metadata.strategy, run.metadata.config["strategy"]["owned"]["diloco"]["sync_interval"]) == (
        "diloco",
        20,
    )
    steps = [event for event in events if isinstance(event, StepEvent) and event.member == 0]
    assert len(steps) == 21 and steps[-1].loss < steps[0].loss - 1
    hashes = {event.weight_hash for event in events if isinstance(event, SyncEvent) and event.step == 21}
    assert len(hashes) == 1, "all have what is left of the last interval"


def events_of(folder: Path) -> Iterator[Event]:
    for path in folder.glob("2*"):  # not the one that is being made
        yield from RunFolder.open(path).events()


def test_a_session_is_stopped_with_a_snapshot_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("loop.py").write_text(LOOP)
    command = [sys.executable, str(ROOT / "cli_typer.py"), "launch", "--local", "2", "--", "loop.py"]
    launched = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(lambda: any(isinstance(event, StepEvent) for event in events_of(Path("output"))))
    launched.send_signal(signal.SIGINT)
    _, told = launched.communicate(timeout=120)
    assert launched.returncode == 130
    assert "resume with" in told
    (path,) = Path("output").iterdir()
    before = [event.step for event in events_of(Path("output")) if isinstance(event, StepEvent)]
    assert main(["train", "--resume", path.name[:20], "--trust-code", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["strategy"] == "diloco" and document["metrics"]["steps"] >= max(before) + 5
    steps = [event.step for event in events_of(Path("output")) if isinstance(event, StepEvent)]
    assert sorted(steps) == sorted([*range(1, max(steps) + 1)] * 2), "no step is repeated or left out"
