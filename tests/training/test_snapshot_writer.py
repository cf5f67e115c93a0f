"""Snapshots written beside training: it waits for a copy only, and what an event tells of is on the disk."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_out_of_memory import Tight
from toy_task import ToyTask, toy_plan

from profiles.errors import RunFailed
from training.exchange.base import SoloExchange
from training.loop.state import check_finite
from training.loop.trainer import Trainer
from training.records.events import AnswerEvent, Event, MemberEvent, SnapshotEvent, StepEvent, WarningEvent
from training.run.orders import Command, Control
from training.snapshots import snapshot_store as checkpoint
from training.snapshots import tensor_file
from training.snapshots.snapshot_store import Snapshot, SnapshotStore
from training.snapshots.snapshot_writer import SnapshotWriter
from training.snapshots.tensor_file import DTYPES, HostCopy, TensorFile

CPU = torch.device("cpu")
PATIENCE = 60.0


class SlowDisk:
    """Its ``fsync`` ends when it is let, or with an error."""

    def __init__(self) -> None:
        self.lets, self.waits = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        self.waits.set()
        assert self.lets.wait(PATIENCE), "training waits for the disk"
        if self.error:
            raise self.error
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    slow = SlowDisk()
    monkeypatch.setattr(checkpoint.os, "fsync", slow.fsync)
    return slow


@pytest.fixture
def full_disk(disk: SlowDisk) -> SlowDisk:
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    disk.lets.set()
    return disk


def writer_of(
    tmp_path: Path, emit: Callable[[Event], None] = lambda event: None, free: int = 1 << 40
) -> SnapshotWriter:
    store = SnapshotStore(tmp_path / "checkpoints" / "member-0", 2)
    return SnapshotWriter(store, CPU, "studio", emit, tmp_path, lambda: free)


def stored(tmp_path: Path, step: int) -> torch.Tensor:
    return SnapshotStore(tmp_path / "checkpoints" / "member-0", 2).load(step, "plan").tensors["w"]


def train(
    tmp_path: Path,
    emit: Callable[[Event], None],
    interval: int = 3,
    control: Control | None = None,
    task: ToyTask | None = None,
    **training: int,
) -> None:
    task = task or ToyTask()
    plan = toy_plan(training={"max_steps": 5, **training}, snapshot={"snapshot_interval": interval})
    task.prepare(lambda *_: None)
    Trainer(plan, 0, task, SoloExchange(), emit, control or Control(), tmp_path).run()


# --------------------------------------------------------------------------------------------------------- the trainer


def test_a_slow_disk_holds_up_no_step_but_the_end_of_the_run(tmp_path: Path, disk: SlowDisk) -> None:
    events = list[Event]()

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepEvent) and event.step == 5:
            assert not any(isinstance(e, SnapshotEvent) for e in events)
            disk.lets.set()

    train(tmp_path, emit)
    assert [event.step for event in events if isinstance(event, SnapshotEvent)] == [3]


def test_what_an_event_tells_of_is_on_the_disk(tmp_path: Path) -> None:
    sound = list[bool]()

    def emit(event: Event) -> None:
        if isinstance(event, SnapshotEvent):
            steps, _ = SnapshotStore((tmp_path / event.path).parent, 2).verified_steps()
            sound.append(event.step in steps)

    train(tmp_path, emit, interval=1)
    assert sound == [True] * 4


def test_who_asks_for_a_snapshot_on_a_full_disk_hears_so(tmp_path: Path, full_disk: SlowDisk) -> None:
    answers = list[AnswerEvent]()
    control = Control(answer=answers.append)
    control.post(Command(command="snapshot", order=1, at_step=2))
    train(tmp_path, lambda _: None, control=control)
    (answer,) = answers
    assert answer.done and answer.failure.startswith("worker-0: the snapshot of step 2 cannot be written to ")
    assert answer.failure.endswith(": the disk is full (free some space)")


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, full_disk: SlowDisk) -> None:
    events = list[Event]()

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepEvent) and event.step == 8:
            full_disk.error = None

    train(tmp_path, emit, interval=2, max_steps=12)
    warned = [event.message for event in events if isinstance(event, WarningEvent)]
    assert len(warned) == 2 and warned[1] == "worker-0 can write snapshots again"
    said = r"worker-0: the snapshot of step 2 cannot be written to .*: the disk is full \(free some space\); "
    assert re.fullmatch(said + "training goes on, and no snapshot was written yet", warned[0])
    assert [event.step for event in events if isinstance(event, SnapshotEvent)][-1] == 10
    assert (tmp_path / "model").exists()


@pytest.mark.parametrize("order", ["stop", "snapshot"])
def test_an_order_is_carried_out_when_the_snapshot_is_on_the_disk(tmp_path: Path, order: str) -> None:
    events, control = list[Event](), Control(answer=lambda answer: events.append(answer))
    control.post(Command.model_validate({"command": order, "order": 1, "at_step": 3}))
    train(tmp_path, events.append, control=control)
    after = events[next(i for i, event in enumerate(events) if isinstance(event, SnapshotEvent)) :]
    assert after[1].kind == ("member" if order == "stop" else "answer")


def test_a_stop_order_tells_of_a_full_disk(tmp_path: Path, full_disk: SlowDisk) -> None:
    events, control = list[Event](), Control()
    control.post(Command(command="stop", at_step=3))
    with pytest.raises(RunFailed, match="the disk is full"):
        train(tmp_path, events.append, interval=0, control=control)
    assert not any(isinstance(event, MemberEvent) and event.status == "left" for event in events)


@pytest.mark.slow
@pytest.mark.parametrize(("fits", "in_thread"), [(8, True), (3, False)])
def test_a_run_that_was_short_of_memory_has_none_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int, in_thread: bool
) -> None:
    fsync, threads = os.fsync, set[bool]()

    def noted(descriptor: int) -> None:
        threads.add(threading.current_thread().name.startswith("snapshots"))
        fsync(descriptor)

    monkeypatch.setattr(checkpoint.os, "fsync", noted)
    train(tmp_path, lambda event: None, task=Tight(fits), batch_size=8)
    assert threads == {in_thread}


# ---------------------------------------------------------------------------------------------------------- the writer


def test_training_may_change_what_is_being_written(tmp_path: Path, disk: SlowDisk) -> None:
    writer, weights, course = writer_of(tmp_path), torch.arange(6.0), [1]
    writer.begin(Snapshot(1, {"w": weights}, {"course": course}), "plan")
    weights += 1
    course.append(2)
    disk.lets.set()
    writer.close()
    assert stored(tmp_path, 1).tolist() == [0, 1, 2, 3, 4, 5]
    assert SnapshotStore(tmp_path / "checkpoints" / "member-0", 2).state(1) == {"course": [1]}


def test_the_next_one_waits_for_the_one_before(tmp_path: Path, disk: SlowDisk) -> None:
    events = list[Event]()
    writer = writer_of(tmp_path, events.append)
    writer.begin(Snapshot(1, {"w": torch.zeros(3)}), "plan")
    second = threading.Thread(target=writer.begin, args=(Snapshot(2, {"w": torch.ones(3)}), "plan"))
    second.start()
    assert disk.waits.wait(PATIENCE) and second.is_alive() and not events
    disk.lets.set()
    second.join()
    assert isinstance(events[0], SnapshotEvent) and events[0].step == 1  # that of the second may be there, too
    writer.close()
    assert (stored(tmp_path, 1).sum(), stored(tmp_path, 2).sum()) == (0, 3)


@pytest.mark.parametrize("case", ["short of memory", "after a memory error", "closed", "in turn"])
def test_where_there_is_no_room_for_a_copy_training_waits(tmp_path: Path, case: str) -> None:
    writer = writer_of(tmp_path, free=23 if case == "short of memory" else 24)
    if case == "after a memory error":
        writer.release()
    if case == "closed":
        writer.close()
    writer.begin(Snapshot(1, {"w": torch.zeros(3)}), "plan", in_background=case != "in turn")
    assert stored(tmp_path, 1).tolist() == [0, 0, 0]
    writer.close()


@pytest.mark.parametrize("in_background", [True, False])
def test_a_failed_one_can_be_written_again(tmp_path: Path, full_disk: SlowDisk, in_background: bool) -> None:
    writer = writer_of(tmp_path)
    writer.begin(Snapshot(1, {"w": torch.zeros(3)}), "plan", in_background)
    assert writer.newest_in_words() == "no snapshot was written yet"
    full_disk.error = None
    with pytest.raises(RunFailed, match="studio: the snapshot of step 1"):
        writer.wait(is_required=True)
    writer.begin(Snapshot(1, {"w": torch.zeros(3)}), "plan")
    assert writer.newest_in_words() == "the snapshot of step 1 is kept"


def test_the_end_sweeps_what_a_killed_process_has_left_although_none_is_written(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    for name in (".writing-00000012", ".replaced-00000006", "step-00000009"):
        (tmp_path / "checkpoints" / "member-0" / name).mkdir(parents=True)
    writer.close()
    assert [path.name for path in (tmp_path / "checkpoints" / "member-0").iterdir()] == ["step-00000009"]


def test_of_those_that_others_write_too_the_oldest_goes_with_the_next(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, keep=1, shared=True)
    seen = list[tuple[list[int], list[int]]]()
    for step in (10, 20, 30, 40, 25):
        before = list[int]()

        def pieces(meanwhile: list[int] = before) -> Iterator[memoryview]:
            meanwhile += store.steps()
            yield from TensorFile({"w": torch.zeros(1)}).pieces()

        store.write(step, pieces(), {}, "plan")
        seen.append((before, store.steps()))
    assert seen == [([], [10]), ([10], [20, 10]), ([20, 10], [30, 20, 10]), ([30, 20], [40, 30, 20]),
                    ([40, 30, 20], [25, 20])]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the file


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5))
    dtypes = [draw(st.sampled_from(list(DTYPES))) for _ in shapes]
    made = [torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) for shape in shapes]
    made = [values.to(dtype) for values, dtype in zip(made, dtypes, strict=True)]
    return {f"{n}": one.mT if one.ndim == 2 else one for n, one in enumerate(made)}


@settings(deadline=None)
@given(first=tensors(), second=tensors(), piece=st.integers(1, 40))
def test_a_copy_is_the_file(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], piece: int) -> None:
    copy = HostCopy(CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "PIECE", piece)
        for given_tensors in (first, second, first):
            file = TensorFile(given_tensors)
            data = b"".join(copy.take(file))
            assert data == b"".join(file.pieces())
            read = safetensors.torch.load(data)
            assert read.keys() == given_tensors.keys()
            for name, value in given_tensors.items():
                assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape)
                assert read[name].tolist() == value.tolist()


def test_every_type_that_is_read_can_be_written() -> None:
    assert {dtype: name for name, dtype in safetensors.torch._TYPES.items()} == DTYPES


def test_a_type_that_no_file_holds_is_one_line() -> None:
    with pytest.raises(RunFailed, match=r"optimizer/0/x is of torch.complex128: no snapshot can hold it"):
        TensorFile({"optimizer/0/x": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_finite_is_seen_among_all(value: float, dtype: torch.dtype) -> None:
    weights = [torch.full((3,), 3e38, dtype=dtype), torch.zeros(0), torch.ones(2, 2)]
    check_finite(weights, "studio", 4, lambda: "")
    weights[0][1] = value
    with pytest.raises(RunFailed, match="the weights of studio are not finite after step 4; the rest"):
        check_finite(weights, "studio", 4, lambda: "the rest")
