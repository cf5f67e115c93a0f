"""``patches``: what a person is shown of the changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def data() -> Path:
    folder = Path("data")
    (folder / "patches" / "delete").mkdir(parents=True)
    (folder / "patches" / "override_text").mkdir()
    (folder / "x.wav").write_bytes(b"")
    (folder / "train.csv").write_text("id,audio_path,text\na,x.wav,one\nb,x.wav,two\n")
    (folder / "patches" / "delete" / "mine.csv").write_text("id\na\nc\n")
    (folder / "patches" / "override_text" / "mine.csv").write_text("id,text\nb,\x1b[31mred\n")
    return folder


def test_changes_with_their_origin(data: Path, capsys: Capture) -> None:
    assert main(["patches", str(data), "--origin"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "train a  delete: 'one' -> '(left out)'  (data/patches/delete/mine.csv, line 2)",
        "train b  override_text: 'two' -> '[31mred'  (data/patches/override_text/mine.csv, line 2)",
    ]
    assert "note: data/patches/delete/mine.csv, line 3: no sample 'c'" in err
    assert "train: 1 of 2 samples" in err


def test_changes_as_json(data: Path, capsys: Capture) -> None:
    assert main(["patches", str(data), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["samples"] == {"train": 1}
    assert document["changes"][0]["where"] == "data/patches/delete/mine.csv, line 2"


def test_a_conflict_is_bad_input(data: Path, capsys: Capture) -> None:
    (data / "patches" / "override_text" / "other.csv").write_text("id,text\nb,blue\n")
    assert main(["patches", str(data)]) == 2
    assert "other.csv, line 2: another text for 'b'" in capsys.readouterr().err


def test_a_name_of_the_hub_has_no_patches(capsys: Capture) -> None:
    assert main(["patches", "owner/name"]) == 2
    assert "patches belong to a data set in a folder" in capsys.readouterr().err
