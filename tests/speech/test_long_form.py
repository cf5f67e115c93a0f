"""Long recordings by the times that the model writes, and reading them piece by piece."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.data.audio import SoundStream, decode
from speech.data.sound_file import AudioError
from speech.whisper.decoding import compression_ratio, split_at_timestamps

FIRST = 1000
"""Token of the time 0; each further one is 20 ms later."""


def at(seconds: float) -> int:
    return FIRST + round(seconds * 50)


def test_whole_segments_are_kept_and_what_was_begun_is_heard_again() -> None:
    tokens = [at(0), 1, 2, at(4), at(4), 3, at(9.5), at(9.5), 4, 5]
    parts, move = split_at_timestamps(tokens, FIRST, 30.0)
    assert [(start, end) for start, end, _ in parts] == [(0.0, 4.0), (4.0, 9.5)]
    assert move == 9.5


def test_after_the_last_words_the_window_moves_on_whole() -> None:
    parts, move = split_at_timestamps([at(0), 1, at(4), at(6), 2, at(9)], FIRST, 30.0)
    assert [(start, end) for start, end, _ in parts] == [(0.0, 4.0), (6.0, 9.0)]
    assert move == 30.0


def test_one_segment_ends_with_its_time_or_with_the_window() -> None:
    assert split_at_timestamps([at(1), 1, 2, at(3)], FIRST, 12.0) == ([(1.0, 3.0, [at(1), 1, 2, at(3)])], 12.0)
    assert split_at_timestamps([1, 2], FIRST, 12.0) == ([(0.0, 12.0, [1, 2])], 12.0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2600), max_size=40), st.floats(0.2, 30.0))
def test_whatever_is_written_the_window_moves_and_times_are_inside(tokens: list[int], seconds: float) -> None:
    parts, move = split_at_timestamps(tokens, FIRST, seconds)
    assert min(1.0, seconds) <= move <= seconds
    assert all(0 <= start <= end <= seconds for start, end, _ in parts)


def test_repetition_compresses_and_speech_does_not() -> None:
    assert (
        compression_ratio("and so on and so on " * 10)
        > 2.4
        > compression_ratio("the quick brown fox jumps over the lazy dog")
    )


@pytest.mark.parametrize("rate", [16_000, 44_100, 8_000])
def test_a_stream_gives_the_samples_of_the_whole_file(rate: int, tmp_path: Path) -> None:
    sound = (0.5 * np.sin(np.arange(rate * 9) * 440 * 2 * np.pi / rate)).astype(np.float32)
    soundfile.write(tmp_path / "x.wav", np.stack([sound, sound], axis=1), rate)
    stream, at_place, pieces = SoundStream(tmp_path / "x.wav", 16_000), 0, []
    while len(piece := stream.window(at_place, 20_000)):
        pieces.append(piece[:15_000])
        at_place += len(pieces[-1])
    whole = np.concatenate(pieces)
    wanted = decode(tmp_path / "x.wav", 16_000).samples
    assert abs(len(whole) - len(wanted)) <= 1
    np.testing.assert_allclose(whole[1000:-1000], wanted[1000 : len(whole) - 1000], atol=1e-3)
    assert stream.ends_within(len(whole)) and stream.seconds == pytest.approx(9.0)


def test_a_stream_keeps_no_more_than_its_window(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.flac", np.zeros(16_000 * 120, np.float32), 16_000)
    stream = SoundStream(tmp_path / "x.flac", 16_000)
    for start in range(0, 100 * 16_000, 160_000):
        assert len(stream.window(start, 160_000)) == 160_000
        assert stream._buffer.nbytes < 4 * (2 * 160_000 + 65_536)
    stream.close()


def test_what_cannot_be_streamed_is_said(tmp_path: Path) -> None:
    (tmp_path / "broken.wav").write_text("no sound")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, np.float32), 8000)
    soundfile.write(tmp_path / "nan.wav", np.full(900, np.nan, np.float32), 16_000, subtype="FLOAT")
    for name, words in (("broken.wav", "not a readable"), ("empty.wav", "no sound"), ("gone.wav", "No such file")):
        with pytest.raises(AudioError, match=words):
            SoundStream(tmp_path / name, 16_000)
    with pytest.raises(AudioError, match="not numbers"):
        SoundStream(tmp_path / "nan.wav", 16_000).window(0, 800)
