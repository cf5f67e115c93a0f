"""What one member says of its snapshots cannot break the others' resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.memory_exchange import RoomExchange, together
from tests.training.toy_task import toy_plan
from training.checkpoint import Snapshot, SnapshotStore
from training.plan import RunPlan, read_plan
from training.resuming import agree_on_snapshot


@pytest.mark.parametrize(
    "lie", [b"", b"[1]", b'{"live": {"x": [0]}}', b'{"live": {"7": 3}}', b'{"live": {"' + b"9" * 5000 + b'": []}}']
)
def test_who_says_nonsense_has_no_snapshot(lie: bytes, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 2)
    store.save(Snapshot(4, {"model/w": torch.ones(1)}, {"live": [0, 1]}), "plan")

    def body(member: RoomExchange) -> Any:
        if member.rank:
            return member.gather("resume/steps", lie)
        return agree_on_snapshot(store, member, lambda message: None)

    agreed = together(2, body)[0][0]
    assert (agreed.step, agreed.holders, agreed.members) == (4, (0,), (0, 1))


@pytest.mark.parametrize(
    ("engine", "asked", "device", "now"),
    [
        ("hub", "auto", "cpu", ("mesh", "auto")),
        ("hub", "hub", "cpu", ("mesh", "mesh")),
        ("torch", "torch", "cpu", ("mesh", "auto")),
        ("torch", "auto", "cuda", ("nccl", "auto")),
    ],
)
def test_a_run_of_an_earlier_engine_goes_on(
    tmp_path: Path, engine: str, asked: str, device: str, now: tuple[str, str]
) -> None:
    document: dict[str, Any] = json.loads(toy_plan(2).model_dump_json())
    document |= {"engine": engine, "hub_address": ""}
    del document["profile"]["strategy"]["coordinator_port"]
    document["profile"]["strategy"] |= {"engine": asked, "hub_port": 4711}
    for one in document["members"]:
        one["device"] = device
    (tmp_path / "plan.json").write_text(json.dumps(document))
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.engine, plan.profile.strategy.engine) == now
    assert plan.profile.strategy.coordinator_port == 4711


def test_who_owns_how_much_and_where_it_is_dialled_changes_no_hash() -> None:
    plan = toy_plan(2)
    first = plan.members[0].model_copy(update={"share": 0.25, "addresses": ("10.0.0.1",)})
    assert plan.model_copy(update={"members": (first, plan.members[1])}).hash() == plan.hash()


def test_an_option_at_its_default_and_what_carries_the_exchanges_change_no_hash() -> None:
    plan = toy_plan(2)
    document = json.loads(plan.model_dump_json())
    del document["profile"]["training"]["optimizer"], document["profile"]["strategy"]["owned"]
    document["engine"] = "nccl"
    document["profile"]["strategy"]["transport"] = "tls"
    assert RunPlan.model_validate(document).hash() == plan.hash()
    for section, option, value in (("training", "optimizer", "sgd"), ("strategy", "sync_interval", 7)):
        document = json.loads(plan.model_dump_json())
        document["profile"][section][option] = value
        assert RunPlan.model_validate(document).hash() != plan.hash()
