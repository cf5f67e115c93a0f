"""``Pool.host(...).train()`` here, ``python -m muster join CODE`` there: two lines on each of three machines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.hosts.joined import joining_folder
from tests.distributed.joining import free_port, short_folder
from tests.distributed.muster_runs import REPOSITORY
from tests.lab.fixtures import MakeLab
from tests.lab.host import LabHost
from tests.lab.spec import HostSpec
from tests.waiting import PATIENCE, until
from training.records.event_log import read_events
from training.records.events import MemberEvent
from training.records.run_files import is_live
from training.run.requests.request_book import leave_request

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = """
import os, time
import torch
from torch import nn
from muster import Pool

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

def loss(output, target):
    if not os.path.exists({gate!r}):
        time.sleep(0.5)  # 600 steps outlast the waits for both machines
    return nn.functional.mse_loss(output, target)

if __name__ == "__main__":
    data = [(torch.ones(2), torch.ones(1))] * 64
    model = Pool.host(Net, data, loss=loss, admit=lambda who: True, output_dir={output!r}).train(
        strategy="local_sgd", sync_interval=2, max_steps=600, batch_size=2, threads=1, learning_rate=0.05)
    print("trained", round(model(torch.ones(2)).item(), 1))
"""


def next_code(script: subprocess.Popen[str]) -> str:
    """Return the code that a script shows next."""
    assert script.stderr is not None
    lines: list[str] = []
    while not lines or (match := re.search(r"python -m muster join (\S+)", lines[-1])) is None:
        lines.append(script.stderr.readline())
        assert lines[-1], "".join(lines)
    return match[1]


def join(host: LabHost, code: str) -> subprocess.Popen[str]:
    environment = f"PATH={Path(sys.prefix, 'bin')}:/usr/bin:/bin"
    words = [
        "env",
        "XDG_CONFIG_HOME=/root/.config",
        environment,
        sys.executable,
        "-m",
        "muster",
        "join",
        "--yes",
        "--lend",
        "own",
        code,
    ]
    nothing = subprocess.DEVNULL
    return host.popen([*words, "--name", host.name], cwd=REPOSITORY, stdin=nothing, stdout=nothing, stderr=nothing)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with short_folder() as folder:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
        (joining_folder() / "door.json").write_text(json.dumps({"port": free_port()}))
        yield


@pytest.mark.alone  # each of its programs starts from nothing
@pytest.mark.usefixtures("config")
def test_two_lines_on_each_machine_train_a_model(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(HostSpec("b", sshd=False), HostSpec("c", sshd=False))
    gate, output = lab.folder / "gate", tmp_path / "output"
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(gate=str(gate), output=str(output)))

    def states(rank: int) -> list[str]:
        events = [event for path in output.glob("*/events.jsonl") for event in read_events(path)]
        return [event.status for event in events if isinstance(event, MemberEvent) and event.member == rank]

    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    pool = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
                            stdout=pipe, stderr=pipe, text=True)  # fmt: skip
    joined = [join(lab["b"], next_code(pool))]
    try:
        until(lambda: "joined" in states(1), patience=4 * PATIENCE)
        joined.append(join(lab["c"], next_code(pool)))  # comes later
        until(lambda: "joined" in states(2), patience=4 * PATIENCE)
        lab["b"].kill()  # goes
        until(lambda: "lost" in states(1))
        gate.touch()
        stdout, stderr = pool.communicate(timeout=4 * PATIENCE)
        assert stdout == "trained 1.0\n", stderr
    finally:
        for path in filter(is_live, output.glob("*")):
            leave_request(path, "kill")
        until(lambda: not any(map(is_live, output.glob("*"))))
        for process in (pool, *joined):
            process.kill()
            with contextlib.suppress(ValueError):
                process.communicate()
