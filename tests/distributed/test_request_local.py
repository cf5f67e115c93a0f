"""Requests to a run on this machine, in the process that started it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from profiles.files.resolve import profile_from_options
from tests.distributed.muster_runs import JOB
from tests.waiting import until
from training.records.events import Event, MemberEvent, RequestEvent, SnapshotEvent, StepEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.outcome import RunOutcome
from training.run.requests.request_book import Action, leave_request
from training.run.requests.request_server import LocalMachines, RequestServer
from training.run.run_controller import RunController

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_local_run_obeys_its_folder(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.format(pause=0.02, gate="", model="nn.Linear(2, 2)"))
    options = {"task": "custom", "model_path": f"{tmp_path / 'job.py'}:build", "max_steps": 5000, "threads": 1}
    plan = plan_local_run(profile_from_options("mine", options), 2)
    with RunFolder.create(tmp_path / "output", plan, []) as folder:
        seen: list[Event] = []

        def on_event(event: Event) -> None:
            desk(event)
            seen.append(event)

        run = RunController(plan, folder, on_event)
        desk = RequestServer(run, folder.path, folder.append, LocalMachines(plan))
        run.start()
        desk.open()
        ended: list[RunOutcome] = []
        waiting = threading.Thread(target=lambda: ended.append(run.wait()))
        waiting.start()

        def answer(identity: str) -> str:
            said = [e for e in folder.events() if isinstance(e, RequestEvent) and e.request == identity]
            return said[-1].outcome if said else ""

        def steps(rank: int) -> int:
            return max((e.step for e in seen if isinstance(e, StepEvent) and e.member == rank), default=0)

        try:
            until(lambda: steps(1) > 3)
            wanted: list[tuple[Action, str]] = [("snapshot", ""), ("drop", "worker-1"), ("add", "worker-1")]
            for action, machine in wanted:
                identity = leave_request(folder.path, action, machine)
                until(lambda: answer(identity) in ("done", "refused"))  # noqa: B023 - called at once
                assert answer(identity) == "done"
            back = steps(0)
            until(lambda: steps(1) > back)
            leave_request(folder.path, "stop")
            waiting.join(60.0)
            assert ended[0].status == "cancelled"
        finally:
            run.kill()
        written = [(e.member, e.step) for e in seen if isinstance(e, SnapshotEvent)]
        assert {member for member, step in written if step == written[0][1]} == {0, 1}
        statuses = [e.status for e in seen if isinstance(e, MemberEvent) and e.member == 1]
        assert "lost" not in statuses and statuses.count("ready") == 3
