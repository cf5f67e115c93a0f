"""The commands as a person types them: real processes, real training, small enough for a slow test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import until
from training.records.events import MemberEvent, StepEvent, WarningEvent
from training.records.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[2] / "cli_typer.py"
LITTLE_DATA = ["--block-size", "32", "--batch-size", "2", "--max-eval-samples", "4", "--max-train-samples", "200"]
SMALL = ["--local", "2", *LITTLE_DATA, "--snapshot-interval", "0"]
ALONE = ["--local", "1", *SMALL[2:]]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240, check=False)


def only_run() -> RunFolder:
    (path,) = Path("output").iterdir()
    return RunFolder.open(path)


def steps_of(folder: RunFolder) -> list[int]:
    return [event.step for event in folder.events() if isinstance(event, StepEvent) and event.member == 0]


def workers_of(folder: RunFolder) -> list[int]:
    """Process ids of the run's workers, as they said themselves."""
    started = [event for event in folder.events() if isinstance(event, MemberEvent) and event.status == "started"]
    return [int(event.message.removeprefix("pid ")) for event in started]


def interrupted(after: int, *arguments: str) -> str:
    """Press Ctrl-C once a run has made more steps than these; return what it says last."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command(*arguments), stdout=pipe, stderr=pipe, text=True) as process:
        until(lambda: list(Path().glob("output/2*")) and len(steps_of(only_run())) > after)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    return said.splitlines()[-1]


def test_a_run_completes_and_its_json_names_the_model() -> None:
    own = ["--set", "eval_local=on"]
    done = run("distributed-train", "nanogpt", *SMALL, "--max-steps", "4", *own, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (Path(document["model"]) / "config.json").is_file()
    assert document["evaluations"]["validation"]["first"]["step"] == 0
    assert document["evaluations"]["validation"]["last"]["step"] == 4
    assert {"validation.local-0", "validation.local-1"} <= set(document["evaluations"])
    assert not [event for event in only_run().events() if isinstance(event, WarningEvent)]
    assert steps_of(only_run()) == [1, 2, 3, 4]
    assert "\x1b" not in done.stderr


def test_ctrl_c_keeps_a_snapshot_and_the_resumed_run_makes_the_next_steps() -> None:
    """Of more steps than it can make until somebody presses a key, on any machine."""
    last = interrupted(0, "distributed-train", "nanogpt", *SMALL, "--max-steps", "5000")
    folder = only_run()
    made = len(steps_of(folder))
    assert len(workers_of(folder)) == 2
    assert not [pid for pid in workers_of(folder) if psutil.pid_exists(pid)]
    logs = {path.name: path.read_bytes() for path in folder.logs.iterdir()}
    assert last.startswith(f"stopped; the snapshot of step {made} is kept, 0 steps lost; resume with: ")
    assert last.endswith(f"--resume {folder.metadata.run_id}")
    interrupted(made, "distributed-train", "--resume", folder.metadata.run_id)
    assert steps_of(folder) == list(range(1, len(steps_of(folder)) + 1))
    assert {name: (folder.logs / name).read_bytes() for name in logs} == logs


def test_a_trial_run_measures_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = command("distributed-train", "nanogpt", *SMALL, "--strategy", "diloco", "--try", "--json")
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=240, check=True)
    measured = json.loads(done.stdout)
    assert measured["seconds_per_step"] > 0
    assert measured["bytes_per_sync"] > 0
    assert measured["memory_peak"] > 50_000_000
    assert list(temporary.glob("muster*")) == []
    assert not Path("output").exists()


def test_missing_data_is_bad_input_and_leaves_nothing() -> None:
    done = run("distributed-train", "nanogpt", *SMALL, "--dataset", "./none.txt", "--json")
    assert done.returncode == 2
    assert "none.txt" in json.loads(done.stdout)["error"]["message"]
    assert not Path("output").exists() or list(Path("output").iterdir()) == []
