"""The examples train: a few real optimizer steps through the task, and the loss falls."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.tasks.tiny_tasks import ProfileMaker, learn, silent
from training.tasks.base import Task
from training.tasks.registry import task_from_profile

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def losses_of(task: Task, steps: int, batch_size: int, learning_rate: float) -> list[float]:
    """Train; return the validation loss before and after."""
    task.prepare(silent)
    torch.manual_seed(0)
    model = task.build_model()
    before, count = validation_loss(task, model, batch_size), len(task.train)
    batches = [
        task.collate([task.train[(step * batch_size + i) % count] for i in range(batch_size)], None)
        for step in range(steps)
    ]
    learn(task, model.train(), batches, learning_rate)
    return [before, validation_loss(task, model, batch_size)]


@torch.no_grad()
def validation_loss(task: Task, model: torch.nn.Module, count: int) -> float:
    data = task.evaluation["validation"]
    batch = task.collate([data[i] for i in range(count)], None)
    return task.metrics(task.evaluate(model.eval(), batch, generate=False))["loss"]


def test_custom(make_profile: ProfileMaker) -> None:
    path = f"{EXAMPLES}/custom/spirals.py:build"
    task = task_from_profile(make_profile(task="custom", model_path=path))
    before, after = losses_of(task, steps=60, batch_size=64, learning_rate=1e-2)
    assert after < before / 2


@pytest.mark.slow
def test_nanogpt(make_profile: ProfileMaker) -> None:
    model, data = str(EXAMPLES / "nanogpt/model"), str(EXAMPLES / "nanogpt/input.txt")
    options = {"task": "causal_lm", "from_scratch": True, "block_size": 64}
    task = task_from_profile(make_profile(model_path=model, dataset_path=data, **options))
    before, after = losses_of(task, steps=12, batch_size=8, learning_rate=3e-3)
    assert before > 5.0  # ln 257 = 5.5
    assert after < before - 0.8


@pytest.mark.slow
@pytest.mark.skipif(not (EXAMPLES / "spoken_commands").is_dir(), reason="examples/spoken_commands is not made yet")
def test_spoken_commands(make_profile: ProfileMaker) -> None:
    model, data = str(EXAMPLES / "tiny_whisper"), str(EXAMPLES / "spoken_commands")
    options = {"from_scratch": True, "max_train_samples": 64, "max_eval_samples": 8}
    task = task_from_profile(make_profile(model_path=model, dataset_path=data, **options))
    before, after = losses_of(task, steps=20, batch_size=8, learning_rate=2e-3)
    assert after < before / 2


def test_nanogpt_text_is_what_its_script_makes() -> None:
    script = runpy.run_path(str(EXAMPLES / "nanogpt/make_text.py"))
    assert script["text"]() == (EXAMPLES / "nanogpt/input.txt").read_text()


def test_nanogpt_model_is_what_its_script_makes(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "nanogpt/make_model.py"))["main"](tmp_path)
    shipped = EXAMPLES / "nanogpt/model"
    made, there = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, shipped))
    assert {**made, "transformers_version": ""} == {**there, "transformers_version": ""}
    assert AutoTokenizer.from_pretrained(shipped).decode(
        AutoTokenizer.from_pretrained(tmp_path)("Größe ✓").input_ids
    ) == ("Größe ✓")
