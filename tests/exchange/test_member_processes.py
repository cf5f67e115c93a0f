"""Real processes: killed, stopped and continued, and a coordinator that is killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.waiting import until

ROOT = Path(__file__).parents[2]
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Process:
    """A process whose lines are kept."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.lines: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # not what a library says, as NCCL does with NCCL_DEBUG
                self.lines.append(json.loads(line))

    def results(self) -> dict[int, dict[str, Any]]:
        return {line["n"]: line for line in self.lines if "n" in line}

    def ask(self, operations: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{operations}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Cluster:
    """A coordinator and three members, each a process."""

    def __init__(self, folder: Path, certificates: Path | None = None, engine: str = "mesh", **config: object) -> None:
        self.folder = folder
        self.config = {"run_id": "r", "names": ["m0", "m1", "m2"], "lease": 2.5, **config}
        if certificates is not None:
            self.config["certificates"] = str(certificates / "coordinator")
        self.stack = ExitStack()
        self.coordinate()
        where = [str(certificates)] if certificates is not None else []
        self.members = [
            self.start(str(Path(__file__).with_name("member_process.py")), self.address, str(rank), "3", engine, *where)
            for rank in range(3)
        ]

    def start(self, *command: str) -> Process:
        process = Process(*command)
        self.stack.callback(process.close)
        return process

    def coordinate(self) -> None:
        self.config["port"] = until(self._port)  # another test may have the one before for a moment
        self.address = f"127.0.0.1:{self.config['port']}"

    def _port(self) -> int:
        path = self.folder / "coordinator.json"
        path.write_text(json.dumps(self.config))
        self.coordinator = self.start("-m", "training.exchange.group.coordinator_main", "--config", str(path))
        return int(until(lambda: self.coordinator.lines)[0]["port"])

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.members[rank].lines[0]["pid"], number)

    def exchange(self, *ranks: int, together: bool = True) -> None:
        """Some members do an operation, and all of them are in its result."""
        asked = [self.members[rank] for rank in ranks]
        before = [len(member.results()) for member in asked]
        for member in asked:
            member.ask(1)
        until(lambda: self._more(asked, before))
        if together:
            assert [member.lines[-1]["members"] for member in asked] == [list(ranks)] * len(ranks)

    def let_in(self, rank: int, *others: int) -> None:
        """Others go on until a newcomer is in, which then takes part."""
        fresh, asked = self.members[rank], [self.members[other] for other in others]
        while "in" not in fresh.lines[-1]:
            self._goes_on(asked, fresh)
        fresh.ask(1)
        until(lambda: len({len(member.results()) for member in asked}) == 1 and "n" in fresh.lines[-1])

    def _goes_on(self, asked: list[Process], fresh: Process) -> None:
        before = [len(member.results()) for member in asked]
        for member in asked:
            member.ask(1)
        until(lambda: self._more(asked, before) or "in" in fresh.lines[-1])

    def _more(self, members: list[Process], before: list[int]) -> bool:
        return all(len(member.results()) > count for member, count in zip(members, before))

    def agree(self) -> None:
        """Nobody has seen another result of an operation than the others."""
        for number in set.union(*(set(member.results()) for member in self.members)):
            found = [m.results()[number] for m in self.members if number in m.results()]
            assert len({(*one["mean"], *one["members"]) for one in found}) == 1
            expected = sum(found[0]["members"]) / len(found[0]["members"])
            assert found[0]["mean"] == [pytest.approx(expected)] * 4


@pytest.fixture(params=["mesh", "nccl", pytest.param("nccl-cuda", marks=[pytest.mark.cuda, NEEDS_CUDA])])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    found = Cluster(tmp_path, engine=request.param)
    with found.stack:
        found.exchange(0, 1, 2)
        yield found


@pytest.mark.slow
def test_a_stopped_member_comes_back_by_itself_and_the_others_outlive_a_killed_one(cluster: Cluster) -> None:
    stopped = cluster.members[2]
    cluster.signal(2, signal.SIGSTOP)
    cluster.exchange(0, 1)
    cluster.signal(2, signal.SIGCONT)
    cluster.exchange(2, together=False)
    assert stopped.lines[-1]["members"] == [0, 1] and not stopped.lines[-1]["included"]
    cluster.exchange(0, 1, 2)
    cluster.signal(2, signal.SIGSTOP)
    for _ in range(4):
        cluster.exchange(0, 1)
    cluster.signal(2, signal.SIGCONT)
    stopped.ask(1)  # so much is missed that it comes back as a newcomer
    cluster.let_in(2, 0, 1)
    cluster.signal(1, signal.SIGKILL)
    cluster.exchange(0, 2)
    cluster.agree()


@pytest.mark.slow
def test_members_go_on_where_they_were_when_the_coordinator_is_started_again(cluster: Cluster) -> None:
    cluster.coordinator.close()
    cluster.exchange(0, 1, 2)
    cluster.coordinate()
    cluster.exchange(0, 1, 2)
    cluster.coordinator.close()
    cluster.signal(0, signal.SIGKILL)
    cluster.coordinate()
    cluster.exchange(1, 2)
    cluster.coordinator.process.send_signal(signal.SIGSTOP)
    cluster.exchange(1, 2)
    cluster.coordinator.process.send_signal(signal.SIGCONT)
    cluster.exchange(1, 2)
    cluster.agree()


@pytest.mark.slow
def test_the_coordinator_tells_each_way_once_and_no_more_while_it_stays(cluster: Cluster) -> None:
    def told() -> list[dict[str, Any]]:
        return [line for line in cluster.coordinator.lines if line.get("kind") == "ways"]

    until(lambda: len(told()) == 3)
    assert {one["member"]: [way["peer"] for way in one["ways"]] for one in told()} == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    assert {(way["how"], way["address"], way["interface"]) for one in told() for way in one["ways"]} <= {
        (how, "127.0.0.1", name) for how in ("dialled", "came") for name in ("lo", "lo0")
    }
    cluster.members[2].close()
    cluster.exchange(0, 1)  # over a new mesh
    ways = [(one["member"], *way.items()) for one in told() for way in one["ways"]]
    assert len(set(ways)) == len(ways)  # who of the two dials may change where one is late
