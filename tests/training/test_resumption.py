"""The plan with which a run goes on, also for longer than it was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.resumption import plan_to_resume


def run(folder: Path, status: str = "completed", snapshots: bool = True, **options: Any) -> Path:
    """A run folder as a run of this machine leaves it."""
    chosen = {"task": "custom", "model_path": "examples/custom/spirals.py:build", **options}
    with RunFolder.create(folder, plan_local_run(profile_from_options("p", chosen), 2), ["test"]) as made:
        made.update_metadata(status=status)
        if snapshots:
            (made.path / "checkpoints" / "member-0" / "step-00000005").mkdir(parents=True)
    return made.path


@pytest.mark.parametrize("status", ["completed", "cancelled"])
def test_a_run_goes_on_for_longer_with_its_own_snapshots(status: str, tmp_path: Path) -> None:
    path = run(tmp_path, status, epochs=3)
    before, after = RunFolder.open(path).plan(), plan_to_resume(path, {"epochs": "6"})
    assert (after.profile.training.epochs, after.resume, after.attempt) == (6, True, 2)
    assert after.hash() == before.hash()
    with RunFolder.resume(path, after, ["again"]) as resumed:
        resumed.update_metadata(status="completed")
    assert plan_to_resume(path, {"epochs": 9}).hash() == before.hash(), "and once more"


def test_epochs_take_the_place_of_steps_and_the_other_way_round(tmp_path: Path) -> None:
    path = run(tmp_path, max_steps=100)
    training = plan_to_resume(path, {"epochs": 2}).profile.training
    assert (training.epochs, training.max_steps) == (2, 0)
    assert plan_to_resume(path, {"max_steps": 200}).profile.training.max_steps == 200


@pytest.mark.parametrize(
    ("lengths", "snapshots", "said"),
    [
        (None, True, "is completed: nothing to resume .*--set epochs=N"),
        ({"epochs": 3}, True, "was planned for epochs = 3 .*above"),
        ({"epochs": "many"}, True, "epochs"),
        ({"epochs": 6}, False, "has no snapshot.*snapshot_interval below 5m"),
    ],
)
def test_what_does_not_go_on_is_refused_with_what_does(
    lengths: dict[str, Any] | None, snapshots: bool, said: str, tmp_path: Path
) -> None:
    path = run(tmp_path, snapshots=snapshots)
    with pytest.raises(BadInput, match=said):
        plan_to_resume(path, lengths)


def test_the_weights_of_a_published_model_begin_a_new_run(tmp_path: Path) -> None:
    path = run(tmp_path, snapshots=False, task="causal_lm", model_path="x", dataset_path="y")
    (path / "model").mkdir()
    with pytest.raises(BadInput, match=rf"train p --model-path {path}/model"):
        plan_to_resume(path, {"epochs": 6})
