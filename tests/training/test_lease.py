"""Who works in a folder that several machines may share."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput
from training.records.lease import LEASE, Lease, held_elsewhere, holder, this_machine
from training.records.run_files import FolderLock, is_live

HERE = "a/boot-1/pid:[7]"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("1000 b/boot-2/pid:[7]", "b"),
        ("1000 b//", "b"),
        (f"1000 {HERE}", ""),
        ("1000 renamed/boot-1/pid:[7]", ""),
        ("1000 a/boot-1/pid:[8]", "a"),
        ("1000 a/boot-0/pid:[7]", ""),
        ("700 b/boot-2/pid:[7]", ""),
        ("9999 b/boot-2/pid:[7]", "b"),
        ("", "another machine"),
        ("soon b/boot-2/pid:[7]", "b"),
    ],
)
def test_who_holds_a_folder(text: str, held: str) -> None:
    assert holder(text, HERE, 1010.0) == held


@pytest.mark.parametrize(("seconds", "held"), [(20.0, "a"), (31.0, "")])
def test_a_container_that_was_started_anew_has_its_folder_soon(seconds: float, held: str) -> None:
    """Its clock is that of the one before, so nothing has to be allowed for."""
    assert holder("1000 a/boot-1/pid:[8]", HERE, 1000.0 + seconds) == held


@given(st.text(max_size=80))
def test_whatever_a_lease_says_it_is_read(text: str) -> None:
    assert isinstance(holder(text, HERE, 1010.0), str)


def test_a_lease_is_this_machines_own_and_goes(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    moment, _, machine = (tmp_path / LEASE).read_text().strip().partition(" ")
    assert machine == this_machine() and abs(time.time() - int(moment)) < 60
    assert held_elsewhere(tmp_path) == ""
    (tmp_path / LEASE).write_text(f"{moment} elsewhere/boot/pid:[1]")
    assert held_elsewhere(tmp_path) == "elsewhere"
    lease.release()
    assert not (tmp_path / LEASE).exists()


def test_a_run_folder_that_another_machine_works_in_is_live_and_not_taken(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert (tmp_path / LEASE).exists()
    lock.release()
    assert not is_live(tmp_path) and not (tmp_path / LEASE).exists()
    (tmp_path / LEASE).write_text(f"{time.time():.0f} elsewhere/boot/pid:[1]")
    assert is_live(tmp_path)
    with pytest.raises(BadInput, match="elsewhere, which shares this folder, is working on this run"):
        FolderLock(tmp_path).acquire()


def test_a_lease_that_is_removed_does_not_come_back(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    (tmp_path / LEASE).unlink()
    lease.renew()
    assert not (tmp_path / LEASE).exists()
    lease.release()
