"""A hub and its members in one process, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE
from training.events import MemberEvent, WarningEvent
from training.exchange.certificates import issue_run_certificates
from training.exchange.hub import Hub
from training.exchange.member import HubMember
from training.exchange.seat import HubConfig

RUN = "test-run"


class Lab:
    """A running hub; members are connected by rank and closed at the end."""

    def __init__(self, folder: Path, size: int, tls: bool = False, **config: Any) -> None:
        self.size = size
        self.events: list[MemberEvent | WarningEvent] = []
        self.members: dict[int, HubMember] = {}
        self.certificates: Path | None = folder / "certificates" if tls else None
        if self.certificates is not None:
            issue_run_certificates(self.certificates, RUN, range(size), ["127.0.0.1", "::1"])
        names = tuple(f"machine-{rank}" for rank in range(size))
        own = self.certificates and self.certificates / "hub"
        document = {"run_id": RUN, "names": names, "elements": 3_000_000, "certificates": own, **config}
        self.hub = Hub(HubConfig(**document), self.events.append)
        host = str(config.get("address", "127.0.0.1"))
        self.address = f"[{host}]:{self.hub.start()}" if ":" in host else f"{host}:{self.hub.start()}"

    def connect(self, rank: int, timeout: float = PATIENCE) -> HubMember:
        own = self.certificates and self.certificates / f"member-{rank}"
        member = HubMember.connect(self.address, own, RUN, rank, self.size, f"machine-{rank}", timeout)
        self.members[rank] = member
        return member

    def connect_all(self) -> list[HubMember]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(self.connect, range(self.size)))

    def statuses(self, rank: int) -> list[str]:
        """States of a member as the hub logged them."""
        return [e.status for e in self.events if isinstance(e, MemberEvent) and e.member == rank]

    def missing(self) -> list[str]:
        """Whom the hub still waits for before it starts."""
        return self.hub._group._missing()

    def warnings(self) -> list[str]:
        return [e.message for e in self.events if isinstance(e, WarningEvent)]

    def close(self) -> None:
        for member in self.members.values():
            member.close()
        self.hub.stop()


@contextmanager
def lab(folder: Path, size: int, tls: bool = False, **config: Any) -> Iterator[Lab]:
    running = Lab(folder, size, tls, **config)
    try:
        yield running
    finally:
        running.close()


def cut(member: HubMember) -> None:
    """Break a member's connections without a good-bye."""
    for channel in member._channels:
        channel.close()
