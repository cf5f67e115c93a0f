"""Runs of other folders of this computer, in the list of the usual one."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import BadInput
from profiles.installation import RUNS_FOLDER
from training.records.model_folders import find_usable_model, is_speech_model
from training.records.run_index import other_folders, remember
from training.records.runs import find_run, list_all_runs

RUN = "20260921-130000-ab12-talk"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_a_run_started_in_another_folder_is_listed_and_found(tmp_path: Path) -> None:
    (tmp_path / "there" / RUN).mkdir(parents=True)
    remember(tmp_path / "there")
    remember(tmp_path / "there")
    assert [run.path for run in list_all_runs(RUNS_FOLDER)] == [tmp_path / "there" / RUN]
    assert find_run(RUNS_FOLDER, RUN[:20]) == tmp_path / "there" / RUN


def test_the_newest_run_and_model_of_all_other_folders_are_meant_by_nothing(tmp_path: Path) -> None:
    for folder, day in (("first", 1), ("second", 3), ("third", 2)):
        run = tmp_path / folder / f"2026092{day}-130000-ab12-talk"
        (run / "model").mkdir(parents=True)
        (run / "model" / "config.json").write_text('{"model_type": "%s"}' % ("whisper" if day < 3 else "llama"))
        remember(tmp_path / folder)
    assert find_run(RUNS_FOLDER, "").parent.name == "second"
    assert find_usable_model(RUNS_FOLDER, "", is_speech_model).parent.parent.name == "third"


def test_who_names_a_folder_sees_only_that(tmp_path: Path) -> None:
    (tmp_path / "there" / RUN).mkdir(parents=True)
    remember(tmp_path / "there")
    assert list_all_runs(tmp_path / "here") == []
    with pytest.raises(BadInput, match="no runs in"):
        find_run(tmp_path / "here", "")


def test_folders_that_are_gone_and_this_one_are_not_others(tmp_path: Path) -> None:
    remember(tmp_path / "gone")
    remember(RUNS_FOLDER)
    RUNS_FOLDER.mkdir()
    assert other_folders(RUNS_FOLDER) == []


def test_an_index_that_cannot_be_read_lists_nothing(tmp_path: Path) -> None:
    index = tmp_path / "state" / "muster" / "run_folders"
    index.mkdir(parents=True)
    remember(tmp_path)
    assert other_folders(RUNS_FOLDER) == []
