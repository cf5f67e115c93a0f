"""What one member says of its snapshots cannot break the others' resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput
from tests.training.memory_exchange import RoomExchange, together
from tests.training.toy_task import toy_plan
from training.exchange.base import SoloExchange
from training.loop.position import EarlyStopping, Position
from training.loop.resuming import Agreed, agree_on_snapshot
from training.records.plan import RunPlan, read_plan
from training.snapshots.snapshot_store import Snapshot, SnapshotStore


@pytest.mark.parametrize(
    "lie", [b"", b"[1]", b'{"live": {"x": [0]}}', b'{"live": {"7": 3}}', b'{"live": {"' + b"9" * 5000 + b'": []}}']
)
def test_who_says_nonsense_has_no_snapshot(lie: bytes, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 2)
    store.save(Snapshot(4, {"model/w": torch.ones(1)}, {"live": [0, 1]}), "plan")

    def body(member: RoomExchange) -> Any:
        if member.rank:
            return member.gather("resume/steps", lie)
        return agree_on_snapshot([store], member, lambda message: None, "plan")

    agreed = together(2, body)[0][0]
    assert (agreed.step, agreed.holders, agreed.members) == (4, (0,), (0, 1))


def _agree(tmp_path: Path, held: list[dict[int, dict[str, Any]]], **more: Any) -> Agreed:
    """Let members agree that hold these snapshots: JSON state by step."""

    def body(member: RoomExchange) -> Any:
        store = SnapshotStore(tmp_path / str(member.rank), 9)
        for step, state in sorted(held[member.rank].items()):
            store.save(Snapshot(step, {"model/w": torch.ones(1)}, state), "plan")
        return agree_on_snapshot([store], member, lambda message: None, "plan", **more)

    agreed = together(len(held), body)[0][0]
    assert isinstance(agreed, Agreed)
    return agreed


def _state(*live: int, course: list[list[int]] | None = None) -> dict[str, Any]:
    return {"live": list(live), **({} if course is None else {"course": course})}


def test_a_snapshot_of_a_course_that_was_given_up_does_not_count(tmp_path: Path) -> None:
    old, new = [[1, 0]], [[1, 0], [2, 4]]
    away = {4: _state(0, 1, course=old), 8: _state(1, course=old)}
    went_on = {4: _state(0, 1, course=old), 6: _state(0, course=new)}
    agreed = _agree(tmp_path, [went_on, away])
    assert (agreed.step, agreed.holders) == (6, (0,))


def test_who_ended_at_a_lost_group_goes_on_at_the_step_of_those_that_went_on(tmp_path: Path) -> None:
    went_on = {4: _state(0, 1, 2), 8: _state(0, 1)}
    agreed = _agree(tmp_path, [went_on, went_on, {4: _state(0, 1, 2), 6: _state(0, 1, 2)}])
    assert (agreed.step, agreed.holders, agreed.members) == (8, (0, 1), (0, 1, 2))


def test_the_same_step_of_another_course_is_handed_over(tmp_path: Path) -> None:
    old, new = [[1, 0]], [[1, 0], [2, 4]]
    agreed = _agree(tmp_path, [{6: _state(0, course=new)}, {6: _state(0, 1, course=old)}])
    assert (agreed.step, agreed.holders) == (6, (0,))


def test_an_attempt_that_wrote_nothing_gives_nothing_up(tmp_path: Path) -> None:
    old = [[1, 0]]
    agreed = _agree(tmp_path, [{4: _state(0, 1, course=old)}, {4: _state(0, 1, course=old), 8: _state(1, course=old)}])
    assert (agreed.step, agreed.holders) == (8, (1,))


def _agree_in_pipeline(
    tmp_path: Path, held: list[dict[int, dict[str, Any]]], damage: Callable[[], object]
) -> dict[int, Any]:
    """Let two stages agree that hold their parts of these snapshots: JSON state by step; return what each was told, or
    its error."""

    def body(device: RoomExchange) -> tuple[Agreed, list[str]]:
        store, warnings = SnapshotStore(tmp_path / str(device.rank), 9), list[str]()
        for step, state in held[device.rank].items():
            part = {"part": [device.rank, 2]}
            store.save(Snapshot(step, {"model/w": torch.ones(1)}, state | part), "plan")
        if device.rank:
            damage()

        def gather(payload: bytes) -> list[bytes]:
            return [*device.gather("parts", payload).values()]

        layout: Any = SimpleNamespace(gather=gather, part=(device.rank, 2), names=("a-stage-1", "b-stage-2"))
        return agree_on_snapshot([store], SoloExchange(), warnings.append, "plan", layout=layout), warnings

    return together(2, body)[0]


def test_a_pipeline_goes_on_where_each_stage_has_its_part_of_one_snapshot(tmp_path: Path) -> None:
    old, new = [[1, 0]], [[1, 0], [2, 4]]
    held = [
        {4: _state(0, course=old), 6: _state(0, course=old), 8: _state(0, course=new)},
        {4: _state(0, course=old), 6: _state(0, course=new), 8: _state(0, course=new)},
    ]
    damaged = tmp_path / "1" / "step-00000008" / "state.safetensors"
    results = _agree_in_pipeline(tmp_path, held, partial(damaged.write_bytes, b""))
    (first, first_lines), (second, second_lines) = results[0], results[1]
    assert first == second
    assert first.step == 4 and first.parts is not None and first.parts.damaged == {}
    assert first_lines == [
        f"the snapshot of step {step} is skipped: part {part} of 2 is missing, or damaged, on all machines"
        for step, part in ((6, "1 (a-stage-1)"), (8, "2 (b-stage-2)"))
    ]
    (line,) = second_lines
    assert "step-00000008/state.safetensors is damaged" in line


def test_which_part_of_the_only_snapshot_is_missing_is_said(tmp_path: Path) -> None:
    held = [{4: _state(0, course=[[1, 0]])}] * 2
    errors = _agree_in_pipeline(tmp_path, held, partial(shutil.rmtree, tmp_path / "1" / "step-00000004"))
    for error in errors.values():
        assert isinstance(error, BadInput)
        assert "no snapshot is whole: of step 4 part 2 (b-stage-2) of 2 is missing" in error.message


@pytest.mark.parametrize(("alike", "step"), [(True, 8), (False, 4)])
def test_where_all_hold_the_same_any_snapshot_serves_all(tmp_path: Path, alike: bool, step: int) -> None:
    both = {4: _state(0, 1, 2), 8: _state(0, 1, 2)}
    assert _agree(tmp_path, [{4: _state(0, 1, 2)}, both, both], alike=alike).step == step


@pytest.mark.parametrize("alike", [True, False])
def test_a_snapshot_of_another_run_is_passed_over(tmp_path: Path, alike: bool) -> None:
    said: list[str] = []

    def body(member: RoomExchange) -> Any:
        store = SnapshotStore(tmp_path / str(member.rank), 9)
        store.save(Snapshot(4, {"model/w": torch.ones(1)}, _state(0, 1)), "plan")
        if member.rank:
            store.save(Snapshot(8, {"model/w": torch.ones(1)}, _state(1)), "another")
        return agree_on_snapshot([store], member, said.append, "plan", alike=alike)

    agreed = together(2, body)[0][0]
    assert (agreed.step, agreed.all_have_it) == (4, True)
    assert len(said) == 1 and "was made with different settings; it is skipped" in said[0]


def test_where_all_snapshots_are_of_another_run_that_is_said(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 2)
    store.save(Snapshot(4, {"model/w": torch.ones(1)}, _state(0)), "another")
    with pytest.raises(BadInput, match="was made with different settings"):
        agree_on_snapshot([store], SoloExchange(), lambda message: None, "plan")


def test_what_machines_that_are_not_there_may_have_is_said(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 2)
    with pytest.raises(BadInput, match="no machine that is there") as caught:
        agree_on_snapshot([store], SoloExchange(), lambda message: None, "plan", absent=["c"])
    assert "switch c on" in caught.value.hint


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_course_names_every_attempt_that_a_later_one_did_not_undo(steps: list[int]) -> None:
    position = Position(EarlyStopping(0, 0.0))
    for attempt, step in enumerate(steps, 1):
        position.step = step
        position.begin(attempt)
    left = [(n, s) for n, s in enumerate(steps, 1) if all(later > s for later in steps[n:])]
    assert position.attempts == left


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    document = json.loads(toy_plan(2).model_dump_json()) | {"version": 9}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match="plan.json: version: .*1.*") as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.hint == "make the plan again with this version"


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
    for section, options in (
        ("training", {"optimizer": "sgd"}),
        ("strategy", {"owned": {"diloco": {"sync_delay": 7}}}),
    ):
        document = json.loads(plan.model_dump_json())
        document["profile"][section] |= options
        assert RunPlan.model_validate(document).hash() != plan.hash()
