"""A machine is lent to another computer: for tasks alone no code arrives, to a friend it runs in a box."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.joined import joined_machines
from distributed.hosts.schema import Hosts, Machine
from tests.distributed.joining import JoinedProcess, SharedCode, free_port, needs_box
from tests.distributed.muster_runs import PATIENCE, REPOSITORY, Muster
from tests.lab.fixtures import MakeLab
from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from tests.preloaded.python import python_itself
from tests.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAM = [python_itself(), str(REPOSITORY / "cli_typer.py"), "machines"]
"""A copy of a preloaded process would not be in a box."""
OWNER = """
import sys
from pathlib import Path
from distributed.joining.lending import presence

presence.PresenceSensor._share = lambda self: 0.0  # the load of other tests is no owner
presence.InputClock.quiet = lambda self: 0.0 if Path(sys.argv[1]).exists() else None
from app.cli.main import main
sys.exit(main(["machines", *sys.argv[2:]]))
"""
"""``join`` on a computer whose owner types while a file is there."""
TEXT_TASK = {"threads": "1", "batch-size": "2", "max-steps": "2", "block-size": "32", "max-eval-samples": "2"}


@contextlib.contextmanager
def lent(lab: Lab, host: LabHost, *options: str, program: Sequence[str] = PROGRAM) -> Iterator[JoinedProcess]:
    """Let a host join this computer on some terms; it ends with the context.

    Args:
        program: takes the words after ``machines``.
    """
    port = free_port()
    shared = SharedCode("--port", str(port))

    def spawn(words: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return host.popen([*program, *words[3:]], stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True)

    process = JoinedProcess(spawn, shared.code, "--at", f"{lab.address}:{port}", "--name", host.name, *options)
    try:
        until(lambda: process.process.poll() is not None or shared.process.poll() is not None, 2 * PATIENCE)
        assert process.process.poll() is None, process.finish()
        code, output = shared.finish()
        assert code == 0, output
        yield process
    finally:
        shared.process.kill()
        host.run([*PROGRAM, "leave"])
        process.finish()


def text_run(*options: str) -> list[str]:
    """Return the words that train a built-in task on this computer and on the machine that is lent."""
    flags = [word for name, value in TEXT_TASK.items() for word in (f"--{name}", value)]
    return ["train", "nanogpt", "--hosts", "localhost,b.joined", *flags, *options]


@needs_box
def test_a_machine_lent_for_tasks_trains_with_its_own_muster(
    make_lab: MakeLab, tmp_path: Path, joining_config: Path
) -> None:
    lab = make_lab(HostSpec("b", sshd=False))
    muster = Muster(tmp_path, Path("localhost,b.joined"))
    with lent(lab, lab["b"], "--lend", "tasks"):
        assert [machine.lend for machine in joined_machines()] == ["tasks"]
        trained = muster.run(*text_run())
        assert trained.returncode == 0, trained.stderr
        (folder,) = (tmp_path / "output").iterdir()
        assert (folder / "model" / "model.safetensors").is_file()
        assert json.loads((folder / "metadata.json").read_text())["metrics"]["lost_members"] == []
        refused = muster.run(*muster.train("--max-steps", "2"))
        assert refused.returncode != 0 and "it is lent for tasks alone: task custom is code" in refused.stderr
        arrived = lab["b"].run(["find", str(joining_config / "cache" / "muster" / "lent"), "-type", "f"]).stdout
        assert "input.txt" in arrived and ".py" not in arrived
        ran = lab["b"].run([*PROGRAM, "lent"])
        assert f"{folder.name[:10]}" in ran.stdout and "(tasks)" in ran.stdout, ran.stdout + ran.stderr


@needs_box
def test_a_friends_code_trains_in_the_box(make_lab: MakeLab, tmp_path: Path, joining_config: Path) -> None:
    lab = make_lab(HostSpec("b", sshd=False))
    muster = Muster(tmp_path, Path("localhost,b.joined"))
    with lent(lab, lab["b"], "--lend", "friend"):
        trained = muster.run(*muster.train("--max-steps", "4"))
        assert trained.returncode == 0, trained.stderr
        (folder,) = (tmp_path / "output").iterdir()
        assert json.loads((folder / "metadata.json").read_text())["metrics"]["lost_members"] == []
        outside = lab["b"].run(["sh", "-c", "ls -A /root/.cache/muster /root"])
        assert "trees" not in outside.stdout.split(), outside.stdout


def test_an_owner_who_returns_has_the_processor_and_who_goes_gives_it_back(
    make_lab: MakeLab, tmp_path: Path, joining_config: Path
) -> None:
    lab = make_lab(HostSpec("b", sshd=False))
    owner = lab.folder / "owner"
    script = lab.folder / "owner.py"  # hosts do not see this computer's temporary files
    script.write_text(OWNER)
    machines = (Machine(name="here", address="localhost"), Machine(name="b", address="b.joined", python=sys.executable))
    save_hosts(Hosts(machines=machines), lab.hosts_file)
    muster = Muster(tmp_path, lab.hosts_file, gate=lab.folder / "gate")
    program = ["env", f"PYTHONPATH={REPOSITORY}", python_itself(), str(script), str(owner)]
    with lent(lab, lab["b"], "--lend", "own", "--while-idle", program=program):
        muster.let_pass(5)
        run_id = muster.detach("--max-steps", "12", "--lease", "60")
        muster.until_step(run_id, 5, members=2)
        owner.write_text("typing")
        until(lambda: stopped(run_id))
        owner.unlink()
        until(lambda: not stopped(run_id))
        muster.let_pass(12)
        ended = muster.wait_for_end(run_id)
        assert ended.returncode == 0, ended.stderr
        assert muster.metadata(run_id)["metrics"]["lost_members"] == []


def stopped(run_id: str) -> bool:
    """Whether a process of a run on the lab's host stands still."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if run_id in " ".join(process.cmdline()) and process.status() == psutil.STATUS_STOPPED:
                return True
    return False
