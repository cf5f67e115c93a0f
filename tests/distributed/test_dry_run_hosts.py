"""``--dry-run`` with a hosts file: what the same command without it would do, and nothing is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main
from distributed.hosts.file import RUN_HOSTS
from profiles.resolve import load_profile
from training.local_plan import plan_local_run
from training.run_folder import RunFolder

HOSTS = {"machines": [{"name": "desk", "address": "localhost"}]}


def test_the_usual_hosts_file_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("distributed_hosts.json").write_text(json.dumps(HOSTS))
    assert main(["distributed-train", "nanogpt", "--dry-run", "--no-input"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("desk: ") and out.rstrip().endswith("nothing was started")
    assert "on the machines of distributed_hosts.json" in err
    assert [path.name for path in tmp_path.iterdir()] == ["distributed_hosts.json"]


def test_a_run_is_not_resumed_by_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_local_run(load_profile("nanogpt", {}).profile, 2)
    with RunFolder.create(tmp_path, plan, ["test"], run_type="distributed") as folder:
        (folder.path / RUN_HOSTS).write_text(json.dumps(HOSTS))
        folder.finish("cancelled", {}, "stopped")
    events = (folder.path / "events.jsonl").read_bytes()
    assert main(["distributed-train", "--resume", plan.run_id, "--dry-run", "--output", str(tmp_path)]) == 2
    assert "error: --dry-run and --resume do not go together" in capsys.readouterr().err
    assert (folder.path / "events.jsonl").read_bytes() == events
