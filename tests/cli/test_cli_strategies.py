"""``compare --strategies``: real members that take turns, and what is done with a comparison that broke off."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.cli.train import compare
from app.cli.train.trials import Bench, Trial, trials_of, whole_runs
from profiles.errors import ExitCode
from profiles.files.resolve import profile_from_options
from tests.cli.fake_run import FakeRun, training
from tests.distributed.muster_runs import JOB

Capture = pytest.CaptureFixture[str]
OPTIONS = {"task": "custom", "max_steps": "20", "batch_size": "4", "threads": "1", "learning_rate": "1e-2"}


def job() -> dict[str, str]:
    Path("job.py").write_text(JOB.format(pause=0.0, gate="", model="nn.Linear(2, 2)"))
    return {**OPTIONS, "model_path": "job.py:build"}


def asked(*more: str) -> list[str]:
    settings = [word for name, value in job().items() for word in ("--set", f"{name}={value}")]
    return ["compare", *settings, "--members", "2", "--seeds", "2", *more]


def trials(seeds: int = 2, **options: str) -> list[Trial]:
    profile = profile_from_options("custom", {**job(), **options})
    return trials_of(profile, 2, seeds, 1, evaluations_chosen=False)


@pytest.mark.slow
def test_two_strategies_are_run_compared_and_not_run_again(capsys: Capture) -> None:
    names = ["--strategies", "allreduce,diloco,zero1 + diloco", "--set", "diloco.sync_interval=5", "--links", "100,20"]
    assert main(asked(*names)) == 0
    shown = capsys.readouterr()
    assert "loss on validation after 160 samples, 2 members, mean ± deviation of 2 seeds" in shown.out
    assert "zero1 + diloco: refused: " in shown.out and "best    " in shown.out
    assert "4 of 4 runs" in shown.err
    assert max(map(len, shown.out.splitlines()[:16])) <= 80
    assert main(asked(*names, "--json", "--jobs", "2")) == 0
    again = capsys.readouterr()
    assert "4 runs of 4 are there already" in again.err and "done" not in again.err
    document = json.loads(again.out)
    allreduce, diloco, refused = document["rows"]
    weights = 20 * 6 * 4  # half of the gradients and half of the means, in fp32
    assert weights <= allreduce["sent"] < 1.1 * weights and 0 < diloco["sent"] < allreduce["sent"]
    assert [len(row["losses"]) for row in document["rows"]] == [2, 2, 0] and refused["loss"] is None
    assert [len(run["curve"]) for run in allreduce["runs"]] == [11, 11]
    assert [times["mbit"] for times in diloco["times"]] == [20, 100]
    assert allreduce["times"][0]["to_end"] > diloco["times"][0]["to_end"] > 0


def test_options_that_cannot_be_are_said_before_anything_runs(capsys: Capture) -> None:
    for words, said in (
        (["--strategies", "alreduce"], "unknown strategy 'alreduce'"),
        (["--strategies", ","], "--strategies names none"),
        (["--strategies", "auto"], "auto is no strategy of its own"),
        (["--strategies", "diloco", "--links", "20,fast"], "not the rates of links"),
        (["--strategies", "diloco", "--set", "simulate=3"], "--set simulate: the comparison decides it"),
        (["--strategies", "zero1 + diloco"], "zero1 keeps all members' weights equal"),
        (["--strategies", "diloco,zero1", "--set", "noloco.sync_interval=5"], "write diloco.sync_interval = 5"),
        (["--strategies", "diloco", "--save", "no/name"], "cannot be the name of a profile"),
        ([], "these options compare strategies"),
    ):
        assert main(asked(*words)) == 2
        assert said in capsys.readouterr().err
    assert main(["compare"]) == 2 and not Path("output").exists()


OWN = """
from training.strategies.local_sgd import LocalSGD

class Mine(LocalSGD):
    name = "mine"
    costs = None
"""


def test_runs_of_ones_own_strategy_are_found_by_the_name_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    Path("mine.py").write_text(OWN)
    monkeypatch.setattr(compare, "Bench", functools.partial(Bench, start_run=FakeRun(training())))
    assert main(asked("--strategies", "mine.py:Mine", "--trust-code", "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["strategy"], row["refused"], len(row["losses"])) == ("mine.py:Mine", "", 2)


def test_a_seed_is_a_run_and_evaluations_make_a_curve() -> None:
    first, second = trials()
    assert (first.seed + 1, first.plan.profile.evaluation.eval_interval) == (second.seed, 2)
    assert first.key != second.key and first.key != trials(strategy="diloco")[0].key
    assert first.plan.engine == "simulated" and first.plan.profile.snapshot.snapshot_interval == 0
    assert [one.key for one in trials(output_dir="elsewhere")] == [first.key, second.key]


def test_a_stop_leaves_whole_runs_and_nothing_else(tmp_path: Path) -> None:
    first, second = trials()
    assert Bench(tmp_path, 1, start_run=FakeRun(training())).carry_out([first])
    stopping: Any = Bench(tmp_path, 1, start_run=FakeRun(training(), "cancelled", on_wait=lambda run: stop()))

    def stop() -> None:
        stopping.stopped.set()

    assert stopping.carry_out([second]) == {} and stopping.refused == {}
    assert len(list(tmp_path.glob("2*"))) == 1
    again = trials()
    assert list(whole_runs(tmp_path, again)) == [again[0]]


def test_pieces_of_a_run_that_was_killed_are_removed(tmp_path: Path) -> None:
    (trial,) = trials(seeds=1)
    failed = Bench(tmp_path, 1, start_run=FakeRun(training(), "failed", ExitCode.RUN_FAILED, "no memory"))
    assert failed.carry_out([trial]) == {} and failed.refused == {trial.strategy: "no memory"}
    assert list(tmp_path.glob("2*")) and whole_runs(tmp_path, [trial]) == {}
    assert not list(tmp_path.glob("2*"))


def test_a_strategy_that_failed_has_no_more_runs(tmp_path: Path) -> None:
    run = FakeRun(training(), "failed", ExitCode.BAD_INPUT, "not with this model")
    bench = Bench(tmp_path, 1, sys.argv, start_run=run)
    assert bench.carry_out(trials(seeds=3)) == {} and run.calls == ["start"]
