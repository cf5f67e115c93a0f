"""Layouts of speech data sets, and the faults a person makes in them."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_speech import write_clips, write_csv

from profiles.errors import BadInput
from speech.data.patches import PSEUDO
from speech.data.speech_clips import Clip, FileSource, hold_out, warn_once
from speech.data.speech_dataset import read_speech, read_with_validation, split_to_evaluate


def clip(name: str) -> Clip:
    return Clip(name, FileSource(Path(name)), "text", "here")


def test_folder_with_a_table_for_each_split(speech_folder: Path) -> None:
    splits = read_speech(str(speech_folder))
    assert {split: len(clips) for split, clips in splits.items()} == {"train": 8, "validation": 2}
    first = splits["train"][0]
    assert (first.id, first.text) == ("clip0", "one")
    assert first.audio == FileSource(speech_folder / "audio/clip0.wav")


@pytest.mark.parametrize("column", ["text_verbatim", "text_perfect"])
def test_names_of_the_text_column(tmp_path: Path, column: str) -> None:
    write_csv(tmp_path / "train.csv", write_clips(tmp_path, 2), f"id,audio_path,{column}")
    assert [clip.text for clip in read_speech(str(tmp_path))["train"]] == ["one", "two"]


def test_text_column_setting_chooses(tmp_path: Path) -> None:
    rows = [(*row, f"chosen {row[0]}") for row in write_clips(tmp_path, 1)]
    write_csv(tmp_path / "train.csv", rows, "id,audio_path,text,subtitle")
    assert read_speech(str(tmp_path), "subtitle")["train"][0].text == "chosen clip0"


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
@pytest.mark.parametrize("in_table", ["NFC", "NFD"])
def test_a_name_with_umlauts_is_found_however_disk_and_table_spell_it(
    tmp_path: Path, on_disk: Literal["NFC", "NFD"], in_table: Literal["NFC", "NFD"]
) -> None:
    folder = tmp_path / "größen"
    folder.mkdir()
    write_clips(folder, 1)
    name = unicodedata.normalize(on_disk, "äpfel/ölfaß.wav")
    (folder / name).parent.mkdir()
    (folder / "audio/clip0.wav").rename(folder / name)
    write_csv(folder / "train.csv", [("a", unicodedata.normalize(in_table, name), "one")])
    assert read_speech(str(folder))["train"][0].audio == FileSource(folder / name)


def test_audiofolder_with_one_table(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        write_clips(tmp_path / split, 1)
    rows = [("train/audio/clip0.wav", "a"), ("dev/audio/clip0.wav", "b")]
    write_csv(tmp_path / "metadata.csv", rows, "file_name,transcription")
    splits = read_speech(str(tmp_path))
    assert {split: [clip.text for clip in clips] for split, clips in splits.items()} == {
        "train": ["a"],
        "validation": ["b"],
    }


def test_audiofolder_with_a_table_in_each_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_clips(tmp_path / split, 1)
        line = f'{{"file_name": "audio/clip0.wav", "sentence": "{split}"}}\n'
        (tmp_path / split / "metadata.jsonl").write_text(line)
    splits = read_speech(str(tmp_path))
    assert {split: clips[0].text for split, clips in splits.items()} == {"train": "train", "test": "test"}


def test_one_table_is_a_training_split(speech_folder: Path) -> None:
    assert list(read_speech(str(speech_folder / "train.csv"))) == ["train"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a,audio/clip0.wav,,1.0,en", "train.csv, line 3, column text: empty"),
        ("a,,hello,1.0,en", "train.csv, line 3, column audio_path: empty"),
        (
            "clip0,audio/clip0.wav,hello,1.0,en",
            "line 3, column id: 'clip0' is there already, in line 2",
        ),
        ("a,audio/none.wav,hello,1.0,en", "train.csv, line 3, column audio_path: .*none.wav is not there"),
        ("a,audio/clip0.wav,hello,long,en", "train.csv, line 3, column duration: 'long' is not a number"),
    ],
)
def test_faults_name_file_line_and_column(tmp_path: Path, line: str, said: str) -> None:
    row = (*write_clips(tmp_path, 1)[0], "0.6", "en")
    write_csv(tmp_path / "train.csv", [row, tuple(line.split(","))], "id,audio_path,text,duration,language")
    with pytest.raises(BadInput, match=said):
        read_speech(str(tmp_path))


def test_a_recording_that_is_named_twice_is_no_id_that_is_there_twice(tmp_path: Path) -> None:
    row = write_clips(tmp_path, 1)[0][1:]
    write_csv(tmp_path / "train.csv", [row, row], "audio_path,text")
    with pytest.raises(BadInput, match="line 3, column audio_path: 'audio.clip0.wav' is there already, in .*line 2"):
        read_speech(str(tmp_path))


def test_missing_column(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [(*write_clips(tmp_path, 1)[0], "good")], "id,audio_path,txt,remark")
    with pytest.raises(BadInput, match="no column 'text' or .* it has: id, audio_path, txt, .*did you mean 'txt'"):
        read_speech(str(tmp_path))


def test_empty_table(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    with pytest.raises(BadInput, match="train.csv: the table is empty"):
        read_speech(str(tmp_path))


@pytest.mark.parametrize("path", ["", "./nowhere", "/no/such/folder"])
def test_no_such_data_set(path: str) -> None:
    with pytest.raises(BadInput, match="no data set was given|no such folder"):
        read_speech(path)


def test_a_mistyped_folder_is_told_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my recordings").mkdir()
    with pytest.raises(BadInput, match=r"no such folder .*did you mean .*/my recordings\?"):
        read_speech(str(tmp_path / "my recording"))


@pytest.mark.parametrize("name", ["train.xlsx", "Train.CSV"])
def test_a_table_of_another_name_or_kind_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(BadInput, match=f"{name} is there: save it as train.csv"):
        read_speech(str(tmp_path))


def test_paths_written_on_windows(tmp_path: Path) -> None:
    rows = [(name, path.replace("/", "\\"), text) for name, path, text in write_clips(tmp_path, 1)]
    write_csv(tmp_path / "train.csv", rows)
    assert read_speech(str(tmp_path))["train"][0].audio == FileSource(tmp_path / "audio/clip0.wav")


def test_a_held_out_recording_that_is_trained_on_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = write_clips(tmp_path, 3)
    write_csv(tmp_path / "train.csv", rows)
    write_csv(tmp_path / "validation.csv", [("other", rows[1][1], "one")])
    read_with_validation(str(tmp_path))
    assert "1 held-out recording in the training data too" in caplog.text


def test_folder_without_a_table(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the folder is empty"):
        read_speech(str(tmp_path))
    (tmp_path / "a.m4a").touch()
    with pytest.raises(BadInput, match=r"nor metadata.csv is there, only 1 recording without what was said"):
        read_speech(str(tmp_path))


def test_the_only_table_of_a_folder_is_its_training_data(tmp_path: Path) -> None:
    rows = write_clips(tmp_path, 2)
    write_csv(tmp_path / "my transcripts.csv", rows)
    (tmp_path / PSEUDO).touch()
    assert [clip.id for clip in read_speech(str(tmp_path))["train"]] == [row[0] for row in rows]
    write_csv(tmp_path / "another.csv", rows)
    with pytest.raises(BadInput, match="neither train.csv nor metadata.csv") as refused:
        read_speech(str(tmp_path))
    assert "another.csv is there" in refused.value.hint


def test_a_line_without_its_recording_is_told_with_what_leaves_it_out(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [*write_clips(tmp_path, 1), ("b", "b.wav", "two")])
    with pytest.raises(BadInput, match="b.wav is not there") as refused:
        read_speech(str(tmp_path))
    assert "mend such lines, or leave them out: " in refused.value.hint


@given(st.sets(st.text(), min_size=2, max_size=60))
def test_held_out_clips_are_a_tenth_and_do_not_depend_on_the_order(names: set[str]) -> None:
    clips = [clip(name) for name in sorted(names)]
    splits = hold_out({"train": clips})
    assert len(splits["validation"]) == max(1, round(len(clips) / 10))
    assert {clip.id for clip in splits["train"]} | {clip.id for clip in splits["validation"]} == names
    again = hold_out({"train": clips[::-1]})
    assert {clip.id for clip in again["validation"]} == {clip.id for clip in splits["validation"]}


def test_holding_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    hold_out({"train": [clip(str(i)) for i in range(20)]})
    assert "no validation split: 2 of 20 training clips are held out" in caplog.text


def test_what_is_held_out_is_evaluated_where_there_is_no_test_split(tmp_path: Path) -> None:
    rows = write_clips(tmp_path, 4)
    table = write_csv(tmp_path / "train.csv", rows)
    assert split_to_evaluate(str(tmp_path)) == "validation"
    assert split_to_evaluate(str(tmp_path), "train") == split_to_evaluate(str(table)) == "train"
    write_csv(tmp_path / "test.csv", rows[:1])
    assert split_to_evaluate(str(tmp_path)) == split_to_evaluate("owner/name") == "test"


def test_one_clip_cannot_be_divided() -> None:
    with pytest.raises(BadInput, match="one clip and no validation split"):
        hold_out({"train": [clip("a")]})


def test_no_training_split() -> None:
    with pytest.raises(BadInput, match="no training split; it has: test"):
        hold_out({"test": [clip("a")]})
