"""The question after Ctrl-C: the run's display goes on while it is open."""

from __future__ import annotations

import io
import os
import pty
import termios
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from rich.console import Console

from app.cli.runs.attach import QUESTION
from app.cli.runs.question import Question
from app.progress import LiveProgress, PlainProgress, ProgressDisplay, ProgressPanel
from app.run_view.run_state import RunState
from tests.waiting import until
from training.records.events import MemberEvent


class Terminal(NamedTuple):
    keyboard: int
    modes: int

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.modes)[3] & termios.ECHO)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    keyboard, other_end = pty.openpty()
    with open(keyboard, "rb"), open(other_end) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield Terminal(keyboard, other_end)


def answered(question: Question) -> str:
    answers: list[str] = []
    until(lambda: bool(answers.extend(filter(None, [question.answer()])) or answers))
    return answers[0]


def test_the_table_is_painted_on_above_the_question_with_what_is_typed(terminal: Terminal) -> None:
    painted = io.StringIO()
    display = LiveProgress("run", RunState(), Console(file=painted, width=100, height=24, force_terminal=True))
    with display, Question("leave? ", display) as question:
        assert question.answer() is None and not terminal.echoes
        terminal.type("x\x7fs")
        until(lambda: question.answer() is None and "leave? s" in painted.getvalue())
        display(MemberEvent(member=0, status="joined", name="larder"))
        until(lambda: "larder" in painted.getvalue())
        terminal.type("\n")
        assert answered(question) == "s"
    assert terminal.echoes and "leave?" not in painted.getvalue().rpartition("larder")[2]


def test_lines_go_on_too(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    display: ProgressDisplay = PlainProgress("run")
    with Question("leave? ", display) as question:
        assert question.answer() is None and terminal.echoes
        terminal.type("k\n")
        assert answered(question) == "k"
    assert capsys.readouterr().err == "leave? \n"


def test_what_is_no_answer_is_asked_again(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    with Question("leave? ", PlainProgress("run"), answers=("", "s")) as question:
        terminal.type("?\nS\n")
        assert answered(question) == "S"
    assert "'?' is no answer. leave? " in capsys.readouterr().err


def test_a_small_terminal_shows_the_question_rather_than_all_machines() -> None:
    state = RunState()
    display = PlainProgress("run", state, lambda line: None)
    for rank in range(30):
        display(MemberEvent(member=rank, status="joined", name=f"pc-{rank}"))
    console = Console(file=io.StringIO(), width=80, height=24)
    with console.capture() as shown:
        console.print(ProgressPanel("run", display.state, 0.0, question=QUESTION))
    lines = shown.get().splitlines()
    assert len(lines) <= 24 and " ".join(lines[-2:]).startswith("[d]etach") and "pc-3" in shown.get()
