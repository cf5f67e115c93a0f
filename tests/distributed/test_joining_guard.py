"""What others have started on a machine that has joined ends with the permission, however the process ends."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
import pytest

from distributed.hosts.joined import door_status, pool_key, save_joined
from distributed.joining.door import JoinedMachine
from distributed.joining.guard import MARK, end_programs, mark_of
from distributed.joining.pairing.keys import JoiningKey
from distributed.joining.pools import JoinedPool, helper_identity, save_pool
from distributed.ssh.connection import SshConnection, SshTarget
from tests.distributed.joining import PROGRAM, RunningDoor
from tests.waiting import until


def is_over(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_a_join_that_is_killed_leaves_no_program_behind(door: RunningDoor) -> None:
    save_joined(JoinedMachine("studio", helper_identity().public))
    save_pool(JoinedPool("vm", JoiningKey(pool_key()).public, (door.address,), "studio"))
    joining = subprocess.Popen([*PROGRAM, "join"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: "studio" in door_status())
        with SshConnection.connect(SshTarget("s", "studio.joined")) as studio:
            left = studio.run(["sh", "-c", "(trap '' TERM HUP; sleep 600) >/dev/null 2>&1 & echo $!"])
        pid = int(left.stdout)
        assert not is_over(pid)
        joining.send_signal(signal.SIGKILL)
        until(lambda: is_over(pid))
    finally:
        joining.kill()
        joining.wait()


def test_programs_of_another_process_or_pool_go_on() -> None:
    marks = (mark_of("a" * 32, "mine"), mark_of("a" * 32, "other"))
    mine, other = (subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark}) for mark in marks)
    try:
        end_programs("mine", grace=1.0)
        end_programs("b" * 32, grace=1.0)
        assert is_over(mine.pid) and not is_over(other.pid)
        end_programs("a" * 32, grace=1.0)
        assert is_over(other.pid)
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
