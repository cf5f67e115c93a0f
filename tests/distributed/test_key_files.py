"""A key file that is none is told by what it is, with the command to mend it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.ssh.keys.key_files import explain_key, is_default, public_blob
from tests.lab.ssh_setup import make_key

ERROR = ValueError("Unable to load PEM file: MalformedFraming")


@pytest.mark.parametrize(
    ("content", "problem", "fix"),
    [
        ("PuTTY-User-Key-File-3: ssh-ed25519\r\nEncryption: none", "a key of PuTTY", "-O private-openssh -o"),
        ("ssh-ed25519 AAAA me@here", "the public half", "ssh-add"),
        ("-----BEGIN PUBLIC KEY-----\n", "the public half", "ssh-add"),
        ("ssh-rsa-cert-v01@openssh.com AAAA me", "a certificate", "name the private key"),
        ("---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----", "of ssh.com", "ssh-keygen -i -f"),
        ("", "empty", "correct 'key'"),
        ("hello", "no private key", "correct 'key'"),
        ("-----BEGIN " + "OPENSSH PRIVATE KEY-----\nAAA", "cannot be read", "ssh-keygen -y -f"),
    ],
)
def test_what_is_no_private_key_is_told_by_what_it_is(tmp_path: Path, content: str, problem: str, fix: str) -> None:
    (tmp_path / "gpu").write_text(content)
    said, hint = explain_key(tmp_path / "gpu", ERROR)
    assert problem in said and fix in hint and ("Malformed" in said) == (said.startswith("cannot be read"))


def test_the_private_half_beside_a_public_one_is_named(tmp_path: Path) -> None:
    make_key(tmp_path / "gpu_key")
    assert f"name {tmp_path / 'gpu_key'} instead" in explain_key(tmp_path / "gpu_key.pub", ERROR)[1]


def test_for_a_file_that_is_not_there_the_nearest_key_is_named(tmp_path: Path) -> None:
    assert "ssh-keygen -t ed25519 -f" in explain_key(tmp_path / "gpu-key", ERROR)[1]
    make_key(tmp_path / "gpu_key")
    (tmp_path / "gpu_key.pub").unlink()
    said, hint = explain_key(tmp_path / "gpu-key", ERROR)
    assert said == "there is no such file" and "gpu_key" in hint
    assert explain_key(tmp_path, ERROR)[0] == "a folder"


def test_the_public_half_is_taken_from_either_file(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    whole = public_blob(tmp_path / "key")
    assert whole and whole == public_blob(tmp_path / "key.pub")
    (tmp_path / "key.pub").unlink()
    assert public_blob(tmp_path / "key") == b""


def test_only_the_names_that_ssh_looks_for_may_be_missing_without_a_word() -> None:
    said = subprocess.run(["ssh", "-F", "/dev/null", "-G", "a"], capture_output=True, text=True, check=True).stdout
    usual = [Path(line.split()[1]) for line in said.splitlines() if line.startswith("identityfile ")]
    assert usual and all(map(is_default, usual)) and not is_default(Path("~/.ssh/gpu"))


@settings(max_examples=20)  # ssh-keygen looks at each
@given(st.binary(max_size=100))
def test_any_file_is_explained_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any key"
    file.write_bytes(content)
    said, hint = explain_key(file, ERROR)
    assert said and hint and "\n" not in said + hint
