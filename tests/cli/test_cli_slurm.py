"""``train --on slurm`` in a real SLURM: its controller and two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.cli.main import main
from app.cli.train.engines import slurm
from tests.cli.test_cli_ranked import TRAIN
from tests.distributed.joining import free_port
from tests.preloaded.python import python_itself
from tests.waiting import until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
is_here = os.geteuid() == 0 and all(shutil.which(name) for name in _PROGRAMS)
with_slurm = pytest.mark.skipif(not is_here, reason="SLURM's programs are not here, or need root")
_CONFIGURATION = """
ClusterName=home
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A SLURM of two nodes."""
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    for path in (folder, *folder.parents[:-1]):
        path.chmod(path.stat().st_mode | 0o011)  # munge looks at each folder above its socket
    ports, host = [free_port() for _ in range(3)], socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, ports=ports, host=host))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = ["munged", "--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in files.items())]
    programs = [munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]]
    running = []
    try:
        for words in programs:
            running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            until(lambda: (folder / "munge.socket").exists())
        until(lambda: _asked("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"])
        yield folder
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(30)


def _left(folder: Path) -> list[list[str]]:
    """The processes that work in a folder, other than those of the cluster."""
    lines = [process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])]
    return [words for words in lines if str(folder) in " ".join(words) and words[0] != "munged"]


def _asked(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@with_slurm
def test_a_job_trains_and_one_that_is_stopped_leaves_nothing(cluster: Path, tmp_path: Path) -> None:
    train = [python_itself(), *TRAIN, "--on", "slurm"]
    done = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and len([*tmp_path.glob("output/*/model/model.safetensors")]) == 1, done.stderr

    words = [*train, "--max-steps", "100000", "--output", "stopped"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        assert any("step 1/" in line for line in lines)
        process.send_signal(signal.SIGINT)
        said = "".join(lines)
    assert process.returncode == 130 and "resume with" in said, said
    assert _asked("squeue", "--noheader") == ""
    until(lambda: not _left(tmp_path))


def test_without_slurm_the_computer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert main(["train", "nanogpt", "--on", "slurm"]) == 2
    assert "srun is not on this computer" in capsys.readouterr().err


def test_another_engine_is_refused_and_the_known_one_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nanogpt", "--on", "kubernetes"]) == 2
    assert "known: slurm" in capsys.readouterr().err
