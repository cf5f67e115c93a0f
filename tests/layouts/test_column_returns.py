"""A member of two devices joins others that train: each device has a column and a coordinator of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.exchange.coordinated_lab import Lab, cut
from tests.layouts.pipeline_runs import queue_carriers
from tests.waiting import PATIENCE, until
from training.exchange.base import JoiningState
from training.exchange.coordinator_protocol import StateOrder
from training.exchange.links.dialling import Address
from training.exchange.links.link import Outgoing
from training.exchange.links.listener import Listener
from training.exchange.mean.handover import channel_of
from training.exchange.mean.mesh_member import MeshMember
from training.layouts.carrier import Carrier
from training.layouts.columns import ColumnExchange
from training.layouts.staged import StagedModel

pytestmark = pytest.mark.slow


class Device(StagedModel):
    """What a device holds; it notes what it has sent to the others of its member."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier, [], 1)
        self.sent: list[bytes] = []

    def gather(self, payload: bytes) -> list[bytes]:
        self.sent.append(payload)
        return super().gather(payload)


class Columns:
    """Three members of two devices each, of which the last one is lost and comes back."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.labs = [Lab(folder / f"column-{number}", 3) for number in range(2)]
        self.members = [[*column] for column in zip(*(lab.connect_all() for lab in self.labs), strict=True)]
        self.devices = [Device(carrier) for carrier in queue_carriers(2)]
        for device in self.members[2]:
            cut(device)
        until(lambda: all("lost" in lab.statuses(2) for lab in self.labs))
        self.members[2] = [lab.connect(2) for lab in self.labs]
        self.coming = [
            pool.submit(device.fetch_state, ColumnExchange(mesh, range(3)))
            for device, mesh in zip(self.devices, self.members[2], strict=True)
        ]

    def train_on(self, member: int) -> None:
        """Let the devices of a member hand their parts of the state over after each step in which all of them can."""
        step = itertools.count(5)

        def have_joined() -> bool:
            number, devices = next(step), self.members[member]
            if all(device.must_publish_state for device in devices):
                for part, device in enumerate(devices):
                    self.publish_part(device, part, number)
            return all(device.done() for device in self.coming)

        until(have_joined)

    def publish_part(self, device: MeshMember, part: int, step: int) -> None:
        device.publish_state(JoiningState({"part": torch.tensor(part)}, {"step": step}))

    def states(self) -> list[JoiningState]:
        return [state for device in self.coming if (state := device.result(0)) is not None]

    def close(self) -> None:
        for device in self.members[2]:
            device.give_up("the test is over")
        for lab in self.labs:
            lab.close()


@pytest.fixture
def columns(tmp_path: Path) -> Iterator[Columns]:
    with ThreadPoolExecutor(2) as pool:
        running = Columns(tmp_path, pool)
        try:
            yield running
        finally:
            running.close()


def hang_up(order: StateOrder, rank: int, data: bytes, relay: Address | None, listener: Listener) -> None:
    """Connect with a newcomer as its donor, and send nothing."""
    by = time.monotonic() + PATIENCE
    connection = listener.meet(channel_of(order), rank, True, order.peers[rank].addresses, by, relay)
    link = Outgoing(connection, rank, {rank: order.peers[rank].name}, lambda lost: None)
    link.cut()
    link.close(0.0)


@pytest.mark.parametrize("dies", [True, False])
def test_the_devices_get_another_state_where_only_one_of_them_has_got_its_part(
    columns: Columns, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device of a donor has handed its part over; then the donor dies, or the other one's connection breaks."""
    first, second = columns.members[0]
    until(lambda: first.must_publish_state and second.must_publish_state)
    columns.publish_part(first, 0, 4)
    until(lambda: columns.devices[0].sent[1:] == [b"4"])
    if dies:
        cut(second)
        cut(first)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(second._state_server, "_send", partial(hang_up, listener=second._listener))
            columns.publish_part(second, 1, 4)
            until(lambda: columns.devices[1].sent[1:])
    columns.train_on(int(dies))
    states = columns.states()
    assert [int(state.tensors["part"]) for state in states] == [0, 1]
    assert len({state.state["step"] for state in states} | {4}) == 2
    for column in range(2):
        present = columns.members[int(dies) :]
        pending = [devices[column].start_gather("x", b"") for devices in present]
        assert {len(answer.wait(PATIENCE)) for answer in pending} == {len(present)}
