"""How an attempt ends: what is written into the run folder, and that nobody removes a folder that holds snapshots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.console import command_line, tour_profile
from app.report import completed_lines, document, failure_hint, next_commands, stopped_line
from app.run_view.run_state import RunState, at_its_end, reduce_events
from app.run_view.view import EndedRun
from distributed.supervisor import supervise_folder
from profiles.errors import BadInput, ExitCode
from profiles.files.resolve import load_profile, profile_from_options
from tests.runs.run_stage import Script
from training.local_trainer import failure_of
from training.records.attempts import RunAttempt
from training.records.events import (
    ErrorEvent,
    Event,
    MemberEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    WarningEvent,
)
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder, remove_run_folder, remove_unused
from training.records.runs import summarise
from training.run.local_plan import plan_local_run
from training.run.outcome import RunOutcome, RunTotals, write_end
from training.run.run_controller import RunController


def new_folder(output: Path) -> RunFolder:
    options = {"task": "custom", "model_path": "nowhere:build", "strategy": "allreduce"}
    plan = plan_local_run(profile_from_options("scripted", options), 1)
    return RunFolder.create(output, plan, ["test"])


def attempt(folder: RunFolder, said: list[Event], code: int) -> RunOutcome:
    """Carry out one attempt of a worker that says and does what it is told."""
    worker = Script()
    for event in said:
        worker.say(event)
    worker.end(code)
    with folder:
        run = RunController(folder.plan(), folder, lambda event: None, lambda rank, log: worker)
        run.start()
        return run.wait()


def step(number: int, time: float) -> StepEvent:
    return StepEvent(
        time=time, member=0, step=number, epoch=0.1, loss=1.0, learning_rate=0.1, samples=10, weight=10.0,
        compute=1.0, wait=0.0, transfer=0.0,
    )  # fmt: skip


def snapshot_in(folder: RunFolder, number: int) -> Path:
    place = folder.path / "checkpoints" / "member-0" / f"step-{number:08d}"
    place.mkdir(parents=True)
    (place / "state.safetensors").write_bytes(b"weights")
    return place


def interrupted(output: Path, status: str) -> tuple[Path, Path]:
    """A run with a snapshot that ended with ``status`` or was killed (``running``); its folder and the snapshot."""
    folder = new_folder(output)
    kept = snapshot_in(folder, 20)
    said = [RunEvent(status="running"), step(20, 1.0)]
    if status == "failed":
        attempt(folder, [*said, ErrorEvent(message="broken")], 1)
    else:
        with folder:
            folder.update_metadata(status=status)
    return folder.path, kept


@pytest.mark.parametrize("code", [ExitCode.BAD_INPUT, ExitCode.NOT_READY, ExitCode.RUN_FAILED])
@pytest.mark.parametrize("status", ["failed", "running", "paused"])
def test_a_resume_that_does_not_begin_leaves_the_run_as_it_was(tmp_path: Path, status: str, code: ExitCode) -> None:
    path, kept = interrupted(tmp_path, status)
    before = RunFolder.open(path).metadata
    again = RunFolder.resume(path, RunFolder.open(path).plan(), ["again"])
    outcome = attempt(again, [ErrorEvent(member=0, message="no data", exit_code=int(code))], int(code))
    assert (outcome.status, outcome.message) == ("failed", "no data")
    assert [event.status for event in again.events() if isinstance(event, RunEvent)][-2:] == ["starting", "failed"]
    assert kept.is_dir()
    assert RunFolder.open(path).metadata == before
    RunFolder.resume(path, again.plan(), []).close()


def test_a_run_that_begins_again_ends_as_the_newest_attempt_did(tmp_path: Path) -> None:
    path, _ = interrupted(tmp_path, "failed")
    again = RunFolder.resume(path, RunFolder.open(path).plan(), ["again"])
    attempt(again, [RunEvent(status="running"), step(21, 5.0)], 0)
    metadata = RunFolder.open(path).metadata
    assert (metadata.status, metadata.attempt, metadata.error_message) == ("completed", 2, "")


def test_a_start_that_is_killed_keeps_what_the_run_was_for_the_next_one(tmp_path: Path) -> None:
    path, _ = interrupted(tmp_path, "failed")
    before = RunFolder.open(path).metadata
    for _ in range(2):  # the first process dies before it can write anything down
        again = RunFolder.resume(path, RunFolder.open(path).plan(), ["again"])
        assert summarise(path).status == "starting"
        again.close()
        assert summarise(path).status == "failed"
    with RunFolder.take_over(path) as held:
        write_end(held, held.append, "failed", ExitCode.BAD_INPUT, "no data")
    assert RunFolder.open(path).metadata == before


def test_bad_input_is_written_into_the_folder_of_a_new_run(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    attempt(folder, [ErrorEvent(message="no model", exit_code=2)], 2)
    metadata = RunFolder.open(folder.path).metadata
    assert (metadata.status, metadata.error_message) == ("failed", "no model")


def test_bad_input_after_the_first_steps_removes_nothing(tmp_path: Path) -> None:
    with new_folder(tmp_path) as folder:
        folder.update_metadata(status="running")
        write_end(folder, folder.append, "failed", ExitCode.BAD_INPUT, "no data")
    assert RunFolder.open(folder.path).metadata.status == "failed"


@pytest.mark.parametrize("where", ["here", "on another machine"])
def test_a_folder_with_snapshots_is_removed_only_when_that_is_asked_for(tmp_path: Path, where: str) -> None:
    with new_folder(tmp_path) as folder:
        if where == "here":
            snapshot_in(folder, 3)
        else:
            folder.append(SnapshotEvent(step=3, path="checkpoints/member-1/step-00000003", bytes=9, seconds=0.1))
    assert not remove_unused(folder.path)
    assert folder.path.is_dir()
    remove_run_folder(folder.path)
    assert not folder.path.exists()


def test_figures_are_of_all_attempts(tmp_path: Path) -> None:
    totals = RunTotals()
    for event in [
        RunEvent(time=100.0, status="starting"),
        RunEvent(time=103.0, status="running"),
        *(step(number, 103.0 + number) for number in range(1, 8)),
        RunEvent(time=110.0, status="cancelled"),
        RunEvent(time=5000.0, status="starting"),  # it does not begin: neither its time nor its end counts
        RunEvent(time=5060.0, status="cancelled"),
        RunEvent(time=9000.0, status="starting"),
        RunEvent(time=9002.0, status="running", details={"step": 5}),
        *(step(number, 9002.0 + number) for number in range(6, 11)),
        RunEvent(time=9030.0, status="completed"),
    ]:
        totals.note(event)
    figures = totals.figures()
    assert (figures["steps"], figures["samples"], figures["attempts"]) == (10, 120, 2)
    assert figures["seconds"] == pytest.approx(7.0 + 28.0)  # from when training begins
    assert figures["samples_per_second"] == pytest.approx(120 / 35)


def test_the_figures_name_who_was_lost_and_did_not_come_back() -> None:
    totals = RunTotals()
    said = [(0, "lost"), (1, "lost"), (0, "joined"), (2, "done"), (3, "left")]
    for rank, status in said:
        totals.note(MemberEvent(member=rank, status=status, name=f"m{rank}"))
    assert totals.figures()["lost"] == ["m1"]
    totals.note(RunEvent(status="starting"))  # all are asked again
    assert "lost" not in totals.figures()


ATTEMPTS = st.lists(
    st.tuples(st.integers(0, 6), st.booleans(), st.floats(0, 1e6), st.floats(-1e5, 1e5)), min_size=1, max_size=6
)


@given(ATTEMPTS)
def test_the_figures_are_the_sums_over_the_attempts_whatever_ends_them(
    attempts: list[tuple[int, bool, float, float]],
) -> None:
    """Each attempt: steps of a second, whether its end was written down, the pause before it, the members' clock."""
    events: list[Event] = []
    now, seconds, steps = 0.0, 0.0, 0
    for made, ended, pause, skew in attempts:
        now += pause
        events.append(RunEvent(time=now, status="starting"))
        events += [step(steps + number, now + skew + number) for number in range(1, made + 1)]
        now += made
        steps += made
        seconds += made  # ended or killed: its steps took so long
        events += [RunEvent(time=now, status="cancelled")] if ended else []
    totals = RunTotals()
    for event in events:
        totals.note(event)
    figures = totals.figures()
    assert (figures["steps"], figures["samples"]) == (steps, 10 * steps)
    assert figures["seconds"] == pytest.approx(seconds, abs=1e-3)
    assert figures["attempts"] == sum(made > 0 for made, *_ in attempts)
    assert totals.figures() == figures
    assert at_its_end(reduce_events(events), "interrupted").seconds(now + 1e6) == figures["seconds"]


def test_a_run_that_goes_on_counts_its_earlier_attempts_and_no_pause() -> None:
    first = [RunEvent(time=100.0, status="starting"), step(1, 105.0), RunEvent(time=110.0, status="failed")]
    idle = [RunEvent(time=500.0, status="starting"), RunEvent(time=530.0, status="failed")]
    second = [RunEvent(time=1000.0, status="starting")]
    assert reduce_events(first).seconds(400.0) == 10.0
    assert reduce_events([*first, *idle]).seconds(900.0) == 10.0  # a start without a step counts for nothing
    assert reduce_events([*first, *idle, *second]).seconds(1003.0) == 10.0  # it starts
    trains = RunEvent(time=1004.0, status="running")
    assert reduce_events([*first, *idle, *second, trains]).seconds(1007.0) == 13.0
    assert reduce_events(idle).seconds(900.0) == 30.0  # where none took a step, all count


def test_a_run_takes_from_when_training_begins_to_its_end_without_pauses() -> None:
    begins = [RunEvent(time=100.0, status="starting"), RunEvent(time=130.0, status="running"), step(1, 135.0)]
    assert reduce_events(begins[:1]).seconds(120.0) == 20.0  # of the start
    assert reduce_events(begins).seconds(140.0) == 10.0
    paused = [*begins, RunEvent(time=140.0, status="paused")]
    assert reduce_events(paused).seconds(500.0) == 10.0
    ended = [*paused, RunEvent(time=640.0, status="running"), step(2, 641.0), RunEvent(time=650.0, status="completed")]
    assert reduce_events(ended).seconds(900.0) == 20.0


def test_the_pauses_of_a_run_without_steps_are_not_told_as_its_time(tmp_path: Path) -> None:
    with new_folder(tmp_path) as folder:
        folder.update_metadata(start_time="2026-11-20T10:00:00+00:00", attempt=2)
        folder.finish("failed", {})
    assert summarise(folder.path).seconds is None


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_what_ended_before_its_first_step_has_not_trained(
    tmp_path: Path, status: Literal["failed", "cancelled"]
) -> None:
    with new_folder(tmp_path) as folder:
        folder.update_metadata(start_time="2026-11-20T10:00:00+00:00")
        folder.finish(status, {"steps": 0, "attempts": 0, "seconds": 119.5})
    assert summarise(folder.path).seconds is None


def test_the_time_of_a_killed_attempt_is_that_of_its_steps(tmp_path: Path) -> None:
    totals = RunTotals()
    said = [RunEvent(time=100.0, status="starting"), *(step(n, 7000.0 + n) for n in (1, 2, 3))]  # another clock
    for event in [
        *said,
        RunEvent(time=200.0, status="starting"),
        step(4, 7200.0),
        RunEvent(time=207.0, status="failed"),
    ]:
        totals.note(event)
    assert totals.figures()["seconds"] == pytest.approx(3.0 + 7.0)


def test_metrics_of_a_resumed_run_count_both_attempts(tmp_path: Path) -> None:
    path, _ = interrupted(tmp_path, "failed")
    again = RunFolder.resume(path, RunFolder.open(path).plan(), ["again"])
    outcome = attempt(again, [RunEvent(status="running", details={"step": 20}), step(21, 5.0)], 0)
    written = json.loads((path / "metrics.json").read_text())
    assert outcome.metrics["samples"] == written["samples"] == 20
    assert written["attempts"] == 2


@pytest.mark.parametrize(("kept", "told"), [(5, ["15 steps are repeated"]), (20, [])])
def test_a_resume_tells_how_many_steps_it_makes_again(tmp_path: Path, kept: int, told: list[str]) -> None:
    path, _ = interrupted(tmp_path, "failed")
    again = RunFolder.resume(path, RunFolder.open(path).plan(), ["again"])
    attempt(again, [RunEvent(status="running", details={"step": kept}), step(kept + 1, 5.0)], 0)
    said = [event.message.rpartition(": ")[2] for event in again.events() if isinstance(event, WarningEvent)]
    assert said == told


def _ended(
    plan: RunPlan,
    path: Path,
    state: RunState,
    metrics: Mapping[str, Any] | None = None,
    status: str = "completed",
) -> EndedRun:
    return EndedRun.of(RunOutcome(status, path, metrics or {}, ExitCode.DONE), plan, state)


def test_the_time_of_a_run_is_that_of_its_attempts(tmp_path: Path) -> None:
    with new_folder(tmp_path) as folder:
        folder.update_metadata(start_time="2026-11-20T10:00:00+00:00")
        folder.finish("completed", {"steps": 40, "seconds": 40.0, "attempts": 2, "samples_per_second": 3.0})
    summary, metadata = summarise(folder.path), RunFolder.open(folder.path).metadata
    assert summary.seconds == 40.0
    ended = _ended(folder.plan(), folder.path, RunState(), metrics=metadata.metrics)
    done, took = completed_lines(ended)[1:3]
    assert done == "Done: 40 steps in 2 attempts, 3.0 samples/s over the whole run"
    assert took == "trained 0:40"


def test_what_came_before_training_is_told_beside_its_time(tmp_path: Path) -> None:
    with new_folder(tmp_path) as folder:
        folder.finish("completed", {"steps": 40, "seconds": 251.0})
    state = RunState(attempts=(RunAttempt(begun=100.0, trains_since=135.0),))
    lines = completed_lines(_ended(folder.plan(), folder.path, state, metrics={"seconds": 251.0}))
    assert lines[2:4] == ["trained 4:11", "before  0:35 of preparation"]


@pytest.mark.parametrize(
    ("name", "own"), [("demo", "demo --local 1 --dataset YOUR_RECORDINGS"), ("demo-scratch", ""), ("nanogpt", "")]
)
def test_the_end_says_what_to_type_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, own: str) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_local_run(load_profile(name).profile, 1)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").touch()
    ended = _ended(plan, tmp_path / "run", RunState())
    lines = completed_lines(ended)
    commands = [line.split("cli_typer.py ")[1] for line in lines[lines.index("next") + 1 :]]
    about = f"run --output {tmp_path}"
    speech = [f"model transcribe {about} FILE.wav", f"model evaluate {about} {plan.profile.data.dataset_path}"]
    speech += [f"model compare {about}", f"model export {about} --to ctranslate2"]
    wanted = [*(speech if name != "nanogpt" else []), *([f"train {own}"] if own else [])]
    assert commands == [*wanted, f"runs show {about}"]


@pytest.mark.parametrize(
    ("name", "template", "wanted"),
    [
        (
            "instruct-lora",
            True,
            ["model generate --compare {} 'YOUR PROMPT'", "model chat {}", "model evaluate {} DATASET"],
        ),
        ("nanogpt", False, ["model generate {} 'YOUR PROMPT'", "model evaluate {} DATASET"]),
    ],
)
def test_the_end_says_how_a_language_model_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, template: bool, wanted: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}' if template else "{}")
    plan = plan_local_run(load_profile(name, {"dataset_path": str(tmp_path)}).profile, 1)
    commands = next_commands(_ended(plan, tmp_path / "run", RunState()))
    about = f"run --output {tmp_path}"
    lines = [line.partition("cli_typer.py ")[2] for line in commands]
    assert lines == [*(line.format(about) for line in wanted), f"runs show {about}"]


@pytest.mark.parametrize(("name", "offered"), [("demo", True), (tour_profile(3), False)])
def test_only_a_run_that_trained_is_offered_to_resume(tmp_path: Path, name: str, offered: bool) -> None:
    plan = plan_local_run(load_profile("demo").profile.model_copy(update={"name": name}), 1)
    snapshot = SnapshotEvent(member=0, step=30, path="", bytes=1, seconds=1.0, live=(0,))
    state = reduce_events([snapshot])
    ended = _ended(plan, tmp_path / "run", state, status="cancelled")
    assert ("--resume" in " ".join(next_commands(ended))) is offered
    assert ("--resume" in stopped_line(ended)) is offered
    assert ("--resume" in failure_hint(ended)) is offered


def test_after_the_tour_the_first_command_is_the_set_up_with_ones_own_machines(tmp_path: Path) -> None:
    plan = plan_local_run(load_profile("demo").profile.model_copy(update={"name": tour_profile(3)}), 1)
    lines = completed_lines(_ended(plan, tmp_path / "run", RunState(), {"steps": 4}))
    following = lines[lines.index("next") + 1]
    assert following == f"  {command_line()}  your own machines: the set-up" and lines[-1].count("runs show")


def test_who_trained_on_recordings_of_their_own_is_not_told_to(tmp_path: Path) -> None:
    options = {"dataset": str(tmp_path), "warmup_steps": "10"}
    plan = plan_local_run(load_profile("demo", options).profile, 1)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").touch()
    lines = completed_lines(_ended(plan, tmp_path / "run", RunState(), {"steps": 4}))
    assert any(line.startswith("short   all of its 4 steps are in the warm-up of 10") for line in lines)
    one = completed_lines(_ended(plan, tmp_path / "run", RunState(), {"steps": 1}))
    assert any(line.startswith("short   its only step is in the warm-up of 10") for line in one)
    assert "  model evaluate" in " ".join(lines).replace("python3 cli_typer.py ", "") and "YOUR_RECORDINGS" not in str(
        lines
    )


def test_the_command_that_resumes_goes_on_without_a_lost_machine(tmp_path: Path) -> None:
    """Also where it was lost before the others met: they count it as one that trains."""
    written = SnapshotEvent(member=0, step=8, path="x", seconds=0.1, bytes=1, live=(0, 1))
    state = reduce_events([MemberEvent(member=1, status="lost", name="b"), written])
    with new_folder(tmp_path) as folder:
        (member,) = folder.plan().members
        device = member.devices[0].model_copy(update={"machine": "b"})
        other = member.model_copy(update={"rank": 1, "name": "b", "devices": (device,)})
        plan = folder.plan().model_copy(update={"members": (member, other)})
        ended = EndedRun.of(RunOutcome("cancelled", folder.path, {}, ExitCode.STOPPED), plan, state)
    assert ended.state.saved_progress.startswith("the snapshot of step 8 is kept")
    assert ended.resume_command.endswith(" --allow-missing")


@pytest.mark.parametrize("resumable", [True, False])
def test_nobody_is_told_to_resume_what_cannot_go_on(tmp_path: Path, resumable: bool) -> None:
    with new_folder(tmp_path) as folder:
        state = reduce_events([SnapshotEvent(member=0, step=80, path="x", seconds=0.1, bytes=1, live=(0,))])
        assert state.resume_step == 80
        outcome = RunOutcome("failed", folder.path, {}, ExitCode.BAD_INPUT, "m", "look there", resumable)
        ended = EndedRun.of(outcome, folder.plan(), state)
        assert ("--resume" in failure_hint(ended)) is resumable
        assert bool(document(ended)["resume_command"]) is resumable
        model = ended.plan.profile.model.model_copy(update={"task": "custom", "model_path": ""})
        profile = ended.plan.profile.model_copy(update={"model": model})
        of_objects = replace(ended, plan=ended.plan.model_copy(update={"profile": profile}))
        assert of_objects.resume_command == (f'fit(resume="{folder.path}")' if resumable else "")
        (folder.path / "checkpoints/member-0/step-00000080").mkdir(parents=True)
        assert ("fit(resume=" in failure_of(outcome).hint) is resumable


def test_an_end_without_an_outcome_keeps_the_figures(tmp_path: Path) -> None:
    with new_folder(tmp_path) as folder:
        folder.append(RunEvent(status="starting"))
        folder.update_metadata(status="running")
        folder.append(step(7, 5.0))
        write_end(folder, folder.append, "failed", BadInput.exit_code, "the disk is full")
    assert RunFolder.open(folder.path).metadata.metrics["steps"] == 7


def test_a_supervisor_that_cannot_begin_leaves_a_resumed_run_as_it_was(tmp_path: Path) -> None:
    path, kept = interrupted(tmp_path, "failed")
    before = RunFolder.open(path).metadata
    RunFolder.resume(path, RunFolder.open(path).plan(), ["again"]).close()
    assert supervise_folder(path) == ExitCode.BAD_INPUT  # its hosts file is gone
    assert RunFolder.open(path).metadata == before
    assert kept.is_dir()
