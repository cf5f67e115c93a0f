"""Tables as other programs and computers write them: what counts as a name, a text, a file, and what as nothing."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from tiny_speech import write_clips, write_csv

from profiles.errors import BadInput
from speech.data.path_resolution import resolve_path
from speech.data.speech_clips import likely_text_column
from speech.data.speech_dataset import read_speech
from training.tasks.data_files.faults import FileFaults
from training.tasks.data_files.tables import read_table


def table_of(folder: Path, data: str | bytes, name: str = "train.csv") -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def texts(folder: Path) -> list[str]:
    return [clip.text for clip in read_speech(str(folder))["train"]]


def test_a_column_without_a_name_is_none(tmp_path: Path) -> None:
    table = read_table(table_of(tmp_path, ",audio_path,,text\n0,a.wav,x,hello\n"))
    assert (table.columns, table.rows[0].cells) == (
        ("audio_path", "text"),
        {"audio_path": "a.wav", "text": "hello"},
    )
    (row,) = read_table(table_of(tmp_path, '{"": 3, "text": "hello"}\n', "m.jsonl")).rows
    assert row.cells == {"text": "hello"}


def test_recordings_are_recognised_by_their_files_and_else_the_command_that_reads_more_is_named(tmp_path: Path) -> None:
    named = [Path(path) for _, path, _ in write_clips(tmp_path, 2)]
    rows = "".join(f"{n},{path.with_suffix('')},sentence {n}\n" for n, path in enumerate(named))
    table_of(tmp_path, "Nr,Memo,What I said\n" + rows)
    first, second = read_speech(str(tmp_path))["train"]
    assert [clip.audio.path.name for clip in (first, second)] == [path.name for path in named]
    table = table_of(tmp_path, "Nr,Memo,text\n1,nowhere,one\n")
    with pytest.raises(BadInput, match="no column 'audio_path'") as error:
        read_speech(str(tmp_path))
    assert f"prepare {table} --out NEW" in error.value.hint


@pytest.mark.parametrize("value", ["NaN", "null", '""', '"NaN"', '"<NA>"', '"None"', "[]"])
def test_what_json_holds_for_a_missing_transcript_is_none(tmp_path: Path, value: str) -> None:
    (_, path, _), *_ = write_clips(tmp_path, 1)
    table_of(tmp_path, f'{{"file_name": "{path}", "text": {value}}}\n', "metadata.jsonl")
    with pytest.raises(BadInput, match=r"metadata.jsonl, line 1, column text: empty"):
        read_speech(str(tmp_path))


@pytest.mark.parametrize(("value", "kind"), [("7", "number"), ("7.5", "number"), ("true", "truth value")])
def test_a_transcript_of_another_type_is_refused_by_its_line(tmp_path: Path, value: str, kind: str) -> None:
    (_, path, _), *_ = write_clips(tmp_path, 1)
    table_of(tmp_path, f'{{"file_name": "{path}", "text": {value}}}\n', "metadata.jsonl")
    with pytest.raises(BadInput, match=f"line 1, column text: .* is a {kind}, not a text"):
        read_speech(str(tmp_path))


@pytest.mark.parametrize("cell", ["nan", "NaN", "<NA>", "#N/A", "NULL", "", '""'])
def test_what_pandas_writes_for_a_missing_transcript_is_none(tmp_path: Path, cell: str) -> None:
    (name, path, _), *_ = write_clips(tmp_path, 1)
    table_of(tmp_path, f"id,audio_path,text\n{name},{path},{cell}\n")
    with pytest.raises(BadInput, match=r"train.csv, line 2, column text: empty"):
        read_speech(str(tmp_path))


def test_a_word_that_only_looks_like_nothing_stays(tmp_path: Path) -> None:
    rows = [(name, path, word) for (name, path, _), word in zip(write_clips(tmp_path, 2), ("null", "Nan bread"))]
    write_csv(tmp_path / "train.csv", rows)
    assert texts(tmp_path) == ["null", "Nan bread"]


@pytest.mark.parametrize(
    ("cell", "text"), [("\ufeffone", "one"), ("o\0n\x07e", "one"), ("don\x92t", "don’t"), ("a\x1fb\x85c", "a b c")]
)
def test_characters_of_no_text_are_none(tmp_path: Path, cell: str, text: str) -> None:
    (_, path, _), *_ = write_clips(tmp_path, 1)
    table_of(tmp_path, f"audio_path,text\n\ufeff{path},{cell}\n")
    assert texts(tmp_path) == [text]


def test_all_errors_of_a_table_are_told_at_once_but_no_endless_list(tmp_path: Path) -> None:
    (name, path, _), *_ = write_clips(tmp_path, 1)
    lines = [
        "id,audio_path,text",
        f"{name},{path},",
        "b,none.wav,hello",
        "c,too,many,fields",
        "d,,x",
        f"{name},{path},y",
    ]
    lines += [f"e{number},{path}," for number in range(3)]
    table_of(tmp_path, "\n".join(lines) + "\n")
    with pytest.raises(BadInput) as refused:
        read_speech(str(tmp_path))
    message = refused.value.message
    assert "\n" not in message and message.count(str(tmp_path / "train.csv")) <= 3
    for said in (
        "line 4: 4 fields",
        "line 5, column audio_path: empty",
        "line 6, column id",
        "line 2, column text: empty",
    ):
        assert said in message
    assert message.endswith("; and 3 more")
    assert isinstance(refused.value, FileFaults) and refused.value.problems == (
        "train.csv:2: column text is empty",
        "train.csv:3: column audio_path: none.wav is not there, nor in a folder below",
        "train.csv:4: 4 fields, but the first line names 3 columns",
        "train.csv:5: column audio_path is empty",
        f"train.csv:6: column id: {name!r} is there already, in line 2",
        "and 3 more in train.csv",
    )


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("sep=;\nid;text\na;b, c\n", "t.csv"),
        ('"sep=;"\r\nid;text\r\na;b, c\r\n', "t.csv"),
        ("id|text\na|b, c\n", "t.csv"),
        ("id\ttext\na\tb, c\n", "t.csv"),
        ("id;text\ra;b, c\r", "t.csv"),
        ("id;text;;\na;b, c;;\n", "t.csv"),
        ('"id";"text"\n"a";"b, c"\n', "t.csv"),
        ('"id";"text";"x, y"\n"a";"b, c";\n', "t.csv"),
        ("id;text;\na;b, c\n", "t.csv"),
        ("\ufeffid;text\na;b, c\n".encode("utf-16-le"), "t.csv"),
        ("id;text\na;b, c\n".encode("utf-16-le"), "t.csv"),
        ("id;text\na;b, c\n".encode("utf-16-be"), "t.csv"),
        ('[{"id": "a", "text": "b, c"}]', "t.json"),
        ('\ufeff[\n {"id": "a",\n  "text": "b, c"}\n]\n', "t.json"),
    ],
)
def test_forms_of_one_table(tmp_path: Path, data: str | bytes, name: str) -> None:
    (row,) = read_table(table_of(tmp_path, data, name)).rows
    assert {column: cell for column, cell in row.cells.items() if cell} == {"id": "a", "text": "b, c"}


def test_lines_are_counted_from_the_first_one_that_tells_the_delimiter(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="line 4: 3 fields"):
        read_table(table_of(tmp_path, "sep=;\nid;text\na;b\nc;d;e\n"))


def test_a_table_with_tabs_need_not_quote(tmp_path: Path) -> None:
    rows = read_table(table_of(tmp_path, 'id\ttext\na\t"Yes", he said\nb\tso\n', "t.tsv")).rows
    assert [row.cells["text"] for row in rows] == ['"Yes", he said', "so"]


def test_a_quotation_mark_that_takes_in_other_recordings_is_refused(tmp_path: Path) -> None:
    data = 'audio_path,text\na.wav,"never closed\nb.wav,two\nc.wav,three"\n'
    (row, *_) = read_table(table_of(tmp_path, data)).rows
    with pytest.raises(BadInput, match="line 2: a quotation mark opens there"):
        row.text("text")


def test_a_name_in_another_spelling_is_the_usual_one(tmp_path: Path) -> None:
    ((name, path, text),) = write_clips(tmp_path, 1)
    write_csv(tmp_path / "train.csv", [(name, path, text, "german", "anna")], "ID,File name,Text,Language,Speaker")
    (clip,) = read_speech(str(tmp_path))["train"]
    assert (clip.id, clip.text, clip.language, clip.columns["speaker"]) == (name, text, "german", "anna")


@pytest.mark.parametrize("columns", ["What I said,Remarks", "Remarks,What I said"])
def test_without_a_usual_name_the_column_of_sentences_is_taken_and_told(
    tmp_path: Path, columns: str, caplog: pytest.LogCaptureFixture
) -> None:
    cells = {"What I said": "the longest of all the texts", "Remarks": "a cough"}
    rows = [(path, *(cells[column] for column in columns.split(","))) for _, path, _ in write_clips(tmp_path, 2)]
    write_csv(tmp_path / "train.csv", rows, f"file_name,{columns}")
    assert set(texts(tmp_path)) == {"the longest of all the texts"}
    assert "column 'What I said' is taken for the transcripts; text_column names another" in caplog.text


def test_a_forgotten_transcript_and_a_number_leave_the_column_of_sentences_likely(tmp_path: Path) -> None:
    spoken = ["", "42", *["the longest of all the texts"] * 8]
    rows = ["a.wav;" + text + ";" + ("noisy" if number < 3 else "") for number, text in enumerate(spoken)]
    table = read_table(table_of(tmp_path, "\n".join(["file_name;What I said;Remarks", *rows])))
    assert likely_text_column(table) == "What I said"


def test_a_column_that_is_mostly_empty_is_not_taken_for_transcripts(tmp_path: Path) -> None:
    rows = ["a.wav;1;a cough and a door"] + ["a.wav;2;"] * 9
    assert likely_text_column(read_table(table_of(tmp_path, "\n".join(["file_name;Nr;Remarks", *rows])))) == ""


def test_of_two_usual_text_columns_the_choice_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [(path, f"raw {text}", text) for _, path, text in write_clips(tmp_path, 1)]
    write_csv(tmp_path / "train.csv", rows, "file_name,sentence,text")
    assert texts(tmp_path) == ["one"]
    assert "'text' is taken for the transcripts; 'sentence' is there too" in caplog.text


def test_what_holds_single_words_is_not_guessed_among_several(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [(path, "yes", "female") for _, path, _ in write_clips(tmp_path, 1)], "path,a,b")
    with pytest.raises(BadInput, match="no column 'text' or"):
        read_speech(str(tmp_path))


@pytest.mark.parametrize(
    ("cell", "stored"),
    [
        ("a.wav", "clips/a.wav"),
        ("sub/a.wav", "wavs/sub/a.wav"),
        ("A.WAV", "a.wav"),
        ("LJ001.02", "wavs/LJ001.02.wav"),
        ("a", "clips/A.FLAC"),
        ("C:\\Users\\me\\My data\\clips\\a.wav", "clips/a.wav"),
        ("/home/elsewhere/data/clips/a.wav", "clips/a.wav"),
        ("/mnt/d/a.wav", "audio/a.wav"),
        ("my%20file.wav", "my file.wav"),
        ("100%25.wav", "100%25.wav"),
        ("file:///home/elsewhere/my%20clips/a.wav", "my clips/a.wav"),
        ("file:///C%3A/Users/me/clips/a.wav", "clips/a.wav"),
        ("file://clips/a.wav", "clips/a.wav"),
        ("'a.wav' ", "clips/a.wav"),
        ('"D:\\sound\\a.wav"', "a.wav"),
        ("a", "recordings of 2026/A.mp3"),
        ("a.wav", "phone/november/a.wav"),
        ("Größe/a.wav", unicodedata.normalize("NFD", "größe") + "/A.wav"),
    ],
)
def test_where_a_file_lies_that_is_not_there_as_written(tmp_path: Path, cell: str, stored: str) -> None:
    (tmp_path / stored).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / stored).touch()
    assert resolve_path(tmp_path, cell) == tmp_path / stored


def test_a_url_of_a_file_elsewhere_is_an_absolute_path(tmp_path: Path) -> None:
    (name, path, text), *_ = write_clips(tmp_path / "far", 1)
    (tmp_path / "near").mkdir()
    write_csv(tmp_path / "near" / "train.csv", [(name, (tmp_path / "far" / path).as_uri(), text)])
    (clip,) = read_speech(str(tmp_path / "near"))["train"]
    assert clip.audio.path == tmp_path / "far" / path and clip.audio.absolute


def test_a_missing_file_says_how_it_was_looked_for(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [("a", "no%20file.wav", "hello"), ("b", "gone.wav", "there")])
    with pytest.raises(BadInput, match="no%20file.wav is not there, nor in a folder below") as caught:
        read_speech(str(tmp_path))
    assert caught.value.message.endswith("gone.wav is not there")  # said once is enough


def test_of_two_folders_with_the_file_none_is_guessed(tmp_path: Path) -> None:
    for folder in ("first takes", "second takes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.wav").touch()
    assert not resolve_path(tmp_path, "a").exists()


def test_headings_in_another_language_are_known_by_their_cells(tmp_path: Path) -> None:
    (tmp_path / "Aufnahmen 2026").mkdir()
    for _, path, _ in write_clips(tmp_path, 2):
        (tmp_path / path).rename(tmp_path / "Aufnahmen 2026" / Path(path).name)
    table_of(tmp_path, "Nr.;Aufnahme;Gesagt;Sprecher\n1;clip0;ja, gern;ada\n2;clip1;nein, danke;ben\n", "Liste.csv")
    clips = read_speech(str(tmp_path))["train"]
    assert [clip.text for clip in clips] == ["ja, gern", "nein, danke"]
    assert [clip.columns["sprecher"] for clip in clips] == ["ada", "ben"]


def test_of_two_files_that_differ_in_case_none_is_guessed(tmp_path: Path) -> None:
    for name in ("a.wav", "A.wav"):
        (tmp_path / name).touch()
    assert resolve_path(tmp_path, "a.WAV") == tmp_path / "a.WAV"
    assert resolve_path(tmp_path, "../x/a.wav") == tmp_path / "../x/a.wav"


def test_a_file_by_the_end_of_its_path_travels(tmp_path: Path) -> None:
    (name, path, text), *_ = write_clips(tmp_path, 1)
    write_csv(tmp_path / "train.csv", [(name, f"/home/other/{path}", text)])
    (clip,) = read_speech(str(tmp_path))["train"]
    assert clip.audio.path == tmp_path / path and not clip.audio.absolute


def test_silence_is_a_sample_where_its_column_says_so(tmp_path: Path) -> None:
    (name, path, _), *_ = write_clips(tmp_path, 1)
    write_csv(tmp_path / "train.csv", [(name, path, "", "yes")], "id,audio_path,text,silence")
    assert texts(tmp_path) == [""]
    write_csv(tmp_path / "train.csv", [(name, path, "", "no")], "id,audio_path,text,silence")
    with pytest.raises(BadInput, match="column text: empty"):
        read_speech(str(tmp_path))


def test_a_hint_can_be_pasted(tmp_path: Path) -> None:
    table = read_table(table_of(tmp_path, json.dumps({"txt of me": "x"}), "t.jsonl"))
    with pytest.raises(BadInput, match="Give --text-column 'txt of me'"):
        table.column(["txt of ma"], "transcripts", "--text-column")


@pytest.mark.parametrize(
    ("cell", "seconds"),
    [("3.25", 3.25), ("3,25", 3.25), ("7,177", 7.177), ("0:01:02.5", 62.5), ("1:02", 62.0), ("nan", None), ("", None)],
)
def test_seconds_as_people_write_them(tmp_path: Path, cell: str, seconds: float | None) -> None:
    assert read_table(table_of(tmp_path, f"id;duration\na;{cell}\n")).rows[0].number("duration") == seconds


@pytest.mark.parametrize("line", ["clips/a.wav,hello there", "clips/a.wav|hello|hello", "1\ta.flac\thello"])
def test_a_first_line_that_is_a_recording_is_told(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadInput, match="its first line names no columns: .* is of a recording"):
        read_table(table_of(tmp_path, f"{line}\n{line}\n"))


@pytest.mark.parametrize("name", ["train.tsv", "train.jsonl", "train.json"])
def test_a_split_may_be_a_table_of_any_kind(tmp_path: Path, name: str) -> None:
    (_, path, _), *_ = write_clips(tmp_path, 1)
    forms = {".tsv": f"path\tsentence\n{path}\tone\n", ".jsonl": f'{{"path": "{path}", "sentence": "one"}}\n'}
    table_of(tmp_path, forms.get(Path(name).suffix, f'[{{"path": "{path}", "sentence": "one"}}]'), name)
    assert texts(tmp_path) == ["one"]


def test_what_to_do_with_a_folder_without_a_table_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my recordings"
    folder.mkdir()
    table_of(folder, "", "my words.csv")
    table_of(folder, "", "older words.csv")
    with pytest.raises(BadInput) as refused:
        read_speech(str(folder))
    assert f"--dataset '{folder / 'my words.csv'}'" in refused.value.hint
    assert f"prepare '{folder}' --out NEW" in refused.value.hint


def test_milliseconds_are_seen_by_the_first_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [(*row, seconds) for row, seconds in zip(write_clips(tmp_path, 2), ("600", "6000"))]
    write_csv(tmp_path / "train.csv", rows, "id,audio_path,text,duration")
    assert [clip.duration for clip in read_speech(str(tmp_path))["train"]] == [0.6, 6.0]
    assert "column duration is in milliseconds" in caplog.text


def test_a_long_recording_is_not_taken_for_milliseconds(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [(*write_clips(tmp_path, 1)[0], "60")], "id,audio_path,text,duration")
    assert read_speech(str(tmp_path))["train"][0].duration == 60.0


def test_a_forgotten_transcript_is_told_with_what_leaves_it_out(tmp_path: Path) -> None:
    rows = [(path, text) for _, path, text in write_clips(tmp_path, 2)]
    write_csv(tmp_path / "train.csv", [rows[0], (rows[1][0], "")], "file_name,text")
    with pytest.raises(BadInput, match="line 3, column text: empty") as caught:
        read_speech(str(tmp_path))
    assert "mend such lines, or leave them out: " in caught.value.hint
