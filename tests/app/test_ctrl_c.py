"""Ctrl+c while a person is asked: none is lost, whenever it comes."""

from __future__ import annotations

import re
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.console import answered_yes, ctrl_c_heard
from tests.waiting import PATIENCE
from tests.wizard.own_terminal import OwnTerminal

ROOT = Path(__file__).parents[2]
READING = """import signal, sys, threading
sys.path.insert(0, sys.argv[1])
from app.console import answered_yes, ctrl_c_heard
from app.wizard.plain.prompts import BareLines
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the thread has it: it does not interrupt what reads here
try:
    with ctrl_c_heard():
        {asks}
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize("asks", ["answered_yes('Well?')", "BareLines().line('Well?')", "BareLines().secret('Well?')"])
def test_one_that_does_not_interrupt_the_reading_is_heard(asks: str, tmp_path: Path) -> None:
    with OwnTerminal(["-c", READING.format(asks=asks), str(ROOT)], tmp_path) as terminal:
        terminal.wait_for("Well?")
        terminal.interrupt()
        assert terminal.exit_code() == 130


ASKED_BY_A_THREAD = """import signal
import sys
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, sys.argv[1])
import typer
from app.cli.main import run_app
from app.console import answered_yes

def asked() -> None:
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(answered_yes, "Well?")
        if len(sys.argv) > 2:  # as where a signal comes just before the main thread waits: only the other one feels it
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        print("waiting", flush=True)
        answer.result()

def made() -> typer.Typer:
    app = typer.Typer()
    app.command()(asked)
    return app

sys.exit(run_app(made, [], "asking"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("unfelt", [[], ["unfelt"]], ids=["felt", "unfelt"])
def test_a_question_of_another_thread_ends_with_it_at_once(unfelt: list[str], tmp_path: Path) -> None:
    with OwnTerminal(["-c", ASKED_BY_A_THREAD, str(ROOT), *unfelt], tmp_path) as terminal:
        terminal.wait_until(re.compile(r"Well\?[\s\S]*waiting|waiting[\s\S]*Well\?"))
        terminal.interrupt()
        assert terminal.exit_code() == 130
    assert terminal.screen.rstrip().endswith("error: stopped") and "Traceback" not in terminal.screen


class Thing:
    """One that can be looked at weakly."""


def swallow_one(then_wait: float) -> None:
    """Press ctrl+c where Python can raise nothing."""
    thing = Thing()
    gone = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    with ctrl_c_heard():
        del thing
        assert gone() is None
        threading.Event().wait(then_wait)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [PATIENCE, 0.0])
def test_one_that_is_swallowed_is_raised_again(waits: float) -> None:
    with pytest.raises(KeyboardInterrupt):
        swallow_one(waits)


def test_it_is_as_before_afterwards() -> None:
    numbers = (signal.SIGINT, signal.SIGURG)
    before = [signal.getsignal(number) for number in numbers]
    with ctrl_c_heard():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


def test_other_threads_may_ask_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As those that meet a machine for the first time do, while a run is prepared."""
    typed = tmp_path / "typed"
    typed.write_text("y\n")
    with typed.open() as stdin, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr("sys.stdin", stdin)
        assert pool.submit(answered_yes, "Do the two match?").result(PATIENCE)
