"""What one member says of its snapshots cannot break the others' resume."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles.schema import StrategySettings
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


SINCE = {
    "model": ("base_precision",),
    "data": ("window", "pseudo_share", "split", "local_data"),
    "training": ("optimizer", "momentum", "lr_decay_share"),
    "evaluation": ("eval_local", "eval_showcase"),
    "strategy": ("owned", "strategy_options"),
}
"""Options that came with windows that follow the clips, and later ones."""
MORE = {
    **SINCE,
    "model": (
        *SINCE["model"],
        "teacher_path",
        "distill_alpha",
        "distill_temperature",
        "student_layers",
        "encoder_path",
    ),
    "data": (*SINCE["data"], "languages"),
}


PLACE = ("local", "share", "addresses", "machine", "data")
"""What a member's place in the exchange is, all but the first of it later than the mesh."""


def hash_of(document: dict[str, Any]) -> str:
    hashed = {key: document[key] for key in ("version", "engine")}
    hashed["members"] = [{key: one[key] for key in one if key not in PLACE} for one in document["members"]]
    hashed["profile"] = {key: document["profile"][key] for key in document["profile"] if key not in ("name", "run")}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]


def before_the_mesh(
    plan: RunPlan, later: dict[str, tuple[str, ...]], engine: str = "hub", asked: str = "auto"
) -> dict[str, Any]:
    """Return a plan's document as it was without some options, while engines were called hub and torch."""
    document: dict[str, Any] = json.loads(plan.model_dump_json())
    for one in document["members"]:
        del one["share"], one["addresses"]
    document["engine"] = engine
    former = StrategySettings.with_former_names(document["profile"]["strategy"])
    document["profile"]["strategy"] = {**former, "engine": asked}
    for section, options in later.items():
        for option in options:
            del document["profile"][section][option]
    return document


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
    document = before_the_mesh(toy_plan(2), MORE, engine, asked)
    document["hub_address"] = ""
    document["profile"]["strategy"]["hub_port"] = 4711
    for one in document["members"]:
        one["device"] = device
    (tmp_path / "plan.json").write_text(json.dumps(document))
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.engine, plan.profile.strategy.engine) == now
    assert plan.profile.strategy.coordinator_port == 4711
    assert hash_of(document) in (plan.hashes() if asked == "torch" else [plan.hash()])


def test_who_owns_how_much_and_where_it_is_dialled_changes_no_hash() -> None:
    plan = toy_plan(2)
    first = plan.members[0].model_copy(update={"share": 0.25, "addresses": ("10.0.0.1",)})
    assert plan.model_copy(update={"members": (first, plan.members[1])}).hash() == plan.hash()


@pytest.mark.parametrize("later", [MORE, SINCE])
def test_a_run_that_began_before_an_option_goes_on_as_it_began(
    tmp_path: Path, later: dict[str, tuple[str, ...]]
) -> None:
    plan = toy_plan()
    document = before_the_mesh(plan, later)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    earlier = read_plan(tmp_path / "plan.json")
    assert earlier.profile.data.window == "full" and plan.profile.data.window == "auto"
    assert hash_of(document) in earlier.hashes()
    assert hash_of(document) not in plan.hashes()  # whole windows are another training
