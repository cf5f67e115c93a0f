from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from test_run_folder import make_plan

from profiles.errors import BadInput
from training.records.plan import Status
from training.records.run_folder import RunFolder
from training.records.runs import (
    RunSummary,
    compare,
    filter_runs,
    find_model,
    find_run,
    list_runs,
    remove_run,
    runs_to_clean,
    summarise,
)

OLD, MIDDLE, NEW = "20260101-000000-aaaa", "20260201-000000-bbbb", "20260202-000000-bbcc"


def make(output: Path, run_id: str, profile: str = "demo", status: Status = "completed", **metrics: float) -> Path:
    with RunFolder.create(output, make_plan(run_id, profile), []) as folder:
        if status != "starting":
            folder.finish(status, {"after": metrics})
    return folder.path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    make(tmp_path, OLD, wer=0.3)
    make(tmp_path, MIDDLE, status="failed")
    make(tmp_path, NEW, profile="other", wer=0.2)
    return tmp_path


def ids(runs: list[RunSummary]) -> list[str]:
    return [run.run_id for run in runs]


def test_runs_are_listed_newest_first(output: Path) -> None:
    (output / "notes").mkdir()
    (output / "20260101-notes.txt").touch()
    assert ids(list_runs(output)) == [NEW, MIDDLE, OLD]


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ({"statuses": ["failed", "cancelled"]}, [MIDDLE]),
        ({"profile": "demo"}, [MIDDLE, OLD]),
        ({"profile": "demo", "statuses": ["completed"]}, [OLD]),
        ({"since": "2026-02-01T12:00:00+00:00"}, [NEW]),
        ({"since": "2d"}, []),
        ({}, [NEW, MIDDLE, OLD]),
    ],
)
def test_a_list_can_be_narrowed(output: Path, wish: dict[str, Any], found: list[str]) -> None:
    days = {OLD: "2026-01-01", MIDDLE: "2026-02-01", NEW: "2026-02-02"}
    for run in list_runs(output):
        with RunFolder.take_over(run.path) as folder:
            folder.update_metadata(start_time=f"{days[run.run_id]}T00:00:00+00:00")
    assert ids(filter_runs(list_runs(output), **wish)) == found


@pytest.mark.parametrize(
    "wish", [{"statuses": ["done"]}, {"since": "yesterday"}, {"since": "-3d"}, {"since": "infd"}, {"since": "999999d"}]
)
def test_a_list_is_not_narrowed_by_what_nobody_knows(output: Path, wish: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        filter_runs(list_runs(output), **wish)


def test_a_mistyped_status_removes_nothing_silently(output: Path) -> None:
    with pytest.raises(BadInput, match="no status 'complete'"):
        runs_to_clean(list_runs(output), statuses=["complete"])


def test_no_folder_means_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []


def test_a_file_instead_of_a_folder_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "output").touch()
    with pytest.raises(BadInput, match="Not a directory"):
        list_runs(tmp_path / "output")


def test_a_damaged_run_is_listed_as_such(output: Path) -> None:
    (next(output.glob(f"{MIDDLE}*")) / "metadata.json").write_text("{")
    damaged = list_runs(output)[1]
    assert (damaged.status, damaged.run_id, damaged.profile) == ("damaged", MIDDLE, "demo")
    assert "metadata.json is damaged" in damaged.damage


def test_a_run_that_nobody_ended_is_interrupted_and_a_held_one_is_not(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, make_plan(OLD), []):
        assert list_runs(tmp_path)[0].status == "starting"
    assert list_runs(tmp_path)[0].status == "interrupted"


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        (OLD, OLD),
        ("20260101", OLD),
        (f"{NEW}-other", NEW),
        ("demo", MIDDLE),
        ("other", NEW),
        ("cc", NEW),
        ("0-aaaa", OLD),
        ("-oth", NEW),
    ],
)
def test_a_run_is_found_by_id_beginning_or_profile(output: Path, reference: str, found: str) -> None:
    assert find_run(output, reference).name.startswith(found)


def test_a_run_is_found_by_path(output: Path) -> None:
    path = next(output.glob(f"{OLD}*"))
    assert find_run(Path("elsewhere"), str(path)) == path


def test_an_ambiguous_beginning_lists_what_fits(output: Path) -> None:
    with pytest.raises(BadInput, match="fits 2 runs") as caught:
        find_run(output, "202602")
    assert MIDDLE in caught.value.hint
    assert NEW in caught.value.hint


def test_an_ambiguous_end_lists_what_fits(output: Path) -> None:
    make(output, "20260301-000000-ffbb", "third")
    with pytest.raises(BadInput, match="'bb' fits 2 runs") as caught:
        find_run(output, "bb")
    assert MIDDLE in caught.value.hint and "20260301-000000-ffbb" in caught.value.hint


def test_a_profile_is_meant_before_the_end_of_an_id(output: Path) -> None:
    make(output, "20260301-000000-ffff", "bbcc")
    assert find_run(output, "bbcc").name.startswith("20260301")


@pytest.mark.parametrize("reference", ["nothing", "../..", "\x1b[31m"])
def test_an_unknown_run_is_bad_input_that_names_the_list(output: Path, reference: str) -> None:
    with pytest.raises(BadInput) as caught:
        find_run(output, reference)
    assert caught.value.hint.endswith("runs list")


def test_the_newest_run_is_meant_by_nothing(output: Path) -> None:
    make(output, "20990101-000000-ffff", "newest")
    (output / "20990102-000000-ffff-broken").mkdir()
    assert find_run(output, "").name.startswith("20990101")


def test_the_model_of_a_profile_is_that_of_its_newest_run_that_has_one(output: Path) -> None:
    model = next(output.glob(f"{OLD}*")) / "model"
    model.mkdir()
    (model / "config.json").touch()
    assert find_model(output, "demo") == model
    assert find_model(output, OLD) == model
    assert find_model(output, str(model)) == model


def test_a_run_without_a_model_says_how_to_go_on(output: Path) -> None:
    with pytest.raises(BadInput, match=r"\(failed\) has no model yet") as caught:
        find_model(output, MIDDLE)
    assert f" train --resume {output / MIDDLE}" in caught.value.hint  # a bare id would be looked for in output/


def test_a_completed_run_without_a_model_is_not_resumed(output: Path) -> None:
    with pytest.raises(BadInput, match=r"\(completed\) has no model yet") as caught:
        find_model(output, NEW)
    assert "--resume" not in caught.value.hint and " train PROFILE" in caught.value.hint


def test_a_run_that_goes_on_has_no_model_yet_and_is_not_resumed(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, make_plan(OLD), []), pytest.raises(BadInput, match="no model yet") as caught:
        find_model(tmp_path, OLD)
    assert f"attach {tmp_path / OLD}" in caught.value.hint


def test_comparison_shows_differing_settings_and_all_metrics(output: Path) -> None:
    runs = [summarise(find_run(output, run_id)) for run_id in (OLD, NEW)]
    table = compare(runs)
    assert dict(table.settings) == {"profile": ("demo", "other")}
    assert dict(table.metrics) == {"after.wer": (0.3, 0.2)}


def test_a_single_run_cannot_be_compared(output: Path) -> None:
    with pytest.raises(BadInput, match="cannot be compared"):
        compare(list_runs(output)[:1])


def test_cleaning_needs_a_condition(output: Path) -> None:
    with pytest.raises(BadInput, match="no runs to remove"):
        runs_to_clean(list_runs(output))


def test_clean_keeps_the_newest(output: Path) -> None:
    assert ids(runs_to_clean(list_runs(output), keep=2)) == [OLD]
    assert ids(runs_to_clean(list_runs(output), keep=0)) == [NEW, MIDDLE, OLD]


def test_clean_by_status(output: Path) -> None:
    assert ids(runs_to_clean(list_runs(output), statuses=["failed", "damaged"])) == [MIDDLE]


def test_clean_by_age(output: Path) -> None:
    path = next(output.glob(f"{OLD}*"))
    before = (datetime.now(timezone.utc) - timedelta(days=3)).isoformat()
    text = (path / "metadata.json").read_text()
    start = RunFolder.open(path).metadata.start_time
    (path / "metadata.json").write_text(text.replace(start, before))
    assert ids(runs_to_clean(list_runs(output), older_than_days=2)) == [OLD]
    assert runs_to_clean(list_runs(output), older_than_days=4) == []


@pytest.mark.slow
def test_a_live_run_is_never_cleaned(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, make_plan(OLD), []):
        (run,) = list_runs(tmp_path)
        assert runs_to_clean([run], keep=0) == []
        with pytest.raises(BadInput, match="is working on this run"):
            remove_run(tmp_path, run)
    assert run.path.exists()


def test_removing_a_run_does_not_follow_links_out_of_it(output: Path) -> None:
    treasure = output / "treasure"
    treasure.mkdir()
    (treasure / "weights").touch()
    run = list_runs(output)[0]
    (run.path / "model").symlink_to(treasure)
    remove_run(output, run)
    assert not run.path.exists()
    assert (treasure / "weights").exists()


def test_a_link_that_looks_like_a_run_is_neither_listed_nor_removed(output: Path, tmp_path: Path) -> None:
    real = next(output.glob(f"{OLD}*"))
    link = output / "20260909-000000-dddd-demo"
    os.symlink(real, link)
    assert "20260909-000000-dddd" not in ids(list_runs(output))
    with pytest.raises(BadInput, match="not a run folder"):
        remove_run(output, summarise(link))
    assert real.exists()


def test_a_folder_elsewhere_is_not_removed(output: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run folder"):
        remove_run(tmp_path / "other", list_runs(output)[0])
