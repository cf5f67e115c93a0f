"""A machine that says what a test has it say."""

from __future__ import annotations

from distributed.machine.link import HereConnection
from distributed.ssh.process import Completed


class Says(HereConnection):
    """This machine with one answer to everything."""

    def __init__(self, answer: bytes) -> None:
        super().__init__("box")
        self._answer = answer

    def run(self, *_: object, **__: object) -> Completed:
        return Completed(0, self._answer, b"")

    def put(self, *_: object, **__: object) -> None:
        pass
