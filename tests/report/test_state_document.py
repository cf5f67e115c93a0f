"""``runs show --json`` tells what the dashboard shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.run_view.figures import state_document
from app.run_view.run_state import reduce_events
from cli_typer import main
from tests.app.app_events import MEMBER_EVENTS, RUN_EVENTS, evaluation, step, sync
from tests.report.report_runs import write_run
from training.records.events import Event
from training.records.run_files import finite

OLD_KEYS = {"status", "step", "total_steps", "members", "evaluations", "warnings", "errors", "snapshot_step"}


def test_the_series_of_the_charts_are_in_it_with_their_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step(n, member=rank, loss=rank + 1 / n) for n in range(1, 5) for rank in (0, 1)]
    run = write_run(tmp_path, [evaluation(0, 0.9), *steps, sync(1), evaluation(4, 0.2)])
    assert main(["runs", "show", str(run), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["state"]
    assert set(state) >= OLD_KEYS
    loss = state["series"]["loss"]
    assert (loss["newest"], loss["lowest"], loss["highest"]) == (0.75, 0.25, 2.0)
    assert loss["members"] == {"0": 0.25, "1": 1.25}
    assert state["series"]["validation wer"]["newest"] == 0.2
    assert state["members"][0]["last_synchronisation"]["bytes_sent"] == 100
    assert [one["kind"] for one in state["happenings"]].count("evaluation") == 2


@given(st.lists(MEMBER_EVENTS | RUN_EVENTS, max_size=30))
def test_every_state_can_be_written_as_json(events: list[Event]) -> None:
    with_members = [event.model_copy(update={"member": 1}) for event in events]
    document = state_document(reduce_events(with_members))
    assert json.loads(json.dumps(finite(document), allow_nan=False)) is not None
