"""Files of others run nothing here before a person has named them, or was asked."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
from pathlib import Path
from queue import Queue

import pytest

from app.cli import approval
from app.cli.approval import read_hosts
from app.cli.main import main
from app.cli.train.request import TrainRequest
from app.cli.train.start import plan_of, resumable
from app.dashboard.dialogs.commands import Proof
from distributed.hosts.file import load_hosts, without_unapproved_pythons
from distributed.hosts.schema import Hosts
from distributed.preparation.custom_code import code_of
from distributed.ssh import config
from profiles.errors import BadInput, ExitCode, MachinesNotReady
from profiles.files.resolve import profile_from_options
from tests.waiting import until
from training.records.run_folder import RunFolder
from training.run.processes import environment

Answers = list[str]


@pytest.fixture(autouse=True)
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of somebody else's, with approvals of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    begin_anew(monkeypatch)


def begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be as a new process, which has used no configuration yet."""
    monkeypatch.setattr(config, "_accepted", set())


def person(monkeypatch: pytest.MonkeyPatch, *answers: bool) -> None:
    """Let somebody sit at the terminal who answers so, and is asked no more often."""
    given = iter(answers)
    monkeypatch.setattr(approval, "answered_yes", lambda question: next(given))


# ------------------------------------------------------------------------------------------------- hosts files


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A hosts file whose SSH configuration leaves a trace when it is read by ``ssh``."""
    (tmp_path / "trap").write_text(f'Match exec "touch {tmp_path}/ran"\nHost *\n  HostName 127.0.0.1\n  Port 1\n')
    file = tmp_path / "distributed_hosts.json"
    file.write_text(json.dumps({"machines": ["box"], "ssh_config": str(tmp_path / "trap")}))
    return file


def ran(tmp_path: Path) -> bool:
    found = (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("command", [["distributed-check"], ["access"], ["clean"], ["plan", "nanogpt"]])
def test_a_hosts_file_that_only_lies_here_runs_nothing(
    command: list[str], hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == ExitCode.BAD_INPUT
    assert not ran(tmp_path)
    said = capsys.readouterr().err
    assert "can run commands" in said and f"access --hosts {hosts.name}" in said


def test_an_interpreter_of_others_is_not_run(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    file = tmp_path / "distributed_hosts.json"
    file.write_text(json.dumps({"machines": [{"name": "me", "address": "localhost", "python": str(program)}]}))
    assert main(["distributed-check"]) == ExitCode.BAD_INPUT
    assert not ran(tmp_path)
    assert without_unapproved_pythons(load_hosts(file)).machines[0].python == ""
    assert main(["distributed-check", "--hosts", str(file)]) == ExitCode.NOT_READY
    assert ran(tmp_path)
    assert without_unapproved_pythons(load_hosts(file)).machines[0].python == str(program)


def test_the_dashboard_of_a_run_of_others_starts_no_interpreter_of_theirs(tmp_path: Path) -> None:
    machine = {"name": "me", "address": "localhost", "python": str(tmp_path / "python")}
    (tmp_path / "hosts.json").write_text(json.dumps({"machines": [machine]}))
    asked: Queue[Hosts] = Queue()

    def leftovers(hosts: Hosts, *_: object) -> dict[str, list[str]]:
        asked.put(hosts)
        return {}

    Proof(tmp_path, "run", leftovers)
    assert [one.python for one in asked.get(timeout=60).machines] == [""]


def test_the_name_of_a_machine_that_cannot_be_asked_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps({"machines": [{"name": "c", "address": "192.0.2.1"}]}))
    proof = Proof(tmp_path, "run", lambda *_: {"c": MachinesNotReady("c: no route to 192.0.2.1:22")})
    proof.ended.set()
    until(lambda: proof.answers is not None)
    assert proof.answers == {"c": "no route to 192.0.2.1:22"}


@pytest.mark.slow
@pytest.mark.parametrize("named", [[], ["--hosts", "distributed_hosts.json"]])
def test_discover_never_reads_the_configuration_of_a_hosts_file(
    named: list[str], hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.accept(str(tmp_path / "trap"))

    def causes() -> list[str]:
        assert main(["discover", "--json", "--timeout", "1", *named]) == ExitCode.DONE
        found = json.loads(capsys.readouterr().out)["machines"]
        return [one["problem"]["cause"] for one in found if one["name"] == "box" and one["problem"]]

    assert until(causes) == ["config_not_read"]
    assert not ran(tmp_path)


def test_stop_of_a_run_of_others_runs_nothing(hosts: Path, tmp_path: Path) -> None:
    plan = plan_of(TrainRequest("nanogpt"))
    with RunFolder.create(tmp_path / "output", plan, []) as folder:
        hosts.rename(folder.path / "hosts.json")
    assert main(["stop", plan.run_id]) == ExitCode.BAD_INPUT
    assert not ran(tmp_path)


def test_a_hosts_file_that_is_named_is_used_and_remembered(
    hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["access", "--hosts", str(hosts)]) == ExitCode.NOT_READY
    assert ran(tmp_path)
    begin_anew(monkeypatch)
    assert main(["distributed-check"]) == ExitCode.NOT_READY
    assert ran(tmp_path)


def test_the_person_is_asked_once_and_again_after_a_change(
    hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    person(monkeypatch, True)
    read_hosts(hosts, named=False, person=True)
    assert f"touch {tmp_path}/ran" in capsys.readouterr().err
    begin_anew(monkeypatch)
    read_hosts(hosts, named=False, person=True)
    begin_anew(monkeypatch)
    (tmp_path / "trap").write_text("ProxyCommand other\n")
    person(monkeypatch, False)
    with pytest.raises(BadInput, match="can run commands .* has changed since it was approved"):
        read_hosts(hosts, named=False, person=True)


def test_who_names_a_machine_has_not_approved_the_file_that_lists_it(hosts: Path) -> None:
    with pytest.raises(BadInput, match="distributed_hosts.json can run commands"):
        read_hosts(Path("box"), named=True, person=False)
    assert read_hosts(Path("ada@box"), named=True, person=False).ssh_config == ""


def test_a_change_of_an_included_file_asks_again(hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap").write_text(f"Include {tmp_path}/more*\n")
    read_hosts(hosts, named=True, person=False)
    begin_anew(monkeypatch)
    (tmp_path / "more.conf").write_text("Match exec evil\n")
    assert config.commands_in(str(tmp_path / "trap")) == [f"Match exec evil ({tmp_path}/more.conf)"]
    with pytest.raises(BadInput):
        read_hosts(hosts, named=False, person=False)


@pytest.mark.parametrize("line", [
    "ProxyCommand evil", "proxycommand=evil", 'Match host x Exec "evil"', "KnownHostsCommand evil",
    "  LocalCommand evil", "PKCS11Provider /evil.so", "match !exec evil",
])  # fmt: skip
def test_every_way_to_run_a_command_is_shown(line: str, tmp_path: Path) -> None:
    (tmp_path / "trap").write_text(f"Host *\n{line}\nProxyCommand none\n")
    (shown,) = config.commands_in(str(tmp_path / "trap"))
    assert "evil" in shown


def test_the_own_configuration_needs_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.accepted("~/.ssh/config") and config.accepted("")


# -------------------------------------------------------------------------------------------------- custom code

JOB = "from pathlib import Path\nPath('ran').touch()\ndef build():\n    raise SystemExit\n"


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a profile in a file of somebody else's."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "config.ini").write_text("[profile:mine]\ntask = custom\nmodel_path = ./job.py:build\n")
    monkeypatch.setattr("profiles.files.library.CONFIG", tmp_path / "config.ini")
    return "mine"


@pytest.mark.parametrize(
    "command", [["plan"], ["measure"], ["distributed-train"], ["distributed-train", "--plan-only", "--no-input"]]
)
def test_a_profile_of_others_runs_no_code(
    command: list[str], profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, profile]) == ExitCode.BAD_INPUT
    assert not ran(tmp_path) and not (tmp_path / "output").exists()
    said = capsys.readouterr().err
    assert "is not approved here" in said
    assert str(tmp_path / "job.py") in said and "--trust-code" in said and "config.ini" in said


def test_no_input_asks_nobody(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    person(monkeypatch)
    with pytest.raises(BadInput):
        plan_of(TrainRequest(profile, no_input=True))


@pytest.mark.parametrize("request_", [
    TrainRequest("mine", trust_code=True),
    TrainRequest("mine", {"model_path": "job.py:build"}),
    TrainRequest(overrides={"task": "custom", "model_path": "job.py:build"}),
])  # fmt: skip
def test_code_that_is_named_or_trusted_runs_and_is_remembered(profile: str, request_: TrainRequest) -> None:
    assert plan_of(request_).profile.model.task == "custom"
    assert plan_of(TrainRequest(profile, no_input=True)).profile.name == "mine"


def test_the_person_is_asked_once_for_code_and_again_after_a_change_beside_it(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "helper.py").write_text("")
    monkeypatch.setattr("app.cli.train.request.somebody", lambda as_json=False: True)
    person(monkeypatch, True)
    plan_of(TrainRequest(profile))
    assert str(tmp_path / "job.py") in capsys.readouterr().err
    plan_of(TrainRequest(profile))
    (tmp_path / "helper.py").write_text("evil = 1\n")
    person(monkeypatch, False)
    with pytest.raises(BadInput, match="has changed since it was approved"):
        plan_of(TrainRequest(profile))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "strategy"), [("optimizer", "allreduce"), ("strategy", ""), ("diloco.outer_optimizer", "diloco")]
)
def test_an_optimizer_or_a_strategy_of_others_needs_approval_too(
    profile: str, tmp_path: Path, option: str, strategy: str
) -> None:
    (tmp_path / "theirs.py").write_text(JOB)
    options = f"task = custom\nmodel_path = examples.custom.spirals:build\n{option} = theirs.py:build\n"
    chosen = f"strategy = {strategy}\n" if strategy else ""
    (tmp_path / "config.ini").write_text(f"[profile:theirs]\n{options}{chosen}")
    with pytest.raises(BadInput, match="is not approved here.*theirs.py"):
        plan_of(TrainRequest("theirs", no_input=True))
    assert not ran(tmp_path)
    for trusted in (TrainRequest("theirs", trust_code=True), TrainRequest("theirs", no_input=True)):
        assert plan_of(trusted).profile.user_code[option] == f"{tmp_path}/theirs.py:build"


@pytest.mark.parametrize("suffix", [".so", ".pyc", importlib.machinery.EXTENSION_SUFFIXES[0]])
def test_a_module_that_is_no_text_counts_too(suffix: str, profile: str, tmp_path: Path) -> None:
    plan_of(TrainRequest(profile, trust_code=True))
    (tmp_path / f"helper{suffix}").write_bytes(b"evil")
    with pytest.raises(BadInput, match="has changed since it was approved"):
        plan_of(TrainRequest(profile))


def test_a_run_of_others_is_not_resumed(profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(TrainRequest(profile, trust_code=True))
    monkeypatch.setattr("app.cli.train.start.plan_to_resume", lambda path, lengths: plan)
    with RunFolder.create(tmp_path / "output", plan, []):
        pass
    (tmp_path / "job.py").write_text(f"{JOB}evil = 1\n")
    with pytest.raises(BadInput, match="has changed since it was approved") as refused:
        resumable(TrainRequest(resume=plan.run_id))
    assert refused.value.hint.endswith(f" train --resume {plan.run_id} --trust-code")
    assert resumable(TrainRequest(resume=plan.run_id, trust_code=True))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_a_module_that_lies_here_hides_none_of_a_worker(tmp_path: Path) -> None:
    (tmp_path / "shutil.py").write_text(JOB)
    subprocess.run([sys.executable, "-m", "training.records.run_files"], env=environment(1), cwd=tmp_path, check=True)
    assert not ran(tmp_path)


def code(model_path: str) -> object:
    return code_of(profile_from_options("p", {"task": "custom", "model_path": model_path}))


@pytest.mark.slow
def test_the_examples_need_no_question_and_what_hides_them_does(tmp_path: Path) -> None:
    for name in (f"{Path(__file__).parents[2]}/examples/custom/spirals.py:build", "examples.custom.spirals:build"):
        own = code(name)
        assert own is not None and own.approved
    (tmp_path / "examples" / "custom").mkdir(parents=True)
    for folder in ("examples", "examples/custom"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "examples" / "custom" / "spirals.py").write_text(JOB)
    other = code("examples.custom.spirals:build")
    assert other is not None and not other.approved
    assert not ran(tmp_path)


def test_a_job_that_a_package_of_muster_hides_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "app.py").write_text("")
    (tmp_path / "job.py").write_text("import app\n")
    job = ["--task", "custom", "--model-path", "job.py:build", "--local", "2", "--no-input"]
    assert main(["distributed-train", *job]) == ExitCode.BAD_INPUT
    assert f"model_path: {tmp_path / 'app.py'} has the name of a package of Muster" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()
