"""A data set that cannot be used is told by the process that starts, before anything that trains is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from fake_run import FakeRun, training

from app.cli.main import main
from app.cli.train.request import TrainRequest
from app.cli.train.start import distributed_train
from profiles.errors import BadInput, ExitCode
from profiles.files.resolve import profile_from_options
from speech.data.speech_clips import warn_once
from speech.data.speech_dataset import read_with_validation
from training.tasks import published_models
from training.workers.data_findings import check_data

ROOT = Path(__file__).parents[2]
FAULTS = {
    "": "the table is empty",
    "id,audio_path,text\n": "the table is empty",
    "id,sound,text\na,a.wav,one\n": "no column 'audio_path' or 'file_name'",
    "id,audio_path,words,more\na,a.wav,one,two\n": "no column 'text'",
    "id,audio_path,text\na,nowhere.wav,one\n": "nowhere.wav is not there",
    "id,audio_path,text\na,a.wav,one,two\n": "4 fields, but the first line names 3",
    "id,audio_path,text\na,a.wav,one\n": "one clip and no validation split",
}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a table; the hub is said to have the model, which no test here reads."""
    monkeypatch.setattr("app.cli.train.start.hub_notes", lambda profile: [])
    Path("speech").mkdir()
    Path("speech/a.wav").write_bytes(b"not listened to")
    return Path("speech/train.csv")


@pytest.mark.parametrize(("text", "words"), FAULTS.items())
def test_a_bad_table_starts_nothing(table: Path, text: str, words: str) -> None:
    table.write_text(text)
    run = FakeRun(training())
    with pytest.raises(BadInput, match=words):
        distributed_train(TrainRequest("whisper-tiny-lora", {"dataset": "speech", "language": "en"}), run)
    assert run.calls == []
    assert not Path("output").exists()


def test_what_is_held_out_or_too_little_is_told_once_to_who_starts_the_run(
    table: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_once.cache_clear()
    table.write_text("id,audio_path,text\na,a.wav,one\nb,a.wav,two\n")
    request = {"dataset": "speech", "warmup_steps": "10", "epochs": "3"}
    distributed_train(TrainRequest("whisper-tiny-lora", request), FakeRun(training()))
    assert caplog.text.count("no validation split: 1 of 2 training clips is held out") == 1
    assert caplog.text.count("1 clip to train on: too few to learn much; 40 sentences (about 3 minutes)") == 1
    assert "warning: all of its 3 steps are in the warm-up of 10" in capsys.readouterr().err
    read_with_validation("speech", quiet=True)
    assert caplog.text.count("no validation split") == 1


def test_what_was_moved_is_told_before_a_run_goes_on(table: Path) -> None:
    table.write_text("id,audio_path,text\na,a.wav,one\nb,a.wav,two\n")
    request = {"dataset": "speech", "language": "en"}
    stopped = FakeRun(training(), "cancelled", ExitCode.STOPPED, "stopped", on_wait=FakeRun.kill)
    distributed_train(TrainRequest("whisper-tiny-lora", request), stopped)
    (run,) = Path("output").iterdir()
    before = sorted(path.name for path in run.iterdir())
    table.rename("speech/elsewhere.old")
    again = FakeRun(training())
    with pytest.raises(BadInput, match="neither train.csv nor metadata.csv"):
        distributed_train(TrainRequest(resume=run.name[:20]), again)
    assert again.calls == []
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize(("name", "words"), [("nowhere.txt", "no such file"), ("empty.txt", "the file is empty")])
def test_a_text_that_is_not_there(name: str, words: str) -> None:
    Path("empty.txt").touch()
    with pytest.raises(BadInput, match=words):
        check_data(profile_from_options("text", {"task": "causal_lm", "dataset_path": name}))


@pytest.fixture
def long_clip(table: Path) -> dict[str, object]:
    """Options of a model that hears 2 s, and clips of 1 and 3 s."""
    for name, seconds in (("short", 1), ("long", 3)):
        soundfile.write(f"speech/{name}.wav", np.zeros(8000 * seconds), 8000)
    table.write_text("id,audio_path,text\na,short.wav,one\nb,short.wav,one\nc,long.wav,two\n")
    shutil.copy(table, "speech/validation.csv")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/preprocessor_config.json").write_text('{"chunk_length": 2}')
    return {"dataset_path": "speech", "model_path": "model"}


def test_clips_longer_than_the_window_are_named_before_anything_starts(long_clip: dict[str, object]) -> None:
    said = r"1 clip longer than the model's window of 2 s: c \(.*train\.csv, line 4\)"
    with pytest.raises(BadInput, match=said) as refused:
        check_data(profile_from_options("speech", {**long_clip, "language": "de"}))
    assert "long_audio = cut or skip, or take a model that hears more (30 s): " in refused.value.hint
    assert refused.value.hint.endswith(f"train whisper-scratch --dataset {Path('speech').resolve()} --language de")


@pytest.mark.parametrize(
    "change",
    [
        {"long_audio": "cut"},
        {"long_audio": "skip"},
        {"languages": "de"},
        {"max_train_samples": 2, "max_eval_samples": 2},
        {"model_path": "owner/unknown"},
    ],
)
def test_long_clips_that_may_be_left_out_are_not_refused(
    long_clip: dict[str, object], change: dict[str, object]
) -> None:
    check_data(profile_from_options("speech", {**long_clip, **change}))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No published model can be had, and none is here."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr(published_models, "_problems", {})


@pytest.mark.parametrize(
    ("arguments", "profile"),
    [
        (["demo", "--dataset", "speech"], "whisper-scratch"),
        (["demo", "--dataset", "speech", "--set", "long_audio=cut"], "demo-scratch"),
        (["demo"], "demo-scratch"),
    ],
)
def test_where_nothing_can_be_fetched_a_profile_is_taken_that_hears_the_clips(
    long_clip: dict[str, object], no_hub: None, arguments: list[str], profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["distributed-train", *arguments, "--plan-only", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)["plan"]["profile"]
    assert (document["name"], document["model"]["language"]) == (profile, "en")
    assert ("profile whisper-scratch is taken, which hears 30 s" in err) == (profile == "whisper-scratch")


def test_a_profile_that_was_named_stays_and_the_command_for_another_is_said(
    long_clip: dict[str, object], no_hub: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["distributed-train", "demo-scratch", "--dataset", "speech"]) == 2
    wanted = f"train whisper-scratch --dataset {Path('speech').resolve()} --language en"
    assert wanted in capsys.readouterr().err
    assert not Path("output").exists()


def test_clips_longer_than_any_published_whisper_hears_are_refused_before_it_is_fetched(
    long_clip: dict[str, object], no_hub: None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("speech/train.csv").read_text().replace("text", "text,duration").replace("one", "one,40")
    Path("speech/train.csv").write_text(text.replace("two", "two,1"))
    assert main(["distributed-train", "demo", "--dataset", "speech"]) == 2
    error = capsys.readouterr().err
    assert "2 clips longer than the model's window of 30 s" in error and "stands in" not in error


def test_the_table_s_own_length_counts_without_a_look_at_the_file(long_clip: dict[str, object]) -> None:
    text = Path("speech/train.csv").read_text().replace("text", "text,duration").replace("one", "one,9")
    Path("speech/train.csv").write_text(text.replace("two", "two,1"))
    with pytest.raises(BadInput, match="2 clips longer than the model's window of 2 s: a "):
        check_data(profile_from_options("speech", long_clip))


def test_a_data_set_of_the_hub_or_of_a_factory_is_not_looked_at() -> None:
    check_data(profile_from_options("hub", {"dataset_path": "owner/name"}))
    check_data(profile_from_options("own", {"task": "custom", "model_path": "a.b:c"}))


WITHOUT_TORCH = """
import sys
from app.cli.main import main
for command in (
    ["distributed-train", "whisper-tiny-lora", "--dataset", "speech"],
    ["distributed-train", "whisper-tiny-lora", "--dataset", "speech", "--try"],
    ["distributed-train", "whisper-tiny-lora", "--dataset", "speech", "--hosts", "hosts.json"],
    ["plan", "whisper-tiny-lora", "--set", "dataset=speech"],
    ["evaluate", "model", "speech/train.csv"],
):
    assert main(command) == 2
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


@pytest.mark.slow
def test_no_command_loads_torch_to_find_a_bad_table(table: Path) -> None:
    table.write_text("id,sound,text\na,a.wav,one\n")
    Path("hosts.json").write_text('{"workers": ["192.0.2.1"]}')
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/model.safetensors").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stderr
    assert done.stderr.count("no column 'audio_path'") == 5


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_split_that_is_not_there_is_told_before_the_model_is_loaded(
    table: Path, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table.write_text("id,audio_path,text\na,a.wav,one\n")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/model.safetensors").touch()
    assert main(["evaluate", "model", "speech/train.csv", "--split", split]) == 2
    assert ("has no split" if split == "test" else "one clip") in capsys.readouterr().err
