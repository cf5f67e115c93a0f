"""Workers of one machine: each gets a GPU of its own as far as there are enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from training.hardware.resources import count_gpus, gpus_have_bf16
from training.run.local_plan import plan_local_run
from training.strategies.registry import scaling_rule_of

SHARED = "3 workers share 2 GPUs"


@pytest.mark.parametrize(
    ("gpus", "device", "indices"),
    [
        (0, "auto", [0, 0, 0]),
        (3, "auto", [0, 1, 2]),
        (8, "cuda", [0, 1, 2]),
        (2, "cuda", [0, 1, 0]),
        (2, "cpu", [0, 0, 0]),
    ],
)
def test_workers_take_turns_over_the_gpus(
    gpus: int, device: str, indices: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    profile = profile_from_options("p", {"device": device})
    plan = plan_local_run(profile, 3, count=lambda: gpus)
    assert [member.lead.index for member in plan.members] == indices
    assert (SHARED in caplog.text) == (indices == [0, 1, 0])
    elsewhere = plan_local_run(profile, 3, on_this_machine=False, count=lambda: gpus)
    assert [member.lead.index for member in elsewhere.members] == [0, 0, 0]


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("GPU-a, GPU-b,GPU-c", 3), ("0,-1,1", 1), ("MIG-a,MIG-b", 1)],
)
def test_only_visible_gpus_count(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_gpus_are_counted_by_the_drivers_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: a)'\necho 'GPU 1: NVIDIA H200 (UUID: b)'\n")
    program.chmod(0o755)
    assert count_gpus() == 2


@pytest.mark.parametrize(
    ("answer", "all_have_it"),
    [("8.0", True), ("10.3\\n8.9", True), ("8.9\\n7.5", False), ("", False), ("Field is not a valid field", False)],
)
def test_gpus_have_bf16_from_capability_8(
    answer: str, all_have_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_have_bf16() is all_have_it


@pytest.mark.parametrize(
    ("strategy", "trained", "new"),
    [
        *[(name, "sqrt", "sqrt") for name in ("auto", "zero1", "demo")],
        *[(name, "sqrt", "off") for name in ("diloco", "streaming_diloco", "local_sgd", "noloco")],
        *[(name, "off", "off") for name in ("sparta", "sparta + diloco")],
    ],
)
def test_a_plan_says_by_which_rule_the_rate_follows_the_batch(strategy: str, trained: str, new: str) -> None:
    def rule(**asked: str) -> str:
        plan = plan_local_run(profile_from_options("p", {"strategy": strategy, **asked}), 2)
        return plan.profile.training.lr_scaling

    assert (rule(planned_as="pretrained"), rule(planned_as="scratch")) == (trained, new)
    assert rule(planned_as="scratch", lr_scaling="linear") == "linear"


def test_the_rule_of_ones_own_strategy_is_left_to_those_who_run_its_code() -> None:
    assert scaling_rule_of("auto", "own.py:Half", "scratch") == "auto"


@pytest.mark.parametrize("option", ["local_data = true", "split = label", "eval_local = true"])
def test_what_makes_no_sense_at_ones_own_pace_is_refused(option: str) -> None:
    name, value = option.split(" = ")
    profile = profile_from_options("p", {"strategy": "async_diloco", name: value})
    with pytest.raises(BadInput, match="with async_diloco"):
        plan_local_run(profile, 2)
    assert plan_local_run(profile, 1).world_size == 1
