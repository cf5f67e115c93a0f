"""The set-up in a real pseudo-terminal: colours, ASCII, the first paint, how it is left."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.lab.host import REPOSITORY
from tests.screens.terminal import ESCAPE, Terminal
from tests.waiting import until

pytestmark = pytest.mark.slow

SET_UP = str(Path(__file__).with_name("set_up_process.py"))


def set_up(*arguments: str, **environment: str) -> Terminal:
    return Terminal(sys.executable, SET_UP, *arguments, environment=environment)


def visit(terminal: Terminal) -> None:
    """Home, machines, help, and out."""
    terminal.until("New set-up")
    terminal.press("n")
    terminal.until("Which machines take part?")
    terminal.press("?")
    terminal.until("Continue to the next step.")
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


def test_home_is_painted_with_little_work() -> None:
    """Of ``wizard.py`` itself; in processor time, against a Python that loads Textual: both are slow where other
    programs run. It takes three times as much; with torch it would be ten."""

    def work() -> float:
        with Terminal(sys.executable, "wizard.py") as terminal:
            terminal.until("New set-up")
            used = psutil.Process(terminal.process.pid).cpu_times()
            terminal.press("\x03")
            assert terminal.end() == 130
        return float(used.user + used.system)

    def loading() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "import textual.app, textual.widgets, textual.screen"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    until(lambda: work() < 5 * loading())


def test_without_a_terminal_it_is_plain_text() -> None:
    done = subprocess.run(
        [sys.executable, "wizard.py"], stdin=subprocess.DEVNULL, capture_output=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 2
    assert b"train PROFILE" in done.stderr and b"\x1b" not in done.stdout + done.stderr


def test_into_a_pipe_it_is_plain_text() -> None:
    piped = f"import subprocess; print(subprocess.run([{sys.executable!r}, 'wizard.py'], stdout=-1).returncode)"
    with Terminal(sys.executable, "-c", piped) as terminal:
        assert terminal.end() == 0
    assert b"\x1b" not in terminal.written and terminal.words.rstrip().endswith("2")


def test_a_fault_ends_in_two_lines_and_shows_no_variables(tmp_path: Path) -> None:
    """A picture of all variables might hold a secret."""
    folder = {name: str(tmp_path) for name in ("XDG_STATE_HOME", "HOME")}
    with set_up("--fault", **folder) as terminal:
        terminal.until("New set-up")
        terminal.press("n")
        assert terminal.end() == 1
    assert "error: unexpected: ZeroDivisionError: division by zero" in terminal.words
    assert "hint: please report this" in terminal.words and "locals" not in terminal.words
