"""Which layouts a job could have, and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from planner_figures import job as planned_job
from planner_figures import joined, machine

from distributed.planning.documents.cluster import Cluster, ClusterMachine
from distributed.planning.layouts import divided_plan
from distributed.planning.layouts.candidates import _extras, _orders, layout_candidates
from distributed.planning.layouts.layout_documents import LayoutCandidate, LayoutJob
from distributed.planning.reasons import sentence
from distributed.planning.run_time import together_text
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from training.tasks.inputs.model_size import ModelSize, decoder_size

GB = 10**9
LLAMA_3B = decoder_size(
    {
        "model_type": "llama",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "vocab_size": 128_256,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    512,
)
UNTIED = replace(LLAMA_3B, tied=0, parameters=LLAMA_3B.parameters + LLAMA_3B.tied)
FIXED = {"tuning": "full", "batch_size": 1, "gradient_accumulation": 16}
"""Settings that are not changed, because a person has set them."""
ADAPTERS = {**FIXED, "tuning": "lora", "base_precision": "fp32"}


def home(*gigabytes: float, mbit: float = 1000, slow: dict[str, float] | None = None, **fields: object) -> Cluster:
    machines = [machine("abcdefgh"[i], 1.0, memory_total=int(size * GB), **fields) for i, size in enumerate(gigabytes)]
    return joined(machines, mbit, slow)


def job(cluster: Cluster, size: ModelSize = LLAMA_3B, with_bitsandbytes: bool = False, **options: object) -> LayoutJob:
    profile = profile_from_options("mine", options or FIXED)
    return LayoutJob(profile, size, cluster, with_bitsandbytes=lambda: with_bitsandbytes)


def timed(cluster: Cluster, seconds: dict[str, list[float]]) -> Cluster:
    """The machines with seconds of each block."""
    machines = tuple(each.model_copy(update={"blocks": tuple(seconds[each.name])}) for each in cluster.machines)
    return cluster.model_copy(update={"machines": machines})


def candidates(cluster: Cluster, size: ModelSize = LLAMA_3B, **options: object) -> list[LayoutCandidate]:
    return layout_candidates(job(cluster, size, **options))


def of(layout: str, candidates: list[LayoutCandidate]) -> LayoutCandidate:
    return next(candidate for candidate in candidates if candidate.layout == layout)


def names(candidate: LayoutCandidate) -> list[str]:
    return ["".join(stage.name for stage in member) for member in candidate.members]


# ------------------------------------------------------------------------------------------------------------- the rule


def test_a_model_that_fits_a_machine_with_adapters_is_not_divided() -> None:
    whole, *others = candidates(home(8, 16, 8), batch_size=2, with_bitsandbytes=True)
    assert (whole.layout, whole.accepted) == ("replicate", True)
    assert sentence(whole.reason) == "machine b holds the whole model, which is faster than dividing it"
    assert {"tuning", "base_precision"} <= set(whole.options)
    assert [(other.layout, other.accepted) for other in others] == [
        ("pipeline", False),
        ("shard", False),
        ("tensor", False),
    ]
    assert {sentence(other.reason) for other in others} == {
        "not needed: machine b holds the whole model, which is faster"
    }


def test_of_several_machines_that_hold_it_the_one_with_the_fewest_changes_is_named() -> None:
    assert of("replicate", candidates(home(16, 128), tuning="full")).reason.subject == "b"


def test_where_a_person_wants_all_weights_trained_the_model_is_divided() -> None:
    ranked = candidates(home(32, 32, 32))
    assert [(each.layout, each.accepted, len(each.members)) for each in ranked] == [
        ("pipeline", True, 1),
        ("pipeline", False, 0),
        ("shard", False, 0),
        ("tensor", False, 0),
        ("replicate", False, 0),
    ]
    assert "no machine holds the whole model: machine a is closest, with" in sentence(ranked[-1].reason)
    assert sentence(ranked[1].reason) == "the memory of 1 member of 2 devices does not hold all blocks, in any order"
    assert sentence(ranked[0].reason).startswith("a+b+c with ")


def test_adapters_over_two_machines_where_one_does_not_hold_even_these() -> None:
    pipeline = of("pipeline", candidates(home(12.3, 12.3), **ADAPTERS))
    assert pipeline.accepted and "tuning" not in pipeline.options


# ------------------------------------------------------------------------------------------------------------ pipelines


def test_the_stages_hold_every_block_once_and_fit_their_memory() -> None:
    pipeline = of("pipeline", candidates(home(40, 20, 24)))
    (stages,) = pipeline.members
    assert [stages[0].start, stages[-1].end] == [0, 28]
    assert all(left.end == right.start for left, right in pairwise(stages))
    assert all(stage.memory <= stage.memory_usable for stage in stages)
    assert [stage.under_way for stage in stages][-1] == 1


def test_smaller_micro_batches_and_checkpointing_may_be_chosen_if_nobody_has_set_them() -> None:
    pipeline = of("pipeline", candidates(home(32, 32, 32), tuning="full"))
    assert pipeline.micro_batch * pipeline.micro_batches == 8
    assert pipeline.options["batch_size"] == ("8", "1")


@pytest.mark.slow
def test_neighbours_in_the_pipeline_are_those_with_fast_links() -> None:
    cluster = home(32, 32, 32)
    slow = tuple(
        link.model_copy(update={"mbit": 20, "mbit_back": 20}) if {link.source, link.target} == {"a", "b"} else link
        for link in cluster.links
    )
    cluster = cluster.model_copy(update={"links": slow})
    (order,) = names(of("pipeline", candidates(cluster, UNTIED)))
    assert order in ("acb", "bca")
    (order,) = names(of("pipeline", candidates(cluster)))  # whose ends sum the gradients of the embedding
    assert {order[0], order[-1]} != {"a", "b"}


def test_machines_without_links_are_no_neighbours() -> None:
    cluster = home(32, 32, 32)
    unlinked = [each for each in candidates(cluster.model_copy(update={"links": ()})) if each.layout == "pipeline"]
    assert {sentence(each.reason).split(" would")[1] for each in unlinked} == {" need links that were not measured"}


@pytest.mark.slow
def test_slow_links_are_hidden_by_more_micro_batches_under_way() -> None:
    fast, slow = (of("pipeline", candidates(home(42, 42, 42, mbit=mbit), UNTIED)) for mbit in (10_000, 100))
    assert slow.extra > 0 and slow.step > fast.step
    assert [stage.under_way for stage in slow.members[0]] > [stage.under_way for stage in fast.members[0]]


@pytest.mark.slow
def test_two_members_of_two_devices_have_the_same_cut() -> None:
    ranked = candidates(home(12.3, 12.3, 12.3, 12.3), **ADAPTERS)
    hybrid = next(each for each in ranked if len(each.members) == 2)
    assert hybrid.accepted and hybrid.exchange > 0
    left, right = hybrid.members
    assert [(stage.start, stage.end) for stage in left] == [(stage.start, stage.end) for stage in right]
    assert sorted("".join(names(hybrid))) == ["a", "b", "c", "d"]
    assert hybrid.samples_per_second == pytest.approx(2 * 16 / hybrid.step)


@pytest.mark.slow
def test_members_that_exchange_seldom_lose_less() -> None:
    steps = []
    for interval in (1, 50):
        ranked = layout_candidates(replace(job(home(12.3, 12.3, 12.3, 12.3), **ADAPTERS), interval=interval))
        steps.append(next(each for each in ranked if len(each.members) == 2))
    assert steps[1].exchange == pytest.approx(steps[0].exchange / 50, rel=0.2)


@pytest.mark.slow
def test_more_devices_than_orders_are_tried_of() -> None:
    pipeline = of("pipeline", candidates(home(16, 16, 16, 16, 16, 16, 16, 18)))
    assert pipeline.accepted and names(pipeline)[0].startswith("h")


def test_a_tied_embedding_is_summed_over_the_ends_of_the_pipeline_in_every_step() -> None:
    tied = of("pipeline", candidates(home(32, 32, 32)))
    assert tied.tied_sum == pytest.approx(4 * 128_256 * 3072 * 8 / 1e9)
    assert of("pipeline", candidates(home(32, 32, 32), UNTIED)).tied_sum == 0
    assert of("pipeline", candidates(home(12.3, 12.3), **ADAPTERS)).tied_sum == 0


def test_ends_of_a_pipeline_that_share_an_embedding_need_a_link() -> None:
    cluster = home(32, 32, 32)
    links = tuple(link for link in cluster.links if {link.source, link.target} != {"a", "c"})
    cluster = cluster.model_copy(update={"links": links})
    refused = [each.reason.code for each in candidates(cluster) if each.layout == "pipeline"]
    assert refused == ["layout-no-memory", "layout-no-link"]  # of two devices, of three
    assert names(of("pipeline", candidates(cluster, UNTIED)))[0][1] == "b"


def test_seconds_measured_block_by_block_decide_the_cut() -> None:
    seconds = {"a": [0.1] * 28, "b": [0.15] * 28}
    pipeline = of("pipeline", layout_candidates(job(timed(home(42, 42), seconds))))
    (stages,) = pipeline.members
    sizes = {stage.name: stage.end - stage.start for stage in stages}
    assert sizes["a"] > sizes["b"] and stages[0].seconds == pytest.approx(
        sum(seconds[stages[0].name][stages[0].start : stages[0].end])
    )


# ----------------------------------------------------------------------------------------------------- shard and tensor


def gpus(kind: str = "cuda") -> Cluster:
    devices = [
        machine(f"pc:{index}", 0.05, machine="pc", identity="k", device=kind, memory_total=40 * GB)
        for index in range(2)
    ]
    return Cluster(machines=tuple(devices))


def test_two_gpus_of_one_machine_may_hold_shards_or_parts_of_matrices() -> None:
    ranked = candidates(gpus())
    for layout in ("shard", "tensor"):
        divided = of(layout, ranked)
        assert divided.accepted and divided.samples_per_second > 0, sentence(divided.reason)
        assert [stage.name for stage in divided.members[0]] == ["pc:0", "pc:1"] and divided.fits


@pytest.mark.parametrize(
    ("cluster", "layout", "expected"),
    [
        (home(32, 32, 32), "shard", "a, b, c would send for 27:25 in a step that computes for"),
        (home(32, 32, 32), "tensor", "tensor needs the links inside a machine, and a, b, c are several"),
        (gpus("mps"), "shard", "shard does not run on the GPU of a Mac"),
        (home(32), "shard", "machine a is the only device"),
    ],
)
def test_elsewhere_a_reason_says_why_not(cluster: Cluster, layout: str, expected: str) -> None:
    refused = of(layout, candidates(cluster))
    assert not refused.accepted and sentence(refused.reason).startswith(expected)


def test_shards_that_do_not_fit_are_refused_with_what_they_need() -> None:
    small = tuple(each.model_copy(update={"memory_total": 12 * GB}) for each in gpus().machines)
    assert " GB each, and " in sentence(of("shard", candidates(Cluster(machines=small))).reason)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (replace(LLAMA_3B, blocks=()), "the blocks of the model are not known"),
        (replace(LLAMA_3B, teacher=ModelSize(10**9)), "a model that learns from a teacher is not divided"),
    ],
)
def test_a_model_that_cannot_be_divided(size: ModelSize, expected: str) -> None:
    assert sentence(of("pipeline", candidates(home(32, 32), size)).reason) == expected


@pytest.mark.parametrize(
    ("cluster", "size", "expected"),
    [
        (
            home(16, 16),
            replace(LLAMA_3B, blocks=LLAMA_3B.blocks[:1]),
            "the model has one block, which cannot be divided",
        ),
        (home(90, 0.001), LLAMA_3B, "2 devices need a block each, and machine b has the memory for none"),
        (
            home(8, 9),
            LLAMA_3B,
            "no device holds block 28 with the head: machine b is closest, with 6.4 GB of the 11 GB",
        ),
    ],
)
def test_memory_that_does_not_suffice_is_named(cluster: Cluster, size: ModelSize, expected: str) -> None:
    divided = layout_candidates(replace(job(cluster, size), divides=True))
    assert sentence(of("pipeline", divided).reason).startswith(expected)


def test_unmeasured_machines_are_an_error() -> None:
    unmeasured: ClusterMachine = machine("a", 0, memory_total=GB)
    with pytest.raises(BadInput, match="measured"):
        candidates(Cluster(machines=(unmeasured,)))


@pytest.mark.slow
def test_blocks_that_were_measured_to_take_no_time_divide_nothing_by_zero() -> None:
    home_of_three = home(30, 30, 30)
    for seconds in ([0.0] * 28, [0.0] * 27 + [1.0]):
        measured = dict.fromkeys("abc", seconds)
        pipeline, *_ = layout_candidates(job(timed(home_of_three, measured)))
        assert pipeline.accepted and pipeline.fits and 0 <= pipeline.bubble < 1


@pytest.mark.slow
def test_an_endless_latency_needs_no_more_than_all_micro_batches_ahead() -> None:
    cluster = home(30, 30, 30)
    links = tuple(link.model_copy(update={"rtt_ms": inf}) for link in cluster.links)
    assert layout_candidates(job(cluster.model_copy(update={"links": links})))


def test_of_many_devices_not_all_choices_are_tried() -> None:
    machines = [machine(f"m{i}", 1 / (1 + i % 3), memory_total=30 * GB) for i in range(12)]
    tried = list(_orders([job(joined(machines, 1000)).stagings()[0].device(each) for each in machines], 6))
    assert sorted(tried) == [(0, 1, 2, 3, 4, 5), (0, 1, 3, 4, 6, 9)]


def test_values_of_extra_are_doubled_for_many_micro_batches() -> None:
    assert _extras(3) == [0, 1, 2, 3]
    assert _extras(100) == [*range(17), 32, 64, 100]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "members"), [(0, 1), (2, 2), (3, 1)])
def test_a_plan_has_members_of_as_many_devices_as_asked_for(
    stages: int, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divided_plan, "size_for", lambda profile: UNTIED)
    between = {"stages": stages, "strategy": "diloco", "sync_interval": 20} if stages else {}
    options = {**FIXED, "layout": "pipeline", **between}
    planning = divided_plan.plan_layout(
        home(400, 400, 400, 400), planned_job(10_000), profile_from_options("mine", options)
    )
    assert planning.settings is not None and planning.best is not None
    assert len(planning.settings.members) == members
    cuts = {tuple(device.blocks for device in member.devices) for member in planning.settings.members}
    assert len(cuts) == 1  # all members alike
    choice = planning.best.choice
    assert (choice.strategy, choice.interval) == (("diloco", 20) if members > 1 else ("allreduce", 1))
    assert len(choice.members) == len(choice.blocks) == members * len(planning.settings.members[0].devices)
    if members > 1:
        assert together_text(choice.members, choice.blocks).startswith(
            "2 members hold the model, each divided over its devices ("
        )


def test_smaller_steps_of_a_pipeline_take_as_many_periods_as_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 samples are 16 and 4 of a micro-batch each: 10 on average, behind the two that fill three stages."""
    monkeypatch.setattr(divided_plan, "size_for", lambda profile: UNTIED)
    profile = profile_from_options("mine", {**FIXED, "layout": "pipeline", "stages": 3})
    whole, halved = (
        divided_plan.plan_layout(home(400, 400, 400), each, profile).ranking[0]
        for each in (planned_job(samples=320, batch=16), planned_job(samples=400, batch=16, epochs=20))
    )
    assert (halved.steps, halved.samples, len(halved.members)) == (40, 400, 3)
    assert halved.step == pytest.approx(whole.step * (10 + 2) / (16 + 2))
