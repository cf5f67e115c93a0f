"""``transcribe`` and ``evaluate`` with a real, random model of two layers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fake_run import SMALL, FakeRun, finished_run, training

from app.cli.main import main
from app.cli.train.request import TrainRequest
from app.cli.train.start import distributed_train
from profiles.errors import ExitCode
from speech.scoring.word_errors import normalizer_for
from training.records.run_folder import RunFolder
from training.tasks.outputs.predictions import read_predictions, write_predictions

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def speech(clips: list[tuple[str, str, str]]) -> Path:
    from tests.speech.tiny_speech import write_csv

    folder = Path("speech")
    write_csv(folder / "test.csv", clips[:3])
    return folder


def test_an_unknown_model_is_bad_input_before_anything_is_loaded(capsys: Capture) -> None:
    assert main(["transcribe", "nothing", "x.wav"]) == 2
    assert capsys.readouterr().err.startswith("error: no run 'nothing'")


def test_a_run_without_a_model_says_how_to_go_on(capsys: Capture) -> None:
    distributed_train(TrainRequest("demo-scratch", SMALL), FakeRun(training(), "failed", ExitCode.RUN_FAILED, "broken"))
    capsys.readouterr()
    assert main(["transcribe", "demo-scratch", "x.wav", "--json"]) == 2
    assert "--resume" in json.loads(capsys.readouterr().out)["error"]["hint"]


@pytest.mark.slow
def test_files_are_transcribed_and_a_broken_one_is_named(model: Path, speech: Path, capsys: Capture) -> None:
    broken = Path("broken.wav")
    broken.write_bytes(b"RIFF")
    files = [str(speech / "audio" / "clip0.wav"), str(broken), str(speech / "audio" / "clip1.wav")]
    assert main(["transcribe", str(model), *files]) == 2
    out, err = capsys.readouterr()
    assert [line.split(":")[0] for line in out.splitlines()] == [files[0], files[2]]
    assert err.startswith(f"listening with {model}\n")
    assert "error: " in err
    assert "broken.wav" in err


@pytest.mark.slow
def test_transcripts_as_json(model: Path, speech: Path, capsys: Capture) -> None:
    clip = str(speech / "audio" / "clip0.wav")
    assert main(["transcribe", str(model), clip, "--json"]) == 0
    (transcript,) = json.loads(capsys.readouterr().out)["transcripts"]
    assert transcript["file"] == clip
    assert transcript["normalised"] == normalizer_for("en")(transcript["text"])
    assert transcript["seconds"] == pytest.approx(0.6, abs=0.01)


@pytest.mark.slow
def test_a_model_is_heard_beside_the_one_it_was_trained_from(
    model: Path, speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from tests.speech.tiny_speech import tiny_whisper

    base, clip = str(tiny_whisper(tmp_path / "base")), str(speech / "audio" / "clip0.wav")
    texts = {}
    for heard in (base, str(model)):
        assert main(["transcribe", heard, clip, "--json"]) == 0
        texts[heard] = json.loads(capsys.readouterr().out)["transcripts"][0]["text"]
    monkeypatch.setattr("speech.commands.transcribe.base_model", lambda path: base)
    assert main(["transcribe", str(model), clip, "--compare", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    shown = {one["model"]: one["transcripts"][0]["text"] for one in (document, document["base"])}
    assert shown == texts
    assert main(["transcribe", str(model), clip, "--compare"]) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == ["before", clip, "after", clip]
    assert main(["transcribe", str(model), clip, "--compare", "--out", "texts"]) == 2
    assert "leave out --out" in capsys.readouterr().err


@pytest.mark.slow
def test_the_model_of_a_run_is_found_by_its_profile(model: Path, speech: Path, capsys: Capture) -> None:
    run = finished_run()
    shutil.rmtree(run / "model")
    (run / "model").symlink_to(model)
    capsys.readouterr()
    assert main(["transcribe", "demo-scratch", str(speech / "audio" / "clip0.wav"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(RunFolder.open(run).model)


@pytest.mark.slow
def test_a_model_is_evaluated_on_a_split(model: Path, speech: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(model), str(speech), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metrics"]["samples"] == 3
    assert document["metrics"]["wer"] > 0
    assert main(["evaluate", str(model), str(speech)]) == 0
    assert "on 3 recordings of test" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_against_another_tells_what_changes_from_that_one(
    model: Path, speech: Path, tmp_path: Path, capsys: Capture
) -> None:
    from tests.speech.tiny_speech import tiny_whisper

    other = tiny_whisper(tmp_path / "other")
    losses = []
    for one in (other, model):
        assert main(["evaluate", str(one), str(speech), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["metrics"]["loss"])
    assert losses[0] != losses[1]
    assert main(["evaluate", str(model), str(speech), "--against", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == [str(other), str(model)]
    assert [one["loss"] for one in found["metrics"]] == losses


@pytest.mark.slow
def test_a_split_that_is_not_there_is_named(model: Path, speech: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(model), str(speech), "--split", "validation"]) == 2
    assert "has no split 'validation'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_of_predictions_that_cannot_be_is_refused_before_anything_is_heard(
    model: Path, speech: Path, capsys: Capture
) -> None:
    (speech / "file").touch()
    assert main(["evaluate", str(model), str(speech), "--predictions", str(speech / "file" / "heard.csv")]) == 2
    told = capsys.readouterr().err
    assert "evaluating" not in told
    assert told.endswith("--predictions\n")


@pytest.mark.slow
def test_a_lone_table_is_evaluated_whole(model: Path, speech: Path, capsys: Capture) -> None:
    table = (speech / "test.csv").rename(speech / "any.csv")
    assert main(["evaluate", str(model), str(table)]) == 0
    assert "on 3 recordings of any.csv" in capsys.readouterr().out


@pytest.mark.slow
def test_what_the_run_itself_found_is_told_where_it_differs(model: Path, speech: Path, capsys: Capture) -> None:
    """A run may round to 16 bits, and holds adapters beside the weights: its figure may be another one."""
    run = finished_run()
    shutil.rmtree(run / "model")
    shutil.copytree(model, run / "model")
    kept = run / "evaluation" / "predictions.csv"
    assert main(["evaluate", "demo-scratch", str(speech), "--predictions", str(kept)]) == 0
    said = capsys.readouterr().out
    assert "computed in float32" in said and "the run itself" not in said
    first, *rest = read_predictions(kept)
    write_predictions(kept, [replace(first, edits=first.edits + first.words), *rest])
    assert main(["evaluate", "demo-scratch", str(speech)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the run itself found")]
    assert len(told) == 1 and told[0].endswith("on these (mixed_precision = auto; here float32)")
