"""What a frozen encoder hears of each clip, kept on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_speech import Prepared

from speech.whisper import encoder as encoder_cache
from speech.whisper.task import WhisperTask
from tests.tasks.tiny_tasks import learn


@pytest.fixture
def prepared(prepared: Prepared) -> Prepared:
    return partial(prepared, freeze_encoder=True)


def trained(task: WhisperTask, steps: int = 4) -> tuple[list[float], torch.Tensor]:
    """Losses of some steps over two batches in turn, and the weights after them."""
    torch.manual_seed(0)
    model = task.build_model().train()
    batches = [
        task.collate([task.train[i] for i in indices], [np.random.default_rng(i) for i in indices])
        for indices in (range(4, 8), range(4))
    ]
    losses = learn(task, model, [batches[step % 2] for step in range(steps)], 1e-3)
    return losses, torch.cat([one.detach().flatten() for one in model.parameters()])


class Encodings:
    """Counts the clips that go through the encoder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, task: WhisperTask) -> None:
        self.clips = 0
        real = task.wrapper.encode_audio

        def encode_audio(model: Any, features: torch.Tensor) -> Any:
            self.clips += len(features)
            return real(model, features)

        monkeypatch.setattr(task.wrapper, "encode_audio", encode_audio)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tuning": "lora", "lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.0}])
def test_each_clip_is_encoded_once_and_the_training_is_the_same(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    task = prepared(**options)
    first = Encodings(monkeypatch, task)
    losses, weights = trained(task)
    assert first.clips == 8
    again = prepared(**options)
    second = Encodings(monkeypatch, again)
    assert trained(again)[0] == losses and second.clips == 0  # the same bits, whether they were there or not
    shutil.rmtree(tmp_path / "cache" / "encoded")
    (tmp_path / "cache" / "encoded").write_text("in the way of a cache")
    uncached = prepared(**options)
    plain = Encodings(monkeypatch, uncached)
    expected, without = trained(uncached)
    assert plain.clips == 16
    assert losses == pytest.approx(expected, rel=2e-3)
    torch.testing.assert_close(weights, without, atol=5e-3, rtol=0)


def test_nothing_is_kept_of_what_is_random_or_trained(prepared: Prepared) -> None:
    task = prepared(augmentation=0.5)
    assert task.cache_for(task.build_model()) is None
    task = prepared()
    model = task.build_model()
    assert task.cache_for(model) is not None
    model.model.encoder.config.attention_dropout = 0.1
    assert task.cache_for(model) is None
    model.model.encoder.config.attention_dropout = 0.0
    model.model.encoder.layer_norm.requires_grad_(True)
    assert task.cache_for(model) is None


def test_other_weights_are_another_entry(prepared: Prepared, tmp_path: Path) -> None:
    task = prepared()
    trained(task, 1)
    model = task.build_model()
    with torch.no_grad():
        model.model.encoder.layer_norm.weight += 0.5
    batch = task.collate([task.train[0]], [np.random.default_rng(0)])
    task.loss(model, batch)
    assert len([one for one in (tmp_path / "cache" / "encoded").iterdir() if one.is_dir()]) == 2
    other = task.build_model()
    other.model.encoder.config.encoder_attention_heads = 1
    task.loss(other, batch)
    assert len([one for one in (tmp_path / "cache" / "encoded").iterdir() if one.is_dir()]) == 3


def test_a_full_disk_costs_the_cache_and_not_the_run(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(encoder_cache, "_write_rows", full)
    task = prepared()
    count = Encodings(monkeypatch, task)
    assert all(np.isfinite(trained(task)[0])) and count.clips == 16


def test_most_of_the_disk_stays_free(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    task = prepared()
    free = iter([1000_000, 800_000, *[740_000] * 9])
    monkeypatch.setattr(encoder_cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    count = Encodings(monkeypatch, task)
    trained(task)
    assert count.clips == 12  # the first four were kept, then a quarter of what had been free was gone


def test_a_cache_that_cannot_be_made_costs_no_run(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task = prepared()
    (tmp_path / "cache" / "encoded").write_text("in the way")
    count = Encodings(monkeypatch, task)
    assert all(np.isfinite(trained(task)[0])) and count.clips == 16
    assert caplog.text.count("are not cached") == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def scramble(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


def flip_one_bit(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 0x40]) + path.read_bytes()[1:])


@pytest.mark.slow
@pytest.mark.parametrize("harm", [cut, scramble, flip_one_bit, Path.unlink])
def test_damage_is_computed_again(prepared: Prepared, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    losses, _ = trained(prepared())
    for file in (tmp_path / "cache" / "encoded").glob("*/*"):
        before = file.read_bytes()
        harm(file)
        assert trained(prepared())[0] == pytest.approx(losses, rel=1e-6)
        assert file.read_bytes() == before


def test_what_would_fill_the_disk_is_not_begun(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_cache, "_SHARE", 10**15)
    trained(prepared(), 1)
    assert list((tmp_path / "cache" / "encoded").iterdir()) == []
