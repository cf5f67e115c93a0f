"""One password, then our key: on real servers with passwords, and the script by itself in a home folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.ssh.access import INSTALL, check_access, install_key, own_key, own_key_path, read_own_key
from distributed.ssh.auth import Prompts
from distributed.ssh.connection import SshConnection
from distributed.ssh.errors import PasswordRefused, Stage, UserRefused
from profiles.errors import BadInput
from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from tests.lab.ssh_setup import configured

SECRET = "correct horse 7"
LINE = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOurs muster@here"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of this machine's user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


# --- our key ---


def test_the_key_is_made_once_and_for_this_user_only(home: Path) -> None:
    first = own_key()
    assert first.path == home / ".ssh" / "muster_ed25519"
    assert [path.stat().st_mode & 0o777 for path in (first.path, first.path.parent)] == [0o600, 0o700]
    assert own_key() == first
    assert sorted(path.name for path in first.path.parent.iterdir()) == ["muster_ed25519", "muster_ed25519.pub"]


def test_openssh_reads_the_key(home: Path) -> None:
    key = own_key()
    derived = subprocess.run(["ssh-keygen", "-yf", str(key.path)], capture_output=True, text=True, check=True).stdout
    assert derived.split()[:2] == key.line.split()[:2]
    assert Path(f"{key.path}.pub").read_text().strip() == key.line


def test_without_a_key_there_is_none() -> None:
    assert read_own_key() is None


def test_a_spoilt_key_is_told_and_kept() -> None:
    own_key_path().parent.mkdir()
    own_key_path().write_text("not a key")
    with pytest.raises(BadInput, match="muster_ed25519: not a key"):
        own_key()
    assert own_key_path().read_text() == "not a key"


# --- the script ---


def install(home: Path, shell: str = "sh") -> str:
    done = subprocess.run([shell, "-c", INSTALL], input=f"{LINE}\n", capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[0]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_new_file_has_narrow_permissions_and_twice_adds_nothing(home: Path, shell: str) -> None:
    assert [install(home, shell), install(home, shell)] == ["added", "present"]
    file = home / ".ssh" / "authorized_keys"
    assert file.read_text() == LINE + "\n"
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]


@pytest.mark.parametrize("before", ["ssh-rsa AAAA old", "ssh-rsa AAAA old\n", "", f"# {LINE}\n"])
def test_what_was_there_stays_whole(home: Path, before: str) -> None:
    file = home / ".ssh" / "authorized_keys"
    file.parent.mkdir(mode=0o700)
    file.write_text(before)
    file.chmod(0o640)
    assert [install(home), install(home)] == ["added", "present"]
    assert file.read_text() == before + ("\n" if before and not before.endswith("\n") else "") + LINE + "\n"
    assert file.stat().st_mode & 0o777 == 0o640


def test_permissions_that_sshd_refuses_are_narrowed(home: Path) -> None:
    folder = home / ".ssh"
    folder.mkdir()
    folder.chmod(0o777)
    install(home)
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_linked_file_is_written_through(home: Path) -> None:
    real = home / "dotfiles"
    real.write_text("ssh-rsa AAAA old\n")
    (home / ".ssh").mkdir(mode=0o700)
    (home / ".ssh" / "authorized_keys").symlink_to(real)
    assert install(home) == "added"
    assert LINE in real.read_text() and (home / ".ssh" / "authorized_keys").is_symlink()


# --- real servers ---


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    passwords = ("PasswordAuthentication no", "UsePAM yes", "KbdInteractiveAuthentication yes")
    specs = [
        HostSpec("plain", password=SECRET, key=False),
        HostSpec("asks", password=SECRET, key=False, sshd_options=passwords),
        HostSpec("only", password=SECRET, sshd_options=("PubkeyAuthentication no",)),
        HostSpec("elsewhere", password=SECRET, key=False, sshd_options=("AuthorizedKeysFile /etc/nobody/%u",)),
        HostSpec("code", password=SECRET, key=False, sshd_options=("AuthenticationMethods password,publickey",)),
        HostSpec("open", password=SECRET, key=False, sshd_options=("StrictModes yes",)),
    ]
    specs += [
        HostSpec(Path(shell).name, password=SECRET, key=False, shell=shell)
        for shell in map(shutil.which, ("fish", "tcsh"))
        if shell
    ]
    with Lab(*specs) as built:
        yield built


def keys(host: LabHost) -> str:
    return (host.files / ".ssh" / "authorized_keys").read_text()


@pytest.mark.lab
@pytest.mark.parametrize("name", ["plain", "asks", "fish", "tcsh"])
def test_one_password_then_the_key_alone(lab: Lab, name: str) -> None:
    try:
        host = lab[name]
    except KeyError:
        pytest.skip(f"{name} is not installed")
    before = check_access(lab.target(name))
    assert (before.failed, before.cause, before.password_possible) == (Stage.LOGIN, "no_key_accepted", True)
    assert f"machines access {name}: its password" in before.fix
    done = install_key(lab.target(name), SECRET)
    assert done.added and done.report.ok and done.report.authenticated_by == str(own_key_path())
    assert check_access(lab.target(name)).authenticated_by == str(own_key_path())
    assert not install_key(lab.target(name), SECRET).added
    assert keys(host) == done.key.line + "\n"
    with SshConnection.connect(lab.target(name)) as connection:
        assert connection.run(["echo", "$HOME"]).stdout == b"$HOME\n"
    (host.files / ".ssh" / "authorized_keys").unlink()


@pytest.mark.lab
@pytest.mark.parametrize("name", ["plain", "asks"])
def test_a_wrong_password_changes_nothing(lab: Lab, name: str) -> None:
    with pytest.raises(PasswordRefused, match=f"{name}: the password for user 'root' was refused") as caught:
        install_key(lab.target(name), "wr0ng horse")
    assert "wr0ng" not in repr(caught.value) + str(caught.value.__dict__)
    assert not (lab[name].files / ".ssh" / "authorized_keys").exists()


@pytest.mark.lab
def test_an_address_without_a_machine_is_no_route(lab: Lab) -> None:
    report = check_access(lab.target("plain", host=f"198.18.{lab.slot}.250"))
    assert (report.failed, report.cause) == (Stage.REACH, "no_route") and report.fix.startswith(
        "is it on, awake and in this network?"
    )


@pytest.mark.lab
def test_a_server_that_takes_no_keys_is_told_before_any_password(lab: Lab) -> None:
    report = check_access(lab.target("only"))
    assert (report.cause, report.password_possible) == ("password_only", False)
    assert "PubkeyAuthentication yes" in report.fix


@pytest.mark.lab
def test_a_server_that_reads_its_keys_elsewhere_is_told(lab: Lab) -> None:
    report = install_key(lab.target("elsewhere"), SECRET).report
    assert not report.ok and "Muster's key is in ~/.ssh/authorized_keys there, but" in report.problem
    assert "authorizedkeysfile" in report.fix


@pytest.mark.lab
def test_a_home_folder_that_others_may_write_to_is_told(lab: Lab) -> None:
    lab["open"].files.chmod(0o777)
    report = install_key(lab.target("open"), SECRET).report
    assert not report.ok and "chmod go-w /root" in report.fix


@pytest.mark.lab
def test_many_keys_before_it_do_not_use_up_the_attempts(lab: Lab, home: Path) -> None:
    files = []
    for number in range(8):
        path = home / f"k{number}"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        files.append(f"IdentityFile {path}")
    target = lab.target("plain", config_file=configured(lab.ssh_config, home, "\n".join(files)))
    assert check_access(target).password_possible
    assert install_key(target, SECRET).report.ok
    assert os.path.samefile(check_access(target).authenticated_by, own_key_path())
    (lab["plain"].files / ".ssh" / "authorized_keys").unlink()


# --- prompts ---


def test_the_password_answers_one_hidden_question_only() -> None:
    prompts = Prompts(SECRET)
    assert prompts.answer("", "", []) == []
    assert prompts.answer("", "", [("Password: ", False)]) == [SECRET]
    assert prompts.answer("", "", [("Verification code: ", False)]) == [""]
    assert prompts.further_prompt == "Verification code:"


def test_the_same_question_again_means_a_wrong_password() -> None:
    prompts = Prompts(SECRET)
    assert [prompts.answer("", "", [("Password: ", False)]) for _ in range(2)] == [[SECRET], [""]]
    assert not prompts.further_prompt


def test_a_question_whose_answer_is_shown_gets_no_password() -> None:
    prompts = Prompts(SECRET)
    assert prompts.answer("", "", [("Favourite colour? ", True)]) == [""] and prompts.further_prompt


@pytest.mark.lab
def test_a_server_that_wants_a_code_as_well_is_told(lab: Lab) -> None:
    with pytest.raises(UserRefused, match="code: user 'root' needs a second proof"):
        install_key(lab.target("code"), SECRET)
