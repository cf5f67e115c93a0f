"""A machine with several GPUs trains on all of them; GPUs stand in as what the driver's program says of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli.train import start
from app.cli.train.request import TrainRequest
from distributed.hosts.schema import Machine
from distributed.launcher import PlanOptions, plan_machines
from distributed.machine.link import MachineLink
from distributed.preparation.members import check_machines, member_names
from distributed.preparation.preflight import Facts, Ready, memory_budgets, take_every_gpu
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile

CARD = "NVIDIA GeForce RTX 3060, 12288 MiB, 8.6, [N/A]"
SLICED = "NVIDIA A100-PCIE-40GB, 40960 MiB, 8.0, Enabled"
FACTS = Facts((3, 11, 7), "2.13.0+cu130", (), 0.1, 10**11, True, "/home/a", "Linux", 2, "eth0", "a",
              gpu_memory=12 << 30, gpus_alike=True)  # fmt: skip
JOB = {"task": "custom", "model_path": "tests.layouts.deep_model:deep_job"}


def profile_of(**options: Any) -> Profile:
    return profile_from_options("p", {**JOB, **options})


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], None]:
    """Return what puts a driver's program in place that reports these GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")

    def put(said: Sequence[str]) -> None:
        listed = "\\n".join(f"GPU {index}: {card}" for index, card in enumerate(said))
        answers = {"-L": listed, "--query-gpu=name*": "\\n".join(said), "--query-gpu=memory*": "\\n".join(
            card.split(", ")[1].split()[0] for card in said), "--query-gpu=compute*": "8.6"}  # fmt: skip
        cases = "".join(f"{asked}) printf '{answer}\\n';;\n" for asked, answer in answers.items())
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\n')
        program.chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("said", "options", "indices"),
    [
        ([CARD, CARD], {}, [0, 1]),
        ([CARD, CARD], {"workers": "1"}, [0]),
        ([CARD, CARD], {"device": "cpu"}, [0]),
        ([CARD, CARD], {"shares": "1"}, [0]),
        ([CARD, "NVIDIA GeForce GT 710, 2048 MiB, 3.5, [N/A]"], {}, [0]),
        ([SLICED, SLICED], {}, [0]),
        ([CARD], {}, [0]),
    ],
)
def test_this_computer_has_a_worker_for_each_of_its_gpus(
    said: list[str], options: dict[str, str], indices: list[int], cards: Callable[[Sequence[str]], None]
) -> None:
    cards(said)
    plan = start.plan_of(TrainRequest(overrides={**JOB, **options}, trust_code=True))
    assert [member.lead.index for member in plan.members] == indices


def machines(facts: Facts = FACTS, **fields: Any) -> list[Ready]:
    return [(MachineLink(Machine(name="box", **fields), lambda: pytest.fail("it was asked")), facts)]


def test_a_listed_machine_has_a_member_for_each_of_its_gpus() -> None:
    box = machines()
    take_every_gpu(profile_of(), box)
    assert member_names(box) == ["box:cuda:0", "box:cuda:1"]
    assert [(budget.name, budget.members) for budget in memory_budgets(profile_of(), box)] == [("box", 1)] * 2
    plan = plan_machines(box, profile_of(), PlanOptions()).plan  # without measurements
    assert [(member.lead.kind, member.lead.index) for member in plan.members] == [("cuda", 0), ("cuda", 1)]


@pytest.mark.parametrize(
    ("box", "options", "named"),
    [
        (machines(devices=("cuda:1",)), {}, ()),
        (machines(replace(FACTS, gpus_alike=False)), {}, ()),
        (machines(replace(FACTS, torch="2.13.0+cpu")), {}, ()),
        (machines(), {"device": "cpu"}, ()),
        (machines(), {"local_data": True, "dataset_path": "data"}, ()),
        (machines(), {"shares": "2,1"}, ()),
        (machines(), {}, ["box"]),
    ],
)
def test_a_machine_stays_one_member_where_somebody_has_decided_so(
    box: list[Ready], options: dict[str, Any], named: Sequence[str]
) -> None:
    take_every_gpu(profile_of(**options), box, named)
    assert member_names(box) == ["box"]


def test_how_many_devices_a_machine_has_is_known_when_it_is_asked() -> None:
    check_machines(profile_of(layout="pipeline"), [Machine(name="box")])
