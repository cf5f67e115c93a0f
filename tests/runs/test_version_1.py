"""Documents of version 1, as they were recorded, are read. A change that breaks this needs a version 2 beside it."""

from __future__ import annotations

from pathlib import Path

from app.run_view.run_state import reduce_events
from distributed.planning.documents.document import Figures, Planning
from training.records.events import UnknownEvent, from_line
from training.records.run_folder import RunFolder
from training.strategies.diloco import DiLoCoOptions

RECORDED = Path(__file__).parent / "version_1"
RUN = RECORDED / "20261128-211221-6c37-nanogpt"


def test_the_plan_and_metadata_of_a_run() -> None:
    folder = RunFolder.open(RUN)
    plan, metadata = folder.plan(), folder.metadata
    assert (plan.version, plan.hash(), plan.world_size) == (1, "d2860401e89860d9", 2)
    assert plan.profile.strategy.of(DiLoCoOptions).sync_interval == 3
    assert (metadata.version, metadata.status, metadata.profile) == (1, "completed", "nanogpt")


def test_the_events_of_a_run() -> None:
    events = list(RunFolder.open(RUN).events())
    assert len(events) == 52 and not any(isinstance(event, UnknownEvent) for event in events)
    state = reduce_events(events)
    assert (state.step, sorted(state.members)) == (6, [0, 1])


def test_an_election_that_was_recorded_as_a_warning() -> None:
    recorded = '{"v":1,"time":9.0,"member":1,"seq":4,"kind":"warning","message":"m","elected":true,"term":2,"port":7}'
    assert [entry.text for entry in reduce_events([from_line(recorded)]).warnings] == ["m"]


def test_a_ranking_and_measured_figures() -> None:
    planning, figures = Planning.read(RECORDED / "planning.json"), Figures.read(RECORDED / "figures.json")
    assert planning.version == figures.version == 1
    assert planning.chosen is not None and len(planning.ranking[planning.chosen].members) == 2
    assert [machine.name for machine in figures.cluster.machines] == ["a", "b"]
