"""Requests to a machine: as they are framed, read, and carried out by the program there."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

from distributed.agent.requests import (
    GetFiles,
    InspectData,
    ListMissing,
    ListRemains,
    MachineRequest,
    ProbeMachine,
    Start,
    frame,
    read_request,
)
from distributed.hosts.schema import Machine
from distributed.machine.link import HereConnection, MachineLink
from distributed.machine.packing import program, sources
from distributed.ssh.errors import RemoteFileError
from tests.preloaded.python import python_itself


def framed(data: bytes) -> bytes:
    return b"%d\n%s" % (len(data), data)


@pytest.mark.parametrize(
    "request_",
    [
        ProbeMachine(["torch"], "host 7"),
        GetFiles("run-1", "0", "model"),
        Start("run-1", "0", ["{python}"], {"A": "b"}, {"plan.json": "e30="}, {}, 30.0, 5.0, {}),
    ],
)
def test_a_request_arrives_as_it_was_made_and_what_follows_stays(request_: MachineRequest) -> None:
    stream = io.BytesIO(frame(request_) + b"payload")
    assert read_request(stream.read) == request_
    assert stream.read() == b"payload"


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"12", b"99\n[]", b"x\n", b"1" * 40),
        *map(framed, (b"1", b"[1, 2]", b'["MachineRequest", {}]', b'["ProbeMachine", {"odd": 1}]')),
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, EOFError)):
        read_request(io.BytesIO(data).read)


@pytest.mark.parametrize("kind", MachineRequest.__subclasses__())
def test_every_request_has_a_part_of_the_program_that_carries_it_out(kind: type[MachineRequest]) -> None:
    assert kind.module in sources() and callable(getattr(import_module(kind.module), kind.function))


def imports(source: str) -> set[str]:
    """Return the packages that a module imports as it is loaded."""
    nodes = ast.parse(source).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def test_the_program_needs_nothing_that_a_machine_may_lack() -> None:
    usual = sys.stdlib_module_names | {"distributed", "profiles", "training"}
    demanding = {name for name, source in sources().items() if imports(source) - usual}
    assert demanding == {"distributed.agent.link_probe", "training.hardware.sensors"}  # their requests say so


def test_whatever_a_module_of_it_imports_of_ours_is_sent() -> None:
    for source in sources().values():
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes}
        ours = {name for name in names if name.startswith(("distributed.", "profiles.", "training."))}
        assert ours <= sources().keys()


@pytest.mark.slow
def test_several_threads_may_ask_at_once() -> None:
    modules = [kind.module for kind in MachineRequest.__subclasses__()] * 8
    with ThreadPoolExecutor(16) as threads:
        assert len(set(map(len, threads.map(sources, ["distributed.agent.daemon"] * 64)))) == 1
        assert all(threads.map(sources, modules))


def test_what_is_sent_along_is_what_the_request_needs() -> None:
    assert set(sources(InspectData("").module)) == {
        *("distributed.agent.data_probe", "distributed.agent.program", "distributed.agent.requests")
    }
    assert len(program(InspectData("").module)) < len(program()) / 3


def test_a_title_names_the_run_for_lists_of_processes() -> None:
    assert GetFiles("run-1", "0", "model").title == ["getfiles", "run-1", "0"]
    assert ListRemains("run-1").title == ["listremains", "run-1"] and ProbeMachine([]).title == ["probemachine"]


@pytest.mark.slow
def test_the_program_is_sent_along_until_it_is_there(tmp_path: Path) -> None:
    link = MachineLink(
        Machine(name="far", python=python_itself(), project_path=str(tmp_path)), lambda: HereConnection("far")
    )
    question = ListMissing(["t" * 64], ["0" * 64])
    before = link.ask(question)
    assert (before["trees"], before["blobs"], list(tmp_path.iterdir())) == (["t" * 64], ["0" * 64], [])
    link.put_agent()
    assert "-c" not in link.command(question) and link.ask(question) == before
    with pytest.raises(RemoteFileError, match="far: not a content hash: 'x'"):
        link.ask(ListMissing([], ["x"]))


@pytest.mark.slow
def test_a_package_of_the_same_name_there_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "distributed.py").write_text("raise SystemExit('another package')")
    request = ListMissing([], [])
    words = [python_itself(), "-c", program().decode(), str(tmp_path), *request.title]
    done = subprocess.run(words, input=frame(request), capture_output=True, cwd=tmp_path, timeout=60)
    assert json.loads(done.stdout)["root"] == str(tmp_path), done.stderr
