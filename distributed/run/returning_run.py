"""A run of several members: one that was lost comes back by itself.

A machine that slept, or was out of reach, for longer than its lease has ended its worker. When it can be reached, a
worker is started there again, gets the state from another member, and trains on with the others from a synchronisation.
A worker that ended by itself or was killed stays out: somebody may have ended it, and it might fail likewise.

A member of several devices comes back whatever the reason: a device that is lost takes it along, as the others of it
cannot go on without its part. The other members go on, and when all machines of the lost one can be reached, workers
are started on them again. A member of which a device has said why it fails stays out.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from profiles.errors import BadInput, MusterError, counted
from profiles.installation import way_to_add
from training.records.events import WarningEvent
from training.records.plan import MemberPlan
from training.run.processes import UNREACHED
from training.run.run_controller import RunController

_LOOKS_EVERY = 10.0
"""Seconds between two looks for lost members."""
_MOST_ATTEMPTS = 3
"""Returns that end before the member has made a step, after which it stays out."""


class ReturningRun(RunController):
    """Such a run.

    Args:
        take_back: lets a lost member join again; raises MusterError where it cannot now, BadInput where it need not.
        is_back: whether one of these machines can be reached.
    """

    def __init__(
        self,
        *arguments: Any,
        take_back: Callable[[MemberPlan], None],
        is_back: Callable[[Sequence[str]], bool],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._take_back, self._is_back, self._is_over = take_back, is_back, threading.Event()
        self._attempts, self._lines = Counter[int](), set[str]()
        self.returns_after = ("",) if self.plan.is_staged else (UNREACHED,)

    def _begin(self, *arguments: Any, **options: Any) -> None:
        super()._begin(*arguments, **options)
        threading.Thread(target=self._watch, name="lost members", daemon=True).start()

    def kill(self) -> None:
        self._is_over.set()
        super().kill()

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOKS_EVERY):
            self.look()

    def look(self) -> None:
        """Let lost members join again that can."""
        for rank in self.members.lost_members:
            self._look_for(self.members.plan.all_members[rank])

    def _look_for(self, member: MemberPlan) -> None:
        ranks = self.members.plan.processes_of(member.rank)
        workers = [worker for rank in ranks if (worker := self.members.workers.get(rank))]
        if not self.plan.is_staged and not any(w.process.end_reason.startswith(UNREACHED) for w in workers):
            return
        if any(worker.step for worker in workers):
            self._attempts[member.rank] = 0
        failure = next((worker.failure for worker in workers if worker.failure), "")
        if self._attempts[member.rank] == _MOST_ATTEMPTS:
            failure = f"it was lost again before it had made a step, {counted(_MOST_ATTEMPTS, 'time')}"
        if failure:
            command = way_to_add(self.folder.path, member.name)
            return self._warn(member, f"{member.name} stays out until it is added: {failure}; to add it: {command}")
        if away := [name for name in member.machines if not self._is_back([name])]:
            return self._warn(member, f"{member.name} comes back when {', '.join(away)} can be reached")
        try:
            self._take_back(member)
        except BadInput:  # the run ends, or somebody has added it
            return
        except (MusterError, OSError) as error:
            return self._warn(member, f"{member.name} cannot come back yet: {error}")
        self._attempts[member.rank] += 1

    def _warn(self, member: MemberPlan, line: str) -> None:
        """Say something once, until the member has trained again."""
        if line not in self._lines:
            self._lines.add(line)
            with contextlib.suppress(MusterError):  # the folder is closed: the run is over
                self.folder.append(WarningEvent(member=member.rank, message=line))
