"""The stages of a machine's start until its worker reports for itself, as events: no bar stands full in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distributed.machine.link import MachineLink
from training.records.events import Event, ProgressEvent


@dataclass(frozen=True)
class MachineStages:
    """Reports the stages of one machine's start, each when it begins."""

    link: MachineLink
    ranks: Sequence[int]
    """Of its members; empty where it has none yet: the stages are the run's then."""
    readers: Sequence[Callable[[Event], object]]
    """Receive the events."""

    def connecting(self) -> None:
        """Report that the machine is being connected with."""
        self._begin("connecting to")

    def reading_files(self) -> None:
        """Report that the files for it are read on this computer."""
        self._begin("reading the files for")

    def sent(self, done: int, total: int) -> None:
        """Report bytes sent; after the last one the machine still unpacks and checks what is on its way."""
        local = self.link.machine.is_local
        phase = "bytes copied on this computer" if local else f"bytes to {self.link.name}"
        if total:
            self._note(phase, done, total)
        if done >= total:
            self._begin("checking the files on")

    def loading_program(self) -> None:
        """Report that Python starts there and imports; its worker reports what follows."""
        self._begin("loading the program on")

    def _begin(self, stage: str) -> None:
        self._note(f"{stage} {'this computer' if self.link.machine.is_local else self.link.name}", 0, None)

    def _note(self, phase: str, done: int, total: int | None) -> None:
        for rank in self.ranks or (None,):
            event = ProgressEvent(member=rank, phase=phase, done=done, total=total)
            for read in self.readers:
                read(event)
