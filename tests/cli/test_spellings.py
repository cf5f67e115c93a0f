"""A command line that is none, but whose meaning is plain, is answered with the one to type."""

from __future__ import annotations

import shlex

import pytest

from app.cli.main import main
from profiles.installation import TOP


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("demo", "python3 cli_typer.py distributed-train demo"),
        ("demo --hosts a,b", "python3 cli_typer.py distributed-train demo --hosts a,b"),
        ("run demo", "python3 cli_typer.py distributed-train demo"),
        ("resume abc", "python3 cli_typer.py distributed-train --resume abc"),
        ("--dataset clips", "python3 cli_typer.py distributed-train PROFILE --dataset clips"),
        ("train demo --hosts a b", "python3 cli_typer.py train demo --hosts a,b"),
        ("train demo --plain --hosts a,b", "python3 cli_typer.py train demo --hosts a,b"),
        ("train demo --machines a,b", "python3 cli_typer.py train demo --hosts a,b"),
        ("train.py --lr 3", "python3 cli_typer.py launch -- train.py --lr 3"),
        ("check --fix", "python3 cli_typer.py machines check --fix"),
        ("list", "python3 cli_typer.py runs list"),
        ("kill abc", "python3 cli_typer.py runs stop abc"),
        ("--hosts a,b", "python3 wizard.py --hosts a,b"),
        ("ada@studio,mini", "python3 wizard.py --hosts ada@studio,mini"),
        ("wizard demo", "python3 wizard.py --profile demo"),
        ("wizard a,b", "python3 wizard.py --hosts a,b"),
    ],
)
def test_a_plain_meaning_is_answered_with_its_command(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TOP)
    assert main(shlex.split(typed)) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"hint: type: {meant}"


def test_what_means_nothing_gets_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gibberish"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "hint: cli_typer.py --help lists the commands"


def test_hosts_alone_open_the_installed_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts", "missing.json"], "muster") == 2
    assert capsys.readouterr().err.startswith("error: missing.json: no such hosts file")
