"""``sweep``: combinations of values, trials over slots, and the ranking."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from app.cli.main import main
from app.cli.sweep.sweep import combinations
from app.cli.sweep.sweep_trials import Slot, SweepBench, SweepTrial
from profiles.errors import BadInput

Capture = pytest.CaptureFixture[str]
SPIRALS = str(Path(__file__).parents[2] / "examples" / "custom" / "spirals.py") + ":build"
STAND_IN = """
import sys
from pathlib import Path
words = sys.argv[1:]
folder = Path(words[words.index("--output-dir") + 1])
(folder / "slot").write_text(words[words.index("--slot") + 1])
if "broken" in words:
    print("error: the machine is off", file=sys.stderr)
    sys.exit(3)
if "x=2" in words:
    print("error: no such value", file=sys.stderr)
    sys.exit(2)
"""
"""In place of ``train``: a machine that is off, and a value that fails."""


def test_every_combination_is_a_trial() -> None:
    assert combinations(["learning_rate=1e-4, 1e-3", "batch-size=4"]) == [
        {"learning_rate": "1e-4", "batch_size": "4"}, {"learning_rate": "1e-3", "batch_size": "4"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ([], "nothing to try"),
        (["learning_rat=1"], "no option 'learning_rat'.*did you mean 'learning_rate'"),
        (["epochs="], "no values"),
        (["epochs=1", "epochs=2"], "given twice"),
        (["hosts=a"], "the sweep decides it"),
        (["seed=" + ",".join(map(str, range(201)))], "201 combinations are more than 200"),
    ],
)
def test_values_that_cannot_be_tried_are_refused(over: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        combinations(over)


def test_a_machine_that_is_off_leaves_its_trials_to_the_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STAND_IN)
    trials = [SweepTrial(f"x={n}", {"x": str(n)}, tmp_path / str(n)) for n in range(4)]
    slots = [Slot("off", ("--slot", "off", "broken")), Slot("fit", ("--slot", "fit"))]
    bench = SweepBench(slots, [], (sys.executable, str(script)))
    bench.carry_out(trials)
    assert {(trial.folder / "slot").read_text() for trial in trials} == {"fit"}
    assert {trial.name: problem for trial, problem in bench.problems.items()} == {"x=2": "no such value"}
    alone = SweepBench(slots[:1], [], (sys.executable, str(script)))
    alone.carry_out(trials[:2])
    assert set(alone.problems.values()) == {"the machine is off", "no machine was left for it"}


@pytest.mark.slow
def test_the_best_value_is_named_with_the_line_that_trains_with_it(tmp_path: Path, capsys: Capture) -> None:
    line = ["sweep", "--set", "task=custom", "--set", f"model_path={SPIRALS}", "--set", "max_steps=12"]
    line += ["--set", "warmup_steps=0", "--over", "learning_rate=1e-7,1e-2", "--output", str(tmp_path)]
    assert main([*line, "--jobs", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [trial["options"]["learning_rate"] for trial in said["trials"]] == ["1e-2", "1e-7"]
    assert said["trials"][0]["loss"] < said["trials"][1]["loss"] and "learning_rate=1e-2" in said["command"]
    assert Path(said["best"]["run"], "model").is_dir()
    assert main(line) == 0
    shown = capsys.readouterr()
    assert "2 trials of 2 done already" in shown.err
    assert "learning_rate = 1e-2 is the largest that was tried" in shown.out
