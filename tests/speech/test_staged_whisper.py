"""A Whisper of which each worker of a run holds one stage."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
from tiny_speech import tiny_whisper, write_splits
from transformers import WhisperConfig, WhisperForConditionalGeneration

from app.cli.main import main
from profiles.errors import BadInput, MusterError, RunFailed
from profiles.files.resolve import profile_from_options
from speech.whisper.evaluation import evaluate_model
from speech.whisper.task import WhisperTask
from tests.lab.processes import end, line_of
from tests.layouts.staged_records import Record, agree, assert_same_weights, plan_of, trained
from training.inference.in_use import model_in_use
from training.layouts.parts import join_parts
from training.layouts.staged import StageBuilder
from training.records.events import EvaluationEvent
from training.records.plan import DevicePlan
from training.tasks.outputs.predictions import FOLDER, NAME


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A Whisper of two blocks in the encoder and three in the decoder, without dropout, and what it learns from."""
    made = tmp_path_factory.mktemp("staged")
    folder = tiny_whisper(made / "whisper")
    config = WhisperConfig.from_pretrained(folder, encoder_layers=2, decoder_layers=3, dropout=0.0, init_std=0.1)
    torch.manual_seed(0)
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    return {
        "task": "whisper", "model_path": folder, "dataset_path": write_splits(made / "speech"),
        "cache_dir": made / "cache",
        "eval_interval": 0, "augmentation": 0.5,  # with which no output of a frozen encoder is cached, in 16 bits
    }  # fmt: skip


@pytest.fixture(scope="module")
def train_whole(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Record]:
    """Train it on one machine, once with and once without its encoder."""

    @cache
    def train(frozen: bool) -> Record:
        plan = plan_of(1, **options, freeze_encoder=frozen, layout="replicate")
        return trained(tmp_path_factory.mktemp("whole"), plan, in_threads=True)

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "workers", "frozen", "in_threads"),
    [
        ("pipeline", 2, False, False),
        ("pipeline", 2, True, True),
        ("pipeline", 3, False, True),
        ("shard", 2, False, False),
        ("tensor", 2, True, False),
    ],
)
def test_it_trains_as_a_whole_one_and_becomes_the_same_folder(
    layout: str,
    workers: int,
    frozen: bool,
    in_threads: bool,
    options: dict[str, Any],
    train_whole: Callable[[bool], Record],
    tmp_path: Path,
) -> None:
    plan = plan_of(workers, **options, freeze_encoder=frozen, layout=layout)
    run, whole = trained(tmp_path, plan, in_threads=in_threads), train_whole(frozen)
    assert run.outcome.status == "completed", run.outcome.message
    agree(run, whole)
    assert_same_weights(run, whole)
    evaluations, expected = ([event.metrics for event in record.of(EvaluationEvent)] for record in (run, whole))
    assert evaluations == [pytest.approx(metrics, rel=1e-6) for metrics in expected] and "wer" in evaluations[0]
    texts, wanted_texts = ((record.outcome.run_dir / FOLDER / NAME).read_text() for record in (run, whole))
    assert texts == wanted_texts
    folder, wanted = (record.outcome.run_dir / "model" for record in (run, whole))
    assert {file.name for file in folder.iterdir()} == {file.name for file in wanted.iterdir()}
    assert (folder / "config.json").read_text() == (wanted / "config.json").read_text()


@pytest.mark.slow
def test_adapters_of_all_stages_become_one_folder(options: dict[str, Any], tmp_path: Path) -> None:
    chosen = {**options, "tuning": "lora", "lora_rank": 2, "lora_merge": False, "freeze_encoder": True}
    folders = [tmp_path / name for name in ("first", "second", "whole", "joined")]
    for number, folder in enumerate(folders[:3]):
        folder.mkdir()
        task = WhisperTask(profile_from_options("p", chosen))
        task.prepare(lambda *progress: None)
        builder = StageBuilder([DevicePlan()] * 2, number, seed=0)
        task.save(task.build_model() if folder.name == "whole" else task.build_stage(builder), folder)
    join_parts(folders[:2], folders[3])
    configurations = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders[2:]]
    for configuration in configurations:
        configuration["target_modules"].sort()
    assert configurations[0] == configurations[1]
    keys = [safetensors.torch.load_file(folder / "adapter_model.safetensors").keys() for folder in folders[2:]]
    assert keys[0] == keys[1]
    assert {file.name for file in folders[2].iterdir()} == {file.name for file in folders[3].iterdir()}


def test_students_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="layout = pipeline cannot train students"):
        plan_of(2, **options, student_layers=1, teacher_path="teacher")


def answered(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    """Return the document that a command writes."""
    main([*map(str, words), "--device", "cpu", "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.slow
def test_a_command_uses_it_as_a_whole_one(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model, data = options["model_path"], options["dataset_path"]
    evaluate = ("evaluate", model, data, "--split", "validation")
    whole, staged = answered(capsys, *evaluate), answered(capsys, *evaluate, "--local", "2")
    assert staged["metrics"] == pytest.approx(whole["metrics"], rel=1e-6)
    assert staged["breakdown"] == whole["breakdown"]
    transcribe = ("transcribe", model, data / "audio/clip1.wav", "--language", "en")
    assert answered(capsys, *transcribe, "--local", "2") == answered(capsys, *transcribe)


@pytest.mark.slow
def test_what_a_worker_cannot_do_is_told(options: dict[str, Any]) -> None:
    with pytest.raises(MusterError, match="a model of 5 blocks cannot lie on 6 devices"):
        evaluate_model(options["model_path"], str(options["dataset_path"]), "validation", "cpu", workers=6)


@pytest.mark.slow
def test_a_killed_worker_ends_what_uses_the_model_in_plain_words(options: dict[str, Any]) -> None:
    profile = profile_from_options("p", {**options, "device": "cpu"})
    task = WhisperTask(profile)

    def use() -> None:
        with model_in_use(task, profile, 2) as (model, _), torch.no_grad():
            for child in psutil.Process().children():
                if "training.inference.in_use" in line_of(child.pid):
                    end(child.pid, signal.SIGTERM)  # after SIGKILL a preloaded copy would live a moment longer
            task.wrapper.encode_audio(model, torch.zeros(1, 16, 100))

    with pytest.raises(RunFailed, match="a worker of this machine that holds a part of the model ended: "):
        use()
