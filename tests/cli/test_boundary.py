"""What a command that is interrupted says."""

from __future__ import annotations

import json

import pytest
import typer

from app.cli.main import run_app
from profiles.errors import ExitCode


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()

    @made.command()
    def interrupted(as_json: bool = typer.Option(False, "--json")) -> ExitCode:
        raise KeyboardInterrupt

    @made.command()
    def told() -> ExitCode:
        return ExitCode.STOPPED

    return made


def test_ctrl_c_is_one_document_with_json(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(lambda: app, ["interrupted", "--json"], "x") == 130
    assert json.loads(capsys.readouterr().out) == {"error": {"message": "stopped", "hint": ""}, "exit_code": 130}


def test_ctrl_c_is_one_line_and_not_told_twice(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(lambda: app, ["interrupted"], "x") == 130
    assert capsys.readouterr().err == "error: stopped\n"
    assert run_app(lambda: app, ["told"], "x") == 130
    assert capsys.readouterr().err == ""
