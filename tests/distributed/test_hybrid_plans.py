"""When a divided model is trained by several members of several devices each, and why."""

from __future__ import annotations

import pytest
from planner_figures import job as planned_job
from test_layout_candidates import ADAPTERS, FIXED, UNTIED, home
from test_recut import Holder, ready

from app.plan_table import candidate_text, choice_text
from distributed.launcher import apply_planning
from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import Job, Planning
from distributed.planning.layouts import divided_plan
from distributed.planning.layouts.divided_plan import plan_layout
from distributed.planning.reasons import sentence
from distributed.planning.run_time import divided_members
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile

pytestmark = pytest.mark.slow

FOUR = home(12.3, 12.3, 12.3, 12.3, mbit=100)
"""Two machines of these hold the model with adapters, one does not."""


@pytest.fixture(autouse=True)
def _of_3_billion_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_plan, "size_for", lambda profile: UNTIED)


def job(**fields: object) -> Job:
    return planned_job(**{"samples": 20_000, "batch": 1, "accumulation": 16, "lora": True, "texts": True} | fields)


def profile(**options: object) -> Profile:
    return profile_from_options("mine", {**ADAPTERS, "layout": "pipeline", **options})


def shape(planning: Planning) -> list[tuple[str, ...]]:
    """The devices of each member."""
    assert planning.settings is not None
    return [tuple(device.machine for device in member.devices) for member in planning.settings.members]


def sentences(planning: Planning) -> list[str]:
    return [sentence(reason) for reason in planning.reasons]


def two_homes() -> Cluster:
    """Four machines of which two and two are near each other."""

    def near(source: str, target: str) -> bool:
        return {source, target} in ({"a", "b"}, {"c", "d"})

    links = (
        link if near(link.source, link.target) else link.model_copy(update={"mbit": 20.0, "mbit_back": 20.0})
        for link in home(15, 15, 15, 15).links
    )
    return home(15, 15, 15, 15).model_copy(update={"links": tuple(links)})


def test_two_members_are_taken_where_they_learn_faster_than_one() -> None:
    planning = plan_layout(FOUR, job(lr_scaling="linear"), profile())
    assert planning.best is not None and planning.settings is not None
    assert [len(devices) for devices in shape(planning)] == [2, 2]
    assert planning.settings.options["stages"] == 2 and planning.settings.options["strategy"] == "allreduce"
    assert planning.best.step > 0 and all(0 < m.memory <= m.memory_free for m in planning.best.members)
    assert planning.best.global_batch == 32 and planning.best.useful_speed_up == planning.best.speed_up
    assert sentences(planning)[1].startswith(
        "2 members of 2 devices learn 1.08 times as fast as 1 member of 2 devices;"
    )
    assert candidate_text(planning.best) == "2 x 2 allreduce"
    assert choice_text(planning.best.choice).endswith("merging in every step")


def test_one_member_is_taken_where_a_larger_batch_teaches_too_little() -> None:
    planning = plan_layout(FOUR, job(lr_scaling="off"), profile())
    assert [len(devices) for devices in shape(planning)] == [2]
    assert planning.settings is not None and "stages" not in planning.settings.options
    assert " would learn 0." in sentences(planning)[1] and "their exchanges would take" in sentences(planning)[1]
    assert {len(each.choice.members) for each in planning.ranking} == {2, 3, 4}  # two members are ranked, too


def test_members_with_slow_links_between_them_exchange_seldom() -> None:
    planning = plan_layout(two_homes(), job(texts=False), profile())
    assert planning.best is not None and planning.settings is not None
    assert sorted(sorted(devices) for devices in shape(planning)) == [["a", "b"], ["c", "d"]]
    options, choice = planning.settings.options, planning.best.choice
    assert options["strategy"] == choice.strategy == "diloco"
    assert options["diloco.sync_interval"] == choice.interval > 1
    assert choice_text(choice).endswith(f"merging every {choice.interval} steps")
    assert planning.best.loss_increase <= 0.02
    plan = apply_planning(planning, profile(), ready(*map(Holder, "abcd"))).plan
    assert [member.name for member in plan.members] == ["+".join(devices) for devices in shape(planning)]
    assert [device.blocks for device in plan.members[0].devices] == [
        device.blocks for device in plan.members[1].devices
    ]
    assert (plan.profile.run.stages, plan.profile.strategy.strategy) == (2, "diloco")


def test_two_members_that_do_not_fit_are_refused_with_the_reason() -> None:
    cluster, options = home(42, 42, 42, 42), {**FIXED, "layout": "pipeline"}
    planning = plan_layout(cluster, job(lora=False), profile_from_options("mine", options))
    assert len(shape(planning)) == 1
    assert "the memory of 2 members of 2 devices does not hold all blocks, in any order" in sentences(planning)


def test_a_run_that_began_with_one_member_keeps_it() -> None:
    planning = plan_layout(two_homes(), job(texts=False), profile(), only_member=True)
    assert len(shape(planning)) == 1
    assert {divided_members(each.choice.blocks) for each in planning.ranking} == {1}


def test_another_way_of_the_ranking_can_be_taken() -> None:
    first = plan_layout(FOUR, job(lr_scaling="linear"), profile())
    index = next(i for i, way in enumerate(first.ranking) if divided_members(way.choice.blocks) == 1)
    second = plan_layout(FOUR, job(lr_scaling="linear"), profile(), chosen=index)
    assert second.ranking == first.ranking and second.best == first.ranking[index]
    assert len(shape(second)) == 1 and second.settings is not None and "stages" not in second.settings.options


def test_who_wants_the_least_traffic_gets_one_member() -> None:
    planning = plan_layout(FOUR, job(lr_scaling="linear", preference="least-traffic"), profile())
    assert len(shape(planning)) == 1
