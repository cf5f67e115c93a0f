"""Predictions in a file and back, and error rates of parts of them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from profiles.errors import BadInput
from speech.scoring.error_analysis import Confusion, by_length, by_noise, by_speaker, confusions, worst_clips
from training.tasks.outputs.predictions import Prediction, read_predictions, write_predictions


def made(name: str, said: str, heard: str, edits: int, **more: object) -> Prediction:
    words = len(said.split())
    return Prediction(name, f"{name}.wav", said, heard, said, heard, edits, words, edits, len(said), **more)


FOUND = [
    made("a", "open the door", "open the store", 1, speaker="ann", duration=1.5, noise="20", columns={"room": "hall"}),
    made("b", "yes", "", 1, speaker="bob", duration=0.5, noise="5", cut=True),
    made("c", 'no, "no"', 'no, "no"', 0, speaker="ann", duration=45.0, noise="20"),
    made("d", "light", "the light", 1, speaker="ann"),
]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "predictions.csv"
    write_predictions(path, FOUND)
    assert path.read_text().splitlines()[0].startswith("id,audio,speaker,language,duration,noise,reference,prediction")
    found = read_predictions(path)
    assert [one.columns for one in found] == [{"room": "hall"}, {"room": ""}, {"room": ""}, {"room": ""}]
    for one, wanted in zip(found, FOUND, strict=True):
        assert {**vars(one), "columns": {}} == {**vars(wanted), "columns": {}}


STRANGE = [
    "a,b",
    "a\nb",
    "a\rb",
    "a\r\nb",
    "=1+1",
    "@SUM(A1)",
    "-1",
    "\t=1",
    "'=1",
    "'tis",
    '"q"',
    "a\x00b",
    "a\u2028b",
]


def test_no_text_breaks_the_file_or_is_a_formula(tmp_path: Path) -> None:
    path = tmp_path / "predictions.csv"
    wanted = [made(f"{n}", text, text, 0, columns={"=c": text}) for n, text in enumerate(STRANGE)]
    write_predictions(path, wanted)
    found = read_predictions(path)
    assert [(one.reference, one.prediction, one.columns) for one in found] == [
        (text, text, {"=c": text}) for text in STRANGE
    ]
    with path.open(newline="") as file:
        assert not [cell for row in csv.reader(file) for cell in row if cell.startswith(("=", "@", "-", "\t"))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("id,audio", "name,audio"), "no column 'id'"),
        (("b,b.wav", "a,b.wav"), "an id is there twice"),
        ((",1,5,0", ",-1,5,0"), "is not a count"),
    ],
)
def test_a_file_that_somebody_changed_is_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "predictions.csv"
    write_predictions(path, FOUND)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(BadInput, match=message):
        read_predictions(path)


def test_error_rates_of_parts() -> None:
    speakers = {part.name: part.wer for part in by_speaker(FOUND)}
    assert list(speakers.items()) == [("bob", 1.0), ("ann", pytest.approx(2 / 6))]
    assert [(part.name, part.edits) for part in by_length(FOUND)] == [
        ("under 1 s", 1),
        ("1 to 2 s", 1),
        ("30 s and more", 0),
    ]
    assert [(part.name, part.recordings) for part in by_noise(FOUND)] == [("", 1), ("5", 1), ("20", 2)]
    assert by_speaker([made("a", "x", "x", 0)]) == by_noise([made("a", "x", "x", 0)]) == []


def test_many_levels_of_noise_are_put_into_ranges() -> None:
    levels = [made(str(level), "x", "y", 1, noise=f"{level / 2} dB") for level in range(4, 44, 4)]
    parts = [(part.name, part.recordings) for part in by_noise(levels)]
    assert parts == [("0 to 5 dB", 2), ("5 to 10 dB", 2), ("10 to 15 dB", 3), ("15 to 20 dB", 2), ("20 to 30 dB", 1)]


def test_the_worst_and_what_is_taken_for_what() -> None:
    assert [one.id for one in worst_clips(FOUND)] == ["b", "d", "a"]
    again = made("e", "door", "store", 1)
    assert confusions([*FOUND, again]) == [
        Confusion("door", "store", 2),
        Confusion("", "the", 1),
        Confusion("yes", "", 1),
    ]
