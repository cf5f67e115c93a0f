"""The data of a report, read once from the run folder. What is missing is ``None``, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.run_view.member_state import MemberTotals
from app.run_view.view import RunView, read_view
from training.records.plan import RunMetadata
from training.records.runs import RunSummary, size_of, summarise


@dataclass(frozen=True, kw_only=True)
class Evidence(RunView):
    """The data of one run."""

    metadata: RunMetadata
    summary: RunSummary
    model_bytes: int

    @property
    def work(self) -> Mapping[int, MemberTotals]:
        """Totals over all starts of every member that took a step."""
        done = {rank: member.total for rank, member in self.state.members.items()}
        return {rank: work for rank, work in done.items() if work.steps}


def read_evidence(path: Path) -> Evidence:
    """Read a run folder.

    Raises:
        BadInput: there is no run, or its metadata is damaged.
    """
    view = read_view(path)
    size = size_of(view.model) if view.model else 0
    return Evidence(**vars(view), summary=summarise(path), model_bytes=size)
