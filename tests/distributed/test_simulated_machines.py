"""A file of machines and the time of a simulated run on them: it is what the cost model says."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from app.cli.train.trials import trials_of
from distributed.planning.cost_model import LINE_SHARE
from distributed.planning.documents.cluster import LARGEST_FILE, Cluster, ClusterMachine, Link, Measurement
from distributed.planning.documents.document import Figures, Workload
from distributed.planning.prediction import Predictor
from distributed.planning.simulated import ClusterClock, Groups, Machines, choice_of, job_after
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from training.records.plan import RunPlan
from training.run.local_plan import plan_local_run
from training.simulated.clock import clock_of
from training.strategies.async_diloco import AsyncDiLoCoOptions

LAPTOP = {"name": "laptop", "count": 4, "samples_per_s": 40, "link": {"mbit": 100, "latency_ms": 20}}
SIZE = 1_000_000


def written(folder: Path, document: Any) -> Path:
    path = folder / "machines.json"
    path.write_text(json.dumps(document))
    return path


def plan_with(groups: Any, **options: Any) -> RunPlan:
    machines = Machines(Groups.model_validate({"groups": groups}))
    profile = profile_from_options("custom", {"task": "custom", "model_path": "a.py:b", "batch_size": 8, **options})
    return machines.with_clock(plan_local_run(profile, len(machines.names), simulated=True))


def clock(plan: RunPlan) -> ClusterClock:
    created = clock_of(plan)
    assert isinstance(created, ClusterClock)
    return created


def equal_links(count: int, mbit: float, rtt: float, speeds: list[float]) -> Cluster:
    """The same as measured figures: every pair has a link."""
    names = [f"laptop-{number}" for number in range(1, count + 1)]
    rate = mbit * LINE_SHARE
    pairs = combinations(names, 2)
    return Cluster(
        machines=tuple(
            ClusterMachine(name=name, measurements=(Measurement(batch=1, seconds=1 / speed),))
            for name, speed in zip(names, speeds, strict=True)
        ),
        links=tuple(Link(source=a, target=b, mbit=rate, mbit_back=rate, rtt_ms=rtt) for a, b in pairs),
    )


@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "demo", "noloco"])
def test_a_step_of_equal_machines_costs_what_the_planner_says(strategy: str) -> None:
    plan = plan_with([LAPTOP], strategy=strategy)
    job = job_after(plan.profile, SIZE, 300, 300 * plan.global_batch)
    cluster = equal_links(4, 100, 20, [40.0] * 4)
    predicted = Predictor(cluster, job).predict(choice_of(plan.profile, tuple(m.name for m in cluster.machines)))
    cost = clock(plan).cost((0, 1, 2, 3), SIZE, 300)
    assert cost.seconds == pytest.approx(predicted.step) and cost.exchange == pytest.approx(predicted.exchange)
    assert cost.wait(2) == pytest.approx(predicted.step - predicted.members[2].busy) and cost.busy[2] >= 8 / 40


def test_as_few_members_as_are_there_exchange_sooner() -> None:
    ticking = clock(plan_with([LAPTOP]))
    alone, three, all_four = (ticking.cost(ranks, SIZE, 100).seconds for ranks in [(2,), (0, 1, 3), (0, 1, 2, 3)])
    assert alone == pytest.approx(8 / 40) and alone < three < all_four
    assert ticking.cost((1, 2, 3), SIZE, 100).busy.keys() == {1, 2, 3}


def test_the_slowest_member_decides_where_all_have_as_many_samples() -> None:
    slow = {**LAPTOP, "name": "old", "count": 1, "samples_per_s": 10}
    cost = clock(plan_with([{**LAPTOP, "count": 3}, slow], shares="1,1,1,1")).cost((0, 1, 2, 3), SIZE, 100)
    assert cost.busy[3] == pytest.approx(8 / 10) == 4 * cost.busy[0]
    assert cost.wait(0) - cost.wait(3) == pytest.approx(8 / 10 - 8 / 40)


def test_the_batch_is_shared_by_speed() -> None:
    slow = {**LAPTOP, "name": "old", "count": 1, "samples_per_s": 10}
    plan = plan_with([{**LAPTOP, "count": 3}, slow], batch_size=13)
    assert [member.batch_size for member in plan.members] == [16, 16, 16, 4]
    assert [member.name for member in plan.members] == ["laptop-1", "laptop-2", "laptop-3", "old"]


def test_members_with_a_pace_of_their_own_have_that_of_their_machines() -> None:
    slow = {**LAPTOP, "name": "slow", "count": 1, "samples_per_s": 10}
    plan = plan_with([{**LAPTOP, "count": 2}, slow], strategy="async_diloco")
    assert plan.profile.strategy.of(AsyncDiLoCoOptions).speeds == "1,1,0.25"
    cost = clock(plan).cost((0, 1, 2), SIZE, 100)
    assert cost.seconds < 0.4 < cost.busy[2] and cost.wait(2) == 0.0
    with_speeds = plan_with([LAPTOP], strategy="async_diloco", **{"async_diloco.speeds": "1,2,3,4"})
    assert with_speeds.profile.strategy.of(AsyncDiLoCoOptions).speeds == "1,2,3,4"
    with pytest.raises(BadInput, match="that are lost on the way"):
        plan_with([{**LAPTOP, "lost_per_hour": 1}], strategy="async_diloco")


def test_a_slow_line_decides() -> None:
    slow = {**LAPTOP, "name": "far", "count": 1, "link": {"mbit": 10, "latency_ms": 100}}
    fast, mixed = (
        clock(plan_with([{**LAPTOP, "count": 3}, last_group])).cost((0, 1, 2, 3), SIZE, 100)
        for last_group in ({**LAPTOP, "name": "near", "count": 1}, slow)
    )
    assert mixed.exchange > 3 * fast.exchange


def test_measured_figures_are_a_file_of_machines_too(tmp_path: Path) -> None:
    cluster = equal_links(3, 100, 5, [40.0, 20.0, 10.0])
    figures = Figures(cluster=cluster, workload=Workload(trainable=1, total=1, samples=1))
    machines = Machines.read(written(tmp_path, figures.model_dump(mode="json")))
    profile = profile_from_options("custom", {"task": "custom", "model_path": "a.py:b", "batch_size": 7})
    plan = machines.with_clock(plan_local_run(profile, 3, simulated=True))
    assert [member.batch_size for member in plan.members] == [12, 6, 3]
    assert clock(RunPlan.model_validate_json(plan.model_dump_json())).cost((0, 1, 2), SIZE, 10).busy[1] == 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "groups.0.count: Input should be greater than or equal to 1"),
        ({"count": 2000}, "groups.0.count: Input should be less than or equal to 1024"),
        ({"samples_per_s": 0}, "groups.0.samples_per_s: Input should be greater than or equal to 0.000001"),
        ({"name": "x" * 99}, "Value error, a name has more than 100 characters with its number"),
        ({"samples_per_s": "fast"}, "groups.0.samples_per_s: Input should be a valid number"),
        ({"memory_gb": -1}, "groups.0.memory_gb: Input should be greater than 0"),
        ({"link": {"mbit": 0}}, "groups.0.link.mbit: Input should be greater than 0"),
        ({"link": {"mbit": 1, "latency_ms": -1}}, "groups.0.link.latency_ms: Input should be greater than or equal"),
        ({"link": {}}, "groups.0.link.mbit: Field required"),
        ({"lost_per_hour": -1}, "groups.0.lost_per_hour: Input should be greater than or equal to 0"),
        ({"back_after_minutes": "soon"}, "groups.0.back_after_minutes: Input should be a valid number"),
        ({"name": ""}, "groups.0.name: String should match"),
        ({"speed": 3}, "groups.0.speed: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {"groups": [{**LAPTOP, **change}]})
    with pytest.raises(BadInput, match="docs/how-to/scale.md") as caught:
        Machines.read(path)
    assert f"{path}: {message}" in caught.value.message and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ("{}", "groups: Field required"),
        ('{"groups": []}', "groups: Tuple should have at least 1 item"),
        (json.dumps({"groups": [LAPTOP, LAPTOP]}), "two groups have the same name"),
        (json.dumps({"groups": [LAPTOP, {**LAPTOP, "name": "laptop-2", "count": 1}]}), "two machines have the same"),
        (" " * (LARGEST_FILE + 1), f"{LARGEST_FILE + 1} bytes are too many"),
        ('{"cluster": {}}', "cluster.machines: Field required"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machines.json"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        Machines.read(path)
    assert message in caught.value.message


def test_another_number_of_members_is_refused() -> None:
    profile = profile_from_options("custom", {"task": "custom", "model_path": "a.py:b"})
    with pytest.raises(BadInput, match="has 4 machines, the run 3 members"):
        Machines(Groups.model_validate({"groups": [LAPTOP]})).with_clock(plan_local_run(profile, 3, simulated=True))


def test_a_job_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="needs .* on laptop-1, which has 954 MB"):
        clock(plan_with([{**LAPTOP, "memory_gb": 1}])).cost((0, 1, 2, 3), 10**9, 100)


def test_runs_that_are_compared_have_the_machines_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"groups": [{**LAPTOP, "count": 3}]})
    chosen = profile_from_options("custom", {"task": "custom", "model_path": "a.py:b", "cluster": str(path)})
    (trial,) = trials_of(chosen, 4, 1, 1, evaluations_chosen=True)
    assert trial.plan.world_size == 3 and trial.plan.clock is not None and trial.plan.members[0].name == "laptop-1"
