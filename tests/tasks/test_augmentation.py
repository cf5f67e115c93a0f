from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.tasks.whisper import features as augmentation
from training.tasks.whisper.features import augment

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


def test_shift_keeps_all_that_is_spoken() -> None:
    moved = augmentation.shift(clip(150), 1.0)
    assert np.array_equal(moved[:, 50:], clip(150)[:, :150])
    assert (moved[:, :50] == FLOOR).all()


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
