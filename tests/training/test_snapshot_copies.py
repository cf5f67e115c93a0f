"""Parts of snapshots on their way between devices, and who gets a copy of which."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles.errors import RunFailed
from tests.layouts.machine_folders import on_machines
from tests.layouts.pipeline_runs import QueueCarrier, queue_carriers, side_by_side
from tests.layouts.staged_records import plan_of
from training.layouts.carrier import gather_among
from training.records.plan import RunPlan
from training.snapshots import snapshot_copies
from training.snapshots.member_snapshots import MemberSnapshots, Origin, SnapshotParts
from training.snapshots.part_transfer import Transfer, bring_parts, in_phases, receive_part, send_part
from training.snapshots.snapshot_copies import SnapshotCopies
from training.snapshots.snapshot_store import DamagedSnapshot, Snapshot, SnapshotStore, announced_copy

CUSTOM: dict[str, Any] = {"task": "custom", "model_path": "tests.layouts.deep_model:deep_job"}
COURSE = ((1, 0),)


def snapshot(step: int, part: int, parts: int) -> Snapshot:
    tensors = {f"model/{part}": torch.full((3,), float(part)), "rng/torch": torch.ones(2)}
    return Snapshot(step, tensors, {"part": (part, parts), "course": COURSE})


def plan_on(names: str) -> RunPlan:
    return on_machines(plan_of(2, **CUSTOM), *names)


def snapshots_on(names: str, folder: Path) -> list[MemberSnapshots]:
    """Return what each device sees of the snapshots of a run on these machines."""
    plan = plan_on(names)
    folders = (folder / machine / "run" / str(rank) / "checkpoints" for rank, machine in enumerate(names))
    return [MemberSnapshots(folder, plan, rank) for rank, folder in enumerate(folders)]


def test_a_part_arrives_whole_or_not_at_all(tmp_path: Path) -> None:
    source, target = (SnapshotStore(tmp_path / name, 2) for name in ("source", "target"))
    source.save(snapshot(4, 1, 2), "plan")
    first, second = queue_carriers(2)
    side_by_side([partial(send_part, first, 1, source, 4), partial(receive_part, second, 0, target, 4)])
    assert target.verified_steps() == ([4], [])
    assert target.load(4, "plan").tensors["model/1"].tolist() == [1.0] * 3
    manifest, content = source.manifest(4), [*source.content(4, 1 << 20)]
    with pytest.raises(DamagedSnapshot, match="what arrived .* is damaged"):
        SnapshotStore(tmp_path / "other", 2).write_copy(manifest, [bytes(len(content[0]))])
    assert not [*(tmp_path / "other").iterdir()]


@pytest.mark.parametrize(
    ("pairs", "phases"),
    [([(0, 1), (1, 2), (2, 0)], 1), ([(0, 1), (1, 0)], 2), ([(0, 1), (0, 2), (1, 2)], 2)],
)
def test_who_sends_to_whom_at_once(pairs: list[tuple[int, int]], phases: int) -> None:
    divided = in_phases(Transfer(0, *pair) for pair in pairs)
    assert len(divided) == phases
    assert sum(map(len, divided)) == len(pairs)


def test_a_machine_gets_the_parts_that_its_devices_want(tmp_path: Path) -> None:
    """Two parts are on a and b; c, which has none, holds the first one's weights from now on, and b those of both."""
    for device, before in enumerate(snapshots_on("ab", tmp_path)):
        before.own.save(snapshot(4, device, 2), "plan")
    plan_snapshots, parts = snapshots_on("cba", tmp_path), SnapshotParts(4, Origin(2, COURSE), {0: [2], 1: [1]})
    wanted = [{"model/0"}, {"model/0", "model/1"}, set[str]()]

    def bring(device: int, carrier: QueueCarrier) -> dict[str, Any]:
        mine = plan_snapshots[device]
        wants = wanted[device].__contains__
        bring_parts(mine, carrier, partial(gather_among, carrier), parts, wants, pytest.fail)
        return mine.load(4, "plan", parts.origin, wanted[device].__contains__).tensors

    loaded = side_by_side([partial(bring, *each) for each in enumerate(queue_carriers(3))])
    assert [tensors.keys() for tensors in loaded] == wanted
    assert sorted(plan_snapshots[2].parts(4, parts.origin)) == [0]  # it wants nothing, and gets nothing


def test_one_device_of_a_machine_receives_for_all(tmp_path: Path) -> None:
    (before,) = snapshots_on("b", tmp_path)
    before.own.save(snapshot(4, 0, 1), "plan")
    now, parts = snapshots_on("baa", tmp_path), SnapshotParts(4, Origin(1, COURSE), {0: [0]})

    def bring(device: int, carrier: QueueCarrier) -> set[str]:
        is_wanted = {"model/0"}.__contains__ if device == 2 else lambda name: False
        bring_parts(now[device], carrier, partial(gather_among, carrier), parts, is_wanted, pytest.fail)
        return {*now[device].load(4, "plan", parts.origin, lambda name: True).tensors}

    loaded = side_by_side([partial(bring, *each) for each in enumerate(queue_carriers(3))])
    assert loaded == [{"model/0", "rng/torch"}] * 3


def holders_of_one_part(folder: Path) -> tuple[list[MemberSnapshots], SnapshotParts]:
    """Return a snapshot of one part that a and b have, and c has not."""
    (before,) = snapshots_on("a", folder)
    before.own.save(snapshot(4, 0, 1), "plan")
    now = snapshots_on("abc", folder)
    now[1].store_of(0).write_copy(before.own.manifest(4), before.own.content(4, 1 << 20))
    return now, SnapshotParts(4, Origin(1, COURSE), {0: [0, 1]})


@pytest.mark.parametrize("failing", ["manifest", "content", "names", "short"])
def test_a_part_that_its_machine_cannot_read_comes_from_another(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, parts = holders_of_one_part(tmp_path)
    if failing == "short":
        file = now[0].own.directory / "step-00000004" / "state.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        monkeypatch.setattr(SnapshotStore, "names", lambda store, step: ["model/0"])
    else:
        read = getattr(SnapshotStore, failing)

        def fail(store: SnapshotStore) -> Iterator[bytes]:
            raise DamagedSnapshot(f"{store.directory}: Input/output error")
            yield b""

        def read_or_fail(store: SnapshotStore, *arguments: Any) -> Any:
            if not store.directory.is_relative_to(tmp_path / "a"):
                return read(store, *arguments)
            return fail(store) if failing == "content" else next(fail(store))

        monkeypatch.setattr(SnapshotStore, failing, read_or_fail)
    warnings: list[list[str]] = [[], [], []]

    def bring(device: int, carrier: QueueCarrier) -> None:
        is_wanted = {"model/0"}.__contains__ if device != 1 else lambda name: False
        bring_parts(now[device], carrier, partial(gather_among, carrier), parts, is_wanted, warnings[device].append)

    side_by_side([partial(bring, *each) for each in enumerate(queue_carriers(3))])
    assert now[2].load(4, "plan", parts.origin, lambda name: True).tensors.keys() == {"model/0", "rng/torch"}
    assert now[0].own.verified_steps() == ([4], [])  # and a sound one of its own again
    assert len(warnings[0]) == 1 and str(tmp_path / "a") in warnings[0][0] and warnings[1:] == [[], []]


def test_a_part_that_no_machine_can_read_is_named_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, parts = holders_of_one_part(tmp_path)
    monkeypatch.setattr(SnapshotStore, "manifest", lambda store, step: (_ for _ in ()).throw(DamagedSnapshot("lost")))

    def bring(device: int, carrier: QueueCarrier) -> str:
        with pytest.raises(RunFailed) as caught:
            bring_parts(now[device], carrier, partial(gather_among, carrier), parts, lambda name: device == 2, str)
        return caught.value.message

    messages = side_by_side([partial(bring, *each) for each in enumerate(queue_carriers(3))])
    assert {*messages} == {"no machine can read part 1 of 1 of the snapshot of step 4"}


def test_a_damaged_part_is_passed_over_until_a_copy_replaces_it(tmp_path: Path) -> None:
    now, parts = holders_of_one_part(tmp_path)
    file = now[0].own.directory / "step-00000004" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    now[0].note_damaged(parts._replace(damaged={0: [str(now[0].own.directory)]}))
    assert now[0].parts(4, parts.origin) == {}
    now[0].own.write_copy(now[1].store_of(0).manifest(4), now[1].store_of(0).content(4, 1 << 20))
    assert [*now[0].parts(4, parts.origin)] == [0]


def test_copies_of_others_arrive_though_a_machine_cannot_read_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_copies, "SMALL", 0)
    all_snapshots, carriers, training = snapshots_on("abc", tmp_path), queue_carriers(3), queue_carriers(3)
    warnings: list[list[str]] = [[], [], []]

    def copy(device: int) -> None:
        mine = all_snapshots[device]
        copies = SnapshotCopies(
            mine, carriers[device], partial(gather_among, training[device]), warnings[device].append
        )
        mine.own.save(snapshot(4, device, 3), "plan")
        if device == 1:
            (mine.own.directory / "step-00000004" / "state.safetensors").unlink()
        copies.begin(4, 100, None)
        copies.wait()

    side_by_side([partial(copy, device) for device in range(3)])
    assert [sorted(mine.parts(4, Origin(3, COURSE))) for mine in all_snapshots] == [[0, 2], [0], [2]]
    assert [len(lines) for lines in warnings] == [0, 1, 0]
    assert "step-00000004/state.safetensors: No such file" in warnings[1][0]


@pytest.mark.parametrize(
    ("names", "small", "held"),
    [("abc", 0, {"a": [0, 2], "b": [0, 1], "c": [1, 2]}), ("abc", 1 << 20, {name: [0, 1, 2] for name in "abc"}),
     ("aab", 0, {"a": [0, 1, 2], "b": [0, 1, 2]})],
)  # fmt: skip
def test_each_part_gets_a_holder_on_another_machine(
    names: str, small: int, held: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_copies, "SMALL", small)
    all_snapshots, carriers, training = snapshots_on(names, tmp_path), queue_carriers(3), queue_carriers(3)

    def copy(device: int) -> None:
        mine = all_snapshots[device]
        copies = SnapshotCopies(mine, carriers[device], partial(gather_among, training[device]), pytest.fail)
        for step in (4, 8):
            mine.own.save(snapshot(step, device, 3), "plan")
            copies.begin(step, 100, None)
            copies.wait()

    side_by_side([partial(copy, device) for device in range(3)])
    for device, machine in enumerate(names):
        assert sorted(all_snapshots[device].parts(8, Origin(3, COURSE))) == held[machine]
        assert sorted(all_snapshots[device].parts(4, Origin(3, COURSE))) == [
            n for n, m in enumerate(names) if m == machine
        ]


def test_what_is_on_its_way_holds_up_no_snapshot_and_is_kept(tmp_path: Path) -> None:
    all_snapshots, carriers, training = snapshots_on("ab", tmp_path), queue_carriers(2), queue_carriers(2)
    may_write = threading.Event()

    def copy(device: int) -> None:
        mine = all_snapshots[device]
        copies = SnapshotCopies(mine, carriers[device], partial(gather_among, training[device]), pytest.fail)
        written: Any = type("Written", (), {"result": lambda self: may_write.wait(30)})()
        for step in range(1, 8):
            mine.own.save(snapshot(step, device, 2), "plan")
            copies.begin(step, 100, written)
        may_write.set()
        copies.wait()

    side_by_side([partial(copy, device) for device in range(2)])
    for device in range(2):
        assert {1, 7} <= {*all_snapshots[device].own.steps()}  # the first was the only one that was copied meanwhile
        assert sorted(all_snapshots[device].parts(7, Origin(2, COURSE))) == [0, 1]


def test_a_snapshot_that_one_machine_could_not_take_secures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_snapshots, carriers, training = snapshots_on("ab", tmp_path), queue_carriers(2), queue_carriers(2)
    write_copy, warnings = SnapshotStore.write_copy, list[str]()

    def write(store: SnapshotStore, manifest: bytes, pieces: Any) -> Path:
        if announced_copy(manifest).step in (2, 3, 4) and store.directory.is_relative_to(tmp_path / "b"):
            raise RunFailed("the disk of b is full")
        return write_copy(store, manifest, pieces)

    monkeypatch.setattr(SnapshotStore, "write_copy", write)
    all_copies = [
        SnapshotCopies(mine, carrier, partial(gather_among, trains), warnings.append)
        for mine, carrier, trains in zip(all_snapshots, carriers, training)
    ]

    def copy(device: int, steps: range) -> None:
        mine = all_snapshots[device]
        for step in steps:
            mine.own.save(snapshot(step, device, 2), "plan")
            all_copies[device].begin(step, 100, None)
            all_copies[device].wait()

    side_by_side([partial(copy, device, range(1, 5)) for device in range(2)])
    assert sorted(all_snapshots[1].parts(1, Origin(2, COURSE))) == [0, 1]  # for the loss of a
    assert sorted(all_snapshots[0].parts(4, Origin(2, COURSE))) == [0, 1]  # for that of b
    side_by_side([partial(copy, device, range(5, 8)) for device in range(2)])
    assert len(warnings) == 3
    for device in range(2):
        assert 1 not in all_snapshots[device].own.steps()
        assert sorted(all_snapshots[device].parts(7, Origin(2, COURSE))) == [0, 1]
