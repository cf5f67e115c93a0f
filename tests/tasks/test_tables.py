"""Tables from spreadsheets: what is read, and what an error says."""

from __future__ import annotations

import contextlib
import csv
import io
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiles.errors import BadInput
from training.tasks.data_files.tables import read_table


def table_of(folder: Path, data: str | bytes, name: str = "train.csv") -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_bom_crlf_and_quoted_commas(tmp_path: Path) -> None:
    table = read_table(table_of(tmp_path, b'\xef\xbb\xbfid,text\r\na,"one, two"\r\n\r\nb,"say ""hi"""\r\n'))
    assert [row.cells["text"] for row in table.rows] == ["one, two", 'say "hi"']
    assert [row.line for row in table.rows] == [2, 4]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiter_is_found(tmp_path: Path, delimiter: str) -> None:
    table = read_table(table_of(tmp_path, delimiter.join(["id", "text"]) + "\n" + delimiter.join(["a", "b c"]) + "\n"))
    assert table.rows[0].cells == {"id": "a", "text": "b c"}


def test_text_is_composed(tmp_path: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "Größe")
    assert read_table(table_of(tmp_path, f"text\n{decomposed}\n")).rows[0].cells["text"] == "Größe"


cell = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1).map(str.strip).filter(bool)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.lists(st.tuples(cell, cell), min_size=1), st.sampled_from([",", ";", "\t"]))
def test_what_a_spreadsheet_writes_is_read(tmp_path: Path, rows: list[tuple[str, str]], delimiter: str) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=delimiter)
    writer.writerow(["id", "text"])
    writer.writerows(rows)
    read = read_table(table_of(tmp_path, buffer.getvalue())).rows
    expected = [tuple(unicodedata.normalize("NFC", text).strip() for text in row) for row in rows]
    assert [(row.cells["id"], row.cells["text"]) for row in read] == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["t.csv", "t.jsonl"]))
def test_any_bytes_give_a_table_or_bad_input(tmp_path: Path, data: bytes, name: str) -> None:
    path = table_of(tmp_path, data, name)
    with contextlib.suppress(BadInput):
        assert read_table(path).rows


def test_json_lines(tmp_path: Path) -> None:
    path = table_of(
        tmp_path, '{"file_name": "a.wav", "text": "x"}\n\n{"file_name": "b.wav", "text": null}\n', "m.jsonl"
    )
    table = read_table(path)
    assert table.columns == ("file_name", "text")
    assert table.rows[1].cells["text"] == ""
    assert table.rows[1].line == 3


def test_half_a_character_of_json_becomes_one_that_can_be_written(tmp_path: Path) -> None:
    (row,) = read_table(table_of(tmp_path, '{"text": "a\\ud800b"}', "m.ndjson")).rows
    assert row.cells["text"] == "a?b"


def test_where_nothing_is_quoted_a_quotation_mark_is_text(tmp_path: Path) -> None:
    (row,) = read_table(table_of(tmp_path, 'id\ttext\na\t"Yes, he said\n', "t.tsv"), quoted=False).rows
    assert row.cells["text"] == '"Yes, he said'


@pytest.mark.parametrize(
    ("data", "name", "said"),
    [
        ("", "train.csv", "the table is empty"),
        ("id,text\n", "train.csv", "the table is empty"),
        ("id,id\n1,2\n", "train.csv", "column 'id' is there twice"),
        ("id,text\na,one, two\n", "train.csv", "train.csv, line 2: 3 fields, but the first line names 2 columns"),
        ('id,text\na,b\nc,"never closed\n', "train.csv", "train.csv, line 3: unexpected end of data"),
        (b"id,text\na,b\nc,\xe4\n", "train.csv", "train.csv, line 3: not UTF-8"),
        ('{"a": 1}\n{oops\n', "m.jsonl", "m.jsonl, line 2: not JSON"),
        ("[1]\n", "m.jsonl", "m.jsonl, line 1: not a JSON object"),
        ('{"a": ' + "1" * 5000 + "}", "m.jsonl", "m.jsonl, line 1: not JSON"),
        ('{"a": ' + "[" * 200_000, "m.jsonl", "m.jsonl, line 1: not JSON"),
    ],
)
def test_faults_are_named(tmp_path: Path, data: str | bytes, name: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_table(table_of(tmp_path, data, name))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_table(tmp_path / "train.csv")


def test_missing_column_lists_what_is_there(tmp_path: Path) -> None:
    table = read_table(table_of(tmp_path, "id,audiopath,text\n1,2,3\n"))
    with pytest.raises(BadInput, match="it has: id, audiopath, text.*'audiopath'. Rename it to 'audio_path' there"):
        table.column(["audio_path"], "recordings")
    with pytest.raises(BadInput, match="did you mean 'text'. Set text_column = text"):
        table.column(["txt"], "transcripts", "text_column")


def test_a_renamed_column_is_known_and_shown_as_the_file_spells_it(tmp_path: Path) -> None:
    table = read_table(table_of(tmp_path, "Id,Sentence\n1,2\n")).with_spelling(["id", "sentence"])
    assert table.columns == ("id", "sentence") and table.column(["Sentence"], "transcripts") == "sentence"
    with pytest.raises(BadInput, match="it has: Id, Sentence .did you mean 'Sentence'. Set text_column = Sentence"):
        table.column(["Sentences"], "transcripts", "text_column")


@pytest.mark.parametrize("value", ["three", "-1", "1:2:3:4", "inf", "1,5,5", "-1:30", "1:-2"])
def test_text_in_a_number_field(tmp_path: Path, value: str) -> None:
    row = read_table(table_of(tmp_path, f'id,duration\na,"{value}"\n')).rows[0]
    with pytest.raises(BadInput, match=r"train.csv, line 2, column duration: .* is not a number of seconds"):
        row.number("duration")
