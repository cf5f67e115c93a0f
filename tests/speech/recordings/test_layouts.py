"""Folders whose files name no columns, each recognised by what lies there and read to the end."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from sounds import wav_bytes, write_tone

from speech.data.hub_speech import HubSource
from speech.recordings.readers import READERS, kind_of
from speech.recordings.recording import ExclusionReason, ReadRequest, Recording


def read(source: Path, kind: str) -> list[Recording]:
    assert kind_of(str(source)) == kind
    return list(READERS[kind](ReadRequest(str(source))))


def facts(recording: Recording) -> tuple[str, ...]:
    return (recording.id, recording.text, recording.speaker, recording.language, recording.split)


def written(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize("table", ["metadata.csv", "filelist.txt"])
def test_ljspeech(table: str, tmp_path: Path) -> None:
    write_tone(tmp_path / "wavs/LJ001-0001.wav")
    written(tmp_path / table, 'LJ001-0001|In 1455 "he" said|In fourteen', "LJ001-0002|gone|gone")
    first, second = read(tmp_path, "ljspeech")
    assert facts(first) == ("LJ001-0001", 'In 1455 "he" said', "", "", "") and first.exclusion is None
    assert second.exclusion and second.exclusion.reason is ExclusionReason.NOT_THERE


def test_the_only_text_file_of_a_folder_may_list_its_recordings(tmp_path: Path) -> None:
    write_tone(tmp_path / "1.wav")
    written(tmp_path / "my list.txt", "1.wav| open the door")
    (recording,) = read(tmp_path, "ljspeech")
    assert recording.text == "open the door" and recording.exclusion is None


def test_a_list_of_files_with_speakers(tmp_path: Path) -> None:
    write_tone(tmp_path / "wavs/a.wav")
    written(tmp_path / "metadata.csv", "wavs/a.wav|7|hello there")
    assert [facts(recording) for recording in read(tmp_path, "ljspeech")] == [
        ("wavs/a.wav", "hello there", "7", "", "")
    ]


@pytest.mark.parametrize("after", ["", "|f o n|0 1"])
def test_a_list_of_files_with_speakers_and_languages(tmp_path: Path, after: str) -> None:
    write_tone(tmp_path / "wavs/a.wav")
    written(tmp_path / "filelist.txt", f"wavs/a.wav|anna|EN|hello there{after}", f"wavs/a.wav|bo|JP|hai{after}")
    assert [facts(recording)[1:4] for recording in read(tmp_path, "ljspeech")] == [
        ("hello there", "anna", "en"),
        ("hai", "bo", "jp"),
    ]


def test_single_words_are_no_speakers(tmp_path: Path) -> None:
    write_tone(tmp_path / "wavs/a.wav")
    written(tmp_path / "metadata.csv", "a|Zero|zero", "a|4|four")
    assert [facts(recording)[1:3] for recording in read(tmp_path, "ljspeech")] == [("Zero", ""), ("4", "")]


def test_a_text_with_a_bar_is_left_out_not_cut(tmp_path: Path) -> None:
    write_tone(tmp_path / "wavs/a.wav")
    written(tmp_path / "metadata.csv", "a|this | or that one|this or that one", "a|fine words|fine words")
    first, second = read(tmp_path, "ljspeech")
    assert first.exclusion and first.exclusion.reason is ExclusionReason.BAD_CELL
    assert second.exclusion is None and second.text == "fine words"


def test_a_table_with_bars_and_names_is_none_of_these(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    written(tmp_path / "metadata.csv", "file_name|text", "a.wav|hello")
    assert [facts(recording) for recording in read(tmp_path, "audiofolder")] == [("a.wav", "hello", "", "", "")]


def test_kaldi_with_segments_and_speakers(tmp_path: Path) -> None:
    folder = tmp_path / "train_clean"
    write_tone(folder / "wav/r1.wav", seconds=3.0)
    written(folder / "wav.scp", "r1 wav/r1.wav", "r2 sph2pipe -f wav r2.sph |", "r3 wav/gone.wav")
    written(
        folder / "segments",
        "u1 r1 0.50 1.75",
        "u2 r1 2.0 -1",
        "u3 r2 0 1",
        "u4 r1 x y",
        "u5 r3 0 1",
        "u6 r1 inf 1",
        "u7 r1 0",
    )
    written(folder / "text", "u1 hello there", "u2 again", "u3 no", "u4 no", "u5 no", "u6 no", "u7 no")
    written(folder / "utt2spk", "u1 anna", "u2 ben")
    first, second, *others = read(tmp_path, "kaldi")
    assert facts(first) == ("u1", "hello there", "anna", "", "train") and first.exclusion is None
    assert (first.offset, first.duration, second.offset, second.duration) == (0.5, 1.25, 2.0, None)
    assert [recording.exclusion and recording.exclusion.reason.value for recording in others] == [
        "outside",
        "bad cell",
        "not there",
        "bad cell",
        "bad cell",
    ]


def test_kaldi_without_segments(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    written(tmp_path / "wav.scp", "a\t/home/other/corpus/a.wav")
    written(tmp_path / "text", "a one two")
    (recording,) = read(tmp_path, "kaldi")
    assert (facts(recording), recording.duration, recording.exclusion) == (("a", "one two", "", "", ""), None, None)


@pytest.mark.parametrize("ending", ["flac", "opus"])
def test_mls(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "mls_german"
    write_tone(folder / "dev/audio/10/20/10_20_000001.flac").rename(folder / f"dev/audio/10/20/10_20_000001.{ending}")
    written(folder / "dev/transcripts.txt", "10_20_000001\tguten tag")
    written(folder / "dev/segments.txt", "10_20_000001\thttp://x\t0\t1")
    for source in (folder, tmp_path):
        (recording,) = read(source, "mls")
        assert (
            facts(recording) == ("10_20_000001", "guten tag", "10", "de", "validation") and recording.exclusion is None
        )


@pytest.mark.parametrize("inner", ["audio/dev", "dev", "audio"])
def test_fleurs(inner: str, tmp_path: Path) -> None:
    write_tone(tmp_path / "nb_no" / inner / "123.wav")
    written(tmp_path / "nb_no/dev.tsv", '7\t123.wav\tHei "du".\thei du\th e i | d u |\t8000\tMALE')
    for source in (tmp_path, tmp_path / "nb_no"):
        (recording,) = read(source, "fleurs")
        assert facts(recording) == ("dev/123.wav", 'Hei "du".', "", "no", "validation") and recording.exclusion is None


def test_a_sound_with_a_text_beside_it(tmp_path: Path) -> None:
    for name in ("train/a.wav", "test/b.FLAC", "c.mp3"):
        write_tone(tmp_path / "tone.wav").rename((tmp_path / name).parent.mkdir(exist_ok=True) or tmp_path / name)
    written(tmp_path / "train/a.txt", "\ufeffone", "two\u00a0three")
    written(tmp_path / "test/b.lab", "four")
    written(tmp_path / "readme.txt", "no sound")
    recordings = [facts(recording) for recording in read(tmp_path, "pairs")]
    assert recordings == [("test/b.FLAC", "four", "", "", "test"), ("train/a.wav", "one two three", "", "", "train")]


def test_a_list_of_json_objects(tmp_path: Path) -> None:
    write_tone(tmp_path / "clips/a.wav")
    (tmp_path / "all.json").write_text('[\n  {"audio": {"path": "a.wav", "bytes": null},\n   "sentence": "hello"}\n]')
    (recording,) = read(tmp_path / "all.json", "table")
    assert (facts(recording), recording.exclusion) == (("a.wav", "hello", "", "", ""), None)


def test_lists_with_lengths(tmp_path: Path) -> None:
    write_tone(tmp_path / "book/a_0001.wav")
    written(tmp_path / "transcript.txt", "book/a_0001.wav|In 1455!|in fourteen|3.52", "book/a_0001.wav|No|no|1.0")
    assert [recording.text for recording in read(tmp_path, "ljspeech") if recording.exclusion is None] == [
        "In 1455!",
        "No",
    ]


def test_files_that_a_mac_writes_beside_others_are_none(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    written(tmp_path / "a.txt", "hello")
    for name in ("._a.wav", "._a.txt"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X\xff")
    assert [recording.id for recording in read(tmp_path, "pairs")] == ["a.wav"]
    (tmp_path / "data").mkdir()
    written(tmp_path / "data/train.csv", "audio_path,text", "../a.wav,hello")
    (tmp_path / "data/._train.csv").write_bytes(b"\0\5\x16\7\xff")
    assert [recording.text for recording in read(tmp_path / "data", "table")] == ["hello"]


def test_texts_of_timit_begin_after_their_samples(tmp_path: Path) -> None:
    write_tone(tmp_path / "DR1/FCJF0/SA1.WAV")
    written(tmp_path / "DR1/FCJF0/SA1.TXT", "0 46797 She had your dark suit.")
    write_tone(tmp_path / "b.wav")
    written(tmp_path / "b.txt", "0 46797 1200 are numbers")
    assert [recording.text for recording in read(tmp_path, "pairs")] == [
        "She had your dark suit.",
        "0 46797 1200 are numbers",
    ]


@pytest.mark.parametrize("form", ["fetched", "saved", "file", "plain"])
def test_tables_that_hold_the_sound_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Literal["fetched", "saved", "file", "plain"]
) -> None:
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"audio": {"bytes": wav_bytes(n), "path": f"{n}.wav"}, "sentence": f"text {n}"} for n in range(2)]
    table = datasets.Dataset.from_list(rows)
    table = table if form == "plain" else table.cast_column("audio", datasets.Audio(decode=False))
    source = tmp_path / "set"
    if form == "saved":
        table.save_to_disk(str(source))
    else:
        (source / "data").mkdir(parents=True)
        table.to_parquet(str(source / "data/train-00000-of-00001.parquet"))
    if form == "file":
        source = source / "data/train-00000-of-00001.parquet"
    first, second = read(source, "hub")
    assert (first.text, first.split, second.text) == ("text 0", "train", "text 1")
    assert isinstance(second.audio, HubSource) and second.audio.read() == wav_bytes(1)
