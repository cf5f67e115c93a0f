"""What layouts are planned for, and how one is described: members, their stages, time and memory, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from pydantic import Field

from distributed.planning.documents.cluster import Cluster, ClusterMachine, Document, Name
from distributed.planning.documents.document import Reason
from distributed.planning.layouts.stage_devices import StagedJob, budget_of
from distributed.planning.memory.fitting import has_bitsandbytes, memory_saving_profiles
from profiles.schema import Profile
from training.tasks.inputs.model_size import ModelSize

Layout = Literal["replicate", "pipeline", "shard", "tensor"]


class StageForecast(Document):
    """What one device of a member holds, and what it takes there."""

    name: Name
    start: int
    end: int
    """Blocks from ``start`` to ``end``, exclusive."""
    seconds: float
    """Forward and backward of a micro-batch."""
    under_way: int
    """Micro-batches whose activations it holds."""
    memory: int
    """Peak in bytes."""
    memory_usable: int
    """Bytes that training may use; 0: unknown."""


class LayoutCandidate(Document):
    """A layout with its prediction."""

    layout: Layout
    accepted: bool
    reason: Reason
    members: tuple[tuple[StageForecast, ...], ...] = ()
    """The stages of each member; empty without a prediction."""
    options: dict[str, tuple[str, str]] = Field(default_factory=dict)
    """Options that differ from the profile, with their values before and after."""
    micro_batch: int = 0
    micro_batches: int = 0
    """Of each member in a step."""
    extra: int = 0
    """See :func:`training.layouts.orders.micro_batches_under_way`."""
    step: float = 0.0
    """Seconds; 0: not predicted."""
    bubble: float = 0.0
    """Share of a step in which a stage does not compute, over links of no cost."""
    exposed: float = 0.0
    """Seconds of a step that the links add."""
    tied_sum: float = 0.0
    """Seconds of a step for the sum of a tied embedding's gradients over the two stages that hold it."""
    exchange: float = 0.0
    """Seconds of a step for exchanges between members, part of ``step``."""

    @property
    def fits(self) -> bool:
        """Whether every device has the memory for its stage, as far as it is known."""
        stages = (stage for member in self.members for stage in member if stage.memory_usable)
        return all(stage.memory <= stage.memory_usable for stage in stages)

    @property
    def samples_per_second(self) -> float:
        """0: not predicted."""
        return len(self.members) * self.micro_batch * self.micro_batches / self.step if self.step else 0.0


def member_name(machines: Sequence[str], devices: Sequence[str], is_only: bool) -> str:
    """Return the name of a member of several devices: those of its machines, or of its devices where another member may
    have devices of the same machine.

    Args:
        machines: names of the machines of its devices.
        devices: their own names.
        is_only: whether the run has no other member.
    """
    names = machines if is_only or len({*machines}) == len(machines) else devices
    return "+".join(dict.fromkeys(names))


def refusal(layout: Layout, code: str, subject: str = "", other: str = "", **numbers: float) -> LayoutCandidate:
    """Return a layout that is not taken, for a reason."""
    return LayoutCandidate(layout=layout, accepted=False, reason=Reason.of(code, subject, other, **numbers))


@dataclass(frozen=True)
class LayoutJob:
    """What layouts are planned for."""

    profile: Profile
    size: ModelSize
    cluster: Cluster
    interval: int = 1
    """Steps between two exchanges of the members."""
    divides: bool = False
    """Whether the model is divided even if a machine holds it."""
    with_bitsandbytes: Callable[[], bool] = has_bitsandbytes
    """Whether the frozen weights can be held in 8 or 4 bits."""

    def stagings(self, stages: int = 0) -> list[StagedJob]:
        """Return the job as it is, and with options changed to need less memory, in the order in which they are tried.

        Args:
            stages: see :class:`~distributed.planning.layouts.stage_devices.StagedJob`.
        """
        measured = {machine.name: machine.blocks for machine in self.cluster.machines if machine.blocks}
        return [
            StagedJob(profile, self.size, self.profile, measured, self._stage_size, stages)
            for profile in memory_saving_profiles(self.profile, self.with_bitsandbytes)
        ]

    @cached_property
    def _stage_size(self) -> Callable[[int, int], ModelSize]:
        return cache(self.size.stage)

    @property
    def devices(self) -> list[ClusterMachine]:
        """The devices that train and of which it is known how fast, those with the most memory first."""
        training = [m for m in self.cluster.machines if m.trains and (m.speed > 0 or m.blocks)]
        return sorted(training, key=lambda machine: (-budget_of(machine).usable, machine.name))
