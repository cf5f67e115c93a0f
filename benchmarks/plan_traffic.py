"""What ``plan_accuracy.py`` says of every strategy: time of a step and bytes, predicted beside measured."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from plan_cells import Cell

from distributed.planning.documents.document import Candidate

Row = Sequence[float]
"""Of a step: number, seconds of compute, wait and transfer, bytes sent and received, when it ended, and samples."""


@dataclass(frozen=True)
class Traffic:
    """One run beside its prediction.

    Args:
        steps: rows of every member, in the order in which it made them.
        interface: bytes at the interface of a host, and when they were read.
    """

    cell: Cell
    candidate: Candidate
    steps: Sequence[Sequence[Row]]
    interface: Sequence[tuple[float, float]]
    load: float

    @property
    def counted(self) -> list[list[Row]]:
        """Whole rounds after the first; of a run without, all after the warm-up."""
        return [[row for row in rows if row[0] > self.cell.skipped] for rows in self.steps]

    @property
    def span(self) -> tuple[float, float]:
        """When the first counted step began, and when the last one ended."""
        begin = max(row[6] for rows in self.steps for row in rows if row[0] <= self.cell.skipped)
        return begin, max(rows[-1][6] for rows in self.counted)

    @property
    def step(self) -> float:
        """Seconds of the slowest member's step; of members with a pace of their own, what one of the group takes."""
        if self.cell.stretch:
            return (self.span[1] - self.span[0]) / self.cell.stretch
        return max(statistics.fmean(row[1] + row[2] for row in rows) for rows in self.counted)

    @property
    def samples_per_second(self) -> float:
        """Of the group."""
        if self.cell.stretch:
            return sum(row[7] for rows in self.counted for row in rows) / (self.span[1] - self.span[0])
        return sum(statistics.fmean(row[7] for row in rows) for rows in self.counted) / self.step

    @property
    def moved(self) -> float:
        """Bytes that a member sent and received in a step, as it says itself."""
        steps = self.cell.stretch or len(self.counted[0])
        return sum(row[4] + row[5] for rows in self.counted for row in rows) / len(self.steps) / steps

    @property
    def at_interface(self) -> float:
        """Bytes that the interface of a host sent and received in a step, with all headers and everything else."""
        begin, end = self.span
        per_second = (self._read(end) - self._read(begin)) / (end - begin)
        return per_second * self.step

    def _read(self, moment: float) -> float:
        """Return the counter at a moment, between what was read before and after it."""
        at = bisect.bisect([when for when, _ in self.interface], moment)
        (t0, b0), (t1, b1) = (self.interface[min(max(i, 0), len(self.interface) - 1)] for i in (at - 1, at))
        return b0 + (b1 - b0) * min(1.0, max(0.0, (moment - t0) / (t1 - t0))) if t1 > t0 else b1

    @property
    def row(self) -> dict[str, str]:
        predicted = statistics.fmean(one.bytes_per_hour for one in self.candidate.members)
        hourly = 3600e-9 / self.step
        ratio = self.step / self.candidate.step
        waits = [statistics.fmean(row[2] for row in rows) for rows in self.counted]
        return {
            "strategy": self.cell.strategy,
            "hosts": f"{self.cell.hosts}",
            "Mbit/s": f"{self.cell.mbit:g}",
            "step predicted, s": f"{self.candidate.step:.3f}",
            "measured": f"{self.step:.3f}",
            "ratio": f"{ratio:.2f}" + (" *" if abs(ratio - 1) > 0.10 else ""),
            "samples/s": f"{self.samples_per_second:.1f}",
            "waited": f"{min(waits):.3f}",
            "GB a member and hour, predicted": f"{predicted * 1e-9:.3g}",
            "sent and received": f"{self.moved * hourly:.3g}",
            "at the interface": f"{self.at_interface * hourly:.3g}",
            "load": f"{self.load:.0f}",
        }
