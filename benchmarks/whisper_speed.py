"""Fine-tuning Whisper in one process: Muster beside ``transformers.Seq2SeqTrainer``; same model, data and batch.

    .venv/bin/python benchmarks/whisper_speed.py --model FOLDER [--rounds 3] [--threads 2] [--json FILE]
        [--device cuda] [--shape small]

Both stand in one process and take turns step by step, so whatever else the machine does meets both alike. The other
trainer reads features that were computed before, as ours does. Ratios are taken round by round, their median counts;
the first round warms up and does not. Windows that follow the clips differ from step to step, so several of their steps
make a round. Prints a Markdown table. About four minutes on two cores that nothing else uses; on a busy machine
``--cpu-time --threads 1`` counts the processor time of this process instead of seconds. On a GPU both compute in bf16.
``--shape`` takes the shape of another Whisper, with random weights, beside the vocabulary of FOLDER.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from benchmarks.whisper_memory import SHAPES, shaped
from profiles.optimisation import TrainingSettings
from profiles.schema import DataSettings, ModelSettings, Profile
from speech.whisper.samples import SpeechData, SpeechSample
from speech.whisper.task import WhisperTask
from training.exchange.base import SoloExchange
from training.hardware.device import select_device
from training.loop.trainer import Trainer
from training.records.events import StepEvent, _Event
from training.run.local_plan import plan_local_run
from training.run.orders import Control

Clock = Callable[[], float]
DATA = ROOT / "examples" / "spoken_commands"
SHORT = 8
"""Steps of short windows in a round."""
AUTO = {"window": "auto"}
LORA = {"tuning": "lora", "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0}


@dataclass(frozen=True)
class Case:
    """One way to train: the other trainer, if it has it, and ours with these options."""

    name: str
    batch: int
    model: dict[str, Any]
    ours: dict[str, dict[str, Any]]
    """Options of each of ours by its name."""
    clips: int = 0
    """To train on; 0: all."""


CASES = (
    Case(
        "all weights",
        16,
        {"tuning": "full"},
        {"full windows": {}, "auto windows": AUTO, "auto windows, bf16": {**AUTO, "bf16": True}},
    ),
    Case(
        "LoRA, no dropout",
        4,
        LORA,
        {"full windows": {}, "full windows, augmentation 0.5": {"augmentation": 0.5}, "auto windows": AUTO},
    ),
    Case("LoRA, dropout 0.05", 4, {**LORA, "lora_dropout": 0.05}, {"full windows": {}}),
    Case("encoder frozen", 4, {"tuning": "full", "freeze_encoder": True}, {"full windows": {}}),
)


def task_for(model: str, case: Case, options: Mapping[str, Any], cache: str, device: str) -> WhisperTask:
    """Return the prepared task of one of ours; ``options`` are ``window``, ``augmentation`` and ``bf16``."""
    half = options.get("bf16") or device == "cuda"
    profile = Profile(
        name="whisper-speed",
        model=ModelSettings(model_path=model, **case.model),
        data=DataSettings(
            dataset_path=str(DATA),
            cache_dir=cache,
            window=options.get("window", "full"),
            augmentation=options.get("augmentation", 0.0),
            max_train_samples=case.clips,
            max_eval_samples=2,
        ),
        training=TrainingSettings(
            batch_size=case.batch, max_steps=100_000, device=device, mixed_precision="bf16" if half else "off"
        ),
    )
    task = WhisperTask(profile)
    task.device = select_device(device)
    task.prepare(lambda *_: None)
    return task


class Ours:
    """A whole trainer of Muster, one step at a time."""

    def __init__(self, task: WhisperTask, folder: str, clock: Clock) -> None:
        self._taken = 0
        self._clock = clock
        plan = plan_local_run(task.profile, 1)
        self._trainer = Trainer(plan, 0, task, SoloExchange(), self._note, Control(), Path(folder))
        self._trainer._set_up()
        self._trainer._take_starting_state()
        self._steps = SHORT if task.windows.are_cut else 1

    def _note(self, event: _Event) -> None:
        if isinstance(event, StepEvent):
            self._taken += event.samples

    def round(self) -> float:
        """Take the steps of a round; return seconds a sample. What is made ahead for the next step is in it."""
        self._taken, start = 0, self._clock()
        for _ in range(self._steps):
            self._trainer._step()
            for *_, ahead in list(self._trainer.source._queue):
                ahead.result()
        return (self._clock() - start) / self._taken

    def close(self) -> None:
        self._trainer.source.close()


@dataclass
class Rounds(TrainerCallback):
    """Lets ours take their turn after every step of the other trainer."""

    ours: dict[str, Ours]
    batch: int
    clock: Clock
    theirs: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    begun: float = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun = self.clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.theirs.append((self.clock() - self.begun) / self.batch)
        for name, one in self.ours.items():
            self.seconds.setdefault(name, []).append(one.round())
        self.begun = self.clock()


class Windows(torch.utils.data.Dataset):
    """The clips as the other trainer's users have them: full windows, computed before."""

    def __init__(self, task: WhisperTask) -> None:
        assert isinstance(task.train, SpeechData)
        self._data = task.train

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> SpeechSample:
        return self._data[index]


def their_trainer(task: WhisperTask, case: Case, rounds: Rounds, count: int, folder: str) -> Seq2SeqTrainer:
    """Return the other trainer with the same model, batch, optimizer settings and clipping."""

    def collate(samples: Sequence[SpeechSample]) -> dict[str, torch.Tensor]:
        batch = task.collate(samples, None)
        return {name: batch[name] for name in ("input_features", "decoder_input_ids", "labels")}

    settings = task.profile.training
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=case.batch,
        max_steps=count,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        warmup_steps=settings.warmup_steps,
        use_cpu=settings.device == "cpu",
        bf16=settings.device == "cuda",
        remove_unused_columns=False,
        label_names=["labels"],
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = task.build_model().train()
    return Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=Windows(task), data_collator=collate, callbacks=[rounds]
    )


def measure(model: str, case: Case, count: int, cache: str, clock: Clock, device: str) -> list[dict[str, Any]]:
    """Return a row for each of ours beside the other trainer: samples/s of both, and the ratio round by round."""
    with tempfile.TemporaryDirectory(prefix="muster-whisper-speed-") as folder:
        tasks = {name: task_for(model, case, options, cache, device) for name, options in case.ours.items()}
        ours = {name: Ours(task, folder, clock) for name, task in tasks.items()}
        rounds = Rounds(ours, case.batch, clock)
        their_trainer(task_for(model, case, {}, cache, device), case, rounds, count + 1, folder).train()
        for one in ours.values():
            one.close()
    theirs = rounds.theirs[1:]
    rows = []
    for name, seconds in rounds.seconds.items():
        ratios = [other / mine for other, mine in zip(theirs, seconds[1:], strict=True)]
        rows.append(
            {
                "trained": case.name,
                "batch": case.batch,
                "ours": name,
                "their_samples_per_s": 1 / statistics.median(theirs),
                "our_samples_per_s": 1 / statistics.median(seconds[1:]),
                "ratio": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| trained | batch | `Seq2SeqTrainer`, samples/s | Muster | samples/s | ratio (lowest to highest round) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['trained']} | {row['batch']} | {row['their_samples_per_s']:.2f} | {row['ours']} | "
            f"{row['our_samples_per_s']:.2f} | **{row['ratio']:.2f}** ({row['lowest']:.2f} to {row['highest']:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Whisper, such as tiny.en")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time instead of seconds")
    parser.add_argument("--cases", default="", help="numbers of the cases by comma, from 0; empty: all")
    parser.add_argument("--cache", default="", help="folder of the features; empty: the user's cache folder")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    chosen = [CASES[int(number)] for number in arguments.cases.split(",")] if arguments.cases else CASES
    rows: list[dict[str, Any]] = []
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            model = arguments.model
            if arguments.shape:
                model = str(shaped(Path(model), arguments.shape, Path(folder)))
            found = measure(model, case, arguments.rounds, arguments.cache, clock, arguments.device)
        print(table(found), flush=True, file=sys.stderr)
        rows += found
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
