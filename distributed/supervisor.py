"""The background process of one distributed run: ``python -m distributed.supervisor``, its folder on standard input.

It holds the run folder, drives the run, and records how it ended; a watcher starts another one where it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

from distributed.agent.requests import RemoveRun
from distributed.hosts.file import RUN_HOSTS, load_hosts
from distributed.machine.link import MachineLink, link_to
from distributed.machine.pool import ConnectionPool
from distributed.run.lasting_run import GOES_ON
from distributed.run.watcher import watch_this_process
from distributed.ssh.command_log import keep_log
from distributed.supervision import Supervisor
from distributed.system import keep_awake
from profiles.errors import ExitCode, MusterError
from profiles.installation import command_words
from training.records.events import ErrorEvent, WarningEvent
from training.records.run_folder import RunFolder
from training.run.outcome import write_end
from training.run.processes import run_from_stdin
from training.run.requests.request_book import leave_request

_TRAINS = ("running", "paused")
"""Status of a run that another supervisor can take over."""


def supervise_folder(path: Path, lock: int | None = None) -> ExitCode:
    """Supervise the run in ``path`` and record in its folder how it ended.

    Args:
        lock: descriptor of the inherited lock, where the supervisor before was killed.
    """
    folder = RunFolder.take_over(path, lock)
    plan = folder.plan()
    trains = folder.metadata.status in _TRAINS and plan.has_coordinator and not plan.is_staged
    if lock is None:
        watcher = watch_this_process(path, folder.lock)
        try:
            return _supervise(folder, takes_over=trains)
        finally:  # released by now
            watcher.communicate()
    if trains:
        return _supervise(folder, takes_over=True)
    folder.close()  # its machines end it with their lease
    return ExitCode.RUN_FAILED


def _supervise(folder: RunFolder, takes_over: bool = False) -> ExitCode:
    path = folder.path
    with folder, ConnectionPool() as pool:
        try:
            hosts, dial = load_hosts(path / RUN_HOSTS), partial(link_to, pool=pool)
            while True:
                links = [dial(machine, hosts) for machine in hosts.machines]
                supervisor = Supervisor(folder, links, hosts.ssh_config, dial, partial(_leave_to_members, folder))
                outcome = supervisor.supervise(takes_over)
                if outcome.status == GOES_ON:
                    takes_over = False
                    continue
                if outcome.status == "completed" and (folder.metadata.attempt > 1 or takes_over):
                    _remove_earlier(links, folder.metadata.run_id)
                return ExitCode(outcome.exit_code)
        except MusterError as error:
            _leave_failure(folder, error)
            return error.exit_code
        except Exception as error:  # noqa: BLE001 - the process boundary: the folder's readers must see the failure
            traceback.print_exc()
            message = f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            _leave_failure(folder, MusterError(message, f"see {path / 'logs' / 'supervisor.log'}"))
            return ExitCode.RUN_FAILED


def _leave_to_members(folder: RunFolder) -> NoReturn:
    """End this process without ending the run, whose folder stays as it is."""
    attach = " ".join(command_words("runs", "attach", folder.metadata.run_id))
    message = f"its machines may train on by themselves: take the run up when one can be reached again, with {attach}"
    folder.append(WarningEvent(message=f"this computer has stopped looking for most members of the run; {message}"))
    folder.close(keys_stay=True)
    os._exit(int(ExitCode.RUN_FAILED))


def _remove_earlier(links: Sequence[MachineLink], run_id: str) -> None:
    """Remove what earlier attempts of a completed run, or agents that have ended by themselves, have left on machines,
    those included that took no part in it."""

    def remove(link: MachineLink) -> None:
        with contextlib.suppress(MusterError), contextlib.closing(link):
            link.ask(RemoveRun(run_id))

    with ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(remove, links))


def _leave_failure(folder: RunFolder, error: MusterError) -> None:
    with contextlib.suppress(MusterError):
        folder.append(ErrorEvent.of(error))
        write_end(folder, folder.append, "failed", error.exit_code, error.message)


def main() -> int:
    if len(sys.argv) > 1:  # of a watcher
        return _run(Path(sys.argv[1]), int(sys.argv[2]))
    path = run_from_stdin()
    return 0 if path is None else _run(path)


def _run(path: Path, lock: int | None = None) -> int:
    signal.signal(signal.SIGTERM, lambda *_: leave_request(path, "stop"))
    keep_log(path)
    awake = keep_awake()
    try:
        return int(supervise_folder(path, lock))
    finally:
        if awake is not None:
            awake.kill()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of lost connections must not delay the end
