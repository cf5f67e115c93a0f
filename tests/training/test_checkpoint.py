"""Snapshots: bit-exact, atomic, checked."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from profiles.errors import BadInput, RunFailed
from training.numerics.randomness import restore_rng, rng_state
from training.snapshots.optimizer_state import load_optimizer, optimizer_tensors
from training.snapshots.snapshot_store import DamagedSnapshot, Snapshot, SnapshotStore

CPU = torch.device("cpu")


def tensors(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.randn(5, 3, generator=rng),
        "model/half": torch.randn(7, generator=rng).to(torch.bfloat16),
        "optimizer/0/step": torch.tensor(3.0),
        "rng/torch": torch.randint(0, 255, (16,), dtype=torch.uint8, generator=rng),
        "strategy/empty": torch.zeros(0),
    }


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "checkpoints" / "member-0", keep=2)


def save(store: SnapshotStore, *steps: int) -> Path:
    for step in steps:
        folder, _ = store.save(Snapshot(step, tensors(step), {"step": step}), "plan")
    return folder


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(value, other[name]), name


# ------------------------------------------------------------------------------------------------------------- saving


def test_round_trip_is_bit_exact(store: SnapshotStore) -> None:
    state = {"loss": 0.1 + 0.2, "cursor": {"epoch": 1, "offset": 7}, "best": None, "tiny": 5e-324}
    folder, size = store.save(Snapshot(120, tensors(), state), "plan")
    loaded = store.load(120, "plan")
    assert folder.name == "step-00000120"
    assert size == sum(file.stat().st_size for file in folder.iterdir())
    assert (loaded.step, loaded.state) == (120, state)
    assert_same(loaded.tensors, tensors())


def test_tied_weights_and_views_are_saved(store: SnapshotStore) -> None:
    shared = torch.arange(6.0)
    tied = {"a": shared, "b": shared, "view": shared[2:4], "column": shared.view(2, 3)[:, 1]}
    store.save(Snapshot(1, tied), "plan")
    assert_same(store.load(1, "plan").tensors, tied)


def test_only_the_newest_are_kept(store: SnapshotStore) -> None:
    save(store, 10, 20, 30)
    assert store.steps() == [30, 20]
    assert sorted(os.listdir(store.directory)) == ["step-00000020", "step-00000030"]


def test_saving_an_earlier_step_drops_the_abandoned_course(store: SnapshotStore) -> None:
    save(store, 20, 30, 25)
    assert store.steps() == [25, 20]


def test_saving_a_step_again_replaces_it(store: SnapshotStore) -> None:
    save(store, 10)
    store.save(Snapshot(10, tensors(99)), "plan")
    assert_same(store.load(10, "plan").tensors, tensors(99))
    assert os.listdir(store.directory) == ["step-00000010"]


def test_leftovers_are_swept_by_the_next_save(store: SnapshotStore) -> None:
    save(store, 10)
    shutil.copytree(store.directory / "step-00000010", store.directory / ".writing-00000020")
    assert store.steps() == [10]
    assert store.verified_steps() == ([10], [])
    save(store, 30)
    assert sorted(os.listdir(store.directory)) == ["step-00000010", "step-00000030"]


def test_no_folder_means_no_snapshots(store: SnapshotStore) -> None:
    assert store.steps() == []
    assert store.verified_steps() == ([], [])


# ------------------------------------------------------------------------------------------------------------- damage


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def remove(file: Path) -> None:
    file.unlink()


def spoil(file: Path) -> None:
    file.write_bytes(b"\xff\x00[1, 2")


def change_a_number(file: Path) -> None:
    document = json.loads(file.read_bytes())
    document["state"]["step"] += 1
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("state.safetensors", flip_a_byte),
        ("state.safetensors", truncate),
        ("state.safetensors", remove),
        ("manifest.json", truncate),
        ("manifest.json", remove),
        ("manifest.json", spoil),
        ("manifest.json", change_a_number),
    ],
)
def test_a_damaged_snapshot_is_named_and_passed_over(store: SnapshotStore, name: str, harm: object) -> None:
    file = save(store, 10, 20) / name
    assert callable(harm)
    harm(file)
    steps, problems = store.verified_steps()
    assert steps == [10]
    assert len(problems) == 1
    assert str(file) in problems[0]
    assert "\n" not in problems[0]


def test_a_missing_step_is_a_damaged_snapshot(store: SnapshotStore) -> None:
    with pytest.raises(DamagedSnapshot, match="step-00000007"):
        store.load(7, "plan")


def test_a_snapshot_of_another_plan_is_bad_input(store: SnapshotStore) -> None:
    save(store, 10)
    with pytest.raises(BadInput, match="different settings"):
        store.load(10, "another plan")


KILLED = """from multiprocessing.util import sys  # so it is a copy of the preloaded Python
import itertools, torch
from pathlib import Path
from training.snapshots.snapshot_store import Snapshot, SnapshotStore
from training.snapshots.snapshot_writer import SnapshotWriter
folder, in_background = Path(sys.argv[1]), sys.argv[2] == "beside"
tell = lambda event: print(event.step, flush=True)
writer = SnapshotWriter(SnapshotStore(folder, keep=2), torch.device("cpu"), "studio", tell, folder)
tensors = {"model/weight": torch.ones(5_000_000)}
for step in itertools.count(1):
    tensors["model/weight"] += 1
    writer.begin(Snapshot(step, tensors), "plan", in_background)
"""


def wait_for_a_half_written_one(folder: Path, deadline: float) -> None:
    while time.monotonic() < deadline:
        if any(name.startswith(".writing") for name in os.listdir(folder)):
            return
    raise AssertionError("no snapshot was being written")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["beside", "in turn"])
def test_kill_during_a_save_leaves_the_older_one(tmp_path: Path, way: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), way], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"1\n"
        wait_for_a_half_written_one(tmp_path, time.monotonic() + 60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    store = SnapshotStore(tmp_path, keep=2)
    steps, problems = store.verified_steps()
    assert steps
    assert not problems
    weights = store.load(steps[0], "plan").tensors["model/weight"]
    assert torch.equal(weights, torch.full((5_000_000,), steps[0] + 1.0))


def test_a_kill_while_an_old_one_goes_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(tmp_path, keep=2)
    remove = shutil.rmtree

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.name.startswith(".writing") or not path.exists():
            return remove(path, ignore_errors)
        next(path.glob("*.safetensors")).unlink()
        raise KeyboardInterrupt

    save(store, 10)
    save(store, 20)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(store, 30)
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert store.verified_steps() == ([30, 20], [])
    save(store, 40)
    assert sorted(os.listdir(tmp_path)) == ["step-00000030", "step-00000040"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_one_line_and_keeps_the_older_one(small_disk: Path) -> None:
    store = SnapshotStore(small_disk / "member-0", keep=2)
    save(store, 10)
    with pytest.raises(RunFailed, match=r"step 20 .*the disk is full"):
        store.save(Snapshot(20, {"model/weight": torch.ones(100_000)}), "plan")
    assert os.listdir(store.directory) == ["step-00000010"]
    assert store.verified_steps() == ([10], [])


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFailed, match=r"cannot be written to .*file"):
        save(SnapshotStore(tmp_path / "file" / "member-0", keep=2), 1)


# ------------------------------------------------------------------------------------------------ optimizer and random

Optimizers = [
    lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95)),
    lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step + 1))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("make", Optimizers)
def test_an_optimizer_goes_on_bit_for_bit(make: object) -> None:
    assert callable(make)
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    saved = optimizer_tensors(optimizer)
    twin.load_state_dict(model.state_dict())
    other = make(twin.parameters())
    load_optimizer(other, saved)
    train(model, optimizer, 2)
    train(twin, other, 2)
    assert_same(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert_same(optimizer_tensors(optimizer), optimizer_tensors(other))


def test_loading_keeps_the_hyper_parameters() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.95))
    train(model, optimizer, 1)
    other = torch.optim.AdamW(model.parameters(), lr=0.7, betas=(0.1, 0.2))
    load_optimizer(other, optimizer_tensors(optimizer))
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.7, (0.1, 0.2))


def draw() -> list[float]:
    return [
        *torch.randn(3).tolist(),
        random.gauss(0, 1),
        *np.random.standard_normal(3).tolist(),
        nn.functional.dropout(torch.ones(64)).sum().item(),
    ]


def test_random_state_goes_on_bit_for_bit(store: SnapshotStore) -> None:
    draw()  # leaves half of a Gaussian pair in Python's and numpy's generators
    store.save(Snapshot(1, rng_state(CPU)), "plan")
    expected = draw()
    draw()
    restore_rng(store.load(1, "plan").tensors, CPU)
    assert draw() == expected
