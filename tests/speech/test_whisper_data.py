"""What WhisperTask does with clips it cannot use as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import soundfile
import torch
from tiny_speech import RATE, Prepared, tone, write_clips, write_csv

from profiles.errors import BadInput
from speech.whisper.task import SpeechData, WhisperTask
from tests.tasks.tiny_tasks import ProfileMaker


def test_a_measurement_computes_the_features_of_few_clips_and_knows_how_many_there_are(
    prepared: Prepared, make_profile: ProfileMaker, english_whisper: Path, speech_folder: Path
) -> None:
    task = WhisperTask(make_profile(model_path=str(english_whisper), dataset_path=str(speech_folder)))
    phases: list[tuple[str, int | None]] = []
    samples = task.prepare_subset(lambda phase, done, total: phases.append((phase, total)), 3)
    whole = prepared()
    assert samples == len(whole.train) == 8
    assert [task.train[i].text for i in range(len(task.train))] == [whole.train[i].text for i in (0, 3, 6)]
    assert set(phases) == {("preparing the recordings (train)", 3)} and task.evaluation == {}
    assert task.evaluation_sizes == {split: len(data) for split, data in whole.evaluation.items()}


def test_the_table_of_a_split_is_the_patched_one(prepared: Prepared, speech_folder: Path) -> None:
    def tables() -> tuple[str, str]:
        task = prepared()
        return task.table("train"), task.table("validation")

    before = tables()
    patch = speech_folder / "patches" / "override_text" / "mine.csv"
    patch.parent.mkdir(parents=True)
    patch.write_text("id,text\nclip0,other\n")
    assert tables()[0] != before[0]
    assert tables()[1] == before[1]
    patch.unlink()
    assert tables() == before


def test_clips_are_told_apart_by_language_and_by_who_speaks(
    prepared: Prepared, multilingual_whisper: Path, speech_folder: Path
) -> None:
    header, *lines = (speech_folder / "train.csv").read_text().splitlines()
    rows = [f"{line},{'en' if i % 2 else 'de'},{'' if i == 3 else f's{i % 3}'}" for i, line in enumerate(lines)]
    (speech_folder / "train.csv").write_text("\n".join([f"{header},language,speaker", *rows]) + "\n")
    task = prepared(model_path=multilingual_whisper, language="en")
    assert list(task.labels("label")) == ["de", "en"] * (len(lines) // 2)
    assert list(task.labels("speaker"))[:5] == ["s0", "s1", "s2", "", "s1"]


@pytest.fixture
def one_broken(speech_folder: Path) -> Path:
    (speech_folder / "audio/clip3.wav").write_text("no sound")
    return speech_folder


def test_broken_file_is_named_and_left_out(
    prepared: Prepared, one_broken: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = prepared(dataset_path=one_broken, max_broken_share=0.2)
    assert len(task.train) == 7
    assert task.train[3].text == "one"  # clip4: clip3 is gone
    assert "train.csv, line 5: clip3: not a readable sound file" in caplog.text


def test_too_many_broken_files(prepared: Prepared, one_broken: Path) -> None:
    with pytest.raises(BadInput, match="1 of 8 recordings broken, more than 10 %; first .*clip3.*max_broken_share"):
        prepared(dataset_path=one_broken, max_broken_share=0.1)


@pytest.fixture
def one_long(speech_folder: Path) -> Path:
    soundfile.write(speech_folder / "audio/clip2.wav", tone(2, 1.5), RATE)
    return speech_folder


def test_long_clip_is_refused(prepared: Prepared, one_long: Path) -> None:
    with pytest.raises(
        BadInput, match=r"1 clip longer than the model's window of 1 s: clip2 .*long_audio = cut or skip"
    ):
        prepared(dataset_path=one_long)


@pytest.mark.parametrize(("policy", "left"), [("cut", 8), ("skip", 7)])
def test_long_clip_is_cut_or_skipped(
    prepared: Prepared, one_long: Path, caplog: pytest.LogCaptureFixture, policy: str, left: int
) -> None:
    task = prepared(dataset_path=one_long, long_audio=policy)
    assert len(task.train) == left
    assert "1 clip longer than the model's window of 1 s" in caplog.text
    assert task.collate([task.train[2]], None)["input_features"].shape == (1, 16, 100)


def test_declared_duration_is_refused_before_anything_is_decoded(prepared: Prepared, tmp_path: Path) -> None:
    rows = [(*row, "7.5") for row in write_clips(tmp_path, 3)]
    write_csv(tmp_path / "train.csv", rows, "id,audio_path,text,duration")
    with pytest.raises(BadInput, match="longer than the model's window"):
        prepared(dataset_path=tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def long_text(speech_folder: Path) -> Path:
    with (speech_folder / "train.csv").open("a") as table:
        table.write("wordy,audio/clip0.wav," + "one " * 30 + "\n")
    return speech_folder


def test_long_transcript_is_refused(prepared: Prepared, long_text: Path) -> None:
    with pytest.raises(BadInput, match="1 clip with transcripts of more than 22 tokens: wordy"):
        prepared(dataset_path=long_text)


def test_long_transcript_is_cut_to_the_positions(prepared: Prepared, long_text: Path) -> None:
    task = prepared(dataset_path=long_text, long_audio="cut")
    batch = task.collate([task.train[8]], None)
    assert batch["decoder_input_ids"].shape == (1, task.wrapper.max_positions)
    with torch.no_grad():
        assert torch.isfinite(task.loss(task.build_model(), batch))


def test_long_transcript_is_skipped(prepared: Prepared, long_text: Path) -> None:
    assert len(prepared(dataset_path=long_text, long_audio="skip").train) == 8


def test_limits_on_samples(prepared: Prepared) -> None:
    task = prepared(max_train_samples=3, max_eval_samples=1)
    assert len(task.train) == 3
    assert len(task.evaluation["validation"]) == 1


def test_hours_of_audio(prepared: Prepared) -> None:
    train = prepared().train
    assert isinstance(train, SpeechData)
    assert train.hours == pytest.approx(8 * 0.6 / 3600)


def test_unknown_language_in_a_row(prepared: Prepared, multilingual_whisper: Path, tmp_path: Path) -> None:
    rows = [(*row, "klingon") for row in write_clips(tmp_path, 2)]
    write_csv(tmp_path / "train.csv", rows, "id,audio_path,text,language")
    with pytest.raises(BadInput, match="train.csv, line .*, column language: Whisper knows no language 'klingon'"):
        prepared(model_path=multilingual_whisper, dataset_path=tmp_path)
