"""Everything of ours off a machine, and nothing else: the scripts in a home folder of this machine."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_connection import Says

from distributed.agent.files import left
from distributed.agent.requests import Attach, ListRemains, Start, frame
from distributed.cleaning.clean import PREPARED, Inventory, remove, survey
from distributed.machine.link import HereConnection
from distributed.machine.packing import AGENT
from distributed.machine.packing import program as source
from distributed.ssh.errors import RemoteFileError
from tests.waiting import until
from training.records.lease import Lease

pytestmark = pytest.mark.slow

BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIOurs"
HASH, SHORT = "ab" * 32, "cd" * 8
SLEEPER = "import time; time.sleep(600)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of the machine to clean: this one."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def machine(home: Path) -> HereConnection:
    return HereConnection("box")


def _command_of(pid: int) -> str:
    return subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True).stdout


def _is_itself(command: str) -> bool:
    """Whether a process has its command: it has none for a moment, that of a shell before it, and none once more."""
    return SLEEPER in command and not command.split()[0].endswith("bash")


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(cwd: Path, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", SLEEPER, *words], cwd=cwd, start_new_session=True)
        started.append(process)
        until(lambda: _is_itself(_command_of(process.pid)))
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def fill(root: Path) -> None:
    """Lay out what a run leaves behind."""
    for name in (f"blobs/ab/{HASH}", f"agent/{SHORT}/agent.py", "runs/dead/0/spool.1"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x" * 50_000)
    (root / "trees" / HASH).mkdir(parents=True)
    os.link(root / "blobs" / "ab" / HASH, root / "trees" / HASH / "weights")
    (root / "blobs" / "ab" / HASH).chmod(0o444)
    (root / "runs" / "dead" / "0" / "agent.json").write_text(json.dumps({"agent": 1, "worker": 999_999_999}))


def cache(home: Path) -> Path:
    root = home / ".cache" / "muster"
    fill(root)
    return root


def trust_us(home: Path, *others: str, end: str = "\n") -> Path:
    file = home / ".ssh" / "authorized_keys"
    file.parent.mkdir(mode=0o700)
    file.write_text("\n".join([*others[:1], f"ssh-ed25519 {BLOB} muster@here", *others[1:]]) + end)
    file.chmod(0o600)
    return file


def test_a_machine_without_anything_of_ours(machine: HereConnection) -> None:
    assert survey(machine, BLOB).empty


def test_the_survey_names_everything_with_its_size(machine: HereConnection, home: Path) -> None:
    root = cache(home)
    file = trust_us(home, "ssh-rsa AAAA old", "ssh-ed25519 BBBB muster@other")
    (root / "envs").mkdir()
    found = survey(machine, BLOB)
    assert {Path(part.path).name: part.kind for part in found.parts} == {
        "blobs": "cache", "trees": "cache", "agent": "cache", "envs": "environment and other files", "dead": "run",
    }  # fmt: skip
    assert 150_000 < found.size < 300_000  # 50 kB each, and the hard link counts once
    assert found.keys == (f"{file}:2",) and found.foreign == ("muster@other",)
    assert found.roots == ((str(root), True),) and not found.alive and not found.processes


def test_all_of_it_goes_and_the_rest_stays(machine: HereConnection, home: Path) -> None:
    cache(home)
    file = trust_us(home, "ssh-rsa AAAA old", "ssh-ed25519 BBBB muster@other")
    left = remove(machine, BLOB, survey(machine, BLOB))
    assert left.empty and left.foreign == ("muster@other",)
    assert file.read_text() == "ssh-rsa AAAA old\nssh-ed25519 BBBB muster@other\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["authorized_keys"]
    assert list((home / ".cache").iterdir()) == []


@pytest.mark.parametrize("files", [(), ("compiled.py",)])
def test_the_folder_that_pytorch_makes_goes_if_it_is_empty(
    machine: HereConnection, home: Path, monkeypatch: pytest.MonkeyPatch, files: Sequence[str]
) -> None:
    cache(home)
    monkeypatch.setenv("TMPDIR", str(home))
    folder = home / f"torchinductor_{getpass.getuser()}"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    assert remove(machine, BLOB, survey(machine, BLOB)).empty
    assert folder.exists() == bool(files)


def test_a_last_line_without_newline_and_a_linked_file_survive(machine: HereConnection, home: Path) -> None:
    file = trust_us(home, "ssh-rsa AAAA old", "ssh-rsa CCCC last", end="")
    real = file.rename(home / "dotfile")
    file.symlink_to("../dotfile")
    assert remove(machine, BLOB, survey(machine, BLOB)).empty
    assert file.is_symlink() and real.read_text().splitlines() == ["ssh-rsa AAAA old", "ssh-rsa CCCC last"]


def test_a_file_that_held_only_our_key_goes_with_its_empty_folder(machine: HereConnection, home: Path) -> None:
    file = trust_us(home)
    assert remove(machine, BLOB, survey(machine, BLOB)).empty
    assert not file.parent.exists()


def test_links_are_never_followed(machine: HereConnection, home: Path) -> None:
    root = cache(home)
    precious = home / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("years of work")
    for link in (root / "trees" / HASH / "data", root / "runs" / "dead" / "inputs", root / "shortcut"):
        link.symlink_to(precious)
    assert remove(machine, BLOB, survey(machine, BLOB)).empty
    assert (precious / "thesis").read_text() == "years of work" and not root.exists()


@pytest.mark.parametrize("what", ["runs", "blobs"])
def test_a_linked_folder_of_ours_is_taken_as_a_link(machine: HereConnection, home: Path, what: str) -> None:
    root = cache(home)
    elsewhere = (root / what).rename(home / "elsewhere")
    (root / what).symlink_to(elsewhere)
    count = len(list(elsewhere.rglob("*")))
    assert remove(machine, BLOB, survey(machine, BLOB)).empty
    assert not root.exists() and len(list(elsewhere.rglob("*"))) == count


def test_a_cache_that_is_itself_a_link_keeps_the_link_and_what_is_not_ours(machine: HereConnection, home: Path) -> None:
    disk = home / "disk"
    fill(disk)
    (disk / "own").write_text("mine")
    (home / ".cache").mkdir()
    (home / ".cache" / "muster").symlink_to(disk)
    left = remove(machine, BLOB, survey(machine, BLOB))
    assert left.empty and left.left_alone == (str(disk / "own"),)
    assert [path.name for path in disk.iterdir()] == ["own"]


def test_a_project_folder_loses_only_what_is_shaped_like_ours(machine: HereConnection, home: Path) -> None:
    root = home / "my work"
    fill(root)
    (root / "notes.txt").write_text("mine")
    (root / "runs" / "of-my-own").mkdir()
    (root / "agent" / "smith.txt").write_text("mine")
    roots = ("~/.cache/muster", "~/my work")
    left = remove(machine, BLOB, survey(machine, BLOB, roots), roots)
    assert left.empty
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()) == [
        f"agent/{SHORT}/agent.py", "agent/smith.txt", "notes.txt",
    ]  # fmt: skip
    assert (root / "runs" / "of-my-own").is_dir()


def test_what_came_after_the_list_was_shown_stays(machine: HereConnection, home: Path) -> None:
    root = cache(home)
    shown = survey(machine, BLOB)
    (root / "runs" / "new" / "0").mkdir(parents=True)
    left = remove(machine, BLOB, shown)
    assert [Path(part.path).name for part in left.parts] == ["new"]


def test_left_over_processes_end_and_a_reused_number_does_not(
    machine: HereConnection, home: Path, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    root = cache(home)
    place = root / "runs" / "dead" / "0"
    worker = spawn(home, "training.workers.worker", f"{place}/plan.json")
    child = spawn(place, "helper")
    stranger = spawn(home, "somebody else's")
    for number, pid in (("0", child.pid), ("1", stranger.pid)):
        (place.parent / number).mkdir(exist_ok=True)
        (place.parent / number / "agent.json").write_text(json.dumps({"agent": 1, "worker": pid}))
    found = survey(machine, BLOB)
    assert {process.pid for process in found.processes} == {worker.pid, child.pid}
    assert remove(machine, BLOB, found).empty
    assert worker.wait(60) != 0 and child.wait(60) != 0 and stranger.poll() is None


def test_a_number_counts_as_left_over_only_while_its_agent_has_not_ended(
    home: Path, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = home / "runs" / "one" / "0"
    folder.mkdir(parents=True)
    child = spawn(home, "a script's helper")
    (folder / "agent.json").write_text(json.dumps({"agent": 1, "worker": child.pid}))
    assert left(home, ListRemains("one"))["processes"] == []
    (folder / "agent.sock").touch()
    assert [line.split()[0] for line in left(home, ListRemains("one"))["processes"]] == [str(child.pid)]


@pytest.fixture
def live(home: Path) -> Iterator[Path]:
    """A cache with an ended run and one that goes on: a real agent with a worker."""
    root = cache(home)
    argv = ["{python}", "-c", SLEEPER, "training.workers.worker", "{folder}/plan.json"]
    start = Start("alive", "0", argv, env={}, files={}, links={}, lease=60.0, grace=0.5, defaults={})
    (home / AGENT).write_bytes(source())
    command = [sys.executable, str(home / AGENT), str(root), *start.title]
    subprocess.run(command, input=frame(start), capture_output=True, check=True, timeout=60)
    yield root
    attach = Attach("alive", "0", 0, 20.0)
    bye = json.dumps({"n": 1, "signal": 9}) + "\n" + json.dumps({"n": 2, "bye": True}) + "\n"
    command[3:] = attach.title
    subprocess.run(command, input=frame(attach) + bye.encode(), capture_output=True, timeout=60)


def test_a_live_run_keeps_what_it_needs(machine: HereConnection, home: Path, live: Path) -> None:
    file = trust_us(home)
    found = survey(machine, BLOB)
    assert found.alive == ("alive",) and not found.processes
    left = remove(machine, BLOB, found)
    assert left.alive == ("alive",) and not left.empty
    assert {Path(part.path).name for part in left.parts} == {"blobs", "trees", "agent", "alive"}
    assert BLOB in file.read_text() and (live / "runs" / "alive" / "0" / "agent.sock").exists()


def test_a_run_is_alive_where_only_its_coordinator_is(
    machine: HereConnection, home: Path, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    folder = cache(home) / "runs" / "alive" / "coordinator"
    folder.mkdir(parents=True)
    coordinator = spawn(folder, "training.exchange.group.coordinator_main")
    (folder / "agent.json").write_text(json.dumps({"agent": 1, "worker": coordinator.pid}))
    spawn(home, "agent.py", str(folder.parents[2]), "start", "alive", "coordinator")
    left = remove(machine, BLOB, survey(machine, BLOB))
    assert left.alive == ("alive",) and folder.is_dir() and coordinator.poll() is None


def test_files_on_their_way_belong_to_a_live_run(
    machine: HereConnection, home: Path, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    root = cache(home)
    spawn(home, "agent.py", str(root), "putfiles")
    left = remove(machine, BLOB, survey(machine, BLOB))
    assert left.alive == (PREPARED,) and (root / "trees" / HASH / "weights").exists()


def test_a_command_without_end_is_looked_at_in_part() -> None:
    """Anybody on the machine can start such a process; all of it would take minutes to look through."""
    agent = "agent.py /r start one 0"

    def alive(command: str) -> tuple[str, ...]:
        return survey(Says(f"\nself\t7\nps\n7 7 {command}\n".encode()), BLOB, ["/r"]).alive

    assert alive(agent) == alive(" " + "x" * 4000 + agent) == ("one",)
    assert alive("x" * 5000 + agent) == alive("agent.py x start " * 100_000) == ()


_WORD = (
    st.sampled_from(["part", "root", "group", "key", "left", "foreign", "1", "²", "9" * 5000, "/r/x", "/r", "/r/../x"])
    | st.text()
)


@settings(max_examples=50)
@given(st.lists(st.lists(_WORD, max_size=3).map("\t".join), max_size=8).map("\n".join))
def test_whatever_a_machine_says_is_read_without_harm(text: str) -> None:
    inventory = survey(Says(f"self\t7\n{text}\nps\n7 9 a command\n".encode()), BLOB)
    tops = tuple(f"{root}/" for root, _ in inventory.roots)
    assert isinstance(inventory, Inventory) and {process.pid for process in inventory.processes} <= {7}
    assert all(part.path.startswith(tops) and "/../" not in part.path for part in inventory.parts)


def test_a_run_that_another_machine_carries_in_the_same_home_is_alive(machine: HereConnection, home: Path) -> None:
    lease = cache(home) / "runs" / "dead" / "0" / "lease"
    lease.write_text(f"{time.time():.0f} b/other-boot/pid:[1]\n")
    left = remove(machine, BLOB, survey(machine, BLOB))
    assert left.alive == ("dead",) and left.elsewhere == ("b",) and (lease.parent / "spool.1").exists()
    lease.write_text(f"{time.time() - 1000:.0f} b/other-boot/pid:[1]\n")
    assert remove(machine, BLOB, survey(machine, BLOB)).empty


def test_the_survey_knows_this_machine_by_its_own_lease(machine: HereConnection, home: Path) -> None:
    folder = cache(home) / "runs" / "dead" / "0"
    lease = Lease(folder)
    assert (folder / "lease").exists() and survey(machine, BLOB).alive == ()
    lease.release()
    assert not (folder / "lease").exists()


@pytest.fixture
def without_ps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let all programs but ``ps`` and ``lsof`` be found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            if program.name not in ("ps", "lsof") and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_without_ps_a_live_run_is_seen(machine: HereConnection, home: Path, live: Path, without_ps: Path) -> None:
    found = survey(machine, BLOB)
    assert found.alive == ("alive",) and not found.processes
    assert len(left(live, ListRemains("alive"))["processes"]) >= 2
    assert remove(machine, BLOB, found).alive == ("alive",)


def test_where_no_process_can_be_listed_nothing_is_removed() -> None:
    with pytest.raises(RemoteFileError, match="nobody knows whether a run goes on there"):
        survey(Says(b"self\t41\nps\n  42   42 sh -c other\n"), BLOB)
