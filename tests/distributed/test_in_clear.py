"""``engine = auto`` sends nothing over a network in clear, whatever it would gain; a person may choose it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_figures import job, joined, machine
from scripted_connection import undialled as link

from app.wizard.state import actions as do
from app.wizard.state.dependencies import apply, inputs
from app.wizard.state.state import Action, Step, TaskKind, WizardState
from distributed.launcher import apply_planning
from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import Planning
from distributed.planning.planner import plan
from distributed.planning.prediction import Predictor
from distributed.planning.reasons import sentence, settings_of
from distributed.preparation.preflight import Facts
from profiles.errors import BadInput
from profiles.schema import Profile
from tests.distributed.test_preflight import SOUND
from tests.screens.states import at

FOUR = joined([machine(name, 80, device="cuda") for name in "abcd"], 100_000)
MUCH = job(37_800_000, samples=2000, strategy="allreduce", codec="fp32")


def best(planning: Planning) -> str:
    assert planning.best is not None
    return planning.best.choice.engine


def test_nccl_is_not_taken_unasked_and_the_plan_says_what_it_would_gain() -> None:
    planning = plan(FOUR, MUCH)
    rival = max(c.useful_speed_up for c in planning.ranking if c.choice.engine == "nccl")
    assert planning.best is not None and rival > 1.05 * planning.best.useful_speed_up
    assert best(planning) == "mesh"
    (reason,) = [reason for reason in planning.reasons if reason.code == "faster-in-clear"]
    assert "--set engine=nccl" in sentence(reason)
    assert best(plan(FOUR, MUCH.model_copy(update={"engine": "nccl"}))) == "nccl"


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1, 50), min_size=1, max_size=3), st.floats(10, 10_000))
def test_no_plan_is_in_clear_unasked(speeds: list[float], mbit: float) -> None:
    cluster = joined([machine("abc"[index], speed, device="cuda") for index, speed in enumerate(speeds)], mbit)
    planning = plan(cluster, job())
    assert best(planning) == "mesh"


def test_devices_of_one_machine_may_use_nccl() -> None:
    box = joined([machine(f"box:cuda:{index}", 80, identity="box", device="cuda") for index in range(2)])
    planning = plan(box, job(37_800_000))
    assert "nccl" in {candidate.choice.engine for candidate in planning.ranking}
    assert "faster-in-clear" not in {reason.code for reason in planning.reasons}


def forced(cluster: Cluster, engine: str) -> Planning:
    """A plan that chose nccl, as one of an earlier time or of somebody else may have."""
    requested = job(engine=engine)
    planning = plan(cluster, requested)
    index = next(i for i, c in enumerate(planning.ranking) if c.choice.engine == "nccl")
    chosen = settings_of(planning.ranking[index], Predictor(cluster, requested))
    return planning.model_copy(update={"chosen": index, "settings": chosen})


@pytest.mark.parametrize(("planned_as", "started_as", "taken"), [
    ("auto", "auto", False), ("auto", "nccl", True), ("nccl", "auto", True),
])  # fmt: skip
def test_a_plan_in_clear_needs_somebody_who_asked(planned_as: str, started_as: str, taken: bool) -> None:
    machines: list[tuple[object, Facts]] = [(link(name, f"10.0.0.{n}"), SOUND) for n, name in enumerate("ab", 1)]
    profile = Profile.model_validate({"name": "p", "strategy": {"engine": started_as}})
    planning = forced(joined([machine(name, 8, device="cuda") for name in "ab"], 300), planned_as)
    if not taken:
        with pytest.raises(BadInput, match="unencrypted"):
            apply_planning(planning, profile, machines)
        return
    assert apply_planning(planning, profile, machines).plan.in_clear


def at_plan(*in_clear: str) -> WizardState:
    state: WizardState = at(Step.PLAN).state
    made = replace(state.plan.value, in_clear=in_clear)
    return state.putting(TaskKind.PLAN, value=made, inputs=inputs(state, TaskKind.PLAN))


@pytest.mark.parametrize("action", [do.confirm, do.save_only])
@pytest.mark.parametrize("answer", ["", "y", "yes"])
def test_the_set_up_goes_on_in_clear_only_after_the_words(answer: str, action: Callable[[str], Action]) -> None:
    before = at_plan("whoever is on that network can read it")
    assert "not encrypted" in apply(before, action(answer)).notice
    assert "not encrypted" not in apply(before, action("Unencrypted ")).notice
    assert "not encrypted" not in apply(at_plan(), action("")).notice
