"""``access`` and ``clean`` as a person meets them: on a terminal, with a real server that knows a password."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from tests.lab.ssh_setup import configured
from tests.lab.terminal import CLI, Terminal, environment

pytestmark = pytest.mark.lab

SECRET = "tr0ub4dor-and-3"


def headless(home: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, CLI, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=environment(home), cwd=home, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(HostSpec("box", password=SECRET, key=False), HostSpec("other", password=SECRET, key=False)) as built:
        yield built


@pytest.fixture
def hosts(lab: Lab, tmp_path: Path) -> list[str]:
    """Options that name the lab's hosts, with a known_hosts file that knows none of them."""
    config = configured(lab.ssh_config, tmp_path, f"UserKnownHostsFile {tmp_path / 'known_hosts'}")
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps({"machines": ["box", "other"], "ssh_config": config}))
    return ["--hosts", str(file)]


class Watch:
    """Looks through arguments and environments of all processes, here and in the lab, for a text."""

    def __init__(self, text: str) -> None:
        self.found: list[str] = []
        self.rounds = 0
        self._text = text.encode()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._end.wait(0.05):
            self.rounds += 1
            for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
                with contextlib.suppress(OSError):
                    if self._text in path.read_bytes():
                        self.found.append(str(path))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def files_with(text: str, *folders: Path) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_one_password_on_a_terminal_then_none_then_nothing_is_left(lab: Lab, tmp_path: Path, hosts: list[str]) -> None:
    key = lab["box"].folder / "host_key.pub"
    shown = subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True).stdout.split()[1]
    with Watch(SECRET) as watch:
        terminal = Terminal(tmp_path, "access", "box", *hosts)
        terminal.wait_for("Do the two match? [y/N]")
        assert shown in terminal.screen and "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in terminal.screen
        terminal.type("y")
        for typed, answer in (("wrong", "2 more tries"), ("wrong again", "one more try")):
            terminal.wait_for("Password of root at")
            terminal.type(typed)
            terminal.wait_for(answer)
        terminal.wait_for("Password of root at")
        terminal.type(SECRET)
        assert terminal.exit_code() == 0
    assert "was added to its ~/.ssh/authorized_keys" in terminal.screen
    assert watch.rounds > 3 and watch.found == []
    assert SECRET not in terminal.screen and "wrong again" not in terminal.screen
    assert files_with(SECRET, tmp_path, lab.folder) == []

    code, out = headless(tmp_path, "access", "box", *hosts, "--json")
    assert code == 0 and json.loads(out)["machines"][0]["authenticated_by"].endswith("muster_ed25519")

    (lab["box"].files / ".cache" / "muster" / "blobs" / "ab").mkdir(parents=True)
    assert headless(tmp_path, "clean", "box", *hosts)[0] == 2  # nobody is there to confirm
    terminal = Terminal(tmp_path, "clean", "box", *hosts)
    terminal.wait_for("remove all of this for good? [y/N]")
    assert "/root/.cache/muster" in terminal.screen and "/root/.ssh/authorized_keys:1" in terminal.screen
    terminal.type("y")
    assert terminal.exit_code() == 0 and "box: nothing of Muster is left" in terminal.screen
    assert list(lab["box"].files.rglob("*muster*")) == [] and not (lab["box"].files / ".ssh/authorized_keys").exists()
    assert headless(tmp_path, "access", "box", *hosts)[0] == 3


def test_three_wrong_passwords_are_enough(lab: Lab, tmp_path: Path, hosts: list[str]) -> None:
    # Where no known_hosts file remembers, an accepted key holds for the whole command.
    configured(lab.ssh_config, tmp_path, "UserKnownHostsFile none")
    terminal = Terminal(tmp_path, "access", "box", "--trust-new", *hosts)
    for _ in range(3):
        terminal.wait_for("Password of root at")
        terminal.type("wrong")
    assert terminal.exit_code() == 3
    assert "the password for user 'root' was refused" in terminal.screen


def test_no_password_given_is_no_attempt(tmp_path: Path, hosts: list[str]) -> None:
    terminal = Terminal(tmp_path, "access", "box", "--trust-new", *hosts)
    terminal.wait_for("Password of root at")
    terminal.type("")
    assert terminal.exit_code() == 3
    assert "no key was accepted" in terminal.screen


def test_who_lets_nobody_in_without_a_password_is_opened_by_one_command(tmp_path: Path, hosts: list[str]) -> None:
    code, out = headless(tmp_path, "machines", "check", "--trust-new", "--json", *hosts)
    assert code == 3 and "machines access root@" in out and "installs a key with its password" in out


def test_a_key_that_a_person_does_not_know_is_refused(tmp_path: Path, hosts: list[str]) -> None:
    terminal = Terminal(tmp_path, "access", *hosts)
    for name in ("box", "other"):
        terminal.wait_for(f"{name}: first contact")
        terminal.wait_for("[y/N]")
        terminal.type("n")
    assert terminal.exit_code() == 3
    rows = [line for line in terminal.screen.splitlines() if line.startswith(("MACHINE", "box   ", "other   "))]
    assert len(rows) == 3 and all(len(row) <= 80 for row in rows)
    assert rows[1].split() == ["box", "ok", "FAILED", "-", "-"]
    assert not (tmp_path / "known_hosts").exists()


def test_without_a_person_a_stranger_is_refused_unless_all_are_trusted(tmp_path: Path, hosts: list[str]) -> None:
    code, out = headless(tmp_path, "access", *hosts, "--json")
    machines = json.loads(out)["machines"]
    assert code == 3 and [machine["cause"] for machine in machines] == ["unknown_host_key"] * 2
    code, out = headless(tmp_path, "access", *hosts, "--trust-new", "--json")
    machines = json.loads(out)["machines"]
    assert code == 3 and [machine["cause"] for machine in machines] == ["no_key_accepted"] * 2
    assert all(machine["password_possible"] for machine in machines)


def test_a_changed_key_is_refused_by_every_command(lab: Lab, tmp_path: Path, hosts: list[str]) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"{lab['box'].address} {lab['other'].host_key}\n")
    for command in (["access", "box", "--trust-new"], ["clean", "box", "--yes"]):
        code, out = headless(tmp_path, *command, *hosts, "--json")
        machine = json.loads(out)["machines"][0]
        assert code == 3 and f"{known}:1" in machine["problem"] and "ssh-keygen -R" in machine["fix"]
    assert known.read_text().count("\n") == 1


@pytest.mark.parametrize("answers", [[], ["y", "y"]])
def test_ctrl_c_in_a_question_before_a_run_stops_the_command(
    answers: list[str], tmp_path: Path, hosts: list[str]
) -> None:
    """The keys are asked about by the threads that connect, the password by the command itself."""
    terminal = Terminal(tmp_path, "distributed-train", "nanogpt", *hosts)
    for answer in answers:
        terminal.wait_for("Do the two match? [y/N]")
        terminal.type(answer)
    terminal.wait_for("Password of root at" if answers else "Do the two match? [y/N]")
    terminal.interrupt()
    assert terminal.exit_code() == 130
    assert terminal.screen.endswith(" stopped\r\n") and "Traceback" not in terminal.screen
    assert terminal.screen.count("first contact") == max(1, len(answers)) and not (tmp_path / "output").exists()
