from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_figures import LARGE, TINY, cluster, job, jobs, joined, machine, predict, rates, speeds

from app.plan_table import summary_lines, table_lines
from distributed.planning.documents.cluster import Cluster, Link, Measurement
from distributed.planning.documents.document import Candidate, Choice, Job, Planning, Reason, Workload, job_of
from distributed.planning.planner import plan, with_hashes
from distributed.planning.prediction import Predictor
from distributed.planning.ranking import SIGNIFICANT_RATIO, simplicity
from distributed.planning.reasons import IN_USE, WORDS, in_use, plain_reasons, sentence, settings_of
from profiles.declarations import Section
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from training.strategies.allreduce import AllReduce, AllReduceCosts
from training.strategies.costs import RunSpec
from training.strategies.registry import forget, register, strategies

ROOT = Path(__file__).parents[2]
few_examples = settings(max_examples=12, deadline=None)


def best_of(planning: Planning) -> Candidate:
    assert planning.best is not None
    return planning.best


def codes(planning: Planning, subject: str | None = None) -> set[str]:
    return {reason.code for reason in planning.reasons if subject in (None, reason.subject)}


def test_a_plan_says_whose_speed_was_measured_while_others_used_it() -> None:
    busy = machine("b").model_copy(update={"measurements": (Measurement(batch=8, seconds=1.0, others=0.5),)})
    planning = plan(joined((machine("a"), busy)), job())
    doubt = "measured while machine b was busy (other programs used 50 % of its processors)"
    assert in_use(planning) == (doubt,)
    summary = " ".join(" ".join(summary_lines(planning, "mine")).split())
    assert f"{doubt}: measure again when it is idle, with:" in summary and "measure mine --max-age 0" in summary


def test_a_plan_says_whose_speed_is_guessed() -> None:
    guessed = machine("b").model_copy(update={"estimated": True})
    assert in_use(plan(joined((machine("a"), guessed)), job())) == ("the speed of machine b is guessed, not measured",)


def test_several_machines_that_were_measured_in_use_are_one_sentence() -> None:
    reasons = tuple(Reason.of(IN_USE, name, others=percent) for name, percent in (("a", 89), ("b", 86), ("c", 88)))
    planning = plan(joined((machine("a"),)), job()).model_copy(update={"reasons": reasons})
    assert in_use(planning) == (
        "measured while a, b and c were busy (other programs used up to 89 % of their processors)",
    )


def test_a_machine_that_was_measured_in_use_is_named_though_it_was_left_out() -> None:
    """It may have been left out only for that."""
    busy = machine("b").model_copy(update={"measurements": (Measurement(batch=8, seconds=90.0, others=0.5),)})
    planning = plan(joined((machine("a"), busy)), job())
    assert best_of(planning).choice.members == ("a",) and len(in_use(planning)) == 1


# ----------------------------------------------------------------------------------------------------------- properties


@pytest.mark.slow
@few_examples
@given(speeds, rates, st.floats(1, 10), jobs, st.data())
def test_more_bandwidth_makes_no_candidate_slower(
    speeds: list[float], mbit: float, factor: float, job: Job, data: st.DataObject
) -> None:
    slow, fast = cluster(speeds, mbit), cluster(speeds, mbit * factor)
    candidate = data.draw(st.sampled_from(plan(slow, job).ranking))
    assert predict(fast, job, candidate.choice).step <= predict(slow, job, candidate.choice).step * (1 + 1e-9)


@pytest.mark.slow
@few_examples
@given(speeds, rates, jobs)
def test_every_machine_alone_is_a_candidate(speeds: list[float], mbit: float, job: Job) -> None:
    alone = [c for c in plan(cluster(speeds, mbit), job).ranking if c.choice.alone]
    assert sorted(c.choice.members[0] for c in alone) == sorted("abc"[: len(speeds)])
    assert max(c.speed_up for c in alone) == pytest.approx(1.0)


@pytest.mark.slow
@few_examples
@given(speeds, rates, jobs)
def test_shares_sum_to_the_global_batch_and_follow_speed(speeds: list[float], mbit: float, job: Job) -> None:
    machines = cluster(speeds, mbit)
    for candidate in plan(machines, job).ranking:
        assert sum(m.micro_batch for m in candidate.members) * candidate.accumulation == candidate.global_batch
        order = sorted(candidate.members, key=lambda member: machines.machine(member.name).speed)
        for slower, faster in itertools.pairwise(order):
            if machines.machine(slower.name).speed < machines.machine(faster.name).speed:
                assert slower.micro_batch <= faster.micro_batch


@pytest.mark.slow
@few_examples
@given(speeds, rates, jobs, st.randoms(use_true_random=False))
def test_the_order_of_machines_and_links_changes_nothing(
    speeds: list[float], mbit: float, job: Job, chance: random.Random
) -> None:
    original = cluster(speeds, mbit)
    machines, links = list(original.machines), [link.reversed() for link in original.links]
    chance.shuffle(machines)
    chance.shuffle(links)
    assert plan(Cluster(machines=tuple(machines), links=tuple(links)), job) == plan(original, job)


@pytest.mark.slow
@few_examples
@given(speeds, rates, jobs)
def test_every_reason_can_be_said(speeds: list[float], mbit: float, job: Job) -> None:
    planning = plan(cluster(speeds, mbit), job)
    assert all("{" not in sentence(reason) and sentence(reason) for reason in planning.reasons)
    assert Planning.model_validate_json(planning.model_dump_json()) == planning


# ----------------------------------------------------------------------------------------------------------- the choice


def test_a_large_model_over_a_slow_link_trains_alone_and_says_so() -> None:
    planning = plan(cluster([8, 8], 10), job(LARGE, strategy="allreduce"))
    assert best_of(planning).choice.alone
    assert planning.settings is not None
    assert planning.settings.left_out == ("b",)
    decisive = sentence(planning.reasons[0])
    assert decisive.startswith("machine a alone is the fastest: 2 machines would compute a step in ")
    assert decisive.endswith(" for the network") and plain_reasons(planning) == (decisive,)


@pytest.mark.parametrize(("strategy", "why"), [
    ("diloco", "Merging only every {} steps, the machines wait for the network"),
    ("allreduce", "Merging in every step pays here, although the machines then wait for the network"),
])  # fmt: skip
def test_a_group_is_explained_in_one_plain_sentence(strategy: str, why: str) -> None:
    planning = plan(cluster([8, 8], 950), job(1_100_000, strategy=strategy))
    (reason,) = plain_reasons(planning)
    assert reason.startswith(why.format(best_of(planning).choice.interval)) and reason.endswith(" of the time")


def test_a_machine_that_is_left_out_is_told_beside_the_reason() -> None:
    planning = plan(cluster([8, 8, 8, 0.5], 950, slow={"d": 5}), job(strategy="allreduce"))
    why, left_out = plain_reasons(planning)
    assert "network" in why and left_out.startswith("machine d is left out: ")


def test_adapters_over_gigabit_are_averaged_exactly() -> None:
    planning = plan(cluster([8, 8, 8, 8], 950), job(1_100_000, lora=True))
    best = best_of(planning)
    assert plain_reasons(planning)[0].endswith("; ways about as fast are less exact")
    assert (best.choice.strategy, len(best.choice.members), best.loss_increase) == ("allreduce", 4, 0)
    assert best.speed_up > 3.8


def test_a_full_fine_tune_over_a_hundred_megabit_is_periodic() -> None:
    planning = plan(cluster([8, 8, 8, 8], 95), job(244_000_000, samples=320_000))
    best = best_of(planning)
    assert best.choice.strategy == "diloco"
    assert best.choice.interval > 1
    assert best.loss_increase <= 0.02
    assert planning.settings is not None
    assert planning.settings.options["diloco.sync_interval"] == best.choice.interval


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"start": "scratch"}, "stays as it is (lr_scaling = auto): a machine's step sees its own samples"),
        ({"start": "scratch", "lr_scaling": "sqrt"}, "is multiplied by 1.41 (lr_scaling = sqrt)"),
        ({"start": "pretrained"}, "is multiplied by 1.41 (lr_scaling = sqrt)"),
    ],
)
def test_a_plan_says_whether_the_rate_follows_the_batch(asked: dict[str, Any], words: str) -> None:
    planning = plan(cluster([8, 8]), job(strategy="diloco", **asked))
    assert any(sentence(reason).startswith(f"the learning rate {words}") for reason in planning.reasons)


def test_a_tighter_bound_means_more_frequent_exchanges() -> None:
    def interval(bound: float) -> int:
        bounded = job(
            samples=32_000, start="scratch", strategy="diloco", preference="least-traffic", max_loss_increase=bound
        )
        return best_of(plan(cluster([8, 8, 8, 8], 500), bounded)).choice.interval

    assert [interval(0.03), interval(0.05), interval(0.07)] == [10, 20, 100]


@pytest.mark.slow
@few_examples
@given(speeds, rates, jobs)
def test_the_simplest_of_those_that_are_about_equal_is_chosen(speeds: list[float], mbit: float, job: Job) -> None:
    fastest_job = job.model_copy(update={"preference": "fastest", "engine": "mesh"})
    ranking = [candidate for candidate in plan(cluster(speeds, mbit), fastest_job).ranking if candidate.fits]
    best, fastest = ranking[0], max(candidate.useful_speed_up for candidate in ranking)
    assert best.useful_speed_up * SIGNIFICANT_RATIO >= fastest * 0.99
    assert simplicity(best) == min(
        simplicity(candidate) for candidate in ranking if candidate.useful_speed_up * SIGNIFICANT_RATIO > fastest * 1.01
    )


def test_a_fine_tune_of_texts_is_merged_only_by_whom_a_higher_loss_suits() -> None:
    def considered(samples: int, price: float) -> bool:
        texts = job(samples=samples, texts=True, max_loss_increase=price)
        return "no-interval" not in codes(plan(cluster([8, 8, 8, 8], 95), texts), "diloco")

    assert considered(32_000, 0.03)
    assert not considered(32_000, 0.02)
    assert not considered(3_200, 0.03)


def test_no_interval_within_the_bound_is_said() -> None:
    planning = plan(cluster([8, 8], 10), job(start="scratch", strategy="diloco", max_loss_increase=0.0))
    assert best_of(planning).choice.alone
    assert "no-interval" in codes(planning, "diloco")


def coordinator(planning: Planning) -> str:
    assert planning.settings is not None
    return planning.settings.coordinator


def test_between_equals_the_coordinator_is_where_the_run_starts() -> None:
    equals = cluster([8, 8, 8], 950)
    assert coordinator(plan(equals.model_copy(update={"here": "b"}), job(engine="mesh"))) == "b"


def test_the_coordinator_stays_where_it_is_allowed() -> None:
    assert (
        coordinator(plan(cluster([8, 8, 8], 950, slow={"a": 400}), job(engine="mesh"), coordinator_candidates=["b"]))
        == "b"
    )


def without(cluster: Cluster, *pair: str) -> Cluster:
    """The cluster less the link of a pair."""
    links = tuple(link for link in cluster.links if {link.source, link.target} != set(pair))
    return cluster.model_copy(update={"links": links})


def test_the_coordinator_is_where_most_reach_it_and_passes_on_what_others_cannot_send() -> None:
    all_linked = cluster([8, 8, 8], 300)
    planning = plan(without(all_linked, "a", "b"), job(strategy="diloco", codec="bf16"))
    assert coordinator(planning) == "c"
    assert len(best_of(planning).choice.members) == 3
    assert "relayed" in codes(planning, "a")
    choice = best_of(planning).choice
    assert (
        predict(without(all_linked, "a", "b"), job(), choice).exchange
        > 1.2 * predict(all_linked, job(), choice).exchange
    )


def test_a_slow_link_owns_little_and_the_plan_says_so() -> None:
    planning = plan(cluster([8, 8, 8, 8], 950, slow={"d": 50}), job(strategy="diloco"))
    best = best_of(planning)
    assert [member.shard for member in best.members] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=0.03)
    (reason,) = [reason for reason in planning.reasons if reason.code == "owns-less"]
    assert "d trains, and leaves merging the weights to the others, because its link is slow" in sentence(reason)
    assert planning.settings is not None
    assert [member.shard for member in planning.settings.members][3] < 0.2


def test_a_fast_link_among_slow_ones_owns_much() -> None:
    names = "abc"
    machines = tuple(machine(name, wifi=name != "c") for name in names)
    links = (
        Link(source="a", target="b", mbit=50, mbit_back=50, medium="wifi", air="home"),
        Link(source="a", target="c", mbit=100, mbit_back=100, medium="wifi", air="home"),
        Link(source="b", target="c", mbit=100, mbit_back=100, medium="wifi", air="home"),
    )
    planning = plan(Cluster(machines=machines, links=links), job(engine="mesh", samples=100_000))
    best = best_of(planning)
    # Two members owe each other nothing then: what they send crosses the air once, to the wire or from it.
    assert [member.shard for member in best.members] == pytest.approx([0, 0, 1], abs=0.05)
    assert "slowest-air" in codes(planning, "home")
    assert "owns-more" in codes(planning, "c")


def test_equal_links_make_equal_owners() -> None:
    best = best_of(plan(cluster([8, 4, 8, 2], 950), job(strategy="diloco")))
    assert {member.shard for member in best.members} == {1 / len(best.members)}


def test_a_brake_is_left_out() -> None:
    planning = plan(cluster([8, 8, 8, 0.5], 950, slow={"d": 5}), job(strategy="allreduce"))
    assert "d" not in best_of(planning).choice.members
    assert "costs-more" in codes(planning, "d")
    assert "d is left out: with it training would be" in " ".join(summary_lines(planning))


def test_a_machine_without_speed_is_left_out_with_a_reason() -> None:
    planning = plan(cluster([8, 8, 0]), job())
    assert all("c" not in candidate.choice.members for candidate in planning.ranking)
    assert "no-speed" in codes(planning, "c")


def test_a_machine_without_a_link_is_left_out_with_a_reason() -> None:
    linked = cluster([8, 8, 8])
    cut = linked.model_copy(
        update={"links": tuple(link for link in linked.links if "c" not in (link.source, link.target))}
    )
    planning = plan(cut, job(1_000_000))
    assert best_of(planning).choice.members == ("a", "b")
    assert codes(planning, "c") & {"no-link", "no-link-nccl"}


def test_nccl_takes_cuda_devices_only() -> None:
    mixed = joined((machine("a", device="cuda"), machine("b", device="cuda"), machine("mac", 8, system="darwin")))
    planning = plan(mixed, job(engine="nccl"))
    assert all("mac" not in c.choice.members for c in planning.ranking if not c.choice.alone)
    assert "no-cuda" in codes(planning, "mac")
    assert {c.choice.engine for c in plan(cluster([8, 8]), job()).ranking} == {"mesh"}


@pytest.mark.parametrize("engine", ["auto", "mesh"])
def test_a_mac_and_a_pc_with_cuda_train_together_each_its_share(engine: str) -> None:
    mac = machine("mac", 4, device="mps", system="darwin")
    pc = machine("pc", 8, device="cuda", system="linux")
    best = best_of(plan(joined((mac, pc), 10_000), job(engine=engine)))
    assert best.choice.engine == "mesh"  # NCCL needs CUDA everywhere
    assert {member.name: member.micro_batch for member in best.members} == {"mac": 5, "pc": 11}
    assert 1.2 < best.useful_speed_up <= 1.5  # of 12 samples/s, the PC alone takes 8


@pytest.mark.parametrize("preference", ["closest-to-exact", "least-traffic"])
def test_preferences(preference: str) -> None:
    from_scratch = job(20_000_000, samples=320_000, start="scratch")
    equals = cluster([8, 8, 8, 8], 950)
    preferred = best_of(plan(equals, from_scratch.model_copy(update={"preference": preference})))
    fastest = best_of(plan(equals, from_scratch))
    assert not preferred.choice.alone
    assert preferred.useful_speed_up <= fastest.useful_speed_up * 1.05  # what differs by less is not told apart
    if preference == "closest-to-exact":
        assert (preferred.choice.codec, preferred.loss_increase) == ("fp32", 0)
    else:
        assert preferred.bytes_per_hour < fastest.bytes_per_hour / 2


# --------------------------------------------------------------------------------------------------------------- memory


def with_memory(free: int, per_sample: int) -> Cluster:
    fixed = 16 * 1_000_000
    points = tuple(Measurement(batch=b, seconds=b / 8, peak=fixed + b * per_sample) for b in (1, 2))
    return joined([machine(name, 0, memory_free=free).model_copy(update={"measurements": points}) for name in "ab"])


def test_gradient_accumulation_makes_a_step_fit_without_changing_it() -> None:
    eight_samples = job(1_000_000, batch=8)
    planning = plan(with_memory(100_000_000, 20_000_000), eight_samples)
    best = best_of(planning)
    assert (best.accumulation, best.global_batch) == (4, 16)
    assert "accumulation-for-memory" in codes(planning)
    assert planning.settings is not None
    assert planning.settings.options["batch_size"] == 2
    assert all(member.memory <= member.memory_free for member in best.members)


def test_what_would_make_it_fit_is_proposed() -> None:
    planning = plan(with_memory(26_000_000, 24_000_000), job(1_000_000, layers=12))
    assert planning.chosen is None
    assert codes(planning, "a") == {"does-not-fit", "would-fit-with-checkpointing"}
    with pytest.raises(BadInput, match="fits no machine"):
        planning.overlay(Profile(name="p"))


def test_adapters_are_proposed_where_the_optimizer_is_too_large() -> None:
    planning = plan(with_memory(12_000_000, 1_000), job(1_000_000))
    assert "would-fit-with-lora" in codes(planning, "a")


def test_what_a_task_refuses_is_not_proposed() -> None:
    assert "needs-dividing" in codes(plan(with_memory(12_000_000, 1_000), job(1_000_000, adaptable=False)), "a")
    workload = Workload(model_path="m:build", trainable=10, total=10, samples=10)
    custom = profile_from_options("p", {"task": "custom", "model_path": "m:build"})
    assert not job_of(custom, workload).adaptable


def test_nothing_helps_is_said_too() -> None:
    assert "needs-dividing" in codes(plan(with_memory(3_000_000, 1_000), job(1_000_000)), "a")


# ------------------------------------------------------------------------------------------------------------- the plan


def test_a_plan_changes_its_profile(tmp_path: Path) -> None:
    profile = Profile(name="p")
    machines = cluster([8, 4, 4], 95)
    planning = with_hashes(plan(machines, job(samples=100_000)), machines, profile)
    planning.write(tmp_path / "plan.json")
    restored = Planning.read(tmp_path / "plan.json")
    assert restored == planning
    assert restored.settings is not None
    changed = restored.overlay(profile)
    assert changed.strategy.strategy == best_of(restored).choice.strategy
    assert changed.training.gradient_accumulation == best_of(restored).accumulation
    assert sum(member.batch_size for member in restored.settings.members) == 24


def test_a_plan_is_refused_for_another_profile() -> None:
    machines = cluster([8, 8])
    planning = with_hashes(plan(machines, job()), machines, Profile(name="p"))
    changed = Profile.model_validate({"name": "p", "training": {"batch_size": 3}})
    with pytest.raises(BadInput, match="a profile other than"):
        planning.overlay(changed)


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "job": 3}'])
def test_files_that_are_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"plan\.json"):
        Planning.read(path)


def test_choices_that_cannot_be_are_refused() -> None:
    machines = cluster([8, 8, 0])
    choice = Choice(strategy="allreduce", codec="fp32", engine="nccl", members=("a", "c"))
    with pytest.raises(BadInput, match="c has no measured speed"):
        predict(machines, job(), choice)
    with pytest.raises(BadInput, match="no link"):
        predict(Cluster(machines=machines.machines), job(), choice.model_copy(update={"members": ("a", "b")}))
    with pytest.raises(BadInput, match="cost of strategy 'no-such'"):
        predict(machines, job(), choice.model_copy(update={"strategy": "no-such"}))
    with pytest.raises(BadInput, match="fewer samples"):
        predict(machines, job(global_batch=1), choice.model_copy(update={"members": ("a", "b")}))


@pytest.fixture
def unknown() -> Iterator[None]:
    """A strategy whose cost is not known."""

    class Unknown(AllReduce):
        name = "unknown"
        options = Section
        costs = None
        is_default = False

    register(Unknown)
    yield
    forget("unknown")


@pytest.mark.usefixtures("unknown")
def test_strategies_of_the_registry_whose_cost_is_known_are_candidates() -> None:
    planning = plan(cluster([8, 8]), job())
    assert {c.choice.strategy for c in planning.ranking} == {"allreduce", "diloco"}
    assert "no-cost-model" in codes(planning, "unknown")


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("engine", ["auto", "nccl"])
def test_a_strategy_of_unknown_cost_is_carried_out_and_not_predicted(engine: str) -> None:
    machines = joined([machine("a", 8, device="cuda"), machine("b", 4, device="cuda")])
    planning = plan(machines, job(strategy="unknown", engine=engine))
    best = best_of(planning)
    assert (best.predicted, best.choice.strategy, best.choice.members) == (False, "unknown", ("a", "b"))
    assert [member.micro_batch for member in best.members] == [11, 5]
    assert planning.settings is not None
    assert planning.settings.options.items() >= {"strategy": "unknown", "codec": "auto"}.items()
    assert not any("." in name for name in planning.settings.options)
    assert "without a prediction" in sentence(planning.reasons[0])
    assert "only-machine" not in codes(planning)
    assert "not predicted" in "".join(table_lines(planning))
    assert list(summary_lines(planning))


def test_machines_that_cannot_work_together_are_not_called_one_machine() -> None:
    planning = plan(Cluster(machines=cluster([8, 8]).machines), job())
    assert {"no-group", "no-link"} <= codes(planning)
    assert "only-machine" not in codes(planning)


RANKED = {
    "speech": {"allreduce", "diloco"},
    "texts": {"allreduce", "diloco", "streaming_diloco", "noloco", "sparta", "sparseloco"},
    "adapters": {"allreduce", "diloco", "streaming_diloco", "noloco", "sparseloco"},
    "scratch": {"allreduce", "diloco", "streaming_diloco", "local_sgd", "fedavg", "sparta"},
}


@pytest.mark.parametrize("name", RANKED)
def test_all_that_are_sound_for_a_job_are_ranked_and_the_others_have_a_reason(name: str) -> None:
    start: Any = "scratch" if name == "scratch" else "pretrained"
    bounded = job(max_loss_increase=0.2, start=start, texts=name in ("texts", "adapters"), lora=name == "adapters")
    planning = plan(cluster([8, 8], 20), bounded)
    assert {candidate.choice.strategy for candidate in planning.ranking} == RANKED[name]
    excluded = {reason.subject for reason in planning.reasons if reason.code in ("no-cost-model", "no-interval")}
    assert excluded == set(strategies()) - RANKED[name]


def test_a_strategy_that_is_not_sound_for_a_job_is_predicted_only_where_it_is_asked_for() -> None:
    class Guessed(AllReduceCosts):
        def why_not_ranked(self, run: RunSpec) -> str:
            return "it is a guess" if run.steps < 2000 else ""

    register(
        type("Own", (AllReduce,), {"name": "guessed", "options": Section, "costs": Guessed(), "is_default": False})
    )
    try:
        short, long = (plan(cluster([8, 8]), job(samples=16 * steps)) for steps in (1999, 2000))
        note = "guessed was not considered: it is a guess"
        assert note in map(sentence, short.reasons) and note not in map(sentence, long.reasons)
        assert "guessed" in {candidate.choice.strategy for candidate in long.ranking}
        asked = best_of(plan(cluster([8, 8]), job(strategy="guessed")))
        assert (asked.predicted, asked.choice.strategy) == (True, "guessed")
    finally:
        forget("guessed")


@pytest.mark.parametrize("codec", ["mxfp4", "topk:0.05"])
def test_a_strategy_that_refuses_the_codec_is_not_proposed(codec: str) -> None:
    planning = plan(cluster([8, 8], 20), job(samples=100_000, texts=True, max_loss_increase=0.2, codec=codec))
    assert {candidate.choice.strategy for candidate in planning.ranking if not candidate.choice.alone} >= {
        "diloco",
        "streaming_diloco",
    }
    assert not {"noloco", "sparta"} & {candidate.choice.strategy for candidate in planning.ranking}
    note = f"sparta was not considered: codec = {codec} is made for differences"
    assert note in " ".join(map(sentence, planning.reasons))


def test_a_strategy_that_needs_more_exchanges_is_not_proposed() -> None:
    owned = {"sparseloco": {"sync_interval": 30}}
    few, many = (
        plan(cluster([8, 8], 20), job(steps=steps, strategy="sparta + sparseloco", owned=owned, max_loss_increase=0.5))
        for steps in (600, 6000)
    )
    assert all(candidate.choice.alone for candidate in few.ranking) and not all(
        candidate.choice.alone for candidate in many.ranking
    )
    refusal = "it has sparseloco, which needs 100 exchanges, and 600 steps have 20"
    assert f"sparta + sparseloco was not considered: {refusal}" in map(sentence, few.reasons)


def test_strategies_without_a_common_codec_keep_their_own_in_a_plan() -> None:
    composition = job(steps=6000, strategy="sparseloco + sparta", max_loss_increase=0.5)
    group = next(
        candidate for candidate in plan(cluster([8, 8], 20), composition).ranking if not candidate.choice.alone
    )
    assert settings_of(group, Predictor(cluster([8, 8], 20), composition)).options["codec"] == "auto"


def test_a_bound_of_all_is_said_in_plain_figures() -> None:
    planning = plan(cluster([8, 8], 20), job(TINY, strategy="diloco", max_loss_increase=1.0))
    assert "(at most 100 % is accepted)" in " ".join(map(sentence, planning.reasons))


def test_an_exchange_in_every_step_is_said_so() -> None:
    planning = plan(cluster([8, 8, 8, 8]), job(strategy="sparta", texts=True, max_loss_increase=0.1))
    assert "an exchange in every step: the final loss may be 7.4 % higher" in " ".join(map(sentence, planning.reasons))


@pytest.mark.parametrize(
    ("loss", "words"),
    [(0.0, "the final loss should be no higher (at most"), (0.21, "the final loss may be 0.2 % higher")],
)
def test_a_loss_of_nothing_is_not_a_percentage(loss: float, words: str) -> None:
    assert words in sentence(Reason.of("interval", interval=50, rounds=3, loss=loss, bound=1.0))


def test_an_unknown_strategy_is_bad_input() -> None:
    with pytest.raises(BadInput, match="unknown strategy"):
        plan(cluster([8, 8]), job(strategy="dilocoo"))


def test_every_code_in_the_planner_has_words() -> None:
    text = "".join((ROOT / "distributed" / "planning" / name).read_text() for name in ("planner.py", "reasons.py"))
    used = set(re.findall(r'(?:Reason\.of\(|_note\(|code = )"([a-z-]+)"', text))
    assert len(used) > 15
    assert used <= set(WORDS)


@pytest.mark.slow
def test_planning_needs_no_torch() -> None:
    code = "import sys, distributed.planning.planner, app.plan_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_every_part_of_an_exchange_has_words() -> None:
    kinds = ("none", "link", "interface", "air", "member")
    assert {f"slowest-{kind}" for kind in kinds} == {code for code in WORDS if code.startswith("slowest-")}
