"""Plans that an earlier version wrote mean what they meant, and fit the snapshots of their runs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from profiles.resolve import profile_from_options
from training.local_plan import plan_local_run
from training.plan import _UNCOUNTED, PLAN_VERSION, RunPlan
from training.strategies.sparta import SpartaOptions


def plan_with(selection: str) -> RunPlan:
    options = {"task": "custom", "strategy": "sparta", "sparta.selection": selection, "sparta.share": 0.3}
    return plan_local_run(profile_from_options("p", options), 2)


def written_by_version_1(selection: str) -> dict[str, Any]:
    document = plan_with("random").model_dump(mode="json") | {"version": 1}
    document["profile"]["strategy"]["owned"]["sparta"]["selection"] = selection
    return document


@pytest.mark.parametrize(
    ("then", "now"), [("random", "random"), ("shuffled", "partitioned"), ("partitioned", "shuffled")]
)
def test_weights_that_sparta_takes_stay_those_of_the_run(then: str, now: str) -> None:
    plan = RunPlan.model_validate(written_by_version_1(then))
    assert plan.profile.strategy.of(SpartaOptions).selection == now
    again = RunPlan.model_validate_json(plan.model_dump_json())
    assert again == plan and again.version == PLAN_VERSION


def hash_of_version_1(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def test_the_hash_of_an_earlier_plan_is_the_one_in_its_snapshots() -> None:
    document = plan_with("random").model_dump(mode="json", exclude=_UNCOUNTED, exclude_defaults=True)
    document["profile"]["strategy"]["owned"]["sparta"]["selection"] = "shuffled"
    assert RunPlan.model_validate(written_by_version_1("shuffled")).hash() == hash_of_version_1(document)
    assert plan_with("shuffled").hash() != plan_with("partitioned").hash()


def test_a_base_in_fp32_of_an_earlier_plan_keeps_its_hash() -> None:
    options = {"model_path": "owner/model", "tuning": "lora"}
    hashes = [
        plan_local_run(profile_from_options("p", {**options, "base_precision": precision}), 1).hash()
        for precision in ("auto", "fp32", "nf4")
    ]
    assert hashes[0] == hashes[1] != hashes[2]
