from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link, Measurement
from distributed.planning.documents.document import Figures, Workload, job_of
from profiles.errors import BadInput
from profiles.optimisation import TrainingSettings
from profiles.schema import ModelSettings, Profile
from tests.strategies.settings import strategy_settings
from training.strategies.allreduce import AllReduceOptions

few = settings(max_examples=30)
WORKLOAD = Workload(trainable=100, total=1000, samples=640)
rates = st.floats(0, 1e6)
names = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=12)
measurements = st.builds(
    Measurement, batch=st.integers(1, 1000), seconds=st.floats(1e-6, 1e4), peak=st.integers(0, 2**40)
)
machines = st.builds(
    ClusterMachine,
    name=names,
    identity=st.text("abc+/=", max_size=8),
    device=st.sampled_from(["cpu", "cuda", "mps"]),
    measurements=st.lists(measurements, max_size=4).map(tuple),
    interface_mbit=rates,
    wifi=st.booleans(),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    members = draw(st.lists(machines, min_size=1, max_size=4, unique_by=lambda machine: machine.name))
    pairs = [(a.name, b.name) for index, a in enumerate(members) for b in members[index + 1 :]]
    linked_pairs = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = [Link(source=a, target=b, mbit=draw(rates), mbit_back=draw(rates), air=draw(st.text("xy", max_size=1)))
             for a, b in linked_pairs]  # fmt: skip
    return Cluster(machines=tuple(members), links=tuple(links), here=draw(st.sampled_from(["", members[0].name])))


@few
@given(clusters())
def test_a_cluster_survives_json(cluster: Cluster) -> None:
    names = [machine.name for machine in cluster.machines]
    cluster.link(names[0], names[-1])  # what is looked up is not written
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


@few
@given(clusters())
def test_a_link_is_the_same_from_both_ends(cluster: Cluster) -> None:
    for source, target in itertools.permutations([machine.name for machine in cluster.machines], 2):
        link, reverse = cluster.link(source, target), cluster.link(target, source)
        assert (link is None) == (reverse is None)
        if link is not None and reverse is not None:
            assert (link.mbit, link.mbit_back) == (reverse.mbit_back, reverse.mbit)
            assert cluster.interface(source) >= link.mbit


@few
@given(clusters())
def test_fits_are_never_negative(cluster: Cluster) -> None:
    for machine in cluster.machines:
        assert machine.overhead >= 0
        assert machine.speed >= 0
        assert (machine.speed > 0) == bool(machine.measurements)


@given(overhead=st.floats(0, 1), speed=st.floats(0.1, 1000))
def test_two_batch_sizes_tell_overhead_from_speed(overhead: float, speed: float) -> None:
    points = tuple(Measurement(batch=b, seconds=overhead + b / speed) for b in (4, 8, 16))
    machine = ClusterMachine(name="a", measurements=points)
    assert machine.overhead == pytest.approx(overhead, abs=1e-6)
    assert machine.speed == pytest.approx(speed, rel=1e-3)


def test_one_batch_size_gives_no_overhead() -> None:
    machine = ClusterMachine(name="a", measurements=(Measurement(batch=8, seconds=2.0),))
    assert machine.step_time == (0.0, 4.0)


def test_memory_of_a_sample() -> None:
    two = (Measurement(batch=1, seconds=1, peak=110), Measurement(batch=3, seconds=1, peak=130))
    assert ClusterMachine(name="a", measurements=two).memory_per_sample(0) == pytest.approx(10)
    assert ClusterMachine(name="a", measurements=two[1:]).memory_per_sample(100) == pytest.approx(10)
    assert ClusterMachine(name="a").memory_per_sample(100) is None


def test_a_link_without_anything_passing_is_none() -> None:
    cluster = Cluster(machines=(ClusterMachine(name="a"), ClusterMachine(name="b")),
                      links=(Link(source="a", target="b", mbit=0, mbit_back=50),))  # fmt: skip
    assert cluster.link("a", "b") is None
    assert cluster.interface("a") == 0


def test_two_devices_of_one_machine_share_its_links() -> None:
    devices = tuple(ClusterMachine(name=f"pc:{index}", identity="SHA256:x") for index in range(2))
    cluster = Cluster(machines=(*devices, ClusterMachine(name="b")),
                      links=(Link(source="b", target="pc:0", mbit=90, mbit_back=80),))  # fmt: skip
    link = cluster.link("pc:1", "b")
    assert link is not None
    assert link.mbit == 80
    assert cluster.on_one_machine(("pc:0", "pc:1"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"machines": []}, "machines"),
        ({"machines": [{"name": "a"}, {"name": "a"}]}, "same name"),
        ({"links": [{"source": "a", "target": "x", "mbit": 1, "mbit_back": 1}]}, "no machine 'x'"),
        ({"links": [{"source": "a", "target": "a", "mbit": 1, "mbit_back": 1}]}, "between two machines"),
        ({"here": "x"}, "no machine 'x'"),
        ({"machines": [{"name": "a\x1b[2J"}]}, "name"),
        ({"machines": [{"name": "a", "measurements": [{"batch": 0, "seconds": 1}]}]}, "batch"),
        ({"machines": [{"name": "a", "speed": 3}]}, "speed"),
    ],
)
def test_figures_that_cannot_be(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    document: dict[str, Any] = {"cluster": {"machines": [{"name": "a"}, {"name": "b"}]} | change,
                                "workload": WORKLOAD.model_dump()}  # fmt: skip
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BadInput, match=problem) as caught:
        Figures.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 9}', '{"cluster": {"machines": [{"name": "a", "mbit": NaN}]}}']
)
def test_files_that_are_no_figures(text: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"figures\.json"):
        Figures.read(path)


def test_a_missing_file_of_figures(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        Figures.read(tmp_path / "none.json")


def test_figures_are_written_whole(tmp_path: Path) -> None:
    figures = Figures(cluster=Cluster(machines=(ClusterMachine(name="a"),)), workload=WORKLOAD)
    figures.write(tmp_path / "figures.json")
    assert Figures.read(tmp_path / "figures.json") == figures
    with pytest.raises(BadInput):
        figures.write(tmp_path / "no" / "figures.json")


def test_rates_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValidationError):
        Link(source="a", target="b", mbit=float("nan"), mbit_back=1)


def profile(**model: Any) -> Profile:
    return Profile(name="p", model=ModelSettings(**model), training=TrainingSettings(epochs=2.5, batch_size=4))


def test_the_job_of_a_profile() -> None:
    job = job_of(profile(from_scratch=True), WORKLOAD, "least-traffic", 0.05)
    assert (job.samples, job.batch, job.start, job.preference, job.max_loss_increase) == (
        1600, 4, "scratch", "least-traffic", 0.05,
    )  # fmt: skip
    assert job.run_steps(2).steps == 200


def test_a_plan_counts_the_short_step_of_each_epoch_as_the_run_does() -> None:
    few = profile().model_copy(update={"training": TrainingSettings(epochs=3, batch_size=8)})
    assert job_of(few, WORKLOAD.model_copy(update={"samples": 40})).run_steps(2).steps == 9
    dropping = few.model_copy(update={"training": few.training.model_copy(update={"drop_last": True})})
    assert job_of(dropping, WORKLOAD.model_copy(update={"samples": 40})).run_steps(2).steps == 6


@pytest.mark.parametrize(
    ("model", "planned_as", "start"),
    [
        ({"task": "custom"}, "auto", "scratch"),
        ({"task": "custom"}, "pretrained", "pretrained"),
        ({"task": "whisper"}, "auto", "pretrained"),
        ({"task": "whisper"}, "scratch", "scratch"),
    ],
)
def test_a_custom_model_is_new_unless_the_profile_says_otherwise(
    model: dict[str, Any], planned_as: Any, start: str
) -> None:
    chosen = profile(**model).model_copy(update={"strategy": strategy_settings(planned_as=planned_as, bucket_mb=2.0)})
    job = job_of(chosen, WORKLOAD)
    assert (job.start, job.of(AllReduceOptions).bucket_mb) == (start, 2.0)


@pytest.mark.parametrize("model", [{"model_path": "other"}, {"tuning": "lora", "model_path": "mine"}])
def test_figures_of_another_model_are_refused(model: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="the figures were measured for mine"):
        job_of(profile(**model), WORKLOAD.model_copy(update={"model_path": "mine"}))
