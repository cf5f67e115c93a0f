"""Stopping a run: asked, ended, and for every machine the proof that nothing of the run is left."""

from __future__ import annotations

from collections.abc import Callable

from textual.content import Content
from textual.widgets import Static

from app.console import command_about
from app.dashboard.commands import Proof
from app.dashboard.pane import LEVELS
from app.dashboard.picture import Picture
from app.shell.dialogs import Dialog
from app.shell.frame import muster
from app.shell.symbols import Mark
from app.shell.text import literal
from app.verdict import verdict

_EVERY = 0.25


class StopDialog(Dialog):
    """Shows how a stop goes on; closing it changes nothing."""

    def __init__(self, proof: Proof, picture: Callable[[], Picture]) -> None:
        super().__init__("Stopping")
        self._proof, self._picture = proof, picture

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_EVERY, self._draw)

    def _draw(self) -> None:
        self.query_one("#content Static", Static).update(self.content())

    def content(self) -> Content:
        picture, plain = self._picture(), muster(self).ascii_only
        ended = not picture.live and picture.read
        if ended:
            self._proof.run_ended()
        kept = "" if picture.state.status == "completed" else f"; {picture.state.kept}"
        lines = [Mark.DONE.show("the run was asked to stop", ascii_only=plain)]
        if not ended:
            doing = "the current step is finished, then a snapshot is written"
            return Content("\n").join([*lines, Mark.WORKING.show(doing, ascii_only=plain)])
        mark = LEVELS[verdict(picture.state, picture.now, live=False).level]
        lines.append(mark.show(f"the run has ended ({picture.state.status}){kept}", ascii_only=plain))
        return Content("\n").join([*lines, *self._proofs(plain), *_next(picture)])

    def _proofs(self, plain: bool) -> list[Content]:
        if not self._proof.needed:
            return [Mark.DONE.show("its run folder is free", ascii_only=plain)]
        if self._proof.answers is None:
            return [Mark.WORKING.show("asking every machine what is left", ascii_only=plain)]
        lines = []
        for name, left in self._proof.answers.items():
            mark = Mark.PROBLEM if left else Mark.DONE
            lines.append(Content.assemble(mark.show("", ascii_only=plain), " ", literal(name, "bold"), ": ",
                                          literal(left or "nothing is left")))  # fmt: skip
        return lines


def _next(picture: Picture) -> list[Content]:
    if picture.plan is None or picture.state.status == "completed":
        return []
    command = command_about(picture.path, "distributed-train", "--resume")
    return [Content(""), literal("resume it later:", "$text-muted"), literal(command, "bold")]
