"""Files on their way to a machine: what a broken connection costs, and what is said meanwhile."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_connection import Says, far_machine

from distributed.agent import files as agent_files
from distributed.agent.requests import ListMissing
from distributed.hosts.schema import Machine
from distributed.machine.link import HereConnection, MachineLink, link_to
from distributed.preparation import transfer
from distributed.preparation.code_sync import folder_tree
from distributed.preparation.transfer import Tree, files_there, packed, send_trees
from distributed.ssh.errors import Dropped, SshError
from distributed.ssh.process import Completed, Input
from profiles.errors import BadInput
from tests.lab.fixtures import MakeLightLab
from tests.waiting import PATIENCE

SIZES = (1_000_000, 3_000_000, 2_000_000)


class Breaking(HereConnection):
    """A connection that ends after some bytes, as often as ``cuts`` says; it counts what goes over it."""

    def __init__(self, cuts: list[int]) -> None:
        super().__init__("far")
        self.cuts = cuts
        self.sent: list[int] = []

    def run(self, argv: Sequence[str], *, input: Input = None, timeout: float | None = 60.0) -> Completed:
        if input is None or isinstance(input, bytes):
            return super().run(argv, input=input, timeout=timeout)
        limit, pipe = self.cuts.pop(0) if self.cuts else None, subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=Path.home()) as process:
            assert process.stdin is not None
            sent = 0
            for data in input:
                process.stdin.write(data)
                sent += len(data)
                if limit is not None and sent >= limit:
                    break
            process.stdin.close()
            process.stdin = None
            output, errors = process.communicate(timeout=PATIENCE)
        self.sent.append(sent)
        if limit is not None:
            raise Dropped(self.machine, "the connection was lost while a command ran")
        return Completed(process.returncode, output, errors)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    dice = random.Random(5)
    (tmp_path / "data").mkdir()
    for number, size in enumerate(SIZES):
        (tmp_path / "data" / f"{number}.bin").write_bytes(dice.randbytes(size))
    return folder_tree(tmp_path / "data")


@pytest.mark.slow
def test_after_a_break_only_the_rest_is_sent(tmp_path: Path, tree: Tree) -> None:
    connection = Breaking([2_500_000, 1_500_000])
    said: list[tuple[int, int]] = []
    machine = far_machine(tmp_path, connection)
    assert files_there(machine, [tree]) == frozenset()
    assert send_trees(machine, [tree], lambda done, total: said.append((done, total))) == 3
    assert files_there(machine, [tree]) == frozenset(tree.sources)
    assert len(connection.sent) == 3
    assert sum(SIZES) < sum(connection.sent) < sum(SIZES) + 600_000
    assert said[-1] == (sum(SIZES), sum(SIZES))
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    for name in tree.files:
        whole = (tmp_path / "far" / "trees" / tree.name / name).read_bytes()
        assert whole == (tmp_path / "data" / name).read_bytes()
    assert not list((tmp_path / "far" / "blobs").rglob("*.part"))


@pytest.mark.slow
def test_a_transfer_that_does_not_move_is_given_up(tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    link = far_machine(tmp_path, connection := Breaking([0] * 100))
    monkeypatch.setattr(link, "connection", unreachable_after(link, connection, 3))
    with pytest.raises(Dropped):
        send_trees(link, [tree], timeout=0.0)


def unreachable_after(link: MachineLink, connection: HereConnection, times: int) -> object:
    left = iter(range(times))

    def connect() -> HereConnection:
        if next(left, None) is None:
            raise Dropped(link.name, "nobody there")
        return connection

    return connect


@pytest.mark.slow
def test_a_machine_that_answers_but_keeps_nothing_is_given_up(tmp_path: Path, tree: Tree) -> None:
    connection = Breaking([0] * 5)
    with pytest.raises(Dropped):
        send_trees(far_machine(tmp_path, connection), [tree], timeout=0.0)
    assert len(connection.sent) == 2


@pytest.mark.slow
def test_a_file_that_has_changed_or_gone_since_it_was_hashed_is_named(tmp_path: Path, tree: Tree) -> None:
    path = tmp_path / "data" / "0.bin"
    path.write_bytes(b"more")
    with pytest.raises(BadInput, match=r"0\.bin has changed while it was sent"):
        send_trees(far_machine(tmp_path), [tree])
    path.unlink()
    with pytest.raises(BadInput, match=r"0\.bin: No such file"):
        send_trees(far_machine(tmp_path), [tree])


def stored(root: Path, content: bytes) -> str:
    blob = hashlib.sha256(content).hexdigest()
    agent_files.store(root, blob, io.BytesIO(content))
    return blob


def test_two_names_that_are_one_on_a_machine_leave_both_contents_as_they_are(tmp_path: Path) -> None:
    first, second = stored(tmp_path, b"first"), stored(tmp_path, b"second")
    with pytest.raises(ValueError, match="two files have the name './a' there"):
        agent_files.build_tree(tmp_path, "0" * 64, {"a": first, "./a": second})
    assert agent_files.blob_path(tmp_path, first).read_bytes() == b"first"
    assert not list((tmp_path / "trees").iterdir())


def test_transfers_with_one_process_number_write_no_common_file(tmp_path: Path) -> None:
    content = b"from both"
    blob = hashlib.sha256(content).hexdigest()

    class Overtaken(io.BytesIO):
        """While it is read, another transfer of the same begins and ends, as in a container with the same folder."""

        def read(self, size: int | None = -1) -> bytes:
            if not self.tell():
                stored(tmp_path, content)
            return super().read(size)

    agent_files.store(tmp_path, blob, Overtaken(content))
    assert agent_files.blob_path(tmp_path, blob).read_bytes() == content


@pytest.mark.slow
def test_a_file_that_shrinks_meanwhile_is_said(tmp_path: Path, tree: Tree) -> None:
    link = far_machine(tmp_path)
    sizes = {path: path.stat().st_size for path in tree.sources.values()}

    def shrink(done: int, total: int) -> None:
        for path in sizes:
            os.truncate(path, 10)

    transfer_tell, transfer.PROGRESS_INTERVAL = transfer.PROGRESS_INTERVAL, 0.0
    try:
        with pytest.raises(BadInput, match=r"\.bin: it became shorter"):
            send_trees(link, [tree], shrink)
    finally:
        transfer.PROGRESS_INTERVAL = transfer_tell


@pytest.mark.parametrize(
    "said",
    [
        "7",
        "{}",
        '{"root": "/r", "trees": [], "blobs": [], "begun": []}',
        '{"root": "/r", "trees": [], "blobs": ["another"], "begun": {}}',
        '{"root": "/r", "trees": [], "blobs": ["asked"], "begun": {"asked": -1}}',
    ],
)
def test_a_machine_that_does_not_say_what_it_lacks_is_named(said: str) -> None:
    link = MachineLink(Machine(name="far"), lambda: Says(said.encode()))
    with pytest.raises(SshError, match="^far: "):
        transfer.ask_missing(link, [], ["asked"])


def test_a_damaged_beginning_is_not_kept(tmp_path: Path, tree: Tree) -> None:
    root = tmp_path / "far"
    blob, path = next(iter(tree.sources.items()))
    part = agent_files.blob_path(root, blob).with_name(f"{blob}.1.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"?" * 1000)
    assert agent_files.missing(root, ListMissing([], [blob]))["begun"] == {blob: 1000}
    with pytest.raises(ValueError, match="damaged"):
        agent_files.store(root, blob, io.BytesIO(path.read_bytes()[1000:]), 1000)
    assert agent_files.missing(root, ListMissing([], [blob]))["begun"] == {}
    with pytest.raises(ValueError, match="its first part is missing"):
        agent_files.store(root, blob, io.BytesIO(b""), 1000)


def test_what_is_missing_of_thousands_of_files_is_found_with_little_work(tmp_path: Path) -> None:
    names = [f"{number:064x}" for number in range(500)]
    part = agent_files.blob_path(tmp_path, names[3]).with_name(f"{names[3]}.17.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"begun")
    calls, before = 0, sys.getprofile()

    def count(frame: object, what: str, argument: object) -> None:
        nonlocal calls
        calls += what == "call"

    sys.setprofile(count)
    try:
        said = agent_files.missing(tmp_path, ListMissing([], names))
    finally:
        sys.setprofile(before)
    assert (said["blobs"], said["begun"]) == (names, {names[3]: 5})
    assert calls < 200 * len(names)  # one pattern compiled for each file: 580


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=2000), st.floats(0, 1)), max_size=5, unique_by=lambda item: item[0]))
def test_the_stream_is_a_tar_of_what_is_missing(
    tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[bytes, float]]
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    blobs, begun, wanted = {}, {}, {}
    for number, (content, share) in enumerate(contents):
        name = f"{number:064x}"
        (folder / name).write_bytes(content)
        blobs[name], begun[name] = folder / name, int(share * len(content))
        wanted[name] = content[begun[name] :]
    said: list[int] = []
    stream = io.BytesIO(b"".join(packed(blobs, begun, said.append)))
    with gzip.open(stream) as unzipped, tarfile.open(fileobj=unzipped, mode="r|") as archive:
        assert {entry.name: (archive.extractfile(entry) or stream).read() for entry in archive} == wanted
    assert said[-1] == sum(map(len, wanted.values()))


@pytest.mark.slow
def test_a_session_that_is_killed_is_made_again(
    make_light_lab: MakeLightLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_light_lab("a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big.bin").write_bytes(random.Random(1).randbytes(30_000_000))
    tree = folder_tree(tmp_path / "data")
    link = link_to(lab.hosts().machines[0], lab.hosts())
    link.put_agent()
    monkeypatch.setattr(transfer, "PROGRESS_INTERVAL", 0.0)
    said: list[tuple[int, int]] = []
    cuts: list[int] = []

    def cut_once(done: int, total: int) -> None:
        said.append((done, total))
        if done > 10_000_000 and not cuts:  # most of it has arrived
            cuts.append(done)
            link.connection().close()

    assert send_trees(link, [tree], cut_once) == 1
    link.close()
    assert cuts and said[-1] == (30_000_000, 30_000_000)
    whole = lab["a"].files / ".cache" / "muster" / "trees" / tree.name / "big.bin"
    assert whole.read_bytes() == (tmp_path / "data" / "big.bin").read_bytes()
