"""Commands about runs on several machines, where no machine is needed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli.machines import check
from app.cli.machines.access import chosen, trust
from app.cli.main import main
from distributed.cleaning.clean import Inventory, InventoryPath
from distributed.hosts.schema import Machine
from distributed.ssh.access import AccessReport
from distributed.ssh.connection import SshTarget, Trust
from distributed.ssh.errors import Stage
from distributed.ssh.keys.host_keys import HostKeyInfo
from tests.report.report_runs import write_run
from training.records.run_folder import RunFolder

Capture = pytest.CaptureFixture[str]
KEY = HostKeyInfo("studio", "studio.local", "ssh-ed25519", b"key")


@pytest.fixture
def run() -> RunFolder:
    folder = RunFolder.open(write_run(Path("output"), [], status="cancelled"))
    folder.log_path("studio").write_text("first\n\x1b[31msecond\n")
    return folder


def test_logs_name_their_machine_and_show_control_characters(run: RunFolder, capsys: Capture) -> None:
    assert main(["logs", "p"]) == 0
    assert capsys.readouterr().out.splitlines() == ["studio: first", "studio: \\x1b[31msecond"]


def test_while_a_machine_is_cleaned_what_is_left_is_counted(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing gigabytes takes minutes."""
    case, removal = check.CleaningCase(Machine(name="studio")), Future[None]()
    case.inventory = Inventory(parts=(InventoryPath("a", 3_000_000_000, "cache"),))
    sizes = iter((2_000_000_000, 1_000_000_000))

    def size_left(case: check.CleaningCase, blob: str) -> int:
        if (size := next(sizes)) == 1_000_000_000:
            removal.set_result(None)
        return size

    monkeypatch.setattr(check.CleaningCase, "size_left", size_left)
    check.tell_removal({removal: case}, "", interval=0.001)
    first, *counted = capsys.readouterr().err.splitlines()
    assert first == "studio: removing 3.0 GB, then looking for what is left ..."
    assert [line.partition(" after ")[0] for line in counted] == ["studio: 2.0 GB left", "studio: 1.0 GB left"]


def test_attach_to_an_ended_run_tells_how_it_ended(run: RunFolder, capsys: Capture) -> None:
    assert main(["attach", "p"]) == 130
    assert not capsys.readouterr().err.isascii()  # the title
    assert main(["attach", "p", "--ascii"]) == 130
    assert capsys.readouterr().err.isascii()


def test_a_run_that_nobody_works_on_is_not_stopped(run: RunFolder, capsys: Capture) -> None:
    assert main(["stop", "p"]) == 2
    assert "no process is running" in capsys.readouterr().err


def test_a_plan_needs_machines(capsys: Capture) -> None:
    assert main(["distributed-train", "nanogpt", "--plan", "plan.json"]) == 2
    assert "--hosts" in capsys.readouterr().err


def test_a_name_is_the_machine_that_the_usual_hosts_file_lists() -> None:
    entries = [{"name": "studio", "address": "10.0.0.5", "port": 2222, "user": "ada"}, {"name": "air"}]
    Path("distributed_hosts.json").write_text(json.dumps({"machines": entries}))
    machines = chosen(["Studio", "bob@10.0.0.9"], None, as_json=False).machines
    assert [machine.login for machine in machines] == ["ada@10.0.0.5:2222", "bob@10.0.0.9"]
    assert [machine.login for machine in chosen(["desk"], None, as_json=False).machines] == ["desk"]


@pytest.mark.parametrize(
    "command", [["distributed-check"], ["distributed-check", "demo"], ["distributed-train", "demo"]]
)
def test_a_missing_hosts_file_is_named(command: list[str], capsys: Capture) -> None:
    assert main([*command, "--hosts", "none.json"]) == 2
    assert "none.json: no such hosts file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["launch", __file__], ["distributed-train", "demo"], ["plan", "demo"], ["measure", "demo"], ["distributed-check"],
     ["access"]],
)  # fmt: skip
def test_every_command_takes_machines_with_commas(command: list[str], capsys: Capture) -> None:
    assert main([command[0], "--hosts", "a,ada@b:99999", *command[1:]]) == 2
    assert "error: --hosts: machine 2 ('b'): 'port' must be" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "taken"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False)])
def test_a_person_judges_a_new_key(monkeypatch: pytest.MonkeyPatch, answer: str, taken: bool) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", shown)
    ask = trust(new=False)
    assert ask is not None and ask(KEY) is taken
    assert KEY.fingerprint in shown.getvalue() and KEY.compare_command in shown.getvalue()


def test_a_key_that_was_accepted_is_not_asked_for_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, address = Terminal(), replace(KEY, machine="198.18.2.13", name="198.18.2.13")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))  # one answer
    monkeypatch.setattr(sys, "stderr", shown)
    ask = trust(new=False)
    assert ask is not None and ask(KEY) and ask(address)
    asked = shown.getvalue()
    other = trust(new=False)
    assert other is not None and other(replace(address, known_as=("studio.local", "pi")))
    assert shown.getvalue() == f"{asked}198.18.2.13: the same machine as studio.local, pi, by its host key\n"


@pytest.mark.parametrize("accepted", [True, False])
def test_access_asks_once_for_a_machine_of_two_names(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, accepted: bool
) -> None:
    questions: list[str] = []

    def check_all(targets: Sequence[SshTarget], *, trust: Trust) -> dict[str, AccessReport]:
        keys = [replace(KEY, machine=target.name, name=target.name) for target in targets]
        unknown = {k.machine: None if trust(k) else k for k in keys}
        return {
            name: AccessReport(name, failed=Stage.HOST_KEY if key else None, unknown_key=key)
            for name, key in unknown.items()
        }

    def agreed(question: str) -> bool:
        questions.append(question)
        return accepted

    monkeypatch.setattr("app.cli.machines.access.check_all", check_all)
    monkeypatch.setattr("app.cli.machines.access.somebody", lambda as_json: True)
    monkeypatch.setattr("app.cli.machines.access.answered_yes", agreed)
    main(["access", "studio", "198.18.2.13"])
    assert len(questions) == 1
    assert ("train demo --hosts localhost,studio,198.18.2.13" in capsys.readouterr().out) == accepted


def test_without_a_person_nobody_vouches() -> None:
    assert trust(new=False) is None
    accept = trust(new=True)
    assert accept is not None and accept(KEY)


def test_a_check_for_an_unknown_profile_names_the_nearest(capsys: Capture) -> None:
    assert main(["distributed-check", "nanogtp"], "cli_typer.py") == 2
    assert "nanogpt" in capsys.readouterr().err
