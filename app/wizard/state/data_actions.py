"""Actions on the data set of the job."""

from __future__ import annotations

from typing import NamedTuple

from app.wizard.state.dependencies import action, inputs
from app.wizard.state.records import UNSETTLED
from app.wizard.state.state import TaskKind
from app.wizard.state.state import WizardState as State
from profiles.errors import counted

LEAVE_OUT = "mend it, or press l: that makes a data set of what can be read beside it, and names what is left out"
"""What to do about a salvageable data set."""

STILL_READ = "the data set is still being read"


class Selection(NamedTuple):
    """A data set made of the recordings that can be read."""

    folder: str
    used: int
    left_out: tuple[str, ...]
    """Reasons, each with the number of recordings and an example; all stand in ``left_out.csv`` of the folder."""

    def __str__(self) -> str:
        taken = f"{self.folder} is taken, with {counted(self.used, 'recording')}"
        return f"{taken}. Left out: {'; '.join(self.left_out)}" if self.left_out else taken


@action
def leave_out(state: State) -> State:
    """Make a data set of the recordings that can be read, and take it for the job."""
    if state.data.status in UNSETTLED:
        return state.noting(STILL_READ)
    if not state.data.value.salvageable:
        return state.noting("no recording has to be left out")
    if state.is_under_way(TaskKind.SELECTING):
        return state
    return state.ordering(TaskKind.SELECTING, inputs=inputs(state, TaskKind.DATA))


def with_selection(state: State, selection: Selection) -> State:
    """Return the state with that data set as the one of the job."""
    others = [pair for pair in state.answers.options if pair[0] not in ("dataset", "dataset_path", "text_column")]
    if any(row.name == "text_column" and row.default for row in state.job.value.options):
        others.append(("text_column", ""))  # that of the profile is not in the new table
    return state.answering(options=(*others, ("dataset", selection.folder))).noting(str(selection))
