"""Clips before and after training, with their sound, as a run of a Whisper keeps them."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import Prepared

from profiles.optimisation import EvaluationSettings
from speech.data.audio import MP3_RATE, as_mp3, decode
from speech.whisper.task import WhisperTask
from training.data.batches import Samples
from training.exchange.base import SoloExchange
from training.hardware.device import Precision
from training.loop.evaluation import Evaluator
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME, Showcase, read_showcase


def kept(task: WhisperTask, run_dir: Path, settings: EvaluationSettings) -> Showcase:
    """Evaluate a model and one with other weights; return what is kept of both."""
    torch.manual_seed(0)
    cpu, model = torch.device("cpu"), task.build_model()
    samples = Samples(task, 0, cpu, 0.0, "here")
    evaluator = Evaluator(samples, model, Precision(None, cpu), SoloExchange(), settings, 2, run_dir=run_dir)
    for step in (0, 7):
        evaluator.evaluate("validation", step, {0: 2})
        with torch.no_grad():
            model.proj_out.weight.add_(torch.randn_like(model.proj_out.weight))
    found = read_showcase(run_dir / FOLDER / NAME)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("generates", [True, False])
def test_clips_and_silence_are_kept_with_their_sound(
    generates: bool, prepared: Prepared, speech_folder: Path, tmp_path: Path
) -> None:
    soundfile.write(speech_folder / "audio" / "clip9.wav", np.zeros(8000, np.float32), 16_000)
    task = prepared(eval_generate=generates)
    (speech_folder / "audio" / "clip8.wav").unlink()
    found = kept(task, tmp_path / "run", task.profile.evaluation)
    assert (found.kind, found.of) == (("speech", 2) if generates else ("items", 2))
    sounds = {one.reference: one.sound for one in found.samples}
    assert len(sounds) == 2
    there = [sound for sound in sounds.values() if sound]
    assert [decode(base64.b64decode(sound), MP3_RATE).seconds for sound in there] == [pytest.approx(0.5, abs=0.1)]
    assert [one.soundless for one in found.samples if not one.sound] != [""]


@pytest.mark.slow
def test_thirty_seconds_of_sound_are_small(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 44_100 * 31).astype(np.float32)
    soundfile.write(tmp_path / "long.wav", np.stack([noise, noise], 1), 44_100)
    sound = as_mp3(tmp_path / "long.wav", 30.0)
    assert len(sound) < 90_000 and decode(sound, MP3_RATE).seconds == pytest.approx(30.0, abs=0.1)
