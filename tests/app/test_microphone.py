"""A microphone that is not real: each of its faults is one plain line, and what it records is a file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from profiles.errors import BadInput
from speech import microphone
from speech.microphone import RATE, hear_microphone, recorded

Capture = pytest.CaptureFixture[str]


class PortAudioError(Exception):
    pass


class FakeStream:
    def __init__(self, samplerate: int, channels: int, dtype: str) -> None:
        self.channels = channels

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def read(self, frames: int) -> Any:
        return np.full((frames, self.channels), 0.5, np.float32), False


def library(rates: tuple[int, ...] = (RATE,), counts: tuple[int, ...] = (1,), **parts: Any) -> SimpleNamespace:
    """Return a sounddevice whose only device has these rates and counts of channels."""

    def check(samplerate: int, channels: int, dtype: str) -> None:
        if samplerate not in rates or channels not in counts:
            raise PortAudioError("Invalid sample rate [PaErrorCode -9997]")

    def stream(samplerate: int, channels: int, dtype: str) -> FakeStream:
        check(samplerate, channels, dtype)
        return FakeStream(samplerate, channels, dtype)

    device = {"name": "Headset", "default_samplerate": float(rates[-1]), "max_input_channels": counts[-1]}
    usual = {"query_devices": lambda kind: device, "check_input_settings": check, "InputStream": stream}
    return SimpleNamespace(**{"PortAudioError": PortAudioError, **usual, **parts})


def raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def use(monkeypatch: pytest.MonkeyPatch, fake: SimpleNamespace) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", fake)


def zeros(seconds: float) -> tuple[Any, int]:
    return np.zeros(round(seconds * RATE), np.float32), RATE


@pytest.mark.parametrize(
    ("rates", "channels", "rate"),
    [((RATE, 48_000), (1, 2), RATE), ((44_100,), (1,), 44_100), ((RATE,), (2,), RATE), ((44_100,), (2,), 44_100)],
)
def test_a_device_is_recorded_in_a_format_that_it_has(
    rates: tuple[int, ...], channels: tuple[int, ...], rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, library(rates, channels))
    with recorded(0.5) as path:
        samples, written = soundfile.read(path)
    assert (samples.shape, written) == ((rate // 2,), rate)
    assert samples == pytest.approx(0.5, abs=1e-3)
    assert not path.exists()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"query_devices": raising(PortAudioError("Error querying device -1"))}, "this computer has no microphone"),
        ({"query_devices": raising(ValueError("Not an input device"))}, "this computer has no microphone"),
        (
            {"InputStream": raising(PortAudioError("Error opening: Device unavailable [PaErrorCode -9985]"))},
            "the microphone Headset cannot be used: Error opening: Device unavailable",
        ),
        (
            {"check_input_settings": raising(PortAudioError("Invalid device")), "InputStream": raising(PortAudioError)},
            "the microphone Headset cannot be used: ",
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_told_in_plain_words(
    parts: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, library(**parts))
    with pytest.raises(BadInput) as refused:
        hear_microphone(0.3)
    assert refused.value.message == message
    assert "a sound file" in refused.value.hint


@pytest.mark.parametrize(("platform", "where"), [("linux", "switch it on"), ("darwin", "Privacy & Security")])
def test_silence_is_no_recording(platform: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(BadInput, match="the microphone recorded only silence") as refused, recorded(0.5, zeros):
        pass
    assert where in refused.value.hint


def test_the_time_that_is_left_can_be_read_while_one_speaks(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    use(monkeypatch, library())
    hear_microphone(12)
    lines = [line.split("] ")[-1] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"speak now: {left} s left" for left in (12, 10, 5, 4, 3, 2, 1)]


def test_without_a_microphone_a_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.setattr(microphone, "_may_have_microphone", lambda: True)
    for error, words in (("ImportError", "sounddevice is not installed"), ("OSError", "PortAudio")):
        (tmp_path / "sounddevice.py").write_text(f"raise {error}")
        with pytest.raises(BadInput, match=words), recorded(1.0):
            pass
    for seconds, words in ((1.0, "nothing was recorded"), (1e9, "cannot be recorded")):
        with pytest.raises(BadInput, match=words), recorded(seconds, lambda _: zeros(0)):
            pass


@pytest.mark.parametrize(
    ("device", "is_possible"),
    [("dev/snd/pcmC0D0p", False), ("dev/snd/pcmC0D0c", True), ("run/user/1000/pulse/native", True)],
)
def test_nobody_installs_a_package_for_a_microphone_that_is_not_there(
    device: str, is_possible: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / device).mkdir(parents=True)
    monkeypatch.setattr(sys, "platform", "linux")
    assert microphone._may_have_microphone(tmp_path) is is_possible
    monkeypatch.setattr(microphone, "_may_have_microphone", lambda: is_possible)
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    expected = "sounddevice is not installed" if is_possible else "this computer has no microphone"
    with pytest.raises(BadInput, match=expected) as refused, recorded(1.0):
        pass
    assert is_possible or "pip" not in refused.value.hint
