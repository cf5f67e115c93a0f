"""The code with which another machine joins, and who asks to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Static

from app.console import visible
from app.screens.access import AcceptDialog
from app.shell.dialogs import Box
from app.shell.folding import Prose
from app.shell.text import literal, muted
from profiles.errors import MusterError
from profiles.quantities import duration_text

if TYPE_CHECKING:  # SSH and more, which only who shares needs
    from distributed.joining.share_client import Applicant, SharedOffer, ShareEvent

_TICK = 1.0


class ShareDialog(Box[str]):
    """Shares a code while it is open; its result is the name of the machine that has joined.

    Args:
        share: opens a code; the door may take seconds to start.
    """

    DEFAULT_CSS = """
    ShareDialog #code { height: auto; margin: 1 0; width: 100%; text-align: center; }
    ShareDialog #content { height: auto; max-height: 60vh; }
    """

    def __init__(self, share: Callable[[], SharedOffer]) -> None:
        super().__init__("A machine joins with this code")
        self._share = share
        self._offer: SharedOffer | None = None
        self._is_closed = False
        self._status = muted("Opening a code.")
        self._question: AcceptDialog | None = None

    def body(self) -> ComposeResult:
        yield Static(id="code", markup=False)
        yield Prose(Content(""), id="content")

    def on_mount(self) -> None:
        self.set_interval(_TICK, self._draw)
        self._draw()
        threading.Thread(target=self._follow, name="share", daemon=True).start()

    def on_unmount(self) -> None:
        self._is_closed = True
        if self._offer is not None:
            threading.Thread(target=self._offer.close, daemon=True).start()

    # ------------------------------------------------------------------------------------------------ in its own thread

    def _follow(self) -> None:
        try:
            offer = self._share()
        except MusterError as error:
            problem = literal(f"{error.message} ({error.hint})", "$text-error")
            self._tell(lambda: self._say(problem))
            return
        self._offer = offer
        if self._is_closed:  # before there was one to close
            offer.close()
            return
        self._tell(lambda: self._say(muted("Waiting for the other machine.")))
        for event in offer.events():
            self._tell(partial(self._take, event))

    def _tell(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the application has ended
            if not self._is_closed:
                self.app.call_from_thread(call)

    # ----------------------------------------------------------------------------------------------- in the application

    def _take(self, event: ShareEvent) -> None:
        from distributed.joining.share_client import Applicant, Joined, WrongTry

        if isinstance(event, Applicant):
            self._ask(event)
        elif isinstance(event, Joined):
            self._end_question()
            self.dismiss(event.name)
        elif isinstance(event, WrongTry):
            self._say(literal(f"A wrong code came from {visible(event.address)}.", "$text-warning"))
        else:
            self._end_question()
            self._offer = None
            self._say(literal(f"No machine has joined: {visible(event.reason)}. c shares again.", "$text-warning"))

    def _ask(self, applicant: Applicant) -> None:
        from distributed.joining.share_client import TRUST, described, lent_line

        name = applicant.introduction.name
        about = literal(f"{described(applicant.introduction)} at {applicant.address}", "bold")
        lines = (about, Content(""), *map(muted, (visible(lent_line(applicant.introduction)), *TRUST)))
        self._question = AcceptDialog(f"Does {name} join this computer?", "Admit it", *lines)
        self.app.push_screen(self._question, lambda admitted: self._answer(name, bool(admitted)))

    def _answer(self, name: str, is_admitted: bool) -> None:
        self._question = None
        if self._offer is not None:
            self._offer.answer(is_admitted)
        if is_admitted:
            self._say(muted(f"Waiting until the person at {name} agrees, too."))

    def _end_question(self) -> None:
        if self._question is not None:
            self._question.dismiss(None)

    def _say(self, status: Content) -> None:
        self._status = status
        self._draw()

    def _draw(self) -> None:
        offer = self._offer
        code = _banner(offer.code) if offer is not None else Content("")
        self.query_one("#code", Static).update(code)
        self.query_one("#content", Prose).update(Content("\n").join([*self._how(offer), self._status]))

    def _how(self, offer: SharedOffer | None) -> list[Content]:
        if offer is None:
            return []
        from distributed.joining.share_client import door_addresses

        at = " or ".join(door_addresses(offer)[:2]) or "ADDRESS"
        left = f"{duration_text(offer.seconds_left())} and {offer.tries_left} tries left"
        return [
            muted("Type on the other machine:"),
            literal(f"muster machines join {offer.code}", "bold"),
            muted("If it does not find this computer, add:"),
            literal(f"--at {at}", "bold"),
            Content(""),
            muted(f"{left}. Tell it only to whom you want to join."),
        ]


def _banner(code: str) -> Content:
    """Return a code as it can be read from where the other machine stands."""
    line = f"    {code}    "
    return Content("\n").join(Content.styled(text, "bold reverse") for text in (" " * len(line), line, " " * len(line)))
