"""``prepare`` from a source to a folder that trains."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import soundfile
from https_site import Site
from sounds import RATE, read_rows, wav_bytes, write_rows, write_tone

from profiles.errors import BadInput, StoppedByUser
from speech.data.speech_dataset import read_speech
from speech.recordings.checks import Limits
from speech.recordings.dataset_folder import Result
from speech.recordings.fetching import FetchLimits
from speech.recordings.preparing import PreparationJob, prepare
from speech.recordings.recording import ReadRequest
from tests.speech.sound_kinds import voice, write


def silent_progress(phase: str, done: int, total: int | None) -> None: ...


def table_of(folder: Path, count: int, speakers: int = 4) -> Path:
    rows = [
        (f"c{i}", write_tone(folder / f"clips/{i}.wav", i).relative_to(folder), f"number {i}", f"p{i % speakers}")
        for i in range(count)
    ]
    return write_rows(folder / "all.csv", "id,audio_path,text,speaker", rows)


def run(source: Path | str, out: Path, **settings: object) -> Result:
    return prepare(PreparationJob(ReadRequest(str(source)), out, **settings), silent_progress)


def content(folder: Path) -> dict[str, str]:
    """Hashes of all that a person gets; what is kept for the next run is not in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".prepare" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def kept_rows(folder: Path) -> list[dict[str, str]]:
    return [row for path in sorted(folder.glob("[tv]*.csv")) for row in read_rows(path)]


def left_out(folder: Path) -> dict[str, str]:
    return {row["id"]: row["reason"] for row in read_rows(folder / "left_out.csv")}


def test_a_prepared_folder_is_a_data_set(tmp_path: Path) -> None:
    result = run(table_of(tmp_path / "source", 12), tmp_path / "out")
    splits = read_speech(str(tmp_path / "out"))
    assert {split: len(clips) for split, clips in splits.items()} == {"train": 6, "validation": 3, "test": 3}
    assert {split: size.clips for split, size in result.splits.items()} == {"train": 6, "validation": 3, "test": 3}
    speakers = {split: {row["speaker"] for row in read_rows(tmp_path / f"out/{split}.csv")} for split in splits}
    assert len(speakers["train"] | speakers["validation"] | speakers["test"]) == sum(map(len, speakers.values()))
    assert left_out(tmp_path / "out") == {}


@pytest.mark.slow
def test_who_is_left_is_divided_anew_where_a_split_would_be_empty(tmp_path: Path) -> None:
    source = table_of(tmp_path / "source", 24)
    complete = run(source, tmp_path / "out")
    trained = {row["speaker"] for row in read_rows(tmp_path / "out/train.csv")}
    for row in read_rows(source):
        if row["speaker"] in trained:
            (tmp_path / "source" / row["audio_path"]).unlink()
    result = run(source, tmp_path / "other")
    assert set(result.splits) == set(complete.splits)
    assert result.notes[0] == "divided by clip: 2 speakers are too few, so the same voices are in all splits"
    assert "too few to learn much; 40 sentences" in result.notes[1]


def test_a_column_of_speakers_is_found_in_any_case(tmp_path: Path) -> None:
    """A spreadsheet's 'Speaker', else nobody would see that the same voices are in all splits."""
    source = table_of(tmp_path / "source", 12)
    source.write_text(source.read_text().replace("speaker", "Speaker", 1))
    assert run(source, tmp_path / "out").notes[0] == "divided by speaker (4): no speaker is in two splits"


@pytest.mark.parametrize(("form", "container", "coding"), [("flac", "FLAC", "PCM_16"), ("opus", "OGG", "OPUS")])
def test_sound_becomes_16_khz_mono(form: str, container: str, coding: str, tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav", rate=44_100, seconds=2.0)
    source = write_rows(tmp_path / "all.csv", "audio_path,text", [("a.wav", "hello")])
    run(source, tmp_path / "out", form=form)
    info = soundfile.info(next((tmp_path / "out/audio").iterdir()))
    assert (info.samplerate, info.channels, info.format, info.subtype) == (RATE, 1, container, coding)
    assert info.duration == pytest.approx(2.0, abs=0.02)


def test_what_is_wrong_with_a_recording_is_its_reason(tmp_path: Path) -> None:
    write_tone(tmp_path / "good.wav")
    write_tone(tmp_path / "silent.wav", level=1e-5)
    write_tone(tmp_path / "loud.wav", number=1, level=4.0, rate=48_000)
    write_tone(tmp_path / "short.wav", seconds=0.05)
    write_tone(tmp_path / "long.wav", seconds=2.5)
    write_tone(tmp_path / "wordy.wav", number=2)
    (tmp_path / "empty.wav").touch()
    (tmp_path / "broken.wav").write_bytes(b"RIFF....WAVEnothing of the kind")
    names = ["good", "silent", "loud", "short", "long", "empty", "broken", "gone"]
    rows = [(name, f"{name}.wav", "a word") for name in names]
    rows += [("wordy", "wordy.wav", "far too many words " * 9), ("mute", "good.wav", " ?! ")]
    rows += [("away", "../outside.wav", "text"), ("plain", "http://a.example/b.wav", "text")]
    run(write_rows(tmp_path / "all.csv", "id,audio_path,text", rows), tmp_path / "out", limits=Limits(longest=2.0))
    assert left_out(tmp_path / "out") == {
        "silent": "silent",
        "loud": "clipped",
        "short": "too short",
        "long": "too long",
        "empty": "empty",
        "broken": "unreadable",
        "gone": "not there",
        "wordy": "characters per second",
        "mute": "no text",
        "away": "outside",
        "plain": "not https",
    }


def test_sound_that_is_not_whole_or_not_heard_is_unreadable_and_why_is_said(tmp_path: Path) -> None:
    write(tmp_path / "good.aac.m4a", voice(1.0))
    write(tmp_path / "high.float.wav", voice(1.0) * 32768)
    write(tmp_path / "opposed.wav", np.stack([voice(1.0), -voice(1.0)]))
    data = write(tmp_path / "short.wav", voice(1.0)).read_bytes()
    (tmp_path / "short.wav").write_bytes(data[:20_000])
    names = ["good.aac.m4a", "high.float.wav", "opposed.wav", "short.wav"]
    table = write_rows(tmp_path / "all.csv", "id,audio_path,text", [(name, name, "a word") for name in names])
    run(table, tmp_path / "out")
    details = {row["id"]: row["detail"] for row in read_rows(tmp_path / "out" / "left_out.csv")}
    assert details.keys() == {*names[1:]}
    for name, words in zip(names[1:], ("full scale", "cancel each other out", "broken off")):
        assert words in details[name]


def test_copies_and_contradictions_are_left_out(tmp_path: Path) -> None:
    for name in ("a", "b", "x", "y"):
        write_tone(tmp_path / f"{name}.wav", number=name in "xy")
    write_tone(tmp_path / "alone.wav", number=9)
    rows = [("a", "a.wav", "One, two."), ("b", "b.wav", "one two"), ("x", "x.wav", "yes"), ("y", "y.wav", "no")]
    source = write_rows(tmp_path / "all.csv", "id,audio_path,text", [*rows, ("alone", "alone.wav", "three")])
    run(source, tmp_path / "out")
    reasons = left_out(tmp_path / "out")
    assert sorted(reasons.values()) == ["contradiction", "contradiction", "duplicate"]
    assert {"x", "y"} < set(reasons) < {"a", "b", "x", "y"}
    assert len(list((tmp_path / "out/audio").iterdir())) == 2


def test_a_clip_that_is_tested_is_not_trained_on(tmp_path: Path) -> None:
    rows = [("t", write_tone(tmp_path / "t.wav").name, "same", "train")]
    rows += [("v", write_tone(tmp_path / "v.wav", 1).name, "other", "dev"), ("s", "t.wav", "same", "test")]
    run(write_rows(tmp_path / "all.csv", "id,audio_path,text,split", rows), tmp_path / "out", limits=Limits())
    assert left_out(tmp_path / "out") == {"t": "duplicate"}


def test_an_id_that_is_there_twice_becomes_two(tmp_path: Path) -> None:
    rows = [("a", write_tone(tmp_path / f"{i}.wav", i).name, f"number {i}") for i in range(3)]
    run(write_rows(tmp_path / "all.csv", "id,audio_path,text", [*rows]), tmp_path / "out")
    assert {clip.id for clips in read_speech(str(tmp_path / "out")).values() for clip in clips} == {"a", "a-2", "a-3"}


def test_nothing_left_is_bad_input_and_says_why(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "all.csv", "audio_path,text", [("gone.wav", "text")])
    with pytest.raises(BadInput, match=r"none of 1 recording can be used: 1 not there, such as gone.wav"):
        run(source, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 7])
def test_an_interrupted_run_goes_on_to_the_same_folder(after: int, tmp_path: Path) -> None:
    source = table_of(tmp_path / "source", 12)
    run(source, tmp_path / "whole")
    heard: list[int] = []

    def interrupt(phase: str, done: int, total: int | None) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(StoppedByUser, match=f"stopped after {after} of 12"):
        prepare(PreparationJob(ReadRequest(str(source)), tmp_path / "out", threads=2), interrupt)
    assert not (tmp_path / "out/train.csv").exists()
    prepare(
        PreparationJob(ReadRequest(str(source)), tmp_path / "out"), lambda phase, done, total: heard.append(total or 0)
    )
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert heard[0] <= 12 - after


def test_a_finished_folder_is_not_heard_again_and_other_limits_only_what_they_change(tmp_path: Path) -> None:
    source = table_of(tmp_path / "source", 8)
    write_tone(tmp_path / "source/clips/3.wav", 3, seconds=3.0)
    progress: list[int] = []
    job = PreparationJob(ReadRequest(str(source)), tmp_path / "out", limits=Limits(longest=1.0))
    prepare(job, lambda phase, done, total: progress.append(done))
    finished = content(tmp_path / "out")
    prepare(job, lambda phase, done, total: progress.append(done))
    assert (len(progress), content(tmp_path / "out")) == (8, finished)
    prepare(dataclasses.replace(job, limits=Limits()), lambda phase, done, total: progress.append(done))
    assert len(progress) == 9
    prepare(job, lambda phase, done, total: progress.append(done))
    assert (len(progress), content(tmp_path / "out")) == (9, finished)


def test_a_torn_journal_and_lost_files_are_made_good(tmp_path: Path) -> None:
    source = table_of(tmp_path / "source", 8)
    run(source, tmp_path / "out")
    finished = content(tmp_path / "out")
    journal = tmp_path / "out/.prepare/journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-30] + b'\n[1]\n"x"\n{"key": 1, "seconds": "a"}\n{"ke')
    next((tmp_path / "out/audio").iterdir()).unlink()
    run(source, tmp_path / "out")
    assert content(tmp_path / "out") == finished


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    source = table_of(tmp_path / "source", 3)
    with pytest.raises(BadInput, match="holds something that 'data prepare' has not made"):
        run(source, tmp_path / "source")
    run(source, tmp_path / "out")
    with pytest.raises(BadInput, match="was prepared from another source"):
        run(table_of(tmp_path / "other", 3), tmp_path / "out")
    with pytest.raises(BadInput, match="was prepared from another source or in another form"):
        run(source, tmp_path / "out", form="wav")


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    source = table_of(tmp_path / "source", 3)
    messages: list[str] = []

    def meanwhile(phase: str, done: int, total: int | None) -> None:
        if not messages:
            with pytest.raises(BadInput) as caught:
                run(source, tmp_path / "out")
            messages.append(caught.value.message)

    prepare(PreparationJob(ReadRequest(str(source)), tmp_path / "out"), meanwhile)
    assert messages[0].endswith("another process is preparing recordings there")


def test_recordings_behind_addresses_are_fetched_once(site: Site, tmp_path: Path) -> None:
    rows = [(f"c{i}", f"{site.url}/{i}.wav?key=secret", f"number {i}") for i in range(6)]
    site.answers = {f"/{i}.wav": wav_bytes(i) for i in range(5)}
    source = write_rows(tmp_path / "all.csv", "id,audio_url,text", rows)
    fetching = FetchLimits(allow_private=True, ca_file=site.ca_file)
    result = run(source, tmp_path / "out", fetching=fetching)
    assert (result.may_pass, left_out(tmp_path / "out")) == (1, {"c5": "download"})
    assert "secret" not in (tmp_path / "out/left_out.csv").read_text()
    asked = len(site.asked)
    site.answers["/5.wav"] = wav_bytes(5)
    result = run(source, tmp_path / "out", fetching=fetching)
    assert (site.asked[asked:], result.left_out) == (["/5.wav?key=secret"], {})


def test_all_downloads_together_are_bounded_over_all_runs(site: Site, tmp_path: Path) -> None:
    site.answers = {f"/{i}.wav": wav_bytes(i) for i in range(4)}
    rows = [(f"{site.url}/{i}.wav", f"number {i}") for i in range(4)]
    source = write_rows(tmp_path / "all.csv", "url,text", rows)
    small = FetchLimits(allow_private=True, ca_file=site.ca_file, total_bytes=3 * len(wav_bytes()))
    for _ in range(2):
        with pytest.raises(BadInput, match="all downloads together have reached"):
            run(source, tmp_path / "out", fetching=small, threads=1)
    run(source, tmp_path / "out", fetching=dataclasses.replace(small, total_bytes=10**6))
    assert sum(len(clips) for clips in read_speech(str(tmp_path / "out")).values()) == 4


def test_a_clip_is_cut_out_of_a_longer_file(tmp_path: Path) -> None:
    write_tone(tmp_path / "long.wav", seconds=8.0)
    rows = [("long.wav", "first", 0.0, 1.5), ("long.wav", "second", 5.0, 2.0), ("long.wav", "behind", 9.0, 1.0)]
    run(write_rows(tmp_path / "all.csv", "audio_path,text,offset,duration", rows), tmp_path / "out")
    durations = [clip.duration for clips in read_speech(str(tmp_path / "out")).values() for clip in clips]
    assert sorted(durations) == [1.5, 2.0]
    assert left_out(tmp_path / "out") == {"long.wav@9": "unreadable"}


def test_a_recording_of_silence_is_kept_where_its_column_says_so(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    for name in ("quiet", "other"):
        soundfile.write(tmp_path / f"{name}.wav", [0.0] * (RATE if name == "quiet" else 2 * RATE), RATE)
    rows = [("a.wav", "one two", ""), ("quiet.wav", "", "yes"), ("other.wav", "", "")]
    table = write_rows(tmp_path / "all.csv", "audio_path,text,silence", rows)
    run(table, tmp_path / "out")
    rows_written = kept_rows(tmp_path / "out")
    assert {(row["id"], row["text"], row.get("silence", "")) for row in rows_written} == {
        ("a.wav", "one two", ""),
        ("quiet.wav", "", "yes"),
    }
    assert left_out(tmp_path / "out") == {"other.wav": "no text"}


def test_a_transcript_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    for number in range(4):
        write_tone(tmp_path / f"{number}.wav", number)
    texts = ['"one two"', "NaN", "true", '"three four"']
    lines = [f'{{"audio_path": "{number}.wav", "text": {text}}}\n' for number, text in enumerate(texts)]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    run(tmp_path / "all.jsonl", tmp_path / "out")
    assert left_out(tmp_path / "out") == {"1.wav": "no text", "2.wav": "bad cell"}


def test_a_table_with_an_index_without_a_name(tmp_path: Path) -> None:
    names = [write_tone(tmp_path / f"{number}.wav", number, 2.0).name for number in range(3)]
    rows = [(number, name, f"number {number}") for number, name in enumerate(names)]
    run(write_rows(tmp_path / "all.csv", ",audio_path,text", rows), tmp_path / "out")
    accepted = kept_rows(tmp_path / "out")
    assert [(row["duration"], row["speaker"], row["language"]) for row in accepted] == [("2.000", "", "")] * 3
