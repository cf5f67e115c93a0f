"""``pseudo-label``: transcripts by a model, judged, resumed, and mixed with those of people."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import unicodedata
from pathlib import Path

import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from tiny_speech import RATE, WORDS, tone, write_clips, write_csv

from profiles.errors import BadInput
from speech.data.patches import PSEUDO_COLUMNS, PseudoRow, TextBounds, find_recordings, read_rows
from speech.data.speech_dataset import read_speech, read_with_validation
from speech.whisper.cleaning.pseudo_label import LabellingJob, label
from tests.tasks.tiny_tasks import silent

GOOD = PseudoRow("a", Path("/x/a.wav"), "a text", -0.1, 1.0, 1.0, 0.0, 1.0)


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    write_clips(tmp_path, 4)
    (tmp_path / "audio" / "broken.wav").write_text("no sound")
    soundfile.write(tmp_path / "audio" / "long.wav", tone(1, 1.5), RATE)
    return tmp_path


@pytest.mark.slow
def test_texts_are_written_and_judged(trained_whisper: Path, sounds: Path) -> None:
    files = find_recordings(sounds, sounds)
    rows = label(LabellingJob(trained_whisper / "model", None, batch_size=4), files, sounds / "pseudo.csv", silent)
    assert [row.id for row in rows] == [name for name, _ in files]
    found = {Path(row.id).stem: row for row in rows}
    assert [found[f"clip{i}"].text for i in range(4)] == list(WORDS)
    assert all(-0.5 < found[f"clip{i}"].confidence <= 0 for i in range(4))
    assert found["broken"].left_out.startswith("not a readable sound file")
    assert found["long"].left_out == "longer than the model's window of 1 s"
    assert [dataclasses.replace(row, left_out="") for row in read_rows(sounds / "pseudo.csv")] == [
        dataclasses.replace(
            row,
            left_out="",
            kind="",
            confidence=pytest.approx(row.confidence, abs=1e-4),
            agreement=pytest.approx(row.agreement, abs=1e-4),
            compression=pytest.approx(row.compression, abs=1e-4),
            no_speech=pytest.approx(row.no_speech, abs=1e-4),
        )
        for row in rows
    ]
    kept = read_speech(str(sounds / "pseudo.csv"))["train"]
    assert {clip.id for clip in kept} == {row.id for row in rows if not row.left_out}


@pytest.mark.slow
def test_recordings_with_decomposed_names_are_known_again_and_found(trained_whisper: Path, sounds: Path) -> None:
    (sounds / "audio" / "clip0.wav").rename(sounds / "audio" / unicodedata.normalize("NFD", "größe.wav"))
    table, files = sounds / "pseudo.csv", find_recordings(sounds, sounds)
    job = LabellingJob(trained_whisper / "model", trained_whisper / "model")
    label(job, files, table, silent)
    assert {row.id for row in read_rows(table)} == {name for name, _ in files}
    assert all(row.path.is_file() for row in read_rows(table))


@pytest.mark.slow
def test_a_second_call_goes_on_and_judges_anew(trained_whisper: Path, sounds: Path) -> None:
    table, files = sounds / "pseudo.csv", find_recordings(sounds, sounds)
    job = LabellingJob(trained_whisper / "model", trained_whisper / "model")
    label(job, files[:3], table, silent)
    with table.open("r+") as file:
        content = file.read().replace(",one,", ",corrected by hand,")
        file.seek(0)
        file.write(content + "audio/clip3.wav,torn")
    strict = dataclasses.replace(job, bounds=TextBounds(confidence=0.0))
    rows = label(strict, files, table, silent)
    assert [row.id for row in rows] == [name for name, _ in files]
    assert "corrected by hand" in [row.text for row in rows]
    assert all(row.left_out for row in rows)
    heard = {row.heard_by for row in label(LabellingJob(trained_whisper / "model", None), files, table, silent)}
    assert len(heard) == 1
    assert "corrected by hand" not in table.read_text()


@pytest.mark.slow
def test_a_model_that_cannot_be_read_costs_no_line(trained_whisper: Path, sounds: Path, tmp_path: Path) -> None:
    table, files = sounds / "pseudo.csv", find_recordings(sounds, sounds)
    label(LabellingJob(trained_whisper / "model", trained_whisper / "model"), files, table, silent)
    before = table.read_bytes()
    broken = Path(shutil.copytree(trained_whisper / "model", tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"torn")
    for models in ((broken, None), (trained_whisper / "model", broken)):
        with pytest.raises(BadInput, match="broken cannot be read"):
            label(LabellingJob(*models), files, table, silent)
    assert table.read_bytes() == before


@pytest.mark.slow
def test_recordings_of_another_folder_are_added(
    trained_whisper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, more, same = Path("data"), Path("more"), Path("same")
    write_clips(data, 2)
    for folder, name in ((more, "other.wav"), (same, "other.wav")):
        (folder / "audio").mkdir(parents=True)
        shutil.copy(data / "audio" / "clip1.wav", folder / "audio" / name)
    job = LabellingJob(trained_whisper / "model", trained_whisper / "model")
    label(job, find_recordings(data, data), data / "pseudo.csv", silent)
    assert ",audio/clip0.wav," in (data / "pseudo.csv").read_text()  # a data set can be moved
    label(job, find_recordings(more, data), data / "pseudo.csv", silent)
    assert {row.id: row.path.name for row in read_rows(data / "pseudo.csv")} == {
        "audio/clip0.wav": "clip0.wav", "audio/clip1.wav": "clip1.wav", "audio/other.wav": "other.wav",
    }  # fmt: skip
    with pytest.raises(BadInput, match=r"audio/other\.wav is another recording there"):
        label(job, find_recordings(same, data), data / "pseudo.csv", silent)
    shutil.rmtree(more)
    label(job, find_recordings(same, data), data / "pseudo.csv", silent)
    assert [row.path.is_file() for row in read_rows(data / "pseudo.csv")] == [True] * 3


@pytest.mark.slow
def test_another_language_is_listened_for_again(trained_whisper: Path, sounds: Path) -> None:
    table, files = sounds / "pseudo.csv", find_recordings(sounds, sounds)
    job = LabellingJob(trained_whisper / "model", trained_whisper / "model")
    (heard,) = {row.heard_by for row in label(job, files, table, silent)}
    (again,) = {row.heard_by for row in label(dataclasses.replace(job, language="english"), files, table, silent)}
    assert heard != again


def test_a_folder_in_place_of_the_table_is_said(tmp_path: Path) -> None:
    (tmp_path / "pseudo.csv").mkdir()
    with pytest.raises(BadInput, match=r"pseudo\.csv: Is a directory"):
        list(read_rows(tmp_path / "pseudo.csv"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"text": ""}, "nothing was heard"),
        ({"cut": True}, "no end"),
        ({"no_speech": 0.7}, "no-speech probability 0.70 above 0.6"),
        ({"compression": 3.0}, "compression ratio 3.00 above 2.4"),
        ({"confidence": -1.2}, "confidence -1.20 below -1"),
        ({"agreement": 0.5}, "agreement 0.50 below 0.9"),
    ],
)
def test_reasons(change: dict[str, object], said: str) -> None:
    reason = TextBounds().judge(dataclasses.replace(GOOD, **change)).left_out
    assert said in reason
    assert bool(said) == bool(reason)


def test_reasons_are_counted_by_measure_and_bound() -> None:
    rows = [TextBounds().judge(dataclasses.replace(GOOD, agreement=figure)) for figure in (0.5, 0.75)]
    assert [row.kind for row in rows] == ["agreement below 0.9"] * 2
    assert TextBounds().judge(dataclasses.replace(GOOD, unusable="not a sound file")).kind == "not a sound file"
    assert TextBounds().judge(TextBounds().judge(GOOD)).kind == ""


@pytest.mark.parametrize("content", ["id,audio_path,text\na,b,c", "id,audio_path,text\na,b,c\n", "anything"])
def test_a_table_of_somebody_else_is_not_touched(tmp_path: Path, content: str) -> None:
    table = tmp_path / "pseudo.csv"
    table.write_text(content)
    with pytest.raises(BadInput, match="not written by 'data pseudo-label'"):
        list(read_rows(table))


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)), st.booleans())
def test_no_table_ends_in_a_traceback(content: bytes, ours: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        table = Path(name, "pseudo.csv")
        table.write_bytes((",".join(PSEUDO_COLUMNS).encode() + b"\n") * ours + content)
        try:
            list(read_rows(table))
        except BadInput as error:
            said = error.message
        else:
            said = "pseudo.csv"
        assert "pseudo.csv" in said


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A data set of 8 clips, and 8 further recordings that a model has labelled."""
    data = tmp_path / "data"
    rows = write_clips(data, 16)
    write_csv(data / "train.csv", rows[:8])
    write_csv(data / "test.csv", rows[14:])
    pseudo = [(*row, "yes") for row in rows[7:15]] + [("out", "audio/clip15.wav", "x", "no")]
    write_csv(data / "pseudo.csv", [*pseudo, ("clip0", "audio/clip9.wav", "never", "yes")], "id,audio_path,text,kept")
    return data


def test_the_share_bounds_what_is_mixed_in(mixed: Path) -> None:
    plain, half, all_of_it = (read_with_validation(str(mixed), "", share) for share in (0.0, 0.3, 1.0))
    assert half["validation"] == all_of_it["validation"] == plain["validation"]
    assert half["train"][:7] == all_of_it["train"][:7] == plain["train"]
    assert len(plain["train"]) == 7
    assert len(half["train"]) == 10  # 3 of 10
    assert {clip.id for clip in all_of_it["train"][7:]} == {f"clip{number}" for number in range(8, 14)}


def test_a_clip_that_was_left_out_does_not_come_back(mixed: Path) -> None:
    write_csv(mixed / "test.csv", [("other", "audio/clip15.wav", "x")])
    patch = mixed / "patches" / "delete" / "mine.csv"
    patch.parent.mkdir(parents=True)
    patch.write_text("id\nclip7\nclip8\n")
    found = {clip.id for clip in read_with_validation(str(mixed), "", 1.0)["train"]}
    assert not {"clip7", "clip8"} & found
    assert "clip9" in found


def test_without_the_file_there_is_nothing_to_mix(mixed: Path) -> None:
    (mixed / "pseudo.csv").unlink()
    with pytest.raises(BadInput, match="no pseudo.csv"):
        read_with_validation(str(mixed), "", 0.5)
    assert len(read_with_validation(str(mixed))["train"]) == 7
