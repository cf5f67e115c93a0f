"""A command line that is none, but whose meaning is plain, is answered with the one to type."""

from __future__ import annotations

import shlex

import pytest

from app.cli.main import main
from profiles.installation import TOP, TYPED_PROGRAM


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("demo", "python3 cli_typer.py train demo"),
        ("demo --hosts a,b", "python3 cli_typer.py train demo --hosts a,b"),
        ("run demo", "python3 cli_typer.py train demo"),
        ("resume abc", "python3 cli_typer.py train --resume abc"),
        ("--dataset clips", "python3 cli_typer.py train PROFILE --dataset clips"),
        ("train demo --hosts a b", "python3 cli_typer.py train demo --hosts a,b"),
        ("train demo --plain --hosts a,b", "python3 cli_typer.py train demo --hosts a,b"),
        ("train demo --machines a,b", "python3 cli_typer.py train demo --hosts a,b"),
        ("machines check --host a --nodes=b", "python3 cli_typer.py machines check --hosts a,b"),
        ("machines check --machines a b demo --fix", "python3 cli_typer.py machines check --hosts a,b demo --fix"),
        ("machines check garage", "python3 cli_typer.py machines check --hosts garage"),
        ("train.py --lr 3", "python3 cli_typer.py launch -- train.py --lr 3"),
        ("check --fix", "python3 cli_typer.py machines check --fix"),
        ("list", "python3 cli_typer.py runs list"),
        ("system-check", "python3 cli_typer.py doctor --self-test"),
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
    assert capsys.readouterr().err.splitlines()[-1].removeprefix("hint: ").endswith(f"type: {meant}")


def test_what_means_nothing_gets_the_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TOP)
    assert main(["gibberish"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "hint: python3 cli_typer.py --help lists the commands"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("gibberish", ".venv/bin/muster --help lists the commands"),
        ("runs ask", ".venv/bin/muster runs ask --help lists the options"),
        ("runs list --host a", ".venv/bin/muster runs list --help lists the options"),
        ("wizard --bad", ".venv/bin/muster wizard --help lists the options"),
        ("tour --demo many", ".venv/bin/muster tour --help lists the options"),
        ("trian", "Did you mean 'train', 'runs track'?"),
        ("launch away.py", "for example: .venv/bin/muster launch -- train.py --its args"),
    ],
)
def test_a_hint_calls_the_program_as_it_was_called(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TYPED_PROGRAM, ".venv/bin/muster")
    assert main(shlex.split(typed), "muster") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"hint: {hint}"


def test_the_first_help_leads_to_the_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--help-all" in capsys.readouterr().out
    assert main(["--help-all"]) == 0
    assert "profiles  List, show and check profiles." in capsys.readouterr().out


def test_hosts_alone_open_the_installed_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hosts", "missing.json"], "muster") == 2
    assert capsys.readouterr().err.startswith("error: missing.json: no such hosts file")
