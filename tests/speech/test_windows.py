"""Windows that follow the clips."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_speech import RATE, WORDS, Prepared, tone, write_csv
from torch import nn
from transformers import WhisperForConditionalGeneration

from profiles.errors import BadInput
from speech.whisper.encoder import encode_window
from speech.whisper.features import Windows
from speech.whisper.task import WhisperTask
from tests.tasks.tiny_tasks import silent
from training.data.batches import BatchSource, Samples
from training.data.sample_order import Cursor, SampleSchedule


@pytest.fixture
def lengths_folder(tmp_path: Path) -> Path:
    """Clips of 0.1 to 0.9 s, for a model that hears 1 s."""
    folder = tmp_path / "lengths"
    (folder / "audio").mkdir(parents=True)
    rows = []
    for index, seconds in enumerate((0.1, 0.3, 0.5, 0.9, 0.2, 0.4)):
        soundfile.write(folder / "audio" / f"{index}.wav", tone(index % 4, seconds), RATE)
        rows.append((str(index), f"audio/{index}.wav", WORDS[index % 4]))
    write_csv(folder / "train.csv", rows[:4])
    write_csv(folder / "validation.csv", rows[4:])
    return folder


def generators(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(index) for index in range(count)]


@given(st.integers(0, 3000), st.sampled_from(["auto", "full", "2", "0.3"]))
def test_a_window_holds_its_clip_and_is_of_few_lengths(sound: int, setting: str) -> None:
    windows = Windows(setting, 3000, 30.0)
    (frames,) = windows.frames([sound])
    assert sound <= frames <= 3000 and frames % 50 == 0
    assert frames == 3000 if setting == "full" else frames >= min(3000, sound + 50)
    assert frames >= {"2": 200}.get(setting, 0)


def test_encoder_is_transformers_own_at_full_length(english_whisper: Path) -> None:
    model = WhisperForConditionalGeneration.from_pretrained(english_whisper).eval()
    features = torch.randn(2, 16, 100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        encode_window(model, features).last_hidden_state, model.model.encoder(features).last_hidden_state
    )


def test_a_cut_window_is_a_model_with_fewer_positions(english_whisper: Path) -> None:
    """Nothing else in it depends on the length: the same weights with fewer positions give the same bits."""
    whole = WhisperForConditionalGeneration.from_pretrained(english_whisper).eval()
    config = copy.deepcopy(whole.config)
    config.max_source_positions = 30
    short = WhisperForConditionalGeneration(config).eval()
    weights = whole.state_dict()
    weights["model.encoder.embed_positions.weight"] = weights["model.encoder.embed_positions.weight"][:30]
    short.load_state_dict(weights)
    features = torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        encode_window(whole, features).last_hidden_state, short.model.encoder(features).last_hidden_state
    )


@pytest.mark.parametrize("frames", [61, 102])
def test_impossible_lengths_are_refused(english_whisper: Path, frames: int) -> None:
    model = WhisperForConditionalGeneration.from_pretrained(english_whisper)
    with pytest.raises(ValueError, match="even number of frames up to 100"):
        encode_window(model, torch.zeros(1, 16, frames))


def test_training_cuts_and_evaluation_does_not(prepared: Prepared, lengths_folder: Path) -> None:
    task = prepared(dataset_path=lengths_folder)
    short = [task.train[0], task.train[1]]
    cut = task.collate(short, generators(2))["input_features"]
    full = task.collate(short, None)["input_features"]
    assert cut.shape == (2, 16, 100) and full.shape == (2, 16, 100)  # 0.3 s and 0.5 s of silence are more than 0.5 s
    (one,) = (task.collate(short[:1], generators(1))["input_features"],)
    assert one.shape[2] == 100
    features, silence = task.train.store.sound(0)
    assert torch.equal(full[0, :, features.shape[1] :], torch.full((16, 100 - features.shape[1]), silence))


def asks_for_masks(model: Path, length: int) -> WhisperForConditionalGeneration:
    asked = {"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": length}
    return WhisperForConditionalGeneration.from_pretrained(model, **asked).train()


@pytest.mark.slow
@settings(max_examples=20)
@given(half=st.integers(1, 50), length=st.integers(1, 100), seed=st.integers(0, 2**32 - 1))
def test_a_cut_window_is_masked_as_the_full_one(english_whisper: Path, half: int, length: int, seed: int) -> None:
    model = asks_for_masks(english_whisper, length)
    heard: list[torch.Tensor] = []
    model.model.encoder.conv1.register_forward_pre_hook(lambda _, given: heard.append(given[0]))
    features = torch.ones(2, 16, 100)
    for frames in (2 * half, 100):
        np.random.seed(seed)
        encode_window(model, features[:, :, :frames])
    assert torch.equal(heard[0], heard[1][:, :, : 2 * half])
    assert (heard[1] == 0).any() and (features == 1).all()  # masked, and not in the caller's batch


@pytest.mark.parametrize("asked", [{"mask_time_prob": 0.1, "mask_time_length": 101}, {"mask_feature_prob": 0.1}])
def test_masks_longer_than_what_is_heard_are_refused(
    prepared: Prepared, english_whisper: Path, lengths_folder: Path, tmp_path: Path, asked: dict[str, float]
) -> None:
    model = shutil.copytree(english_whisper, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    asked = {"mask_feature_length": 17, "apply_spec_augment": True, **asked}
    (model / "config.json").write_text(json.dumps({**config, **asked}))
    with pytest.raises(BadInput, match=r"mask_\w+_length is 1\d*, but it hears 1\d* (frames|mels).*apply_spec_augment"):
        prepared(model_path=model, dataset_path=lengths_folder)


def encoder_gradients(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_parameters() if ".encoder." in name and one.grad is not None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"tuning": "lora", "lora_rank": 2, "lora_alpha": 4},
        {"tuning": "lora", "lora_rank": 2, "lora_alpha": 4, "gradient_checkpointing": True},
    ],
)
def test_a_cut_step_reaches_every_trained_weight(
    prepared: Prepared, lengths_folder: Path, options: dict[str, object]
) -> None:
    task = prepared(dataset_path=lengths_folder, **options)
    torch.manual_seed(0)
    model = task.build_model().train()
    batch = dict(task.collate([task.train[0]], None))
    batch["input_features"] = batch["input_features"][:, :, :60]
    task.loss(model, batch).backward()
    trained = [name for name, one in model.named_parameters() if one.requires_grad and ".encoder." in name]
    assert trained and encoder_gradients(model) == trained


def test_a_frozen_encoder_keeps_nothing_for_backward(prepared: Prepared, lengths_folder: Path) -> None:
    task = prepared(dataset_path=lengths_folder, freeze_encoder=True, gradient_checkpointing=True)
    model = task.build_model().train()
    batch = task.collate([task.train[0]], None)
    assert not task.wrapper.encode_audio(model, batch["input_features"]).last_hidden_state.requires_grad
    task.loss(model, batch).backward()
    assert encoder_gradients(model) == []


def step_gradient(task: WhisperTask, model: nn.Module, batch_sizes: dict[int, int], accumulation: int) -> torch.Tensor:
    """The gradient of the group's first step, as members with these batch sizes compute it."""
    model.zero_grad()
    taken = []
    for rank in batch_sizes:
        schedule = SampleSchedule(len(task.train), 1, accumulation, lengths=task.lengths(), block=4)
        source = BatchSource(task, schedule, rank, Samples(task, 1))
        taken.append(source.take(Cursor(), batch_sizes, remaining_steps=False))
        source.close()
    weight = sum(batches.weight for batches in taken)
    for batches in taken:
        for batch, share in zip(batches.micro_batches, batches.weights, strict=True):
            (task.loss(model, batch) * share / weight).backward()
    assert sum(batches.samples for batches in taken) == 4
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", [0.0, 1.0])
def test_members_and_micro_batches_equal_one_with_the_joint_batch(
    prepared: Prepared, lengths_folder: Path, augmentation: float
) -> None:
    """Whoever holds a step's longest clip, and wherever the others are: all hear as much silence."""
    task = prepared(dataset_path=lengths_folder, augmentation=augmentation)
    task.windows = replace(task.windows, grid=0.1, margin=0.0)
    task.prepare(silent)
    assert set(task.lengths()) == {20, 40, 60, 100}
    model = task.build_model().eval()
    joint = step_gradient(task, model, {0: 4}, 1)
    for batch_sizes, accumulation in (({0: 2, 1: 2}, 1), ({0: 1, 1: 1}, 2), ({0: 3, 1: 1}, 1), ({0: 1}, 4)):
        torch.testing.assert_close(step_gradient(task, model, batch_sizes, accumulation), joint, atol=1e-6, rtol=1e-5)
