"""From a long recording to a data set folder, with a real detector of speech and a listener that knows what is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from long_talk import RATE, Listening, Talk, make_talk
from sounds import read_rows

from app.cli.main import main
from profiles.errors import BadInput
from speech.data.audio import SECONDS, Activity, decode, stream
from speech.data.sound_file import AudioError
from speech.data.speech_dataset import read_speech
from speech.recordings.segments import dataset
from speech.recordings.segments.cutting import SegmentOptions, TimeSpan, cut_at_pauses
from speech.recordings.segments.dataset import RecordingResult, find_sources, segment_all
from speech.recordings.segments.recording import pieces
from training.tasks.base import Progress


def silent(name: str) -> Progress:
    return lambda phase, done, total: None


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return make_talk(tmp_path / "talk.wav", [0.5, 0.6, 0.7, 3.0, 0.6, 0.8])


def segmented(talk: Talk, text: str, listener: Listening, **options: float) -> tuple[Path, RecordingResult]:
    folder = talk.path.parent / "made"
    talk.path.with_suffix(".txt").write_text(text)
    sources = find_sources(talk.path, None)
    (outcome,) = segment_all(sources, folder, "m", lambda: listener, "en", SegmentOptions(4.0, **options), silent)
    return folder, outcome


@pytest.mark.slow
def test_each_clip_has_the_words_that_are_said_in_it(talk: Talk) -> None:
    listener = Listening(talk)
    folder, outcome = segmented(talk, talk.text, listener)
    table = read_rows(folder / "train.csv")
    assert " ".join(row["text"] for row in table) == talk.text and len(table) == outcome.clips >= 2
    for row in table:
        sound_info = soundfile.info(str(folder / row["audio_path"]))
        assert (sound_info.samplerate, sound_info.channels, sound_info.format) == (RATE, 1, "FLAC")
        assert (
            sound_info.duration == pytest.approx(float(row["end"]) - float(row["start"]), abs=0.002)
            and sound_info.duration <= 4.0
        )
        spoken = [w.text for w in talk.words if float(row["start"]) < (w.start + w.end) / 2 < float(row["end"])]
        assert row["text"].split() == spoken
    assert outcome.given_words == outcome.transcript_words == len(talk.words)
    assert [clip.text for clip in read_speech(str(folder))["train"]] == [row["text"] for row in table]
    words = read_rows(folder / "words.csv")
    assert [row["word"] for row in words] == talk.text.split()
    assert not list(folder.glob("*lock*")) and not folder.with_name("made.partial").exists()


@pytest.mark.slow
def test_casing_and_numbers_are_those_of_the_transcript(talk: Talk) -> None:
    transcript = talk.text.upper().replace(" ", ", ")
    folder, _ = segmented(talk, transcript, Listening(talk))
    assert ", ".join(row["text"].rstrip(",") for row in read_rows(folder / "train.csv")) == transcript


@pytest.mark.slow
def test_words_that_nobody_says_are_in_no_clip(talk: Talk) -> None:
    listener = Listening(talk)
    beginning = [word.text for word in talk.words if word.end < talk.words[0].start + 5.0]
    remainder = [word.text for word in talk.words[len(beginning) :]]
    folder, outcome = segmented(talk, " ".join([*beginning, *["never"] * 9, *remainder]), listener)
    assert " ".join(row["text"] for row in read_rows(folder / "train.csv")) == talk.text
    assert outcome.transcript_words - outcome.given_words == 9


@pytest.mark.slow
def test_what_agrees_too_little_is_cut_finer_and_left_out_with_its_reason(talk: Talk) -> None:
    last_words = [number for number, word in enumerate(talk.words) if word.start > talk.words[-1].start - 0.8]
    listener = Listening(talk, dict.fromkeys(last_words, "elephantine"))
    folder, outcome = segmented(talk, talk.text, listener, agreement=0.75)
    (rejected,) = read_rows(folder / "left_out.csv")
    assert rejected["reason"].startswith("agreement ") and "elephantine" in rejected["heard"]
    assert outcome.reasons == {"agreement below 0.75": 1} and outcome.clips >= 3
    assert float(rejected["start"]) > 8.0


@pytest.mark.slow
def test_without_a_transcript_there_are_clips_with_empty_texts(talk: Talk) -> None:
    sources, folder = find_sources(talk.path, None), talk.path.parent / "made"
    (outcome,) = segment_all(sources, folder, "", lambda: Listening(talk), "", SegmentOptions(), silent)
    assert outcome.clips >= 2 and {row["text"] for row in read_rows(folder / "train.csv")} == {""}


@pytest.mark.slow
def test_a_draft_is_what_the_model_hears(talk: Talk) -> None:
    sources, folder = find_sources(talk.path, None), talk.path.parent / "made"
    segment_all(sources, folder, "m", lambda: Listening(talk), "", SegmentOptions(draft=True), silent)
    assert " ".join(row["text"] for row in read_rows(folder / "train.csv")) == talk.text


@pytest.mark.slow
def test_a_second_start_goes_on_after_what_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        talk = make_talk(tmp_path / "in" / f"{name}.wav", [0.5, 0.6])
        talk.path.with_suffix(".txt").write_text(talk.text)
    listener, real = Listening(talk), dataset.segment_recording
    calls: list[Path] = []

    def interrupted_at_second(path: Path, *arguments: object) -> object:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(path, *arguments)

    monkeypatch.setattr(dataset, "segment_recording", interrupted_at_second)
    arguments = (
        find_sources(tmp_path / "in", None),
        tmp_path / "out",
        "m",
        lambda: listener,
        "en",
        SegmentOptions(),
        silent,
    )
    with pytest.raises(KeyboardInterrupt):
        segment_all(*arguments)
    assert not (tmp_path / "out").exists()
    outcomes = segment_all(*arguments)
    assert [path.name for path in calls] == ["a.wav", "b.wav", "b.wav"] and [outcome.clips for outcome in outcomes] == [
        1,
        1,
    ]
    assert {row["speaker"] for row in read_rows(tmp_path / "out" / "train.csv")} == {"a", "b"}
    with pytest.raises(BadInput, match="is there already"):
        segment_all(*arguments)


@pytest.mark.slow
def test_a_broken_recording_is_named_and_the_others_go_on(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    folder = talk.path.parent
    (folder / "broken.wav").write_bytes(b"RIFF but no more")
    assert main(["segment", str(folder), "--out", str(folder / "made"), "--json"]) == 2
    captured = capsys.readouterr()
    outcomes = {outcome["name"]: outcome for outcome in json.loads(captured.out)["recordings"]}
    assert outcomes["talk"]["clips"] >= 2 and "not a readable sound file" in outcomes["broken"]["error"]
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("name", ["talk.en.vtt", "talk.mp4.srt", "talk.pt-BR.vtt", "talk.TXT", "talk.en-orig.srt"])
def test_transcripts_as_downloaders_and_whisper_name_them(tmp_path: Path, name: str) -> None:
    for file in ("talk.mp4", name, "talker.en.vtt", "talk.final.txt"):
        (tmp_path / file).touch()
    assert [source.transcript for source in find_sources(tmp_path / "talk.mp4", None)] == [tmp_path / name]
    (tmp_path / "talk.de.vtt").touch()
    with pytest.raises(BadInput, match="which is its transcript"):
        find_sources(tmp_path, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_of_a_recording_that_broke_off_the_segments_before_are_used(tmp_path: Path, kind: str) -> None:
    talk = make_talk(tmp_path / f"talk.{kind}", [0.5, 0.6, 0.7, 3.0, 0.6, 0.8])
    data = talk.path.read_bytes()
    cut_word = next(word for word in talk.words if word.start > 9.0)  # in the middle of this word
    duration = soundfile.info(str(talk.path)).duration
    talk.path.write_bytes(data[: round(len(data) * (cut_word.start + cut_word.end) / 2 / duration)])
    folder, outcome = segmented(talk, talk.text, Listening(talk))
    assert not outcome.error and "broken off" in outcome.damage
    texts = " ".join(row["text"] for row in read_rows(folder / "train.csv"))
    assert texts and talk.text.startswith(texts) and len(texts.split()) < talk.words.index(cut_word)
    assert [row["reason"] for row in read_rows(folder / "left_out.csv")][-1] == "the recording is damaged there"
    for row in read_rows(folder / "train.csv"):
        spoken = [w.text for w in talk.words if float(row["start"]) < (w.start + w.end) / 2 < float(row["end"])]
        assert row["text"].split() == spoken


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.wav"], "not there"),
        (["."], "no recordings in this folder"),
        (["talk.txt", "talk.txt"], "no model to align"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.txt").write_text("no sound")
    assert main(["segment", *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "segments").exists()


@pytest.mark.slow
def test_a_real_model_listens_through_the_command(
    talk: Talk, whisper_tiny_en: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.path.with_suffix(".srt").write_text(f"1\n00:00:00,000 --> 00:00:12,000\n{talk.text}\n")
    out = talk.path.parent / "made"
    words = ["segment", str(talk.path), "--model", str(whisper_tiny_en), "--out", str(out), "--device", "cpu"]
    assert main([*words, "--agreement", "0.3"]) == 0
    assert capsys.readouterr().err.count("listening with") == 1
    table = read_rows(out / "train.csv")
    assert table and all(row["text"] in talk.text for row in table)


def activity(*turns: tuple[float, float]) -> Activity:
    """Speech and silence in turns, of so many seconds, each with its loudness."""
    frames = [round(seconds / SECONDS) for seconds, _ in turns]
    speech = [float(number % 2 == 0) for number, count in enumerate(frames) for _ in range(count)]
    loud = [level for count, (_, level) in zip(frames, turns) for _ in range(count)]
    return Activity(np.array(speech, np.float32), np.array(loud, np.float32))


def test_segments_are_as_long_as_fits_and_cut_at_the_longest_pause() -> None:
    spans = cut_at_pauses(
        activity((4, 1), (0.3, 0), (4, 1), (0.8, 0), (4, 1), (0.3, 0), (4, 1), (3, 0), (2, 1)), 15.0, None
    )
    assert all(0 < span.seconds <= 15.0 for span in spans)
    assert all(before.end <= after.start for before, after in pairwise(spans))
    assert [round(span.end) for span in spans] == [8, 18, 22]


def test_speech_without_a_pause_is_cut_where_it_is_told() -> None:
    spans = cut_at_pauses(activity((25, 1)), 10.0, lambda uncut: uncut.start + 1)
    assert max(span.seconds for span in spans) <= 10.0 and len(spans) >= 3


def test_a_stream_is_what_decoding_gives(tmp_path: Path) -> None:
    sound = np.random.default_rng(1).normal(0, 0.1, (44_100 * 3, 2)).astype(np.float32)
    soundfile.write(str(tmp_path / "a.wav"), sound, 44_100, subtype="FLOAT")
    decoded, streamed = decode(tmp_path / "a.wav", RATE).samples, np.concatenate(list(stream(tmp_path / "a.wav", RATE)))
    assert len(streamed) == len(decoded) and np.abs(streamed - decoded).max() < 1e-3
    spans = [TimeSpan(0.1, 0.5), TimeSpan(0.5, 1.2), TimeSpan(2.0, 9.0)]
    for span, samples in zip(spans, pieces(tmp_path / "a.wav", spans)):
        start, end = round(span.start * RATE), round(span.end * RATE)
        assert np.array_equal(samples, streamed[start:end])


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 5000])
def test_no_sound_is_an_audio_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(AudioError):
        list(stream(tmp_path / "a.wav", RATE))


@pytest.mark.parametrize("note", [b"", b'{"key"', b"[]", b"{}", b'{"key": "", "outcome": {}}', b"[" * 100_000])
def test_a_damaged_note_of_an_earlier_start_is_made_anew(tmp_path: Path, note: bytes) -> None:
    sound = tmp_path / "talk.wav"
    sound.write_bytes(b"x")
    calls: list[Path] = []

    def make() -> dict[str, object]:
        calls.append(sound)
        return {"outcome": asdict(RecordingResult("talk", clips=3)), "train": [], "left_out": [], "words": []}

    source = dataset.RecordingSource("talk", sound, None)
    assert dataset.segment_once(source, tmp_path, [], make).clips == 3
    (tmp_path / "done" / "talk.json").write_bytes(note)
    for _ in range(2):
        assert dataset.segment_once(source, tmp_path, [], make).clips == 3
    assert len(calls) == 2
