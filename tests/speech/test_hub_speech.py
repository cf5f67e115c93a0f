"""Speech data sets of the hub, as ``datasets`` gives them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import pytest
import soundfile
from tiny_speech import RATE, Prepared, tone, write_clips

from profiles.errors import BadInput
from speech.data import hub_speech
from speech.data.speech_dataset import read_speech
from training.tasks.text import texts


def sound(word: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(word), RATE, format="FLAC")
    return buffer.getvalue()


def hub_data(count: int, **columns: list[Any]) -> datasets.Dataset:
    audio = [{"bytes": sound(index), "path": None} for index in range(count)]
    return datasets.Dataset.from_dict({"audio": audio, **columns}).cast_column("audio", datasets.Audio())


@pytest.fixture
def on_the_hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the hub has, by split."""
    there: dict[str, Any] = {}
    monkeypatch.setattr(hub_speech.datasets, "load_dataset", lambda path, name: there)
    return there


def test_clips_are_read_without_decoding(on_the_hub: dict[str, Any]) -> None:
    on_the_hub["train"] = hub_data(2, sentence=["one", "two"], language=["en", "de"])
    on_the_hub["dev"] = hub_data(1, sentence=["three"], language=["en"])
    splits = read_speech("somebody/speech:en")
    assert [(clip.text, clip.language) for clip in splits["train"]] == [("one", "en"), ("two", "de")]
    assert splits["validation"][0].audio.read() == sound(0)


def data_of_file(path: Path) -> datasets.Dataset:
    rows = datasets.Dataset.from_dict({"audio": [str(path)], "text": ["x"]})
    return rows.cast_column("audio", datasets.Audio())


def test_files_in_the_cache_that_a_data_set_points_to(
    on_the_hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_speech.datasets.config, "HF_DATASETS_CACHE", tmp_path)
    path = tmp_path / write_clips(tmp_path, 1)[0][1]
    on_the_hub["train"] = data_of_file(path)
    assert read_speech("somebody/speech")["train"][0].audio.read() == path.read_bytes()


@pytest.mark.parametrize("way", ["{outside}", "{cache}/../mine/audio/clip0.wav", "{cache}/link.wav"])
def test_files_elsewhere_on_this_machine_are_not_read(
    on_the_hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(hub_speech.datasets.config, "HF_DATASETS_CACHE", cache)
    outside = tmp_path / "mine" / write_clips(tmp_path / "mine", 1)[0][1]
    (cache / "link.wav").symlink_to(outside)
    on_the_hub["train"] = data_of_file(Path(way.format(outside=outside, cache=cache)))
    with pytest.raises(OSError, match="outside its cache, which is not read"):
        read_speech("somebody/speech")["train"][0].audio.read()


def test_rows_without_text_are_left_out(on_the_hub: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    on_the_hub["train"] = hub_data(3, text=["one", "", None])
    assert len(read_speech("somebody/speech")["train"]) == 1
    assert "left out 2 rows without a text" in caplog.text


def test_a_task_takes_them(on_the_hub: dict[str, Any], prepared: Prepared) -> None:
    on_the_hub["train"] = hub_data(4, text=["one", "two", "three", "four"])
    task = prepared(dataset_path="somebody/speech")
    assert len(task.train) + len(task.evaluation["validation"]) == 4


def test_missing_columns(on_the_hub: dict[str, Any]) -> None:
    on_the_hub["train"] = hub_data(1, words=["one"])
    with pytest.raises(BadInput, match="no column 'text' or .* it has: audio, words"):
        read_speech("somebody/speech")
    on_the_hub["train"] = datasets.Dataset.from_dict({"text": ["one"]})
    with pytest.raises(BadInput, match="no audio column; it has: text"):
        read_speech("somebody/speech")


def test_no_known_split(on_the_hub: dict[str, Any]) -> None:
    on_the_hub["other"] = hub_data(1, text=["one"])
    with pytest.raises(BadInput, match="it has: other"):
        read_speech("somebody/speech")


@pytest.mark.usefixtures("no_hub")
def test_data_set_that_is_not_there() -> None:
    with pytest.raises(BadInput, match="data set nobody/nothing: no such folder, and not from the hub"):
        read_speech("nobody/nothing")


def test_texts_of_the_hub(on_the_hub: dict[str, Any]) -> None:
    on_the_hub["train"] = datasets.Dataset.from_dict({"text": ["one", "", "two"]})
    assert texts.read_texts("somebody/text") == {"train": ["one", "two"]}
    with pytest.raises(BadInput, match="no column 'body'; it has: text"):
        texts.read_texts("somebody/text", "body")
