"""Runs on hosts without root, through the real command line and a real terminal."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path

import pytest

from distributed.hosts.file import save_hosts
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLightLab
from tests.lab.spec import HostSpec
from tests.preloaded.python import python_itself
from tests.waiting import until
from training.records.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_two_hosts_train_to_a_model(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    """The processes here and on one host are started as a user's are; in the other tests a preloaded one is copied. The
    other host has two members, and one session for each connection."""
    lab = make_light_lab("a", HostSpec("b", sshd_options=("MaxSessions 1",)))
    cold, usual = lab.hosts("a", python=python_itself()), lab.hosts("b", devices=("cpu", "cpu"))
    save_hosts(cold.model_copy(update={"machines": cold.machines + usual.machines}), lab.hosts_file)
    muster = Muster(tmp_path, lab.hosts_file, python=python_itself())
    done = muster.run(*muster.train("--max-steps", "6"))
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "output").iterdir()
    assert RunFolder.open(folder).metadata.run_type == "distributed"
    assert (folder / "model" / "model.safetensors").is_file()
    assert lab["a"].logins == 2  # of the command, and of the run
    assert lab["b"].logins in (3, 4)  # the members' sessions on connections of their own
    assert [ours(host) for host in lab] == [[], []]


def test_ctrl_c_asks(make_light_lab: MakeLightLab, tmp_path: Path) -> None:
    lab = make_light_lab("a")
    muster = Muster(tmp_path, lab.hosts_file, pause=0.05)
    run_id = muster.detach("--max-steps", "2000")
    keyboard, terminal = pty.openpty()
    try:
        muster.until_step(run_id, 3)
        until(lambda: RunFolder.open(muster.folder_of(run_id)).metadata.status == "running")
        for answer, code, status in (("", 0, "running"), ("s", 130, "cancelled")):
            watching = muster.popen("attach", run_id, stdin=terminal)
            assert watching.stderr is not None and watching.stderr.readline()  # it hears signals
            watching.send_signal(signal.SIGINT)
            os.write(keyboard, f"{answer}\n".encode())
            _, stderr = watching.communicate(timeout=60)
            assert watching.returncode == code, stderr
            assert "[d]etach: the run goes on (default), [s]top with a snapshot, or [k]ill? then Enter:" in stderr
            assert muster.metadata(run_id)["status"] == status
    finally:
        os.close(keyboard)
        os.close(terminal)
        muster.run("stop", "--kill", run_id)
    assert ours(lab["a"]) == []
