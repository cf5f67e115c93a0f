"""``blacklist`` and ``pseudo-label`` with a real, random model of two layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_run import finished_run

from app.cli.main import main
from profiles.schema import Profile
from speech.whisper.cleaning.cross_validation import Fold

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def speech(clips: list[tuple[str, str, str]]) -> Path:
    from tests.speech.tiny_speech import write_csv

    folder = Path("speech").absolute()
    write_csv(folder / "train.csv", clips[:2])
    write_csv(folder / "validation.csv", clips[:1])
    return folder


@pytest.fixture
def run(model: Path, speech: Path, capsys: Capture) -> str:
    """A finished run on these clips."""
    run = finished_run(dataset_path=str(speech), workers="1")
    shutil.rmtree(run / "model")
    (run / "model").symlink_to(model)
    capsys.readouterr()
    return run.name


@pytest.mark.slow
def test_a_model_that_has_learnt_nothing_is_told_from_bad_data(run: str, speech: Path, capsys: Capture) -> None:
    assert main(["blacklist", run, "--folds", "0", "--margin", "0", "--listens", "1", "--yes"]) == 2
    assert "this suggests a model that has not learnt enough" in capsys.readouterr().err
    assert not (speech / "patches").exists()


@pytest.mark.slow
def test_a_list_that_cannot_be_written_says_what_is_in_the_way(run: str, speech: Path, capsys: Capture) -> None:
    (speech / "patches").mkdir()
    (speech / "patches" / "delete").write_text("a file")
    given = ["blacklist", run, "--folds", "0", "--margin", "0", "--listens", "1", "--most", "1", "--yes"]
    assert main(given) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert "patches/delete" in error and hint == "hint: move it"


@pytest.mark.slow
def test_a_run_with_damaged_metadata_is_told_as_such(run: str, capsys: Capture) -> None:
    (Path("output") / run / "metadata.json").write_text("{}")
    assert main(["blacklist", run, "--folds", "0"]) == 2
    assert f"{run}: metadata.json is damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_a_list_is_written_only_by_consent(run: str, speech: Path, capsys: Capture) -> None:
    given = ["blacklist", run, "--folds", "0", "--margin", "0", "--listens", "1", "--most", "1", "--json"]
    assert main(given) == 0
    out, err = capsys.readouterr()
    assert [one["id"] for one in json.loads(out)["listed"]] == ["clip0", "clip1"]
    assert "repeat with --yes" in err
    assert not (speech / "patches").exists()
    assert main([*given, "--yes"]) == 0
    path = Path(json.loads(capsys.readouterr().out)["file"])
    assert path.parent == speech / "patches" / "delete"
    assert path.name.startswith("blacklist-")


def test_trainings_are_told_with_their_cost_and_begun_only_by_consent(run: str, speech: Path, capsys: Capture) -> None:
    more = "".join(f"more{number},audio/clip0.wav,a text\n" for number in range(6))
    (speech / "train.csv").write_text((speech / "train.csv").read_text() + more)
    assert main(["blacklist", run, "--json"]) == 2
    out, err = capsys.readouterr()
    assert "3 trainings on this machine, 2.0 times the work of one on all 8 samples" in err
    assert "there is no terminal to confirm the trainings on" in out
    assert not (speech / "patches").exists()


@pytest.mark.slow
def test_folds_are_trained_in_turns_and_not_again(
    run: str, speech: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speech.commands import transcripts

    rows = [f"clip{number},audio/clip{number}.wav,one" for number in range(4)]
    (speech / "train.csv").write_text("\n".join(["id,audio_path,text", *rows]) + "\n")
    trained = list[int]()

    def train(fold: Fold, profile: Profile, workers: int) -> Path:
        trained.append(len(fold.others))
        fold.folder.mkdir(parents=True)
        return Path("output") / run / "model"

    monkeypatch.setattr(transcripts, "trained", train)
    given = ["blacklist", run, "--folds", "2", "--margin", "0", "--most", "1", "--json", "--yes"]
    for _ in range(2):
        assert main(given) == 0
        assert len(json.loads(capsys.readouterr().out)["listed"]) == 4
        shutil.rmtree(speech / "patches")
    assert trained == [2, 2]


def test_what_cannot_be_listened_to_is_bad_input(capsys: Capture) -> None:
    assert main(["blacklist", "demo", "--rounds", "2", "--repeated", "3"]) == 2
    assert main(["blacklist", "demo", "--folds", "1"]) == 2
    assert main(["blacklist", "nothing"]) == 2
    assert main(["pseudo-label", "nothing", "nowhere"]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_recordings_without_a_transcript_are_labelled(model: Path, speech: Path, capsys: Capture) -> None:
    before = (speech / "train.csv").read_bytes()
    given = [str(model), str(speech / "audio"), "--into", str(speech), "--min-agreement", "0"]
    assert main(["pseudo-label", *given, "--min-confidence=-0.1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["recordings"], document["kept"], document["with_transcript"]) == (2, 0, 2)
    assert (speech / "train.csv").read_bytes() == before
    assert len((speech / "pseudo.csv").read_text().splitlines()) == 3
