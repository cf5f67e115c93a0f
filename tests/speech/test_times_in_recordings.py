"""Sound lies where a film or a browser's recording has it: what was not sent is silence, and moves nothing after it."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from sound_kinds import RATE, film, voice, write

from speech.data.audio import SoundStream, decode, duration_of, stream

SECONDS = 6.0
PAUSE = (2.0, 4.0)
_KINDS = {"webm": "webm", "aac.m4a": "mp4"}


def remuxed(source: Path, target: Path, form: str, late: float = 0.0, pause: tuple[float, float] = (0.0, 0.0)) -> Path:
    """Copy the tracks of a file, its sound ``late`` by so many seconds and without what lies in ``pause``."""
    with av.open(str(source)) as old, av.open(str(target), "w", format=form) as new:
        tracks = {track.index: new.add_stream_from_template(track) for track in old.streams}
        for packet in old.demux():
            if packet.dts is None or packet.pts is None or packet.time_base is None:
                continue
            is_sound = packet.stream.type == "audio"
            if is_sound and pause[0] <= packet.pts * packet.time_base < pause[1]:
                continue
            packet.dts += round(late / packet.time_base) * is_sound
            packet.pts += round(late / packet.time_base) * is_sound
            packet.stream = tracks[packet.stream.index]
            new.mux(packet)
    return target


@pytest.fixture(scope="module", params=_KINDS)
def paused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of which two seconds were not sent."""
    folder, kind = tmp_path_factory.mktemp("paused"), request.param
    return remuxed(write(folder / f"whole.{kind}", voice(SECONDS)), folder / f"a.{kind}", _KINDS[kind], pause=PAUSE)


def loudness(samples: np.ndarray, start: float, end: float) -> float:
    return float(np.abs(samples[round(start * RATE) : round(end * RATE)]).max(initial=0.0))


def lag(samples: np.ndarray, start: float, end: float) -> float:
    """Seconds in ``samples`` at which the part of :func:`voice` from ``start`` to ``end`` lies."""
    part, size = voice(SECONDS)[round(start * RATE) : round(end * RATE)], 1 << 18
    product = np.fft.irfft(np.fft.rfft(samples, size) * np.conj(np.fft.rfft(part, size)))
    return float(product[: len(samples)].argmax()) / RATE


def test_what_was_not_sent_is_silence(paused: Path) -> None:
    samples = decode(paused, RATE).samples
    assert len(samples) / RATE == pytest.approx(SECONDS, abs=0.1)
    assert loudness(samples, 2.2, 3.8) < 0.01 < 0.3 < min(loudness(samples, 0.5, 1.8), loudness(samples, 4.2, 5.8))
    assert lag(samples, 4.5, 5.5) == pytest.approx(4.5, abs=0.002)
    np.testing.assert_array_equal(np.concatenate([*stream(paused, RATE)]), samples)
    assert duration_of(paused) == pytest.approx(SECONDS, abs=0.1)


@pytest.mark.parametrize(("start", "voiced"), [(0.5, 0.5), (1.4, 1.4), (3.4, 4.1), (4.5, 4.5)])
def test_a_part_of_it_lies_where_the_whole_has_it(paused: Path, start: float, voiced: float) -> None:
    part = decode(paused, RATE, 1.0, start).samples
    assert len(part) == RATE
    assert lag(part, voiced, voiced + 0.3) == pytest.approx(
        voiced - start, abs=0.01
    )  # Opus is 6.5 ms late after a jump
    assert loudness(decode(paused, RATE, 1.0, 2.5).samples, 0.0, 1.0) < 0.01


@pytest.mark.parametrize("form", ["mp4", "matroska"])
@pytest.mark.parametrize("part", [0.0, 1.5, 3.0])
def test_sound_that_begins_after_the_pictures_is_where_a_player_has_it(tmp_path: Path, form: str, part: float) -> None:
    path = remuxed(film(tmp_path / "whole.mp4", voice(3.0), 6.0), tmp_path / "late", form, late=2.0)
    samples = decode(path, RATE).samples
    assert len(samples) / RATE == pytest.approx(5.0, abs=0.1) == duration_of(path)
    assert loudness(samples, 0.0, 1.9) < 0.01 < 0.3 < loudness(samples, 2.1, 2.5)
    difference = decode(path, RATE, 1.0, part).samples - samples[round(part * RATE) :][:RATE]
    assert loudness(difference, 0.0, 1.0) < 0.02


def test_a_recording_without_pictures_begins_with_its_sound(tmp_path: Path) -> None:
    path = remuxed(write(tmp_path / "a.webm", voice(3.0)), tmp_path / "late.webm", "webm", late=2.0)
    assert len(decode(path, RATE).samples) / RATE == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize(
    ("kind", "options"), [("webm", {"live": "1"}), ("aac.m4a", {"movflags": "empty_moov+frag_keyframe"})]
)
def test_a_recording_whose_header_has_no_length_is_counted(tmp_path: Path, kind: str, options: dict[str, str]) -> None:
    """What a browser's MediaRecorder, or a program that writes into a pipe, leaves."""
    path = write(tmp_path / f"a.{kind}", voice(3.0), options=options)
    assert duration_of(path) == pytest.approx(3.0, abs=0.1)
    assert SoundStream(path, RATE).seconds == pytest.approx(3.0, abs=0.1)
