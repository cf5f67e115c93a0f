"""What ``layout = auto`` takes for several machines: what fits their memory, if anything does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_figures import job, joined, machine
from test_layout_candidates import GB, LLAMA_3B

from distributed.planning.layouts import divided_plan
from distributed.planning.layouts.candidates import layout_candidates
from distributed.planning.layouts.divided_plan import fit_or_divide, plan_layout
from distributed.planning.layouts.layout_documents import LayoutCandidate, LayoutJob
from distributed.planning.layouts.stage_devices import budget_of
from distributed.planning.memory import fitting
from distributed.planning.memory.fitting import MemoryBudget
from distributed.planning.memory.memory_model import need_of
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile

OPTIONS = ({}, {"tuning": "full"}, {"tuning": "full", "fit_memory": "off"}, {"tuning": "lora", "batch_size": 1})


@pytest.fixture(autouse=True)
def _of_3_billion_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fitting, divided_plan):
        monkeypatch.setattr(module, "size_for", lambda profile: LLAMA_3B)


def profile_of(**options: object) -> Profile:
    return profile_from_options("mine", {"model_path": "owner/model", "base_precision": "fp32", **options})


def pipelines(profile: Profile, budgets: list[MemoryBudget]) -> list[LayoutCandidate]:
    """Return those that the planner accepts, with measured machines that are all linked."""
    machines = [machine(budget.name, 1.0, memory_total=budget.total) for budget in budgets]
    job = LayoutJob(profile, LLAMA_3B, joined(machines), divides=True, with_bitsandbytes=fitting.has_bitsandbytes)
    return [each for each in layout_candidates(job) if each.layout == "pipeline" and each.accepted]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gigabytes=st.lists(st.integers(6, 90), min_size=2, max_size=3),
    options=st.sampled_from(OPTIONS),
    alike=st.booleans(),
)
def test_auto_takes_what_fits_and_only_that(gigabytes: list[int], options: dict[str, object], alike: bool) -> None:
    sizes = [gigabytes[0]] * len(gigabytes) if alike else gigabytes
    budgets = [MemoryBudget("abc"[index], size * GB) for index, size in enumerate(sizes)]
    profile = profile_of(**options)
    try:
        taken = fit_or_divide(profile, budgets)
    except BadInput:
        assert not pipelines(profile, budgets)
        return
    if taken.run.layout == "pipeline":
        planned = pipelines(taken, budgets)
        assert planned and all(each.fits for each in planned)
    else:
        need = need_of(taken, LLAMA_3B).total
        assert all(need <= budget.total for budget in budgets)
        assert all(need <= budget.usable for budget in budgets) or not pipelines(profile, budgets)


def test_a_model_that_leaves_nothing_to_other_programs_is_divided() -> None:
    profile = profile_of(tuning="full", fit_memory="off", batch_size=1)
    need, lines = need_of(profile, LLAMA_3B).total, list[str]()
    for share, layout in ((0.8, "auto"), (1.0, "pipeline"), (1.2, "pipeline"), (1.3, "pipeline")):
        budgets = [MemoryBudget(name, int(need / share)) for name in "abc"]
        assert fit_or_divide(profile, budgets, lines.append).run.layout == layout
    assert lines[-1].endswith(": the model is divided")
    with pytest.raises(BadInput, match="not divided: no device holds block 28 with the head"):
        fit_or_divide(profile, [MemoryBudget(name, int(need / 8)) for name in "ab"])


def test_a_model_that_may_be_tight_exceeds_the_memory_of_no_machine() -> None:
    profile = profile_of(tuning="full", fit_memory="off", batch_size=1)
    need = need_of(profile, LLAMA_3B).total
    shared = MemoryBudget("mac", int(1.1 * need), "mps")  # training may use the smaller part of it
    box = MemoryBudget("box", need, limited=True)
    fitting.fit_to_budgets(profile, LLAMA_3B, [box, shared], tolerance=1)
    with pytest.raises(BadInput, match=", box has"):
        fitting.fit_to_budgets(profile, LLAMA_3B, [replace(box, total=int(0.95 * need)), shared], tolerance=1)


@pytest.mark.parametrize(("mbit", "devices"), [(10_000, "abc"), (5, "a")])
def test_a_machine_that_holds_the_whole_model_is_compared_with_divisions(mbit: float, devices: str) -> None:
    profile = profile_of(tuning="full", fit_memory="off", batch_size=1, gradient_accumulation=16)
    machines = [machine(name, 1.0, memory_total=size * GB) for name, size in (("a", 90), ("b", 40), ("c", 40))]
    taken = fit_or_divide(profile, [budget_of(each) for each in machines])
    planning = plan_layout(joined(machines, mbit), job(batch=1, accumulation=16), taken)
    assert planning.best is not None and planning.settings is not None
    assert "".join(sorted(planning.best.choice.members)) == devices
    assert all(member.memory <= member.memory_free for each in planning.ranking for member in each.members)
    chosen = planning.overlay(taken).run.layout
    assert (chosen, len(planning.best.choice.blocks)) == (("pipeline", 3) if devices == "abc" else ("replicate", 0))
    by_hand = profile_of(tuning="full", fit_memory="off", batch_size=1, layout="pipeline")
    assert all(each.choice.blocks for each in plan_layout(joined(machines, mbit), job(batch=1), by_hand).ranking)
