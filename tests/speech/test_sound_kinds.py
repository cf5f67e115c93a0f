"""Every kind of sound file gives its samples, whole, in part and as a stream; what is not whole is refused."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sound_kinds import KINDS, RATE, film, voice, write

from speech.data.audio import SoundStream, decode, duration_of, stream
from speech.data.sound_file import AudioError

SECONDS = 3.0
_SAME_SAMPLES = ("wav", "s24.wav", "float.wav", "w64", "aiff", "caf", "au", "flac", "alac.m4a")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: write(folder / f"a.{kind}", voice(SECONDS), kind=kind) for kind in KINDS}


def streamed(path: Path, rate: int = RATE) -> np.ndarray:
    return np.concatenate([*stream(path, rate)])


def delay(samples: np.ndarray, sound: np.ndarray) -> int:
    """Samples by which a sound comes later than it should."""
    size = 1 << 17
    product = np.fft.irfft(np.fft.rfft(samples, size) * np.conj(np.fft.rfft(sound, size)))
    return (int(product.argmax()) + size // 2) % size - size // 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_and_streamed_alike(files: dict[str, Path], kind: str) -> None:
    audio = decode(files[kind], RATE)
    np.testing.assert_array_equal(streamed(files[kind]), audio.samples)
    np.testing.assert_array_equal(decode(files[kind].read_bytes(), RATE).samples, audio.samples)
    assert audio.seconds == len(audio.samples) / RATE
    assert duration_of(files[kind]) == pytest.approx(audio.seconds, abs=0.05)
    if kind in _SAME_SAMPLES:
        np.testing.assert_allclose(audio.samples, voice(SECONDS), atol=1 / 32768)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("wma", "aac", "adpcm.wav")])
def test_what_encoders_put_around_the_sound_is_cut(files: dict[str, Path], kind: str) -> None:
    samples = decode(files[kind], RATE).samples
    assert abs(delay(samples, voice(SECONDS))) <= 1
    assert abs(len(samples) - SECONDS * RATE) <= 64  # a WebM has times of a millisecond


@pytest.mark.parametrize("rate", [6_000, 44_100, 192_000])
def test_other_rates_are_streamed_as_they_are_decoded(rate: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.flac", voice(1.0, rate), rate)
    samples = decode(path, RATE).samples
    np.testing.assert_array_equal(streamed(path), samples)
    assert abs(len(samples) - RATE) <= 2


_WITH_EXACT_TIMES = [kind for kind in KINDS if kind not in ("webm", "aac.m4a")]


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(_WITH_EXACT_TIMES), start=st.floats(0.0, 2.8), limit=st.floats(0.01, 3.0))
def test_a_part_is_what_the_whole_has_there(files: dict[str, Path], kind: str, start: float, limit: float) -> None:
    whole = decode(files[kind], RATE)
    rate = 8_000 if kind == "g722" else RATE
    part = decode(files[kind], rate, limit, start)
    expected = whole.samples[round(start * rate) : round((start + limit) * rate)]
    if kind == "opus":  # is 48 kHz inside, and resampled
        assert abs(len(part.samples) - len(expected)) <= 1
        return
    np.testing.assert_allclose(part.samples, expected, atol=1e-4)
    assert part.seconds == pytest.approx(whole.seconds, abs=0.05)


def test_the_sound_of_films(tmp_path: Path) -> None:
    assert len(decode(film(tmp_path / "a.mp4", voice(2.0), 4.0), RATE).samples) == 2 * RATE
    with pytest.raises(AudioError, match="holds no sound"):
        decode(film(tmp_path / "silent.mp4", None, 1.0), RATE)


def test_amr_with_frames_of_silence(tmp_path: Path) -> None:
    speech, comfort_noise, nothing = b"\x3c" + bytes(31), b"\x44" + bytes(5), b"\x7c"
    (tmp_path / "a.amr").write_bytes(b"#!AMR\n" + speech * 50 + comfort_noise * 10 + nothing * 15 + speech * 25)
    assert len(decode(tmp_path / "a.amr", 8000).samples) == 100 * 160


def test_a_part_of_an_amr_may_begin_in_its_silence(tmp_path: Path) -> None:
    speech, nothing = b"\x3c" + bytes(31), b"\x7c"
    (tmp_path / "a.amr").write_bytes(b"#!AMR\n" + speech * 75 + nothing * 75 + speech * 50)
    part = decode(tmp_path / "a.amr", 8000, limit=0.9, start=2.6).samples
    assert len(part) == 0.9 * 8000
    assert np.flatnonzero(part)[0] == pytest.approx(0.4 * 8000, abs=160)  # a frame


@pytest.mark.parametrize("name", ['it\'s "said".wav', "two\nlines.mp3", "a\udce9.flac", "http:x.wav", "x.ogg"])
def test_the_name_does_not_matter(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.aac.m4a", voice(1.0)).rename(tmp_path / name)
    assert len(decode(path, RATE).samples) == RATE == len(streamed(path))


@pytest.mark.parametrize("kind", ["mp3", "opus", "flac", "aac"])
def test_joined_files_are_read_to_the_end(files: dict[str, Path], tmp_path: Path, kind: str) -> None:
    joined = tmp_path / f"a.{kind}"
    joined.write_bytes(files[kind].read_bytes() * 3)
    samples = streamed(joined)
    assert len(samples) / RATE == pytest.approx(3 * SECONDS, abs=0.25)
    np.testing.assert_array_equal(decode(joined, RATE).samples, samples)
    part = decode(joined, RATE, 1.0, 2.5 * SECONDS).samples
    assert abs(delay(part, samples[int(2.5 * SECONDS * RATE) :][:RATE])) <= 1


@pytest.mark.parametrize("kind", ["wav", "alac.m4a"])
def test_a_joined_file_of_which_only_the_first_can_be_read_is_refused(
    files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    joined = tmp_path / f"a.{kind}"
    joined.write_bytes(files[kind].read_bytes() * 2)
    for read in (lambda: decode(joined, RATE), lambda: streamed(joined)):
        with pytest.raises(AudioError, match="a second file is joined"):
            read()


def test_a_joined_flac_of_other_channels_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    stereo = write(tmp_path / "a.flac", np.stack([voice(1.0, 44_100)] * 2), 44_100)
    with pytest.raises(AudioError, match="damaged at"):
        decode(files["flac"].read_bytes() + stereo.read_bytes(), RATE)


_TELLS_ITS_END = [kind for kind in KINDS if kind != "aac"]


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(_TELLS_ITS_END), share=st.floats(0.3, 0.85))
def test_a_copy_that_broke_off_is_refused(files: dict[str, Path], kind: str, share: float) -> None:
    data = files[kind].read_bytes()
    with pytest.raises(AudioError, match="broken off|damaged"):
        decode(data[: round(len(data) * share)], RATE)


def test_a_fragmented_m4a_that_broke_off_is_refused(tmp_path: Path) -> None:
    options = {"movflags": "frag_keyframe+empty_moov", "frag_duration": "500000"}
    data = write(tmp_path / "a.aac.m4a", voice(3.0), options=options).read_bytes()
    assert len(decode(data, RATE).samples) == pytest.approx(3 * RATE, abs=2100)
    with pytest.raises(AudioError, match="broken off"):
        decode(data[: data.rindex(b"moof") - 100], RATE)


def test_what_comes_before_the_damage_is_streamed(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    data = files["flac"].read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    sound = SoundStream(path, RATE)
    samples = sound.window(0, 10 * RATE)
    assert RATE < len(samples) < SECONDS * RATE
    np.testing.assert_allclose(samples[:RATE], voice(1.0), atol=1 / 32768)
    assert sound.ends_within(len(samples)) and "broken off" in sound.error
    with pytest.raises(AudioError, match="broken off"):
        sound.window(len(samples), RATE)


def test_damage_in_the_middle_is_silence_and_is_said(files: dict[str, Path], tmp_path: Path) -> None:
    data = bytearray(files["flac"].read_bytes())
    data[len(data) // 2] ^= 0x55
    (tmp_path / "a.flac").write_bytes(data)
    sound = SoundStream(tmp_path / "a.flac", RATE)
    samples = sound.window(0, 4 * RATE)
    assert len(samples) == SECONDS * RATE
    np.testing.assert_allclose(samples[-RATE:], voice(SECONDS)[-RATE:], atol=1 / 32768)
    assert sound.error.startswith("damaged at ")


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000])
def test_a_wav_that_does_not_know_its_length_is_read_to_its_end(tmp_path: Path, size: int) -> None:
    data = bytearray(write(tmp_path / "a.wav", voice(1.0)).read_bytes())
    place = data.index(b"data") + 4
    data[place : place + 4] = size.to_bytes(4, "little")
    assert len(decode(bytes(data), RATE).samples) == RATE


def test_the_last_packet_of_an_m4a_may_be_missing(files: dict[str, Path]) -> None:
    data = bytearray(files["aac.m4a"].read_bytes())
    end = data.index(b"moov") - 4
    data[end - 100 : end] = bytes(100)
    assert len(decode(bytes(data), RATE).samples) == pytest.approx(SECONDS * RATE, abs=2048)


def test_a_codec_that_nobody_knows_is_refused(files: dict[str, Path]) -> None:
    data = bytearray(files["wav"].read_bytes())
    data[20:22] = b"\x34\x12"
    with pytest.raises(AudioError, match="its codec is unknown"):
        decode(bytes(data), RATE)


def test_a_wav_that_counts_its_header_too_is_read(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "a.wav", voice(1.0)).read_bytes())
    place = data.index(b"data") + 4
    data[place : place + 4] = len(data).to_bytes(4, "little")
    assert len(decode(bytes(data), RATE).samples) == RATE


def test_a_wav_that_counts_too_little_is_refused(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "a.wav", voice(1.0)).read_bytes())
    place = data.index(b"data") + 4
    data[place : place + 4] = (4000).to_bytes(4, "little")
    with pytest.raises(AudioError, match="its header counts 4000 bytes of sound, and 28000 bytes follow"):
        decode(bytes(data), RATE)


@pytest.mark.parametrize("after", [b"LIST\x06\0\0\0INFOab", b"id3 \x03\0\0\0abc", bytes(20_000), b"TAG" + bytes(125)])
def test_what_follows_the_sound_of_a_wav_is_no_sound(tmp_path: Path, after: bytes) -> None:
    data = write(tmp_path / "a.wav", voice(1.0)).read_bytes() + after
    assert len(decode(data, RATE).samples) == RATE


def test_a_wav_of_more_than_4_gb_that_broke_off_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "a.wav", voice(1.0), options={"rf64": "always"}).read_bytes()
    assert len(decode(data, RATE).samples) == RATE
    place = data.index(b"ds64") + 16
    with pytest.raises(AudioError, match="of 5000000000 bytes of sound"):
        decode(data[:place] + (5_000_000_000).to_bytes(8, "little") + data[place + 8 :], RATE)


def test_half_a_sample_at_the_end_is_no_damage(tmp_path: Path) -> None:
    data = write(tmp_path / "a.wav", voice(1.0)).read_bytes()
    assert len(decode(data[:-1], RATE).samples) == pytest.approx(RATE, abs=2048)


def test_an_m4a_without_its_whole_index_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(AudioError, match=r"broken off: its index \(moov\) is missing"):
        decode(files["aac.m4a"].read_bytes()[:-20], RATE)


def test_a_flac_of_unknown_length(files: dict[str, Path], tmp_path: Path) -> None:
    data = bytearray(files["flac"].read_bytes())
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])  # 36 bits of the stream's information: the samples
    (tmp_path / "a.flac").write_bytes(data)
    assert len(streamed(tmp_path / "a.flac")) == len(decode(bytes(data), RATE).samples) == SECONDS * RATE
    assert duration_of(tmp_path / "a.flac") == pytest.approx(SECONDS)
    assert decode(bytes(data), RATE, 0.5).seconds == pytest.approx(SECONDS)


def ape_tag(has_header: bool) -> bytes:
    """A tag of one item of 40 bytes; its size counts the footer, not the header."""
    ends = struct.pack("<8sIIII8x", b"APETAGEX", 2000, 40 + 32, 1, has_header << 31)
    return ends * has_header + bytes(40) + ends


@pytest.mark.parametrize(
    "tags", [b"TAG" + bytes(125), ape_tag(False), ape_tag(True), ape_tag(True) + b"TAG" + bytes(125)]
)
def test_tags_behind_a_flac_take_nothing_of_its_sound(files: dict[str, Path], tmp_path: Path, tags: bytes) -> None:
    path = tmp_path / "a.flac"
    path.write_bytes(files["flac"].read_bytes() + tags)
    np.testing.assert_array_equal(decode(path, RATE).samples, decode(files["flac"], RATE).samples)


def test_an_mp3_of_changing_bit_rate_that_does_not_tell_its_length(tmp_path: Path) -> None:
    quiet = np.concatenate([np.zeros(RATE, np.float32), voice(2.0)])
    path = write(tmp_path / "a.mp3", quiet, options={"write_xing": "0"})
    assert len(decode(path, RATE).samples) / RATE == pytest.approx(3.0, abs=0.15)
    assert duration_of(path) == pytest.approx(3.0, abs=0.15)


def test_tags_and_pictures_of_an_mp3(files: dict[str, Path]) -> None:
    title = b"TIT2" + (4).to_bytes(4, "big") + b"\0\0" + b"\0\xe9\xe8\xff"
    picture = b"APIC" + (2014).to_bytes(4, "big") + b"\0\0" + b"\0image/png\0\x03\0" + bytes(2001)
    tag = b"ID3\x03\0\0" + bytes([0, 0, (len(title + picture)) >> 7, len(title + picture) & 127]) + title + picture
    tagged = tag + files["mp3"].read_bytes() + b"TAG" + bytes(125)
    np.testing.assert_array_equal(decode(tagged, RATE).samples, decode(files["mp3"], RATE).samples)


@pytest.mark.parametrize(
    "text",
    [
        "<html><head><title>404 Not Found</title></head></html>",
        "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{}'\n",
        "1\n00:00:00,000 --> 00:00:02,500\na\n",
    ],
)
def test_texts_are_no_sound_and_open_no_other_file(files: dict[str, Path], tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.mp3"
    path.write_text(text.format(files["wav"]))
    for read in (lambda: decode(path, RATE), lambda: duration_of(path)):
        with pytest.raises(AudioError, match="not a readable sound file"):
            read()


def test_float_samples_in_the_range_of_integers_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.float.wav", voice(1.0) * 32768)
    for read in (lambda: decode(path, RATE), lambda: streamed(path), lambda: decode(path, RATE, 0.5)):
        with pytest.raises(AudioError, match="its samples reach 13107 where 1 is full scale"):
            read()
    assert len(decode(write(tmp_path / "b.float.wav", voice(1.0) * 5), RATE).samples) == RATE


def test_channels_that_cancel_each_other_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", np.stack([voice(1.0), -voice(1.0)]))
    for read in (lambda: decode(path, RATE), lambda: streamed(path), lambda: decode(path, RATE, 0.2)):
        with pytest.raises(AudioError, match="cancel each other out"):
            read()


def test_channels_of_which_one_is_heard_are_not_refused(tmp_path: Path) -> None:
    surround = np.zeros((6, RATE), np.float32)
    surround[2] = voice(1.0)
    np.testing.assert_allclose(
        decode(write(tmp_path / "a.flac", surround), RATE).samples, voice(1.0) / 6, atol=1 / 32768
    )
    assert not decode(write(tmp_path / "b.wav", np.zeros((2, RATE), np.float32)), RATE).samples.any()


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from([*KINDS]),
    places=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=9),
    start=st.sampled_from([0.0, 1.5]),
)
def test_whatever_is_damaged_there_are_samples_or_an_audio_error(
    files: dict[str, Path], kind: str, places: list[tuple[float, int]], start: float
) -> None:
    data = bytearray(files[kind].read_bytes())
    for number, (share, byte) in enumerate(places):
        data[int(share * (len(data) if number % 2 else 200))] = byte
    with suppress(AudioError):
        assert np.isfinite(decode(bytes(data), RATE, 2.0, start).samples).all()
