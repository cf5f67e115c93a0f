from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speech.whisper import features as augmentation
from speech.whisper.features import augment

FLOOR = np.float32(-0.75)


def clip(spoken: int = 60, frames: int = 200, mels: int = 40) -> np.ndarray:
    """Features with one loud band for ``spoken`` frames, then padding."""
    features = np.full((mels, frames), FLOOR, np.float32)
    features[:, :spoken] = 0.0
    features[mels // 2, :spoken] = 1.0
    return features


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    strength=st.floats(0, 1),
    spoken=st.integers(0, 400),
    shape=st.tuples(st.integers(1, 80), st.integers(1, 400)),
)
def test_shape_type_and_finiteness_hold_for_every_clip(
    seed: int, strength: float, spoken: int, shape: tuple[int, int]
) -> None:
    changed = augment(clip(spoken, shape[1], shape[0]), strength, np.random.default_rng(seed))
    assert changed.shape == shape
    assert changed.dtype == np.float32
    assert np.isfinite(changed).all()


def test_same_generator_state_gives_the_same_result() -> None:
    first, second = (augment(clip(), 1.0, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(first, second)


def test_input_is_left_alone() -> None:
    features = clip()
    augment(features, 1.0, np.random.default_rng(0))
    assert np.array_equal(features, clip())


def test_strength_zero_changes_nothing() -> None:
    assert np.array_equal(augment(clip(), 0.0, np.random.default_rng(0)), clip())


def test_more_strength_changes_more() -> None:
    def change(strength: float) -> float:
        pairs = (augment(clip(), strength, np.random.default_rng(seed)) for seed in range(50))
        return float(np.mean([np.abs(pair - clip()).mean() for pair in pairs]))

    assert 0 < change(0.2) < change(0.6) < change(1.0)


@pytest.mark.parametrize(("factor", "band"), [(1.2, 24), (0.8, 16)])
def test_warp_moves_the_formant(factor: float, band: int) -> None:
    assert augmentation.warp_frequency(clip(), factor)[:, 0].argmax() == band


@pytest.mark.parametrize(("factor", "spoken"), [(1.2, 72), (0.75, 45)])
def test_stretch_changes_the_length_of_the_speech(factor: float, spoken: int) -> None:
    left = 200 - augmentation.padding(augmentation.stretch_time(clip(60), factor))
    assert abs(left - spoken) <= 1


def test_stretch_never_pushes_speech_out_of_the_window() -> None:
    features = clip(190)
    features[:, 189] = 2.0
    assert augmentation.stretch_time(features, 1.5).max() > 1.5


def shift(features: np.ndarray, share: float) -> np.ndarray:
    """Start later by a share of the window; nothing spoken is pushed out."""
    moved: np.ndarray = np.roll(features, min(int(share * features.shape[1]), augmentation.padding(features)), axis=1)
    return moved


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    strength=st.floats(0.01, 1),
    spoken=st.integers(0, 90),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 90)),
)
def test_a_clip_is_changed_as_if_the_whole_window_were_in_each_step(
    seed: int, strength: float, spoken: int, shape: tuple[int, int]
) -> None:
    features = np.full(shape, FLOOR)
    features[:, :spoken] += np.random.default_rng(seed).random(features[:, :spoken].shape, dtype=np.float32)
    rng = np.random.default_rng(seed)
    drawn = strength * rng.random()
    changed = augmentation.warp_frequency(features, np.exp(rng.uniform(-0.12, 0.12) * drawn))
    changed = augmentation.stretch_time(changed, np.exp(rng.uniform(-0.12, 0.12) * drawn))
    changed = shift(changed, rng.uniform(0.0, 0.25) * drawn)
    changed = augmentation.tilt(changed, rng.uniform(-6.0, 6.0) * drawn)
    if rng.random() < 0.5 * drawn:
        changed = augmentation.add_noise(changed, rng.uniform(15.0, 40.0), rng)
    changed = augmentation.mask(changed, drawn, rng)
    assert np.array_equal(augment(features, strength, np.random.default_rng(seed)), changed)


@pytest.mark.parametrize(("axis", "factor"), [(0, 1.1), (0, 0.9), (1, 1.1), (1, 0.9)])
def test_what_lies_between_two_values_is_read_linearly(axis: int, factor: float) -> None:
    features = np.random.default_rng(0).standard_normal((30, 50)).astype(np.float32)
    changed = (augmentation.warp_frequency if axis == 0 else augmentation.stretch_time)(features, factor)
    factor = min(factor, 1.0) if axis else factor  # nothing of it is padding
    count = features.shape[axis]
    read = [
        np.interp(np.arange(count) / factor, np.arange(count), row) for row in (features.T if axis == 0 else features)
    ]
    np.testing.assert_allclose(changed.T if axis == 0 else changed, read, atol=1e-5)


def test_noise_is_added_to_the_power() -> None:
    features = np.random.default_rng(0).standard_normal((20, 50)).astype(np.float32)
    noisy = augmentation.add_noise(features, 20.0, np.random.default_rng(1))
    rng = np.random.default_rng(1)
    slope = np.linspace(-0.5, 0.5, 20)[:, None] * rng.uniform(-15, 15) * augmentation.DECIBEL
    noise = features.max() - 20 * augmentation.DECIBEL + slope
    noise = noise + 3 * augmentation.DECIBEL * rng.standard_normal(features.shape, dtype=np.float32)
    expected = np.log(np.exp(features * augmentation.LOG_SCALE) + np.exp(noise * augmentation.LOG_SCALE))
    np.testing.assert_allclose(noisy, expected / augmentation.LOG_SCALE, atol=1e-5)


def test_tilt_leaves_padding_alone() -> None:
    tilted = augmentation.tilt(clip(), 6.0)
    assert (tilted[:, 60:] == FLOOR).all()
    assert tilted[-1, 0] - tilted[0, 0] == pytest.approx(6 * augmentation.DECIBEL)


def test_noise_adds_power_as_far_below_the_peak_as_asked() -> None:
    noisy = augmentation.add_noise(clip(), 20.0, np.random.default_rng(0))
    assert np.median(noisy[:, 100:]) == pytest.approx(1.0 - 20 * augmentation.DECIBEL, abs=0.05)
    assert noisy[20, :60].max() < 1.1


def test_masks_blank_bands_with_the_mean() -> None:
    features = np.random.default_rng(0).standard_normal((40, 200)).astype(np.float32)
    masked = augmentation.mask(features, 1.0, np.random.default_rng(3))
    share = float((masked != features).mean())
    assert 0 < share < 0.4
    assert np.unique(masked[masked != features]).size == 1
