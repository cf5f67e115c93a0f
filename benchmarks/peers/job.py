"""The demo job for other programs: the same model, batches, order of samples, optimizer and events as Muster's own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from profiles.files.resolve import load_profile
from training.data.batches import BatchSource, Samples
from training.data.sample_order import Cursor, SampleSchedule
from training.exchange.base import SoloExchange
from training.hardware.device import Precision
from training.loop.evaluation import Evaluator
from training.numerics.schedule import learning_rate_at, scaled_learning_rate
from training.optimization.optimizers import build_optimizer, set_learning_rate
from training.records.event_log import EventSink
from training.records.events import MemberEvent, StepEvent
from training.tasks.registry import task_from_profile


class Job:
    """One member's half of the work: everything but the exchange."""

    def __init__(self, rank: int, world: int, options: dict[str, str]) -> None:
        self.rank = rank
        self.settings = load_profile("demo-scratch", options).profile.training
        self.profile = load_profile("demo-scratch", options).profile
        torch.set_num_threads(max(1, self.settings.threads))
        self.emit = EventSink(sys.stdout, rank)
        self.task = task_from_profile(self.profile)
        self.task.prepare(lambda *_: None)
        torch.manual_seed(self.settings.seed)
        self.model: nn.Module = self.task.build_model()
        self.model.train()
        self.optimizer = build_optimizer(self.model, self.settings)
        schedule = SampleSchedule(len(self.task.train), self.settings.seed, 1)
        self.samples = Samples(self.task, self.settings.seed)
        self.source = BatchSource(self.task, schedule, rank, self.samples)
        self.sizes = dict.fromkeys(range(world), self.settings.batch_size)
        self.peak = scaled_learning_rate(
            self.settings.learning_rate,
            self.settings.lr_scaling,
            world * self.settings.batch_size,
            self.settings.batch_size,
        )
        torch.manual_seed(self.settings.seed * 1000 + rank)

    def train(self, model: nn.Module) -> Iterator[int]:
        """Train ``model`` (this job's, perhaps wrapped); yields after every step's backward and optimizer."""
        self.emit(MemberEvent(status="ready"))
        cursor, total = Cursor(), self.settings.max_steps
        for step in range(total):
            start = time.monotonic()
            batches = self.source.take(cursor, self.sizes, step + 1 < total)
            cursor = batches.cursor
            rate = learning_rate_at(step, total, self.settings.warmup_steps, self.settings.lr_schedule, self.peak)
            set_learning_rate(self.optimizer, rate)
            loss = self.task.loss(model, batches.micro_batches[0])
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self._note(step + 1, float(loss.detach()), rate, batches.samples, batches.weight, time.monotonic() - start)
            yield step + 1

    def _note(self, step: int, loss: float, rate: float, samples: int, weight: float, seconds: float) -> None:
        self.emit(
            StepEvent(
                step=step,
                epoch=0.0,
                loss=loss,
                learning_rate=rate,
                samples=samples,
                weight=weight,
                compute=seconds,
                wait=0.0,
                transfer=0.0,
            )
        )

    def evaluate(self) -> None:
        """Emit the validation loss of the whole set."""
        precision = Precision(None, torch.device("cpu"))
        evaluator = Evaluator(
            self.samples,
            self.model,
            precision,
            SoloExchange(),
            self.profile.evaluation,
            self.settings.batch_size,
        )
        self.emit(evaluator.evaluate("validation", self.settings.max_steps, {0: 1}))
        self.source.close()


def parse() -> argparse.Namespace:
    """Read the common command line; ``options`` is a JSON object of profile options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--world", type=int, default=-1)
    parser.add_argument("--address", default="", help="own address in the lab's network")
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--interval", type=int, default=50)
    parser.add_argument("--options", type=json.loads, default={})
    return parser.parse_args()
