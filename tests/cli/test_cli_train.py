from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_run import SMALL, FakeRun, step, training

from app.cli.main import main
from app.cli.train.request import TrainRequest
from app.cli.train.start import distributed_train, plan_of
from app.cli.train.trial_run import lines, measure, rehearse
from app.run_view.run_state import reduce_events
from distributed.planning.documents.evaluations import EvaluationPlan
from distributed.planning.run_time import promised_time
from profiles.errors import BadInput, ExitCode, RunFailed
from profiles.files.resolve import profile_from_options
from tests.app.test_plan_vs_actual import planning
from tests.waiting import until
from training.records.run_folder import RunFolder
from training.run import stopping
from training.run.local_plan import plan_local_run
from training.strategies.diloco import DiLoCoOptions
from training.tasks.published_models import created_folder

Capture = pytest.CaptureFixture[str]


def asked(changes: dict[str, Any]) -> TrainRequest:
    if changes.get("resume"):
        return TrainRequest(**{"profile": "demo-scratch", **changes})
    return TrainRequest(**{"profile": "demo-scratch", **changes, "overrides": SMALL | changes.get("overrides", {})})


def train(run: FakeRun, **changes: Any) -> ExitCode:
    return distributed_train(asked(changes), run)


def rehearsal(run: FakeRun, **changes: Any) -> ExitCode:
    return rehearse(asked({"trial": True, **changes}), run)


def only_run() -> Path:
    (path,) = Path("output").iterdir()
    return path


def stopped_run() -> Path:
    """Leave a run behind that was stopped at step 6."""
    assert train(FakeRun(training(), "cancelled", ExitCode.STOPPED, "stopped", on_wait=FakeRun.kill)) == 130
    return only_run()


def test_a_completed_run_says_what_it_reached_and_what_to_type_next(capsys: Capture) -> None:
    assert train(FakeRun(training())) == ExitCode.DONE
    out = capsys.readouterr().out
    run = only_run()
    assert "Done: 6 steps, 32.0 samples/s" in out and "\ntrained 1:23\n" in out
    assert "WER     test  98.0 % -> 3.0 %" in out
    assert f"model   {run / 'model'}" in out
    assert f"transcribe {run.name[:20]} FILE.wav" in out


def test_progress_goes_to_stderr_without_escape_codes(capsys: Capture) -> None:
    train(FakeRun(training()))
    err = capsys.readouterr().err
    assert "WER on test: 98.0 % -> 3.0 % (step 6)" in err
    assert "\x1b" not in err


def test_json_is_one_document_on_stdout(capsys: Capture) -> None:
    assert train(FakeRun(training()), as_json=True) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 0
    assert document["evaluations"]["test"]["first"]["wer"] == 0.98
    assert document["evaluations"]["test"]["last"]["wer"] == 0.03
    assert Path(document["model"]).is_dir()


def test_options_reach_the_plan() -> None:
    run = FakeRun(training())
    train(run, overrides={"workers": "3", "strategy": "diloco", "learning_rate": "5e-4"})
    assert run.plan.world_size == 3
    assert run.plan.profile.strategy.strategy == "diloco"
    assert run.plan.profile.training.learning_rate == 5e-4


def test_a_custom_job_needs_no_profile() -> None:
    factory = "examples/custom/spirals.py:build"
    plan = plan_of(TrainRequest(overrides={"task": "custom", "model_path": factory, "workers": "2"}))
    assert (plan.profile.name, plan.profile.model.task, plan.world_size) == ("custom", "custom", 2)
    assert plan.profile.model.model_path == str(Path(factory).absolute())
    with pytest.raises(BadInput, match="no profile given"):
        plan_of(TrainRequest(overrides={"task": "custom"}))


def test_the_command_line_is_kept_in_the_metadata() -> None:
    train(FakeRun(training()), command=("cli_typer.py", "distributed-train", "demo-scratch"))
    assert RunFolder.open(only_run()).metadata.command == ["cli_typer.py", "distributed-train", "demo-scratch"]


def test_a_failed_run_ends_with_one_error_and_the_way_back(capsys: Capture) -> None:
    assert train(FakeRun(training(), "failed", ExitCode.RUN_FAILED, "the loss is nan in step 7")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2] == "error: the loss is nan in step 7"
    assert lines[-1].startswith("hint: the hint; resume from step 6 with: python3 ")
    assert lines[-1].endswith(f" train --resume {only_run().name[:20]}")


def test_a_failed_run_is_json_too(capsys: Capture) -> None:
    train(FakeRun(training(), "failed", ExitCode.RUN_FAILED, "broken"), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["error"]["message"], document["exit_code"]) == ("broken", 1)


def test_a_start_that_fails_is_listed_with_its_cause(capsys: Capture) -> None:
    assert train(FakeRun([], "failed", ExitCode.BAD_INPUT, "data/train.csv is empty")) == 2
    capsys.readouterr()
    main(["runs", "list"])
    assert re.search(rf"{only_run().name[:20]} .* failed .* data/train.csv is empty", capsys.readouterr().out)


def test_a_model_that_this_computer_cannot_get_is_not_trained_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    request = TrainRequest("whisper-tiny-lora", {"model": "owner/none", "dataset": "spoken-commands"})
    with pytest.raises(BadInput, match="nothing was started") as refused:
        plan_of(request)
    assert "is on this computer" not in refused.value.hint
    folder = created_folder("openai/whisper-tiny.en")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "whisper"}')
    (folder / "model.safetensors").touch()
    with pytest.raises(BadInput, match="nothing was started") as refused:
        plan_of(request)
    assert "; --model whisper-tiny-en is on this computer (38 M weights, English only); " in refused.value.hint
    german = TrainRequest(request.profile, {**request.overrides, "language": "de"})
    with pytest.raises(BadInput, match="nothing was started") as refused:
        plan_of(german)
    assert "is on this computer" not in refused.value.hint


def test_what_to_do_after_a_failed_start_is_shown(capsys: Capture) -> None:
    def taken(run: FakeRun) -> None:
        raise BadInput("port 80 is in use", "free it")

    with pytest.raises(BadInput):
        train(FakeRun(on_start=taken))
    main(["runs", "show", only_run().name[:20]])
    assert "error     port 80 is in use\nto do     free it\n" in capsys.readouterr().out


def test_a_run_that_breaks_in_this_process_keeps_its_folder_and_the_reason() -> None:
    def full(run: FakeRun) -> None:
        raise RunFailed("the disk is full")

    with pytest.raises(RunFailed):
        train(FakeRun(training(), on_wait=full))
    metadata = RunFolder.open(only_run()).metadata
    assert (metadata.status, metadata.error_message) == ("failed", "the disk is full")


def pressing(capsys: Capture, *numbers: int) -> Callable[[FakeRun], None]:
    """Return what sends this process signals, and waits until it has said so, which a thread does."""

    def press(run: FakeRun) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
        until(lambda: stopping.STOPPING in capsys.readouterr().err)

    return press


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_and_says_how_to_resume(capsys: Capture, number: int) -> None:
    run = FakeRun(training(), "cancelled", ExitCode.STOPPED, on_wait=pressing(capsys, number))
    assert train(run) == 130
    assert run.calls == ["start", "stop: stopped by the user"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("stopped; the snapshot of step 6 is kept, 0 steps lost; resume with: ")
    assert last.endswith(f" train --resume {only_run().name[:20]}")


def test_a_second_signal_ends_everything_at_once(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(stopping, "ONE_PRESS", 0.0)
    run = FakeRun([], "cancelled", ExitCode.STOPPED, on_wait=pressing(capsys, signal.SIGINT, signal.SIGINT))
    assert train(run) == 130
    assert run.calls[-1] == "kill"


def test_a_signal_during_the_start_is_carried_out_after_it(capsys: Capture) -> None:
    run = FakeRun(
        [],
        "cancelled",
        ExitCode.STOPPED,
        on_wait=pressing(capsys),
        on_start=lambda run: os.kill(os.getpid(), signal.SIGINT),
    )
    assert train(run) == 130
    assert run.calls == ["start", "stop: stopped by the user"]


def test_signals_are_given_back_after_the_run() -> None:
    before = signal.getsignal(signal.SIGINT)
    train(FakeRun(training()))
    assert signal.getsignal(signal.SIGINT) is before


def test_resume_goes_on_in_the_same_folder_as_planned(capsys: Capture) -> None:
    first = stopped_run()
    run = FakeRun([step(7, 0), step(7, 1)])
    assert train(run, profile="", overrides={}, resume=first.name[:20]) == ExitCode.DONE
    assert run.plan.resume
    assert run.plan.run_id == first.name[:20]
    assert run.plan.hash() == RunFolder.open(first).plan().hash()
    assert RunFolder.open(only_run()).metadata.attempt == 2
    assert "WER     test  98.0 % -> 3.0 %" in capsys.readouterr().out


def test_a_failed_resume_keeps_the_folder() -> None:
    first = stopped_run()
    train(FakeRun([], "failed", ExitCode.BAD_INPUT, "gone"), profile="", overrides={}, resume=first.name[:20])
    assert only_run() == first


def test_a_run_without_a_snapshot_is_not_resumed() -> None:
    train(FakeRun(training()[:5], "cancelled", ExitCode.STOPPED, on_wait=FakeRun.kill))
    with pytest.raises(BadInput, match="no snapshot.*start a new run"):
        train(FakeRun(), profile="", overrides={}, resume="demo-scratch")


def test_a_run_is_not_resumed_and_rehearsed() -> None:
    with pytest.raises(BadInput, match="do not go together"):
        rehearsal(FakeRun(training()), resume=stopped_run().name[:20])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides": {"learning_rate": "1"}, "profile": ""}, "takes no other learning_rate"),
        (
            {"overrides": {"workers": "3", "layout": "pipeline"}, "profile": ""},
            "goes on with the workers it began with",
        ),
        ({"overrides": {}, "profile": "nanogpt"}, "is of profile 'demo-scratch'"),
    ],
)
def test_resume_refuses_what_would_make_it_another_run(changes: dict[str, object], message: str) -> None:
    reference = stopped_run().name[:20]
    with pytest.raises(BadInput, match=message):
        train(FakeRun(), resume=reference, **changes)


def test_a_completed_run_is_not_resumed() -> None:
    train(FakeRun(training()))
    with pytest.raises(BadInput, match="is completed"):
        train(FakeRun(), profile="", overrides={}, resume="demo-scratch")


def test_a_trial_run_measures_and_leaves_nothing(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "work"))
    run = FakeRun(training())
    assert rehearsal(run, as_json=True) == ExitCode.DONE
    measured = json.loads(capsys.readouterr().out)
    assert run.plan.profile.training.max_steps == 6
    assert measured["seconds_per_step"] == pytest.approx(0.5)
    assert measured["samples_per_second"] == pytest.approx(32.0)
    assert measured["bytes_per_sync"] == 8000
    assert measured["memory_peak"] == 200_000_000
    assert list(Path.cwd().iterdir()) == []


def test_a_trial_run_of_diloco_spreads_a_round_over_its_inner_steps(capsys: Capture) -> None:
    overrides = {"strategy": "diloco", "sync_interval": "40", "max_steps": "1000"}
    run = FakeRun(training())
    assert rehearsal(run, as_json=True, overrides=overrides) == ExitCode.DONE
    measured = json.loads(capsys.readouterr().out)
    assert run.plan.profile.strategy.of(DiLoCoOptions).sync_interval == 3
    assert measured["seconds_per_step"] == pytest.approx(0.4 + 0.4 / 40)
    assert measured["bytes_per_sync"] == 2000
    assert measured["seconds_total"] == pytest.approx(1000 * 0.41)


@pytest.mark.parametrize(("in_epoch", "in_all"), [(100, 300), (6.5, 21)])
def test_a_trial_run_estimates_the_steps_of_all_epochs(in_epoch: float, in_all: int, capsys: Capture) -> None:
    """An epoch of six and a half steps has seven, and takes as long as six and a half."""
    said = [step(number, member, epoch=number / in_epoch) for number in range(1, 7) for member in (0, 1)]
    rehearsal(FakeRun(said), as_json=True, overrides={"max_steps": "0", "epochs": "3"})
    measured = json.loads(capsys.readouterr().out)
    assert measured["total_steps"] == in_all
    assert measured["seconds_total"] == pytest.approx(3 * in_epoch * measured["seconds_per_step"])


def test_a_trial_run_of_a_plan_counts_evaluations_and_stands_beside_the_promise() -> None:
    options = {"task": "custom", "model_path": "a.b:c", "strategy": "allreduce", "max_steps": 6}
    plan, events, promise = plan_local_run(profile_from_options("p", options), 2), training(), planning()
    job = promise.job.model_copy(update={"evaluation": EvaluationPlan(samples={"validation": 50})})  # of 0.2 s each
    promise = promise.model_copy(update={"job": job})
    measured = measure(plan, events, reduce_events(events), promise)
    assert lines(measured, promised_time(promise))[-2] == (
        "whole run     6 steps, about 0:13 (0:20 promised; pc alone 0:32)"
    )


def test_a_trial_run_for_a_person(capsys: Capture) -> None:
    rehearsal(FakeRun(training()))
    out = capsys.readouterr().out
    assert "step          500 ms, 32.0 samples/s" in out
    assert "80 % computing, 20 % waiting for the others" in out
    assert "sends         8.0 kB a worker, every step" in out


def test_a_failed_trial_run_says_why(capsys: Capture) -> None:
    run = FakeRun([], "failed", ExitCode.BAD_INPUT, "no data")
    assert rehearsal(run) == 2
    assert capsys.readouterr().err.splitlines()[-2:] == ["error: no data", "hint: the hint"]
