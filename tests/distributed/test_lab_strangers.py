"""A stranger in the network who finds the coordinator's port neither joins a run nor stops it."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distributed.hosts.file import save_hosts
from tests.distributed.muster_runs import Muster, ours
from tests.lab.capture import Capture
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.lab.processes import signal_all
from tests.preloaded.python import python_itself
from tests.waiting import until
from training.exchange.links.certificates import issue_run_certificates
from training.records.events import MemberEvent

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]

STRANGER = Path(__file__).with_name("stranger.py")
MEMBERS = ("a", "b", "c")
FEW_FILES = 512
STEPS = 30
VISITED_AT = 5
CLIENT_HELLO = b"\x16\x03\x01"
NOT_LET_IN = re.compile(r"|ConnectionResetError|BrokenPipeError|15030[0-9](..)*")
"""Nothing, or a TLS alert."""
SERVER_HELLO_AND_THE_END = re.compile(r"160303(..)*(ConnectionResetError)?")
REFUSAL = '{"failed"'
"""How the coordinator's answer begins to whom it lets in and does not understand."""


def few_files() -> None:
    """Allow fewer open files than the stranger opens connections: what a coordinator inherits on many systems."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class Visited:
    """A run on three hosts, and a fourth host whose owner has nothing to do with it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        save_hosts(lab.hosts(*MEMBERS), folder / "members.json")
        # Whose command line is the coordinator's must be who listens: not so where a copy stands behind it.
        itself = python_itself()
        self.muster = Muster(folder, folder / "members.json", gate=lab.folder / "gate", python=itself)
        self.muster.let_pass(VISITED_AT)
        self.run_id = self.muster.detach("--max-steps", str(STEPS), preexec_fn=few_files)
        self.port = until(self._find_port)

    def _find_port(self) -> int:
        """Return the port on which the run's coordinator listens; 0 before it does."""
        for process in psutil.Process(self.muster.supervisor(self.run_id)).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "training.exchange.group.coordinator_main" in process.cmdline():
                    connections = process.net_connections()
                    listening = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
                    # The relay listens too, and nobody needs it here.
                    return next((one.laddr.port for one in connections if one.raddr and one.laddr.port in listening), 0)
        return 0

    def command(self, what: str, how: object) -> list[str]:
        return [sys.executable, "-I", str(STRANGER), self.lab.address, str(self.port), what, str(how)]

    def visit(self, what: str, how: object) -> list[str]:
        """Return what the coordinator answered the stranger's connections."""
        done = self.lab["x"].run(self.command(what, how))
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    def present(self, folder: Path) -> str:
        """Return how the answer to a client with these certificates begins, or what it failed with."""
        (said,) = self.visit("present", folder)
        return said

    def parcel(self, name: str) -> Path:
        """Return a file or folder that the stranger sees under the same path."""
        return self.lab["x"].files / name

    def own_certificates(self) -> Path:
        """Return what a member of the run shows; the stranger has stolen it."""
        shutil.copytree(self.muster.folder_of(self.run_id) / "secrets" / "member-0", self.parcel("own"))
        return self.parcel("own")

    def foreign_certificates(self) -> Path:
        """Return what member 0 of another run with the same name shows; the authority it trusts is this run's."""
        issue_run_certificates(self.parcel("other"), self.run_id, [0], [self.lab.address])
        folder = self.parcel("other") / "member-0"
        shutil.copy(self.muster.folder_of(self.run_id) / "secrets" / "coordinator" / "ca.pem", folder)
        return folder

    def ends_well(self) -> None:
        """Let the run go on to its end; all three members must have trained to it, and nobody else."""
        self.muster.until_step(self.run_id, VISITED_AT)
        assert self.muster.metadata(self.run_id)["status"] == "running"
        self.muster.let_pass(STEPS)
        ended = self.muster.wait_for_end(self.run_id)
        assert ended.returncode == 0, ended.stderr
        assert self.muster.metadata(self.run_id)["metrics"]["lost_members"] == []
        joined = [e for e in self.muster.events(self.run_id) if isinstance(e, MemberEvent) and e.status == "joined"]
        assert sorted(event.name for event in joined) == list(MEMBERS)
        assert all(len(self.muster.losses(self.run_id, rank)) == STEPS for rank in range(3))
        assert [ours(self.lab[name]) for name in MEMBERS] == [[], [], []]


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    return make_lab(*MEMBERS, "x")


@pytest.fixture
def wire(lab: Lab) -> Iterator[Capture]:
    with Capture(lab.bridge) as wire:
        yield wire


@pytest.fixture
def run(lab: Lab, wire: Capture, tmp_path: Path) -> Iterator[Visited]:
    visited = Visited(lab, tmp_path)
    yield visited
    visited.muster.leave_nothing()


@contextlib.contextmanager
def silence(run: Visited) -> Iterator[None]:
    """A thousand connections that say nothing."""
    host = run.lab["x"]
    with host.popen(run.command("hold", 1000), stdout=subprocess.PIPE, text=True) as holding:
        try:
            assert holding.stdout is not None and holding.stdout.readline() == "1000\n"
            yield
        finally:
            signal_all(host.pids("stranger.py"), signal.SIGTERM)


def test_strangers_neither_join_nor_stop_it(wire: Capture, run: Visited) -> None:
    """Silence and rubbish come while the members are still on their way; there is silence again at the end."""
    with silence(run):
        answers = run.visit("rubbish", 3)
        run.muster.until_step(run.run_id, VISITED_AT, members=3)
    assert not [answer for answer in answers if not NOT_LET_IN.fullmatch(answer)]
    recorded_bytes_and_stolen_certificates_are_refused(wire, run)
    with silence(run):
        run.ends_well()


def recorded_bytes_and_stolen_certificates_are_refused(wire: Capture, run: Visited) -> None:
    stream = max(wire.streams(run.lab["a"].address, run.port), key=len)  # a may have had to try again
    assert stream.startswith(CLIENT_HELLO) and len(stream) > 2000
    run.parcel("stream").write_bytes(stream)
    (said,) = run.visit("replay", run.parcel("stream"))
    assert SERVER_HELLO_AND_THE_END.fullmatch(said), said
    assert run.present(run.own_certificates()).startswith(REFUSAL)
    assert run.present(run.foreign_certificates()) in ("SSLError", "ConnectionResetError", "")
