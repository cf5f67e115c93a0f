"""A coordinator and its members in one process, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tests.waiting import PATIENCE, until
from training.exchange.base import MeanResult
from training.exchange.codecs import codec_by_name
from training.exchange.coordinator_protocol import Report
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.coordinator_state import CoordinatorConfig
from training.exchange.group.group_membership import GroupMembership
from training.exchange.group.join_config import JoinConfig
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.mean.mesh_member import MeshMember
from training.exchange.stock_torch.torch_mean import TorchMember
from training.exchange.unauthenticated import HANDSHAKE_SECONDS
from training.records.events import MemberEvent, WarningEvent, WaysEvent

RUN = "test-run"


class Lab:
    """A running coordinator; members are connected by rank and closed at the end."""

    def __init__(
        self,
        folder: Path,
        size: int,
        tls: bool = False,
        elements: int = 1,
        engine: str = "mesh",
        handshake: float = HANDSHAKE_SECONDS,
        decides: type[GroupMembership] = GroupMembership,
        **config: Any,
    ) -> None:
        self.size = size
        self.engine = engine
        self.elements = elements
        self.events: list[MemberEvent | WarningEvent | WaysEvent] = []
        self.members: dict[int, MeshMember] = {}
        self._silent: dict[int, threading.Event] = {}
        self.certificates: Path | None = folder / "certificates" if tls else None
        if self.certificates is not None:
            issue_run_certificates(self.certificates, RUN, range(size + 2), ["127.0.0.1", "::1"])
        self.told: list[tuple[int, str]] = []
        """What members of engine ``nccl`` say of what carries the exchange."""
        names = tuple(f"machine-{rank}" for rank in range(size))
        own = self.certificates and self.certificates / "coordinator"
        self.config = CoordinatorConfig(**{"run_id": RUN, "names": names, "certificates": own, **config})
        self.coordinator = Coordinator(self.config, self.events.append, handshake, decides)
        host = self.config.address
        self.port = self.coordinator.start()
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def connect(self, rank: int, timeout: float = PATIENCE, **named: Any) -> MeshMember:
        own = self.certificates and self.certificates / f"member-{rank}"
        joining = JoinConfig(self.address, own, RUN, rank, self.size, f"machine-{rank}", **named)
        if self.engine == "mesh":
            member = MeshMember(joining)
        else:
            member = TorchMember(joining, torch.device("cpu"), lambda line: self.told.append((rank, line)))
        if self.elements >= 0:
            member.expect_model(self.elements)  # with its first words: how long it may take is another matter
        member.join(timeout)
        self.members[rank] = member
        return member

    def connect_all(self, **named: Any) -> list[MeshMember]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: self.connect(rank, **named), range(self.size)))

    def statuses(self, rank: int) -> list[str]:
        """States of a member as the coordinator logged them."""
        return [e.status for e in self.events if isinstance(e, MemberEvent) and e.member == rank]

    def warnings(self) -> list[str]:
        return [e.message for e in self.events if isinstance(e, WarningEvent)]

    def silence(self, rank: int) -> None:
        """Have a member say nothing more until it is closed, once all know what it has done: or they wait to leave."""
        member, closes = self.members[rank], threading.Event()
        until(lambda: member._status.settled >= member._log.full)
        report, self._silent[rank] = member._client._report, closes
        member._client._report = lambda: (closes.wait(PATIENCE), report())[1]

    def hang_up(self, rank: int) -> None:
        """Break a member's connection with the coordinator."""
        group = self.coordinator.group
        self.coordinator._loop.call_soon_threadsafe(lambda: group.members[rank].close())

    def close(self) -> None:
        for rank, member in self.members.items():
            if rank in self._silent:
                self._silent[rank].set()
            member.close()
        self.coordinator.stop()


@contextmanager
def lab(folder: Path, size: int, tls: bool = False, **config: Any) -> Iterator[Lab]:
    running = Lab(folder, size, tls, **config)
    try:
        yield running
    finally:
        running.close()


def cut(member: MeshMember) -> None:
    """Break a member's connections without a good-bye."""
    line = member._client

    def nothing() -> Report:
        raise asyncio.CancelledError  # who is about to report says nothing more, and holds up nobody

    line._report = nothing
    member._closed = True
    with suppress(RuntimeError):  # its thread has ended
        line._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(line._loop)])
    if (mesh := member.mesh) is not None:
        mesh.end()
    member._listener.close()


def means(
    members: list[MeshMember], name: str, vectors: list[torch.Tensor], codec_name: str, weight: float | None = None
) -> list[MeanResult]:
    """The mean of vectors with the weights 1, 2 ..., or equal ones."""
    codec = codec_by_name(codec_name)
    pending = [m.start_mean(name, v, weight or m.rank + 1.0, codec) for m, v in zip(members, vectors)]
    return [p.wait(PATIENCE) for p in pending]
