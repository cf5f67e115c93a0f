"""Tables of texts and conversations: their kinds, where an error is, and that cells stay as they are written."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.locations import is_on_hub
from training.tasks.text.conversations import conversation_files, read_conversations
from training.tasks.text.row_files import row_files, rows_of
from training.tasks.text.texts import read_texts
from training.workers.data_findings import findings

ROWS = [{"prompt": f"say {number}", "response": f"    {number}\n"} for number in range(3)]


def lines(path: Path) -> None:
    path.write_text("\n".join(map(json.dumps, ROWS)))


def array(path: Path) -> None:
    path.write_text("\ufeff" + json.dumps(ROWS, indent=2), encoding="utf-8")


def delimited(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([["", "prompt", "response"], *([n, *row.values()] for n, row in enumerate(ROWS))])


def parquet(path: Path) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), path)


def arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.json", array),
        ("rows.JSON", lines),
        ("rows.jsonl", lines),
        ("rows.jsonl", array),
        ("rows.ndjson", lines),
        ("rows.csv", delimited),
        ("rows.tsv", delimited),
        ("rows.parquet", parquet),
        ("rows.arrow", arrow_file),
        ("rows.arrow", arrow_stream),
    ],
)
def test_every_kind_of_file_gives_the_same_responses(tmp_path: Path, name: str, write: Any) -> None:
    write(tmp_path / name)
    splits = read_conversations(conversation_files(str(tmp_path / name)))
    responses = sorted(talk.messages[-1]["content"] for talks in splits.values() for talk in talks)
    assert responses == ["    0\n", "    1\n", "    2\n"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[", "line 1: not JSON"),
        ('[{"prompt": "a"},\n{"prompt": }]', "line 2: not JSON"),
        ("[3]", "row 1: not a JSON object"),
        ("[]", "the file is empty"),
        ('{"prompt": "a"}\n3', "line 2: not a JSON object"),
        ('{\n"data": [{"prompt": "a"}]}', "neither text, nor messages nor"),
    ],
)
def test_json_that_holds_no_rows_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(BadInput, match=reason):
        read_conversations(conversation_files(str(file)))


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("no")
    with pytest.raises(BadInput, match="rows.parquet: cannot be read"):
        list(rows_of(tmp_path / "rows.parquet"))


def test_all_rows_that_cannot_be_used_are_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "response": "b" if number < 2 else ""} for number in range(9)]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(BadInput) as caught:
        read_conversations({"train": [file]})
    assert caught.value.message == (
        f"{file}, line 3, column response: empty; 7 of 9 rows cannot be used, also line 4, line 5, line 6, line 7, "
        "line 8, and 1 more"
    )


def test_the_tables_of_a_folder(tmp_path: Path) -> None:
    array(tmp_path / "dataset_info.json")
    array(tmp_path / "answers.json")
    assert row_files(str(tmp_path)) == {"train": [tmp_path / "answers.json"]}
    lines(tmp_path / "more.jsonl")
    with pytest.raises(BadInput, match="which table is meant.*answers.json, more.jsonl"):
        row_files(str(tmp_path))
    lines(tmp_path / "train.jsonl")
    lines(tmp_path / "val.jsonl")
    assert row_files(str(tmp_path)) == {"train": [tmp_path / "train.jsonl"], "validation": [tmp_path / "val.jsonl"]}
    delimited(tmp_path / "train.csv")
    with pytest.raises(BadInput, match="which table is meant"):
        row_files(str(tmp_path))


@pytest.mark.parametrize("folder", ["", "data"])
def test_parts_of_a_table_are_one(tmp_path: Path, folder: str) -> None:
    (tmp_path / "README.md").touch()
    (tmp_path / folder).mkdir(exist_ok=True)
    parts = [tmp_path / folder / f"train-0000{number}-of-00002.parquet" for number in range(2)]
    test = tmp_path / folder / "test-00000-of-00001.parquet"
    for path in (*parts, test):
        parquet(path)
    assert row_files(str(tmp_path)) == {"train": parts, "test": [test]}
    assert len(read_conversations(row_files(str(tmp_path)), hold_out=False)["train"]) == 6
    assert len(read_texts(str(tmp_path), "prompt")["train"]) == 6
    parts[0].unlink()
    with pytest.raises(BadInput, match="of the 2 parts of a table only train-00001-of-00002.parquet"):
        row_files(str(tmp_path))


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.csv", "train.txt"])
def test_a_file_that_git_has_not_fetched_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(BadInput, match=f"{name}: a Git LFS pointer instead of the file .*git lfs pull"):
        read_texts(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.pdf", b"%PDF-1.4\nplain letters", "a PDF, not text"),
        ("a.rtf", b"{\\rtf1\\ansi plain letters}", "a document with formatting .* plain text"),
        ("a.xlsx", b"PK\3\4\x14\0", "an archive or an office document"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}', mtime=0), "compressed, not text .*gunzip"),
        ("a.csv", gzip.compress(b"prompt,response", mtime=0), "compressed, not text .*gunzip"),
    ],
)
def test_a_file_of_another_kind_is_not_learnt(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=f"{name}: {reason}"):
        read_texts(str(tmp_path / name))


def test_rows_of_a_text_are_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rows.json"
    file.write_text(
        json.dumps([{"text": "    Once", "id": 1}, {"text": ""}, {"text": None}, {"text": "upon", "label": "tale"}])
    )
    assert conversation_files(str(file)) == {}
    assert read_texts(str(file)) == {"train": ["    Once", "upon"]}
    assert "left out 2 rows without a text" in caplog.text
    assert "only column text is learnt, and not label\n" in caplog.text


def test_another_column_may_be_the_text(tmp_path: Path) -> None:
    array(tmp_path / "train.json")
    assert conversation_files(str(tmp_path), "prompt") == {}
    assert read_texts(str(tmp_path), "prompt") == {"train": ["say 0", "say 1", "say 2"]}
    with pytest.raises(BadInput, match="row 1: no column 'story'; it has: prompt, response"):
        read_texts(str(tmp_path), "story")


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")), min_size=2, max_size=2))
def test_cells_of_csv_stay_as_they_are_written(tmp_path_factory: pytest.TempPathFactory, cells: list[str]) -> None:
    file = tmp_path_factory.mktemp("csv") / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["prompt", "response"], cells])
    if "".join(cells).strip():
        assert [dict(row) for row, _ in rows_of(file)] == [dict(zip(("prompt", "response"), cells))]


@pytest.mark.parametrize("name", ["answers.json", "answers.jsonl", "answers.PARQUET", "answers.csv"])
def test_a_file_that_is_missing_is_none_of_the_hub(name: str) -> None:
    assert not is_on_hub(name)


def test_what_a_data_set_holds_is_counted_in_conversations(tmp_path: Path) -> None:
    array(tmp_path / "rows.json")
    options = {"task": "causal_lm", "model_path": "owner/name", "dataset_path": str(tmp_path / "rows.json")}
    assert findings(profile_from_options("p", options)) == {
        "splits": {"train": 2, "validation": 1},
        "unit": "conversations",
    }
