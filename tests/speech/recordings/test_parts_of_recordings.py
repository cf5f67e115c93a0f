"""Rows that are parts of a longer file: cut by ``prepare``, and never trained on as the whole file."""

from __future__ import annotations

from pathlib import Path

import pytest
from sounds import read_rows, write_rows, write_tone

from profiles.errors import BadInput
from speech.data.speech_dataset import read_speech
from speech.recordings.preparing import PreparationJob, prepare
from speech.recordings.readers import read_tables
from speech.recordings.recording import ExclusionReason, ReadRequest, Recording


def recordings(table: Path) -> list[Recording]:
    return list(read_tables(ReadRequest(str(table))))


@pytest.mark.parametrize("header", ["start,end", "start_time,end_time", "begin,stop", "Start,End", "offset,end"])
def test_a_part_ends_where_its_column_says(tmp_path: Path, header: str) -> None:
    write_tone(tmp_path / "a.wav", seconds=4.0)
    rows = [("a.wav", "one", "0.5", "1.5"), ("a.wav", "two", "0:02", "2,75")]
    first, second = recordings(write_rows(tmp_path / "all.csv", f"path,text,{header}", rows))
    assert [(recording.offset, recording.duration) for recording in (first, second)] == [(0.5, 1.0), (2.0, 0.75)]
    assert first.id != second.id


def test_a_part_that_ends_before_it_begins_is_left_out(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    (recording,) = recordings(write_rows(tmp_path / "all.csv", "path,text,start,end", [("a.wav", "one", 3, 2)]))
    assert recording.exclusion is not None and recording.exclusion.reason is ExclusionReason.BAD_CELL


def test_a_clip_that_was_cut_out_already_is_not_cut_again(tmp_path: Path) -> None:
    rows = [
        (write_tone(tmp_path / f"{i}.wav", i, 0.5 + i / 4).name, f"number {i}", i, i + 0.5 + i / 4) for i in range(4)
    ]
    table = write_rows(tmp_path / "train.csv", "audio_path,text,start,end", rows)
    assert len(read_speech(str(table))["train"]) == 4
    prepare(PreparationJob(ReadRequest(str(table)), tmp_path / "out"), lambda *_: None)
    lengths = {
        row["text"]: float(row["duration"]) for path in (tmp_path / "out").glob("t*.csv") for row in read_rows(path)
    }
    assert all(lengths[f"number {i}"] == pytest.approx(0.5 + i / 4) for i in range(1, 4) if f"number {i}" in lengths)
    assert len(lengths) >= 2


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        ("id,path,text,start,end", [("1", "a.wav", "one", 0, 1), ("2", "a.wav", "two", 1, 2)]),
        ("id,path,text,begin", [("1", "a.wav", "one", 0), ("2", "a.wav", "two", 1)]),
        ("path,text,offset,duration", [("a.wav", "one", 1.5, 1)]),
    ],
)
def test_no_part_is_trained_on_as_the_whole_file(tmp_path: Path, header: str, rows: list[tuple[object, ...]]) -> None:
    write_tone(tmp_path / "a.wav", seconds=2.0)
    table = write_rows(tmp_path / "train.csv", header, rows)
    with pytest.raises(BadInput, match=r"train.csv, line 2, column \w+: parts of recordings") as caught:
        read_speech(str(table))
    assert f"prepare {table}" in caught.value.hint


def test_an_offset_of_nothing_is_the_whole_file(tmp_path: Path) -> None:
    write_tone(tmp_path / "a.wav")
    rows = [("a.wav", "one", "0.0", "0.5")]
    table = write_rows(tmp_path / "train.csv", "path,text,offset,duration", rows)
    assert len(read_speech(str(table))["train"]) == 1
