"""Samples read by several threads or processes: the same as by one, and told where they cannot be."""

from __future__ import annotations

import itertools
import multiprocessing.connection
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer import losses, train
from toy_task import ToyTask, toy_plan

from profiles.errors import RunFailed
from profiles.schema import Profile
from tests.lab.processes import is_dead
from tests.waiting import PATIENCE, until
from training.data import batches as batches_module
from training.data import reading
from training.data.batches import BatchSource, Samples
from training.data.reading import batch_source
from training.data.sample_order import Cursor, SampleSchedule
from training.records.events import StepEvent
from training.records.plan import RunPlan
from training.run.orders import Command, Control
from training.tasks.base import Batch
from training.tasks.custom import CustomTask

JOB = """
import random, numpy, torch
from torch import nn
class Noisy:
    def __len__(self): return 16
    def __getitem__(self, index):
        if index == 5: raise OSError(f"{index}.png is no picture")
        noise = torch.randn(3) + float(numpy.random.randn()) + random.random()
        return torch.full((3,), float(index)) + noise, torch.tensor([float(index)])
def stacked(samples): return tuple(map(torch.stack, zip(*samples)))
def job(): return dict(model=nn.Linear(3, 1), train=Noisy(), loss=nn.functional.mse_loss, collate=stacked)
def unsendable(): return {**job(), "collate": lambda samples: stacked(samples)}
def opened(samples): return [open(__file__), stacked(samples)]
def opened_files(): return {**job(), "collate": opened}
"""

SCRIPT = """
import sys, torch
from torch import nn
class Pairs:
    def __len__(self): return 16
    def __getitem__(self, index): return torch.randn(4), torch.ones(1)
def told(event):
    if event.kind in ("warning", "error"): print(event.message)
if __name__ == "__main__":
    from training.local_trainer import LocalTrainer
    fitted = dict(loss=nn.functional.mse_loss, output_dir=sys.argv[1], workers=1, on_event=told)
    LocalTrainer(nn.Linear(4, 1), Pairs(), **fitted).fit(max_steps=3, batch_size=4, data_workers=2)
"""


class Augmented(ToyTask):
    """Draws from its samples' own generators alone."""

    uses_global_rng = False

    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        batch = super().collate(samples, rngs)
        noise = torch.tensor([rng.random() for rng in rngs or ()])[:, None]
        return {**batch, "x": batch["x"] + noise} if rngs else batch


def steps_of(source: BatchSource, cursor: Cursor, sizes: Sequence[dict[int, int]]) -> Iterator[torch.Tensor]:
    for left, size in zip(range(len(sizes) - 1, -1, -1), sizes, strict=True):
        step = source.take(cursor, size, left)
        yield torch.cat([batch["x"] for batch in step.micro_batches])
        cursor = step.cursor
    source.close()


@pytest.mark.parametrize("workers", [2, 8])
def test_threads_make_the_same_batches_as_one(workers: int) -> None:
    task = Augmented(20)
    task.prepare(lambda *_: None)
    sizes = [{0: 4}] * 4 + [{0: 4, 1: 2}] * 3 + [{0: 6}] * 4  # made ahead in vain twice, and past the epoch

    def made(threads: int) -> list[torch.Tensor]:
        source = BatchSource(task, SampleSchedule(20, 3, 1), 0, Samples(task, 3), workers=threads)
        return list(steps_of(source, Cursor(), sizes))

    for one, other in zip(made(1), made(workers), strict=True):
        assert torch.equal(one, other)


def test_a_stopped_run_with_several_readers_goes_on_exactly(tmp_path: Path) -> None:
    def plan(workers: int, resume: bool = False) -> RunPlan:
        made = toy_plan(resume=resume)
        data = made.profile.data.model_copy(update={"data_workers": workers})
        return made.model_copy(update={"profile": made.profile.model_copy(update={"data": data})})

    _, whole = train(plan(1), tmp_path / "whole", Augmented())
    control = Control()
    control.post(Command(command="stop", at_step=5))
    _, first = train(plan(4), tmp_path / "cut", Augmented(), control)
    _, rest = train(plan(4, resume=True), tmp_path / "cut", Augmented())
    assert losses(first) + losses(rest) == losses(whole)


def test_no_more_is_made_than_the_run_needs() -> None:
    task = Augmented(48)
    task.prepare(lambda *_: None)
    source = BatchSource(task, SampleSchedule(48, 0, 1), 0, Samples(task, 0), workers=4)
    list(steps_of(source, Cursor(), [{0: 4}] * 6))
    assert len(task.seen) == 24


def test_the_time_that_a_step_waits_for_its_samples_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(batches_module.time, "monotonic", lambda: float(next(clock)))
    _, events = train(toy_plan(), tmp_path)
    assert all(0 < event.data <= event.compute for event in events if isinstance(event, StepEvent))


# ----------------------------------------------------------------------------------------------------------- processes


def source_of(tmp_path: Path, workers: int, factory: str = "job") -> tuple[BatchSource, Samples, list[str]]:
    (tmp_path / "job_5.py").write_text(JOB)
    plan, path = toy_plan(), f"{tmp_path / 'job_5.py'}:{factory}"
    changes = {"model": {"task": "custom", "model_path": path}, "data": {"data_workers": workers}}
    profile = Profile.model_validate(plan.profile.model_dump(exclude={"model", "data"}) | changes)
    task, warnings = CustomTask(profile), list[str]()
    task.prepare(lambda *_: None)
    samples = Samples(task, 42, max_broken_share=0.5)
    plan = plan.model_copy(update={"profile": profile})
    return batch_source(plan, task, SampleSchedule(16, 42, 1), 0, samples, True, warnings.append), samples, warnings


def data_of(source: BatchSource) -> list[torch.Tensor]:
    cursor, made = Cursor(), []
    for left in range(5, -1, -1):
        step = source.take(cursor, {0: 4}, left)
        made += [part for batch in step.micro_batches for part in batch["data"]]
        cursor = step.cursor
    return made


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    source, _, _ = source_of(tmp_path_factory.mktemp("one"), 1)
    found = data_of(source)
    source.close()
    return found


@pytest.mark.slow
def test_processes_make_the_same_batches_as_this_one(tmp_path: Path, by_one: list[torch.Tensor]) -> None:
    source, samples, warnings = source_of(tmp_path, 2)
    assert source._processes is not None and not warnings
    found = data_of(source)
    assert all(torch.equal(one, other) for one, other in zip(found, by_one, strict=True))
    (line,) = samples.take_warnings()
    assert line.startswith("sample 5 of train cannot be read and is left out: OSError: 5.png is no picture (job_5.py")
    workers = list(source._processes._pool._processes.values())
    source.close()
    assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize(
    ("factory", "why"), [("unsendable", "Can't pickle"), ("opened_files", "cannot pickle '_io.TextIOWrapper'")]
)
def test_what_cannot_be_sent_is_read_here(tmp_path: Path, by_one: list[torch.Tensor], factory: str, why: str) -> None:
    source, _, warnings = source_of(tmp_path, 2, factory)
    assert source._processes is None
    assert len(warnings) == 1 and warnings[0].startswith("data_workers = 2: other processes cannot read the samples: ")
    assert why in warnings[0] and "\n" not in warnings[0]
    source.close()


def test_a_data_set_that_is_too_large_for_copies_is_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_BYTES", 100)
    source, _, warnings = source_of(tmp_path, 2)
    assert source._processes is None and "the data set takes more than" in warnings[0]
    source.close()


def test_a_process_that_is_killed_is_one_line(tmp_path: Path) -> None:
    source, _, _ = source_of(tmp_path, 2)
    assert source._processes is not None
    workers = list(source._processes._pool._processes.values())
    for worker in workers:
        worker.kill()
    for worker in workers:  # a copy of the preloaded Python lives a moment longer than whom it stands for
        assert multiprocessing.connection.wait([worker.sentinel], PATIENCE)
    with pytest.raises(RunFailed, match="worker-0: a process that reads samples was killed") as caught:
        data_of(source)
    assert "data_workers = 1" in caught.value.hint
    source.close()


def _read_and_wait(folder: Path, pids: multiprocessing.SimpleQueue[list[int]]) -> None:
    source, _, _ = source_of(folder, 2)
    assert source._processes is not None
    pids.put(list(source._processes._pool._processes))
    threading.Event().wait()


@pytest.mark.slow
def test_processes_end_with_the_one_that_trains_however_it_ends(tmp_path: Path) -> None:
    spawned = multiprocessing.get_context("spawn")
    pids: multiprocessing.SimpleQueue[list[int]] = spawned.SimpleQueue()
    trains = spawned.Process(target=_read_and_wait, args=(tmp_path, pids), daemon=False)
    trains.start()
    readers = pids.get()
    trains.kill()
    trains.join()

    assert len(readers) == 2
    until(lambda: all(map(is_dead, readers)))


@pytest.mark.slow
def test_processes_read_what_a_script_gives_to_a_trainer(tmp_path: Path) -> None:
    script = tmp_path / "script" / "fit.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    words, root = [sys.executable, str(script), str(tmp_path / "out")], str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
