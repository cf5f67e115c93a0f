"""Runs of real workers whose model lies on several of them, and what they have in common with one that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from profiles.files.resolve import profile_from_options
from tests.layouts.thread_workers import NoCoordinator, ThreadWorkers
from tests.tasks.tiny_tasks import byte_tokenizer
from training.loop import showcase_sampling
from training.records.events import Event, StepEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run, with_workers
from training.run.outcome import RunOutcome
from training.run.resumption import plan_to_resume
from training.run.run_controller import RunController, StartWorker
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME, read_showcase
from training.tasks.text import causal_lm

STEPS = 5
TRAINING: dict[str, Any] = {
    "max_steps": STEPS, "batch_size": 8, "learning_rate": 0.01, "max_grad_norm": 0.5, "eval_interval": 2,
    "snapshot_interval": 2, "mixed_precision": "off",
}  # fmt: skip


Act = Callable[[RunController, Event], None]


def watch(run: RunController, event: Event) -> None:
    """Do nothing about an event."""


def stop_soon(run: RunController, event: Event) -> None:
    """Stop a run after its first steps."""
    if isinstance(event, StepEvent):
        run.request_stop("enough")


@contextmanager
def unhurried() -> Iterator[None]:
    """Let samples that are shown take as long as they do: on a busy machine, time would end their texts anywhere."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(causal_lm, "_SECONDS", 600.0)
        patched.setattr(showcase_sampling, "SECONDS", 600.0)
        yield


class Record:
    """A finished run.

    Args:
        in_threads: its workers are threads of this process, see :mod:`tests.layouts.thread_workers`.
    """

    def __init__(
        self,
        folder: RunFolder,
        act: Act = watch,
        start_worker: StartWorker | None = None,
        in_threads: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.is_unhurried = in_threads

        def take(event: Event) -> None:
            self.events.append(event)
            act(run, event)

        with folder, unhurried() if in_threads else nullcontext():
            plan, coordinator = folder.plan(), NoCoordinator if in_threads else None
            if in_threads and start_worker is None:
                start_worker = ThreadWorkers(plan, lambda rank: folder.path, act is stop_soon).start
            run = RunController(plan, folder, take, start_worker, start_coordinator=coordinator)
            run.start()
            self.outcome: RunOutcome = run.wait()

    @property
    def steps(self) -> dict[int, tuple[float, float | None]]:
        """Loss and gradient norm by step."""
        return {event.step: (event.loss, event.grad_norm) for event in self.of(StepEvent)}

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def plan_of(workers: int, **options: Any) -> RunPlan:
    layout = "pipeline" if workers > 1 else "replicate"
    return plan_local_run(profile_from_options("p", {**TRAINING, "layout": layout, **options}), workers)


def trained(output: Path, plan: RunPlan, act: Act = watch, in_threads: bool = False) -> Record:
    return Record(RunFolder.create(output, plan, ["test"]), act, in_threads=in_threads)


def resumed(
    run_dir: Path,
    workers: int = 0,
    act: Act = watch,
    layout: str = "",
    in_threads: bool = False,
) -> Record:
    """Resume a run, with another number of workers if it is not 0."""
    plan = plan_to_resume(run_dir)
    plan = with_workers(plan, workers, layout) if workers else plan
    return Record(RunFolder.resume(run_dir, plan, ["test"]), act, in_threads=in_threads)


def agree(record: Record, expected: Record) -> None:
    """Check loss and norm of the steps that a run has made."""
    assert len(record.steps) == len(record.of(StepEvent))
    assert {event.member for event in record.of(StepEvent)} == {0}
    for step, figures in record.steps.items():
        assert figures == pytest.approx(expected.steps[step], rel=1e-6)


def weights_in(run_dir: Path) -> dict[str, torch.Tensor]:
    (file,) = (run_dir / "model").glob("*.safetensors")
    return safetensors.torch.load_file(file)


def assert_same_showcase(run: Record, whole: Record) -> None:
    """Check losses and texts of the samples; time ends those of worker processes anywhere on a busy machine."""
    shown, expected = (read_showcase(record.outcome.run_dir / FOLDER / NAME) for record in (run, whole))
    assert shown is not None and expected is not None and shown.samples
    for sample, other in zip(shown.samples, expected.samples, strict=True):
        losses = [(entry.first or 0.0, entry.last or 0.0) for entry in (sample, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for text, wanted in ((sample.before, other.before), (sample.after, other.after)):
            both = max(len(text), len(wanted)) if run.is_unhurried else min(len(text), len(wanted))
            assert text[:both] == wanted[:both]


def assert_same_weights(run: Record, whole: Record) -> None:
    weights, expected = weights_in(run.outcome.run_dir), weights_in(whole.outcome.run_dir)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def tied_llama(folder: Path, blocks: int, lines: int) -> dict[str, Any]:
    """Make a Llama with a tied embedding, and a text of so many lines; return the options to train it."""
    model, text = folder / "llama", folder / "text"
    text.mkdir()
    (text / "input.txt").write_text("the quick brown fox jumps over the lazy dog\n" * lines)
    byte_tokenizer().save_pretrained(model)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": blocks, "num_attention_heads": 2}
    ends = {"eos_token_id": 256, "bos_token_id": 256}
    config = LlamaConfig(vocab_size=258, max_position_embeddings=32, tie_word_embeddings=True, **shape, **ends)
    LlamaForCausalLM(config).save_pretrained(model)
    return {"task": "causal_lm", "model_path": model, "dataset_path": text, "block_size": 16}
