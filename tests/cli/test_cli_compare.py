"""``compare``: two files, or the start and the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main
from speech.report.figures import breakdown_lines, difference_lines
from speech.scoring.error_analysis import WerDifference
from tests.report.report_runs import write_run
from training.tasks.outputs.predictions import BEFORE, FOLDER, NAME, Prediction, write_predictions

Capture = pytest.CaptureFixture[str]


def written(path: Path, heard: list[str]) -> Path:
    found = [
        Prediction(
            f"c{number}", "", "open door", text, "open door", text, sum(text != "open door" for _ in (1,)), 2, 0, 9,
            speaker="ann" if number % 2 else "bob",
        )
        for number, text in enumerate(heard)
    ]  # fmt: skip
    write_predictions(path, found)
    return path


def test_two_files(tmp_path: Path, capsys: Capture) -> None:
    first = written(tmp_path / "a.csv", ["open store"] * 20)
    second = written(tmp_path / "b.csv", ["open door"] * 19 + ["open store"])
    assert main(["compare", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "WER   50.0 % -> 2.5 %: 47.5 points fewer (95 % interval" in out
    assert "20 recordings resampled, p under 0.001" in out
    assert "  ann  50.0 % -> 5.0 % of 20 words in 10 recordings" in out
    assert main(["compare", str(first), str(first), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["shown"], document["difference"], document["recordings"]) == (False, 0.0, 20)


def test_no_difference_is_said_in_words(tmp_path: Path, capsys: Capture) -> None:
    first, second = (["open store", "open door"][:: 1 - 2 * turn] for turn in (0, 1))
    main(["compare", str(written(tmp_path / "a.csv", first)), str(written(tmp_path / "b.csv", second))])
    assert "no difference in 2 recordings (95 % interval 50.0 more to 25.0 fewer; p 1.00)" in capsys.readouterr().out


def test_a_difference_of_too_few_recordings_is_told_as_one() -> None:
    found = WerDifference(6, 0, "recordings", 6, 0.431, 0.196, -0.451, -0.039, 0.062, 0.97)
    assert difference_lines(found)[0].startswith(
        "WER   43.1 % -> 19.6 %: 23.5 points fewer, but 6 recordings are too few to be sure "
        "(95 % interval 3.9 to 43.1 fewer; p"
    )


def test_a_difference_that_may_be_chance_is_told_as_one() -> None:
    found = WerDifference(3, 0, "recordings", 3, 0.312, 0.062, -0.6, 0.0, 0.5, 0.97)
    assert difference_lines(found) == [
        "WER   31.2 % -> 6.2 %: 25.0 points fewer, which may be chance in 3 recordings "
        "(95 % interval 0.0 to 31.2 fewer; p 0.50)"
    ]


def test_where_no_recording_has_changed_nothing_is_estimated() -> None:
    found = WerDifference(3, 0, "recordings", 3, 0.0, 0.0, 0.0, 0.0, 1.0, 0.97)
    assert difference_lines(found) == ["WER   0.0 % -> 0.0 %: as many words wrong in each of 3 recordings"]


def test_one_recording_is_not_compared() -> None:
    found = WerDifference(1, 0, "recordings", 1, 1.0, 0.5, -0.5, -0.5, 1.0, 1.0)
    assert difference_lines(found) == ["WER   100.0 % -> 50.0 %: 1 recording is too few to compare"]


def test_a_difference_in_points_has_both_rates_however_high() -> None:
    found = WerDifference(60, 0, "recordings", 60, 1.743, 2.488, 0.55, 0.93, 0.0001, 0.97)
    assert difference_lines(found)[0].startswith("WER   174.3 % -> 248.8 %: 74.5 points more (")


def test_a_model_that_says_nothing_usable_yet_is_not_divided_by_speaker() -> None:
    def heard(text: str, edits: int) -> list[Prediction]:
        return [Prediction(f"c{n}", "", "open", text, "open", text, edits, 1, 0, 9, speaker=f"s{n}") for n in (1, 2)]

    assert not any("WER by" in line for line in breakdown_lines(heard("a b c", 3)))
    assert "WER by speaker" in breakdown_lines(heard("oven", 1))


def test_start_and_end_of_a_run(capsys: Capture) -> None:
    run = write_run(Path("output"), [], task="whisper")
    assert main(["compare", "p"]) == 2
    assert "has no predictions from before and after training" in capsys.readouterr().err
    written(run / FOLDER / BEFORE, ["open store"] * 12)
    written(run / FOLDER / NAME, ["open door"] * 12)
    assert main(["compare", "p"]) == 0
    assert main(["compare"]) == 0  # the newest run
    assert "50.0 % -> 0.0 %: 50.0 points fewer" in capsys.readouterr().out
    assert main(["runs", "show", "p"]) == 0
    assert "  bob  50.0 % -> 0.0 % of 12 words in 6 recordings" in capsys.readouterr().out


def test_what_is_not_there_is_said(capsys: Capture) -> None:
    assert main(["compare", "a.csv", "b.csv"]) == 2
    assert main(["compare", "a", "b", "c"]) == 2
