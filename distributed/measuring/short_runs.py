"""Short runs on several machines at once: each starts as soon as its machine has the code, and imports while data and
model are sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from distributed.machine.link import MachineLink, Tell
from distributed.measuring.machine_figures import (
    MeasuringProgress,
    Placement,
    SpeedFigures,
    StartBarrier,
    bring,
    measure_member,
)
from distributed.preparation.code_sync import Inputs
from distributed.preparation.model_blocks import BlockInputs
from profiles.errors import MusterError


class ShortRuns:
    """Short runs of one measurement.

    Args:
        blocks: of the inputs that each machine is sent; closed once all are sent.
        barrier: holds the short runs back until it is opened, or ends them.
    """

    def __init__(
        self, placements: Sequence[Placement], inputs: Inputs, blocks: BlockInputs, barrier: StartBarrier, tell: Tell
    ) -> None:
        self.figures: dict[str, SpeedFigures] = {}
        """By the name of a member that could be measured."""
        self._placements, self._inputs, self._blocks = placements, inputs, blocks
        self._barrier, self._tell = barrier, tell
        self._unsent: dict[MachineLink, MusterError] = {}
        self._failed = defaultdict[MachineLink, list[MusterError]](list)
        self._started: list[Future[None]] = []

    @property
    def problems(self) -> list[MusterError]:
        """Errors of the machines that were not measured: those of sending them their files, else of the runs there."""
        links = dict.fromkeys(placement.link for placement in self._placements)
        errors = ([self._unsent[link]] if link in self._unsent else self._failed[link] for link in links)
        return [error for of_link in errors for error in of_link]

    def carry_out(self) -> None:
        """Send all machines their files, and return once all of them are measured or have failed."""
        links, most = list(dict.fromkeys(placement.link for placement in self._placements)), len(self._placements)
        with ThreadPoolExecutor(max(1, most)) as running:
            try:
                with ThreadPoolExecutor(max(1, len(links))) as sending:
                    list(sending.map(partial(self._send, running), links))
            except BaseException:
                self._barrier.give_up()  # else those that have started would wait for ever
                raise
            finally:
                self._blocks.close()
            self._barrier.brought.set()
        for run in self._started:
            run.result()

    def _send(self, running: ThreadPoolExecutor, link: MachineLink) -> None:
        here = [placement for placement in self._placements if placement.link is link]
        barrier = self._barrier
        try:
            inputs = self._blocks.of(link, self._inputs)

            def start() -> None:
                self._started += [running.submit(self._measure, placement, inputs) for placement in here]

            bring(link, inputs, self._tell, barrier.given_up.is_set, has_code=start)
        except MusterError as error:
            if not barrier.given_up.is_set():  # else it was ended, which is no problem
                self._unsent[link] = error
            barrier.exclude(link)

    def _measure(self, placement: Placement, inputs: Inputs) -> None:
        try:
            self.figures[placement.member.name] = measure_member(placement, inputs, self._barrier, self._tell)
            self._tell(MeasuringProgress(placement.member.name, "measured"))
        except MusterError as error:
            if not self._barrier.given_up.is_set():
                self._failed[placement.link].append(error)
