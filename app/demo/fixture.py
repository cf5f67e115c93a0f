"""The recording of the tour: its machines, the links between them, and the data of its job."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from app.demo import RECORD
from distributed.checks.findings import Health
from distributed.measuring.link_figures import PairFigures
from distributed.planning.documents.cluster import ClusterMachine
from distributed.planning.documents.document import Workload

HERE = "demo-macbook"
"""Name of the machine that stands for this computer."""


class _RecordModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Trouble(_RecordModel):
    """What prevents a machine of the tour from training."""

    error: str
    """Cause of the :class:`distributed.ssh.errors.SshError` that connecting raises."""
    problem: str = ""
    hint: str = ""
    seconds: float = 0.0
    """Seconds after which the trouble ends by itself; 0: it does not."""
    lacks: tuple[str, ...] = ()
    """Packages that are missing until they are installed."""


class TourMachine(_RecordModel):
    """One machine of the tour."""

    name: str
    chip: str
    """Common name of the processor or graphics card."""
    system: str
    uname: str
    memory: int
    address: str
    interface: str
    kind: Literal["wired", "wifi"]
    found_by: str
    trouble: Trouble | None
    facts: dict[str, Any]
    """Answer to the first probe of a check."""
    health: Health
    speed: ClusterMachine
    """Its measured speed for the job."""

    @property
    def key_blob(self) -> bytes:
        """Public part of its host key."""
        return f"the host key of {self.name}".encode()


class Fixture(_RecordModel):
    """The whole recording."""

    machines: tuple[TourMachine, ...]
    pairs: tuple[PairFigures, ...]
    workload: Workload
    data: dict[str, Any]
    """The job's data as :mod:`training.workers.data_findings` describes it."""
    input_bytes: int

    def pair(self, name: str, peer: str) -> PairFigures:
        """Return the figures of the link between two machines, in either direction."""
        return next(pair for pair in self.pairs if {pair.source, pair.target} == {name, peer})


@lru_cache
def fixture() -> Fixture:
    return Fixture.model_validate_json((RECORD / "machines.json").read_bytes())
