"""``--plan-only`` and ``--try`` with a hosts file: nothing is started, or a few steps that leave nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main
from distributed.hosts.file import RUN_HOSTS
from profiles.files.resolve import load_profile
from training.records.plan import read_plan
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run

HOSTS = {"machines": [{"name": "desk", "address": "localhost"}]}


@pytest.mark.slow
def test_the_usual_hosts_file_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("distributed_hosts.json").write_text(json.dumps(HOSTS))
    assert main(["distributed-train", "nanogpt", "--plan-only", "--no-input", "--out", "plan.json", "--details"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("desk: ") and out.endswith("\nNothing was started.\n")
    assert "on the machines of distributed_hosts.json" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["distributed_hosts.json", "plan.json"]
    assert read_plan(tmp_path / "plan.json").hash() in out


@pytest.mark.parametrize(("options", "said"), [
    (["--plan-only", "--try"], "contradict"),
    (["--plan-only", "--dry-run"], "--try and --plan-only contradict"),
    (["--out", "plan.json"], "--out needs a plan that is not carried out"),
    (["--plan-only", "--local", "1", "--out", "none/plan.json"], "none/plan.json: No such file or directory"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["distributed-train", "nanogpt", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_run_is_not_resumed_by_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_local_run(load_profile("nanogpt", {}).profile, 2)
    with RunFolder.create(tmp_path, plan, ["test"], run_type="distributed") as folder:
        (folder.path / RUN_HOSTS).write_text(json.dumps(HOSTS))
        folder.finish("cancelled", {}, "stopped")
    events = (folder.path / "events.jsonl").read_bytes()
    assert main(["distributed-train", "--resume", plan.run_id, "--try", "--output", str(tmp_path)]) == 2
    assert "error: --try and --resume do not go together" in capsys.readouterr().err
    assert (folder.path / "events.jsonl").read_bytes() == events


@pytest.mark.parametrize(("options", "way"), [
    (["--local", "1"], "One machine: nothing is exchanged."),
    (["--local", "2", "--strategy", "zero1"], "Exact: they merge in every step, as if one machine did all the work."),
    (["--local", "2", "--strategy", "demo"], "Fast: they merge in every step, and send less than everything."),
    (["--local", "2", "--strategy", "diloco"], "Fast: they merge what they have learnt every 50 steps."),
])  # fmt: skip
def test_a_plan_is_shown_without_names_for_experts(
    options: list[str], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["distributed-train", "nanogpt", *options, "--plan-only"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert way in lines
    assert not any(word in " ".join(lines) for word in ("allreduce", "diloco", "mesh", "plan "))
