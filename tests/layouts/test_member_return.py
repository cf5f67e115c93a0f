"""A member of several devices that was lost, or dropped, comes back: each device gets the state of its part."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from profiles.errors import BadInput, ExitCode
from tests.layouts.pipeline_runs import queue_carriers, side_by_side
from tests.layouts.staged_records import Record, trained
from tests.layouts.test_columns import CUSTOM, plan_of, staged
from tests.waiting import until
from training.exchange.base import Confirm, ExchangeError, JoiningState, SoloExchange
from training.layouts.staged import StagedModel
from training.records.events import Event, MemberEvent, RequestEvent, StepEvent
from training.run.intake import COORDINATOR
from training.run.members.membership import Membership, WorkerHandle
from training.run.requests.request_book import Action, leave_request
from training.run.requests.request_server import LocalMachines, RequestServer
from training.run.run_controller import RunController

PATIENCE = 240.0  # workers start several times, on a machine that may be busy


class Returns:
    """Loses a device of member 1, and another one while the member comes back; takes it back, drops it, takes it back
    again, and stops the run."""

    def __init__(self, gate: Path) -> None:
        self._gate, self._passed, self.problems = gate, 13, list[BaseException]()
        self._steps: dict[int | None, int] = {}
        self._joined = 0
        self._answers: dict[str, str] = {}
        self._server: RequestServer | None = None

    def __call__(self, run: RunController, event: Event) -> None:
        if self._server is not None:
            self._server(event)
        if isinstance(event, MemberEvent) and event.member == 1 and event.status == "joined":
            self._joined += 1
        if isinstance(event, StepEvent):
            self._steps[event.member] = event.step
            if self._server is None and (event.member, event.step) == (1, 3):
                self._server = RequestServer(run, run.folder.path, self._note, LocalMachines(run.plan))
                threading.Thread(target=self._change_members, args=(run,)).start()

    def _note(self, event: Event) -> None:
        if isinstance(event, RequestEvent):
            self._answers[event.request] = event.outcome

    def _change_members(self, run: RunController) -> None:
        try:
            self._lose(run, 3)
            self._take_back(run)
            self._until(lambda: self._joined == 2)  # the first device has connected, and has no state yet
            self._lose(run, 2)
            self._take_back(run)
            self._until_it_trains()
            self._ask(run, "drop")
            self._ask(run, "add")
            self._until_it_trains()
        except BaseException as problem:
            self.problems.append(problem)
            raise
        finally:
            run.request_stop("enough")
            self._gate.write_text("100000")

    def _lose(self, run: RunController, rank: int) -> None:
        os.kill(run.members.workers[rank].process.pid, signal.SIGKILL)
        self._until(lambda: run.members.lost_members == [1] and not run.members.is_ending(1))

    def _take_back(self, run: RunController) -> None:
        assert self._server is not None
        self._server.take_back(run.plan.members[1])

    def _ask(self, run: RunController, action: Action) -> None:
        request = leave_request(run.folder.path, action, "worker-1")
        assert self._server is not None
        self._server.poll()
        self._until(lambda: self._answers.get(request) in ("done", "refused"))
        assert self._answers[request] == "done"

    def _until_it_trains(self) -> None:
        step = self._steps[0]
        self._until(lambda: self._steps[1] > step)

    def _until(self, happened: Callable[[], bool]) -> None:
        """Let steps pass meanwhile, but not all that there are."""

        def happens() -> bool:
            self._passed += 1
            self._gate.write_text(str(self._passed))
            return happened()

        until(happens, PATIENCE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_and_a_dropped_member_come_back_with_the_state_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("13")  # the first micro-batch of the fourth step waits
    monkeypatch.setenv("DEEP_GATE", str(gate))
    options = {"strategy": "diloco", "sync_interval": 2, "max_steps": 20_000, "eval_interval": 0}
    returns = Returns(gate)
    run = trained(tmp_path, plan_of(4, **{**CUSTOM, **options}, stages=2), returns)
    assert not returns.problems
    assert (run.outcome.status, run.outcome.metrics["lost_members"]) == ("cancelled", [])
    assert run.outcome.message.endswith(" is kept, 0 steps lost")
    statuses = [event.status for event in run.of(MemberEvent) if event.member == 1]
    assert [statuses.count(status) for status in ("lost", "joined", "done")] == [2, 4, 0]
    for column in ("", "-stage-2"):
        one, other = (strategy_state(run, f"member-{member}{column}") for member in (0, 1))
        assert one and one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def strategy_state(run: Record, process: str) -> dict[str, torch.Tensor]:
    """Return what a strategy keeps in the newest snapshot of a process: the anchor and the outer momentum."""
    *_, newest = sorted((run.outcome.run_dir / "checkpoints" / process).glob("step-*"))
    (file,) = newest.glob("*.safetensors")
    return {name: t for name, t in safetensors.torch.load_file(file).items() if name.startswith("strategy/")}


class FakeMesh(SoloExchange):
    """A device's exchange with other members.

    Args:
        steps: of the states that it is handed one after the other as a newcomer, 0: one that does not arrive; empty: it
            is none.
    """

    engine = "mesh"

    def __init__(self, steps: Sequence[int] = (), must_publish: bool = False) -> None:
        super().__init__()
        self._steps, self._must_publish = steps, must_publish

    @property
    def is_newcomer(self) -> bool:
        return bool(self._steps)

    @property
    def must_publish_state(self) -> bool:
        return self._must_publish

    def fetch_state(self, timeout: float = 0.0, confirm: Confirm | None = None) -> JoiningState:
        assert confirm is not None
        states = (JoiningState({}, {"step": step}) if step else None for step in self._steps)
        return next(state for state in states if confirm(state) and state is not None)


def on_two_devices(work: Callable[[StagedModel, int], Any]) -> list[Any]:
    """Return what the two devices of a member get."""
    models = [StagedModel(carrier, [], 1) for carrier in queue_carriers(2)]

    def of(device: int) -> Any:
        try:
            return work(models[device], device)
        except ExchangeError as error:
            return str(error)

    return side_by_side([lambda: of(0), lambda: of(1)])


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        ([(), ()], None),
        ([(8,), (8,)], 8),
        ([(8,), ()], "the other members train already with some of its devices, and not with all"),
        ([(8, 10), (10, 10)], 10),
        ([(8, 0, 0, 12), (0, 0, 10, 12)], 12),
    ],
)
def test_the_devices_of_a_member_join_together_or_not_at_all(steps: list[tuple[int, ...]], outcome: Any) -> None:
    def fetch(model: StagedModel, device: int) -> int | None:
        joining = model.fetch_state(FakeMesh(steps[device]))
        return joining.state["step"] if joining is not None else None

    assert on_two_devices(fetch) == [outcome, outcome]


@pytest.mark.parametrize("both", [False, True])
def test_a_member_publishes_its_state_and_leaves_when_all_its_devices_can(both: bool) -> None:
    def agree(model: StagedModel, device: int) -> tuple[bool, bool]:
        return model.agree(FakeMesh(must_publish=both or device == 0), is_dropped=both or device == 1)

    assert on_two_devices(agree) == [(both, both)] * 2


def test_a_run_of_one_divided_model_asks_no_device() -> None:
    assert StagedModel(queue_carriers(2)[0], [], 1).agree(SoloExchange(), False) == (False, True)


class Silent:
    """A worker's process, which notes that it is killed."""

    pid, end_reason = 0, ""

    def __init__(self) -> None:
        self.killed = threading.Event()

    def signal(self, number: int) -> None:
        self.killed.set()


def members() -> Membership:
    """Return two members of two devices each, of which the second one's devices have ended, one of them by itself."""
    membership = Membership(staged())
    membership.workers = {rank: WorkerHandle(cast(Any, Silent())) for rank in range(4)}
    assert membership.note_lost(3) and membership.note_gone(3)
    membership.workers[3].exit_code = -signal.SIGKILL
    return membership


def test_what_is_left_of_a_lost_member_ends_before_it_comes_back() -> None:
    membership = members()
    assert membership.is_ending(1)
    membership.end_member_of(3, 0.0)
    assert membership.is_ending(1) and membership.active_ranks == [0, 1]
    with pytest.raises(BadInput, match="worker-1 has not ended yet"):
        membership.check_can_join(1)
    assert cast(Any, membership.workers[2].process).killed.wait(60)
    membership.workers[2].exit_code = ExitCode.RUN_FAILED
    membership.add_workers(1, {rank: cast(Any, Silent()) for rank in (2, 3)})
    assert (membership.lost_members, membership.joining, membership.active_ranks) == ([], {2, 3}, [0, 1])
    with pytest.raises(BadInput, match="worker-1 already takes part"):
        membership.check_can_join(1)
    joined = [membership.note(rank, MemberEvent(member=rank, status="joined")) for rank in (3, 2)]
    assert joined == [False, True] and membership.active_ranks == [0, 1, 2, 3]  # its first device speaks for it


def test_members_of_several_devices_come_back_one_by_one() -> None:
    """Else one column could let a device of the first in, and another column one of the second: both would wait."""
    membership = Membership(staged(workers=6, batch_size=6))
    membership.workers = {rank: WorkerHandle(cast(Any, Silent())) for rank in range(6)}
    for rank in range(2, 6):
        membership.note_lost(rank)
        membership.note_gone(rank)
        membership.workers[rank].exit_code = -signal.SIGKILL
    membership.add_workers(2, {rank: cast(Any, Silent()) for rank in (4, 5)})
    for joined in (5, 4):
        with pytest.raises(BadInput, match="worker-2 is joining"):
            membership.check_can_join(1)
        membership.note(joined, MemberEvent(member=joined, status="joined"))
    membership.add_workers(1, {rank: cast(Any, Silent()) for rank in (2, 3)})
    assert membership.joining == {2, 3}


def test_the_loss_of_a_member_that_comes_back_is_told_once() -> None:
    membership = members()
    membership.workers[2].exit_code = ExitCode.RUN_FAILED
    membership.add_workers(1, {rank: cast(Any, Silent()) for rank in (2, 3)})
    assert [membership.note_lost(2), membership.note_lost(3)] == [True, False]
    assert [membership.note_gone(2), membership.note_gone(3)] == [True, False]


def test_a_member_is_back_with_the_last_of_its_devices_that_were_lost() -> None:
    """Its coordinator calls a device lost whose machine sleeps, and the first device of the member notices nothing."""
    membership = Membership(staged())
    membership.workers = {rank: WorkerHandle(cast(Any, Silent())) for rank in range(4)}
    for rank in range(4):
        membership.note(COORDINATOR, MemberEvent(member=rank, status="joined"))
    losses = [membership.note(COORDINATOR, MemberEvent(member=rank, status="lost")) for rank in (3, 2)]
    returns = [membership.note(rank, MemberEvent(member=rank, status="joined")) for rank in (2, 3)]
    assert (losses, returns) == ([True, False], [False, True])
    assert membership.active_ranks == [0, 1, 2, 3]


def test_a_member_of_several_devices_is_dropped_with_all_of_them() -> None:
    membership = members()
    membership.workers[2].exit_code = ExitCode.RUN_FAILED
    membership.add_workers(1, {rank: cast(Any, Silent()) for rank in (2, 3)})
    joining = [cast(Any, membership.workers[rank].process) for rank in (2, 3)]
    membership.dismiss([1])
    assert all(process.killed.is_set() for process in joining)
    with pytest.raises(BadInput, match="no machine would be left"):
        membership.dismiss([0])
    with pytest.raises(BadInput, match="take back those that were planned, and no others"):
        membership.check_extendable()
