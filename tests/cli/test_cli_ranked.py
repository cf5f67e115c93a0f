"""``train`` under torchrun: the processes that an engine has started train together."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from app.cli.main import main
from profiles.errors import BadInput, RunFailed
from tests.distributed.joining import free_port
from tests.waiting import until
from training.ranked import ranks
from training.ranked.engine_process import EngineProcess

ROOT = Path(__file__).parents[2]
_JOB = ["--task", "custom", "--model-path", f"{ROOT}/examples/custom/spirals.py:build", "--no-input"]
TRAIN = [str(ROOT / "cli_typer.py"), "train", *_JOB, "--max-steps", "3", "--snapshot-interval", "0"]
OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}


def _weights(folder: Path) -> bytes:
    (path,) = folder.glob("output/*/model/model.safetensors")
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_train_the_weights_of_two_local_workers(tmp_path: Path) -> None:
    port = free_port()
    starts = {
        "torchrun": [[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *TRAIN]],
        "variables": [["env", *_variables(rank, port), sys.executable, *TRAIN] for rank in (1, 0)],
        "local": [[sys.executable, *TRAIN, "--local", "2"]],
    }
    for name, commands in starts.items():
        (folder := tmp_path / name).mkdir()
        processes = [subprocess.Popen(words, cwd=folder, stderr=subprocess.DEVNULL) for words in commands]
        assert [process.wait(240) for process in processes] == [0] * len(commands)
    assert _weights(tmp_path / "torchrun") == _weights(tmp_path / "variables") == _weights(tmp_path / "local")


def _variables(rank: int, port: int) -> list[str]:
    """What SLURM's line in the documents sets."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, **address}
    return [f"{name}={value}" for name, value in variables.items()]


def test_a_rank_is_read_from_the_variables_of_its_engine() -> None:
    assert EngineProcess.of_environment(OF_TORCHRUN) == EngineProcess(1, 4, 1)


@pytest.mark.parametrize(
    "change",
    [{"MASTER_ADDR": ""}, {"RANK": ""}, {"RANK": "0", "WORLD_SIZE": "1"}, {"MUSTER_RUN_ID": "a script of launch"}],
)
def test_no_engine_has_started_it(change: dict[str, str]) -> None:
    assert EngineProcess.of_environment({**OF_TORCHRUN, **change}) is None


@pytest.mark.parametrize(("change", "message"), [({"RANK": "x"}, "RANK=x"), ({"RANK": "4"}, "RANK=4 is not below")])
def test_variables_that_contradict_each_other_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        EngineProcess.of_environment({**OF_TORCHRUN, **change})


@pytest.mark.parametrize("option", ["--hosts=a,b", "--local=3", "--simulate=4", "--detach"])
def test_an_option_for_other_processes_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "nanogpt", option]) == 2
    assert f"{option.partition('=')[0]} does not go with the 4 processes" in capsys.readouterr().err


class _Store:
    """The engine's store, as long as the first rank lives in this process."""

    published: ClassVar[dict[str, Any]] = {}
    is_there = threading.Event()

    def __init__(self, process: EngineProcess) -> None:
        pass

    def publish(self, meeting: dict[str, Any]) -> None:
        _Store.published = meeting
        self.is_there.set()


@pytest.fixture(params=[60.0])
def first(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[ranks.Ranks | RunFailed]:
    """What comes of the first of two ranks, which waits for the other."""
    monkeypatch.setattr(ranks, "EngineStore", _Store)
    monkeypatch.setattr(_Store, "is_there", threading.Event())
    monkeypatch.setattr(ranks, "_COMING_SECONDS", request.param)
    outcome: list[ranks.Ranks | RunFailed] = []

    def gather() -> None:
        try:
            outcome.append(ranks.Ranks(EngineProcess(0, 2, 0)))
        except RunFailed as error:
            outcome.append(error)

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    assert _Store.is_there.wait(60)
    return outcome


def _report(token: str) -> dict[str, Any]:
    return ranks.RankReport.of(EngineProcess(1, 2, 1), token).model_dump()


def _says(message: bytes) -> bytes:
    """Connect to the first rank, and return what it answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=_Store.published["authority"])
    with (
        socket.create_connection(("127.0.0.1", _Store.published["port"]), 60) as connection,
        context.wrap_socket(connection, server_hostname=ranks.COORDINATOR_NAME) as line,
    ):
        line.sendall(message)
        return line.recv(100)


def test_a_stranger_is_hung_up_on_and_the_rank_is_taken(first: list[ranks.Ranks | RunFailed]) -> None:
    for message in (b"\n", b"{}\n", b"[1]\n", b"x" * 100 + b"\n", json.dumps(_report("guess")).encode() + b"\n"):
        assert _says(message) == b""
    with socket.create_connection(("127.0.0.1", _Store.published["port"]), 60) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
    line = ranks._dial("127.0.0.1", _Store.published)
    line.send(_report(_Store.published["token"]))
    until(lambda: bool(first))
    (group,) = first
    assert isinstance(group, ranks.Ranks) and group.machines == [EngineProcess(1, 2, 1).machine] * 2
    group.close()
    assert list(line.messages()) == [{"end": 1}]
    line.close()


@pytest.mark.parametrize("first", [0.1], indirect=True)
def test_a_rank_that_does_not_come_is_named(first: list[ranks.Ranks | RunFailed]) -> None:
    until(lambda: bool(first))
    assert isinstance(first[0], RunFailed) and "rank 1 has not come" in first[0].message
