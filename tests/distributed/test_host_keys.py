"""known_hosts: read as OpenSSH reads it, written so that OpenSSH reads it."""

from __future__ import annotations

import base64
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.ssh.keys.host_keys import (
    HostKeyInfo,
    HostKeyStatus,
    KnownHosts,
    authority_of,
    is_revoked,
    known_name,
    parse_line,
    remember,
)
from tests.lab.ssh_setup import make_key, public_key

needs_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def key(name: str = "studio", blob: bytes = b"\0\0\0\x0bssh-ed25519AAAA") -> HostKeyInfo:
    return HostKeyInfo("studio", name, "ssh-ed25519", blob)


def judge(text: str, info: HostKeyInfo) -> HostKeyStatus:
    return KnownHosts(entry for line in text.splitlines() if (entry := parse_line(line))).judge(info)


def line(hosts: str, info: HostKeyInfo, marker: str = "") -> str:
    return f"{marker} {hosts} {info.key_type} {base64.b64encode(info.blob).decode()} comment"


def test_a_key_is_known_under_all_its_names() -> None:
    lines = [line("studio,198.18.2.13", key()), line("|1|c2FsdA==|ZGlnZXN0", key()), line("pi", key(blob=b"other"))]
    lines.append(line("gone", key(), "@revoked"))
    known = KnownHosts(entry for one in lines if (entry := parse_line(one)))
    assert known.names_of(key().blob) == ("studio", "198.18.2.13", "a hashed name")


@pytest.mark.parametrize(
    ("hosts", "name", "verdict"),
    [
        ("studio", "studio", HostKeyStatus.KNOWN),
        ("a,studio,b", "studio", HostKeyStatus.KNOWN),
        ("STUDIO", "studio", HostKeyStatus.KNOWN),
        ("*.local", "studio.local", HostKeyStatus.KNOWN),
        ("*.local,!studio.local", "studio.local", HostKeyStatus.UNKNOWN),
        ("stud?o", "studio", HostKeyStatus.KNOWN),
        ("[studio]:2222", "[studio]:2222", HostKeyStatus.KNOWN),
        ("[studio]:2222", "studio", HostKeyStatus.UNKNOWN),
        ("[s]tudio", "studio", HostKeyStatus.UNKNOWN),
        ("other", "studio", HostKeyStatus.UNKNOWN),
    ],
)
def test_patterns_cover_what_openssh_says(hosts: str, name: str, verdict: HostKeyStatus) -> None:
    assert judge(line(hosts, key(name)), key(name)) is verdict


def test_another_key_is_a_change_and_a_second_known_key_is_not() -> None:
    old, new = key(), key(blob=b"other")
    assert judge(line("studio", old), new) is HostKeyStatus.CHANGED
    assert judge(line("studio", old) + "\n" + line("studio", new), new) is HostKeyStatus.KNOWN


def test_a_revoked_key_is_refused_even_if_known() -> None:
    assert judge(line("studio", key()) + "\n" + line("*", key(), "@revoked"), key()) is HostKeyStatus.REVOKED


def test_a_certificate_authority_is_no_host_key() -> None:
    assert judge(line("*", key(blob=b"ca"), "@cert-authority"), key()) is HostKeyStatus.UNKNOWN


@settings(max_examples=50)
@given(st.text(max_size=80))
def test_any_line_is_read_or_passed_over(text: str) -> None:
    entry = parse_line(text)
    assert entry is None or entry.covers("studio") in (True, False)


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("name", ["studio", "[fe80::1]:2222"])
def test_what_is_remembered_is_known(tmp_path: Path, name: str, hashed: bool) -> None:
    path = tmp_path / "new" / "known_hosts"
    remember(key(name), path, hashed)
    assert KnownHosts.read([path]).judge(key(name)) is HostKeyStatus.KNOWN
    assert ("studio" in path.read_text()) is (name == "studio" and not hashed)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_last_line_does_not_swallow_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text("other ssh-ed25519 AAAA")
    remember(key(), path)
    assert KnownHosts.read([path]).judge(key()) is HostKeyStatus.KNOWN


def test_many_may_remember_at_once(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: remember(key(f"host{number}"), path), range(40)))
    known = KnownHosts.read([path])
    assert all(known.judge(key(f"host{number}")) is HostKeyStatus.KNOWN for number in range(40))


@pytest.mark.slow
@needs_keygen
@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_fingerprint_and_command_are_those_of_ssh_keygen(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "k"
    make_key(file, kind)
    key_type, blob = Path(f"{file}.pub").read_text().split()[:2]
    info = HostKeyInfo("m", "m", key_type, base64.b64decode(blob))
    printed = subprocess.run(["ssh-keygen", "-lf", f"{file}.pub"], capture_output=True, text=True, check=True).stdout
    assert info.fingerprint in printed.split()
    assert info.compare_command == f"ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub"


@needs_keygen
@pytest.mark.parametrize("hashed", [False, True])
def test_ssh_keygen_finds_what_we_wrote(tmp_path: Path, hashed: bool) -> None:
    file, path = tmp_path / "k", tmp_path / "known_hosts"
    make_key(file)
    blob = base64.b64decode(Path(f"{file}.pub").read_text().split()[1])
    remember(HostKeyInfo("m", known_name("studio", 2222), "ssh-ed25519", blob), path, hashed)
    assert subprocess.run(["ssh-keygen", "-F", "[studio]:2222", "-f", str(path)], capture_output=True).returncode == 0
    subprocess.run(["ssh-keygen", "-R", "[studio]:2222", "-f", str(path)], capture_output=True, check=True)
    assert path.read_text() == ""


@dataclass(frozen=True)
class Authority:
    """A certificate authority with a folder for its files."""

    folder: Path
    key: Path

    def certified(self, name: str, *options: str, kind: str = "ed25519") -> HostKeyInfo:
        """Return a new host key of the machine ``name``, certified with these options of ssh-keygen."""
        host_key = self.folder / "host_key"
        make_key(host_key, kind)
        words = ["ssh-keygen", "-q", "-s", str(self.key), "-I", "lab", *options, f"{host_key}.pub"]
        subprocess.run(words, check=True)
        key_type, blob = public_key(host_key).split()
        certificate = public_key(Path(f"{host_key}-cert")).split()[1]
        return HostKeyInfo("studio", name, key_type, base64.b64decode(blob), base64.b64decode(certificate))

    def line(self, hosts: str, marker: str = "@cert-authority") -> str:
        return f"{marker} {hosts} {public_key(self.key)}"


@pytest.fixture(scope="module", params=["ed25519", "rsa", "ecdsa"])
def authority(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Authority:
    folder = tmp_path_factory.mktemp("authority")
    make_key(folder / "ca", request.param)
    return Authority(folder, folder / "ca")


@needs_keygen
@pytest.mark.parametrize(
    ("name", "options", "verdict"),
    [
        ("studio", ("-h", "-n", "other,studio"), HostKeyStatus.KNOWN),
        ("[studio]:2222", ("-h", "-n", "studio"), HostKeyStatus.KNOWN),
        ("studio.lan", ("-h", "-n", "*.lan"), HostKeyStatus.KNOWN),
        ("studio", ("-h",), HostKeyStatus.KNOWN),  # for every host: PROTOCOL.certkeys
        ("studio", ("-h", "-n", "other"), HostKeyStatus.UNKNOWN),
        ("studio", ("-n", "studio"), HostKeyStatus.UNKNOWN),  # of a user
        ("studio", ("-h", "-n", "studio", "-V", "20200101:20210101"), HostKeyStatus.UNKNOWN),
    ],
)
def test_a_certificate_holds_for_its_hosts_and_its_time(
    authority: Authority, name: str, options: tuple[str, ...], verdict: HostKeyStatus
) -> None:
    assert judge(authority.line("*"), authority.certified(name, *options)) is verdict


@needs_keygen
def test_an_authority_is_trusted_with_the_hosts_of_its_line_until_it_is_revoked(authority: Authority) -> None:
    shown = authority.certified("studio", "-h", "-n", "studio")
    assert judge(authority.line("*.lan"), shown) is HostKeyStatus.UNKNOWN
    assert judge(authority.line("studio", ""), shown) is HostKeyStatus.CHANGED  # its key is a host's, not an authority
    revoked = authority.line("studio") + "\n" + authority.line("*", "@revoked")
    assert judge(revoked, shown) is HostKeyStatus.REVOKED
    assert judge(line("studio", shown), replace(shown, certificate=b"")) is HostKeyStatus.KNOWN


@needs_keygen
def test_a_certificate_that_was_changed_certifies_nothing(authority: Authority) -> None:
    whole = authority.certified("studio", "-h", "-n", "studio").certificate
    assert authority_of(whole, "studio") is not None
    assert authority_of(whole.replace(b"studio", b"studia"), "studia") is None


@given(st.binary(max_size=200))
def test_no_bytes_are_taken_for_a_certificate(data: bytes) -> None:
    assert authority_of(data, "studio") is None


@needs_keygen
def test_revoked_keys_are_read_as_lines_and_as_the_list_of_ssh_keygen(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        make_key(tmp_path / name)
    shown = {}
    for name in ("good", "bad"):
        key_type, blob = public_key(tmp_path / name).split()
        shown[name] = HostKeyInfo("studio", "studio", key_type, base64.b64decode(blob))
    (tmp_path / "lines").write_text(f"# lost\n{public_key(tmp_path / 'bad')} of the studio\n")
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", tmp_path / "list", tmp_path / "bad.pub"], check=True)
    for file in ("lines", "list"):
        assert [is_revoked(shown[name], tmp_path / file) for name in ("good", "bad")] == [False, True]
    assert is_revoked(shown["good"], tmp_path / "missing")
