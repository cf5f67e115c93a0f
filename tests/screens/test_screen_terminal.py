"""The set-up in a real pseudo-terminal: colours, ASCII, the first paint, how it is left."""

from __future__ import annotations

import pytest

from tests.screens.terminal import ESCAPE, Terminal

SET_UP = """
import sys
from app.screens.app import run_wizard
from tests.wizard.fake_services import FakeServices
sys.exit(run_wizard(FakeServices(), "", "--ascii" in sys.argv))
"""


def set_up(*arguments: str, **environment: str) -> Terminal:
    return Terminal("-c", SET_UP, *arguments, environment=environment)


def visit(terminal: Terminal) -> None:
    """Home, machines, help, and out."""
    terminal.until("New set-up")
    terminal.press("n")
    terminal.until("Which machines shall train?")
    terminal.press("?")
    terminal.until("Go on to the next step.")
    terminal.press("\x1b")
    terminal.until("anna")
    terminal.press("\x03")
    assert terminal.end() == 130


def test_colours_and_no_color() -> None:
    with set_up() as coloured:
        visit(coloured)
    assert coloured.colours
    with set_up(NO_COLOR="1") as plain:
        visit(plain)
    assert plain.colours == []


def test_ascii_means_every_byte() -> None:
    with set_up("--ascii") as terminal:
        visit(terminal)
    assert ESCAPE.sub(b"", terminal.written).isascii()


@pytest.mark.parametrize(("keys", "code"), [("q", 0), ("\x1b", 0), ("\x03", 130)])
def test_it_is_left(keys: str, code: int) -> None:
    with set_up() as terminal:
        terminal.until("New set-up")
        terminal.press(keys)
        assert terminal.end() == code
