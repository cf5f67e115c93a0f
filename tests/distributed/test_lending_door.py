"""A computer that is lent over a real connection: what its pool may do there, and what it is told of it."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed.agent import files
from distributed.agent.requests import BuildEnvironment, ListMissing, PutFiles
from distributed.agent.run_folders import write_keys
from distributed.checks.lending import lending_problem
from distributed.hosts.joined import NotConnected, call_joined, door_status, joined_machines, on_terms, save_joined
from distributed.hosts.schema import Hosts, Machine
from distributed.joining import door as door_module
from distributed.joining.helper import PoolConnection, serve_pools
from distributed.joining.lending.commands import box_folder
from distributed.joining.lending.terms import LendingTerms
from distributed.joining.pairing.keys import JoiningKey
from distributed.joining.pools import JoinedPool, helper_identity, joined_pools, save_pool
from distributed.machine.link import MachineLink, link_to
from distributed.preparation.code_sync import CODE_FOLDERS, collect, folder_tree, muster_code
from distributed.preparation.members import plan_run
from distributed.preparation.preflight import check
from distributed.preparation.transfer import ask_missing, send_trees
from distributed.ssh.connection import SshConnection, SshTarget
from distributed.ssh.errors import SshError
from distributed.ssh.process import command_line, command_words
from distributed.workers.agent_records import assigned
from distributed.workers.remote_worker import RemoteWorker
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from tests.distributed.joining import RunningDoor, needs_box
from tests.preloaded.python import python_itself
from tests.waiting import until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TARGET = SshTarget("studio", "studio.joined")


@pytest.fixture(autouse=True)
def _real_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python_itself())


@contextlib.contextmanager
def lent(door: RunningDoor, **terms: Any) -> Iterator[PoolConnection]:
    """Lend this computer to itself."""
    identity = helper_identity()
    save_joined(door_module.JoinedMachine("studio", identity.public, user="ada"))
    key = JoiningKey(door_module.pool_key()).public
    pool = JoinedPool("vm", key, (door.address,), "studio", LendingTerms(**terms))
    connection = PoolConnection(pool, identity, lambda line: None)
    try:
        until(lambda: "studio" in door_status())
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def linked() -> Iterator[MachineLink]:
    machine = Machine(name="studio", address="studio.joined")
    link = link_to(machine, Hosts(machines=(machine,)))
    try:
        yield link
    finally:
        link.close()


@pytest.mark.slow
@needs_box
def test_a_machine_lent_for_tasks_answers_requests_and_runs_no_command(door: RunningDoor) -> None:
    with lent(door, lend="tasks"), linked() as link:
        assert link.lend == "tasks"
        report = link.probe(["torch", "no_such_package"])
        assert report["missing"] == ["no_such_package"] and report["root"] == "/home/lent/.cache/muster"
        own = muster_code().name
        assert link.ask(ListMissing([own, "b" * 64], []))["trees"] == ["b" * 64]
        connection = link.connection()
        for words in (["sh", "-c", "id"], ["python3", "-c", "print(1)"], ["true"]):
            done = connection.run(words)
            assert (done.returncode, done.stdout) == (126, b""), words
            assert "lent for tasks alone" in done.problem
        with pytest.raises(SshError, match="lent for tasks alone"):
            connection.put(b"x", "~/.bashrc")
        with pytest.raises(SshError, match="builds programs"):
            link.ask(BuildEnvironment("x", [], "", "", "", ""))


@pytest.mark.slow
@needs_box
def test_data_arrive_and_code_does_not(door: RunningDoor, tmp_path: Path) -> None:
    with lent(door, lend="tasks") as connection, linked() as link:
        folder = tmp_path / "data"
        folder.mkdir()
        (folder / "train.csv").write_text("1,2\n")
        sent = folder_tree(folder)
        send_trees(link, [sent])
        there = box_folder(connection.pool.identity) / "home" / ".cache" / "muster" / "trees" / sent.name / "train.csv"
        assert there.read_text() == "1,2\n"
        (folder / "train.py").write_text("print(1)\n")
        with pytest.raises(SshError, match="'train.py' may be code"):
            send_trees(link, [folder_tree(folder)])


@pytest.mark.slow
@needs_box
def test_a_friends_program_sees_its_own_folder(door: RunningDoor) -> None:
    with lent(door, lend="friend"), SshConnection.connect(TARGET) as connection:
        assert connection.run(["sh", "-c", "pwd; ls -A"]).stdout == b"/home/lent\n"
        assert not connection.run(["ls", str(Path.home())]).ok or Path.home() == Path("/root")
        connection.put(b"x", "~/note")
        assert connection.run(["cat", "note"]).stdout == b"x"
        forward = connection.forward_remote(("127.0.0.1", door.port))
        script = f"import socket; socket.create_connection(('127.0.0.1', {forward.port}), timeout=20)"
        assert connection.run(["python3", "-c", script]).ok
        script = f"import socket; socket.create_connection(('127.0.0.1', {door.port}), timeout=20)"
        assert "refused" in connection.run(["python3", "-c", script]).problem  # it is this computer's, not the box's


def test_a_box_that_has_gone_since_is_noticed_before_anything_runs(
    door: RunningDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    save_pool(JoinedPool("vm", helper_identity().public, (door.address,), "studio", LendingTerms("tasks")))
    lines: list[str] = []
    with pytest.raises(BadInput, match="nothing that this computer has joined may run here"):
        serve_pools(lambda seconds: False, lines.append)
    assert "vm runs nothing here: bubblewrap is not installed" in lines[0]


def test_a_computer_that_rests_says_why_and_comes_back(door: RunningDoor) -> None:
    with lent(door) as connection:
        connection.rest("its owner is there")
        until(lambda: door_status()["studio"]["rests"] == "its owner is there")
        with pytest.raises(NotConnected, match="studio rests: its owner is there"):
            call_joined("studio", 1.0)
        connection.rest("")
        until(lambda: door_status()["studio"]["rests"] == "")
        SshConnection.connect(TARGET).close()


def test_a_rest_ends_what_runs_there(door: RunningDoor) -> None:
    with lent(door) as connection, SshConnection.connect(TARGET) as ssh:
        process = ssh.stream(["sleep", "1000"])
        until(lambda: connection.commands.box.processes())
        connection.rest("it runs on battery")
        until(lambda: not connection.commands.box.processes())
        until(lambda: not ssh.alive())
        process.close()


def test_other_terms_are_told_when_it_dials(door: RunningDoor) -> None:
    with lent(door, lend="own"):
        assert [machine.lend for machine in joined_machines()] == ["own"]
    with lent(door, lend="own", hours=(1320, 420)):
        until(lambda: [machine.limits for machine in joined_machines()] == ["from 22:00 to 07:00"])


def test_a_machine_that_says_what_no_machine_says_keeps_its_class(door: RunningDoor) -> None:
    machine = door_module.JoinedMachine("studio", helper_identity().public, lend="tasks")
    save_joined(machine)
    assert on_terms(machine, {"lend": "everything"}) == machine
    assert on_terms(machine, {"lend": ["own"]}) == machine
    said = on_terms(machine, {"lend": "friend", "limits": "a\x1b[2J\nb" + "x" * 1000})
    assert (said.lend, len(said.limits) <= 120, said.limits.isprintable()) == ("friend", True, True)


def test_terms_are_kept_and_those_of_before_are_all(joining_config: Path) -> None:
    pool = JoinedPool("vm", helper_identity().public, ("10.0.0.1:7799",), "studio", LendingTerms("tasks", True, (1, 2)))
    save_pool(pool)
    assert joined_pools() == [pool]
    save_pool(replace(pool, terms=LendingTerms()))
    assert joined_pools()[0].terms == LendingTerms()


def test_a_long_command_is_known_by_its_marker() -> None:
    line, first = command_line(["sh", "-c", "x" * 9000], "muster0a")
    assert first and command_words(line.encode()) == ("muster0a", [])


@pytest.mark.parametrize("words", [["true"], ["sh", "-c", "echo 'a b' \"$HOME\" \\"], ["muster-request", "ä", ""]])
def test_a_short_command_is_read_as_it_was_sent(words: list[str]) -> None:
    line, first = command_line(words, "muster0a")
    assert (command_words(line.encode()), first) == (("muster0a", words), b"")


@pytest.mark.parametrize("line", [b"id", b"sh -c 'id'", b"sh -c 'unset PYTHONHOME; echo x; id' sh 'y'", b""])
def test_other_commands_are_none(line: bytes) -> None:
    assert command_words(line) is None


@pytest.mark.parametrize("name", ["../x", "/etc/x", "secrets/../../x", "inputs/code/x.py", "plan.json"])
def test_a_running_member_is_given_keys_and_nothing_else(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no key|leaves its folder"):
        write_keys(tmp_path, {name: base64.b64encode(b"x").decode()})
    assert not list(tmp_path.rglob("x*"))


@pytest.mark.slow
@needs_box
def test_a_member_trains_a_built_in_task_in_the_box(door: RunningDoor, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    model = str(EXAMPLES / "nanogpt" / "model")
    paths = {"task": "causal_lm", "model_path": model, "from_scratch": True, "dataset_path": str(text)}
    few = {"block_size": 16, "batch_size": 2, "max_steps": 2, "device": "cpu", "threads": 1, "eval_interval": 0}
    with lent(door, lend="tasks", memory=8 << 30), linked() as link:
        (machine,) = check(Hosts(machines=(link.machine,)), "causal_lm")
        assert machine.problem is None and machine.facts is not None, machine.problem
        assert machine.facts.memory == 8 << 30
        inputs = collect(plan_run(profile_from_options("p", {**paths, **few}), [(machine.link, machine.facts)]))
        assert lending_problem(inputs, ask_missing(link, [tree.name for tree in inputs.trees.values()], []).trees) == ""
        sent = {folder: tree for folder, tree in inputs.trees.items() if folder not in CODE_FOLDERS}
        send_trees(link, inputs.trees.values())
        assert set(sent) == {"inputs/model", "inputs/dataset"}
        with open(tmp_path / "log", "wb") as log:
            worker = RemoteWorker(link, assigned(inputs.plan, inputs.links, 0, 1), log, tmp_path, tmp_path / "secrets")
            worker.send({"address": ""})
            kinds = [json.loads(line)["kind"] for line in worker.lines()]
        assert worker.exit_code() == 0, (kinds, (tmp_path / "log").read_text())
        assert kinds.count("step") == 2 and (tmp_path / "model" / "model.safetensors").is_file()
        machine.link.close()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_a_link_or_device_among_the_files_leaves_nothing(
    kind: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w:gz") as archive:
        entry = tarfile.TarInfo("a" * 64)
        entry.type, entry.linkname = kind, "/etc/passwd"
        archive.addfile(entry)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(sent.getvalue())))
    with contextlib.suppress(tarfile.TarError):  # which ends the request
        files.put(tmp_path, PutFiles({}, {}))
    assert list(tmp_path.rglob("*")) == []
