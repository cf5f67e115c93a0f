"""Removes everything of Muster from a machine: cache, environments, run folders, processes, and finally its key.

A survey lists what is there, for the user to confirm; another survey over the same connection verifies the removal. A
live run keeps what it needs: its folder, the cache, and the key with which its supervisor reconnects. After a run
:func:`leftovers` asks every machine for remaining processes.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from pydantic import ValidationError

from distributed.agent.requests import ListRemains
from distributed.cleaning.clean_scripts import END, FORGET, REMOVE, SURVEY, WHERE
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import CACHE, Connection, Dial, link_to
from distributed.ssh.errors import RemoteFileError, SshError
from profiles.errors import MusterError
from training.records.events import SnapshotEvent
from training.records.lease import holder

_REMOVAL_TIMEOUT = 600.0
_SURVEY_TIMEOUT = 120.0
_CACHE = ("blobs", "trees", "agent")
_LONGEST_COMMAND = 4096
"""Maximum characters of a process's command that are examined: any user there may start one with 100,000."""
PREPARED = "(being prepared)"
"""Stands for a run whose files are being sent to the machine."""


@dataclass(frozen=True)
class InventoryPath:
    """A file or folder of Muster."""

    path: str
    size: int
    """Bytes on disk; hard links count once."""
    kind: str
    """``cache``, ``run`` or ``environment and other files``."""


@dataclass(frozen=True)
class OrphanProcess:
    """A process of a run whose agent is gone."""

    pid: int
    command: str


@dataclass(frozen=True)
class Inventory:
    """Everything of Muster on a machine."""

    parts: tuple[InventoryPath, ...] = ()
    keys: tuple[str, ...] = ()
    """``file:line`` of our key in authorized_keys."""
    processes: tuple[OrphanProcess, ...] = ()
    alive: tuple[str, ...] = ()
    """Runs that are alive there."""
    elsewhere: tuple[str, ...] = ()
    """Machines that share our folder and on which some of these runs are alive."""
    foreign: tuple[str, ...] = ()
    """Comments of keys of Muster on other machines; they are not removed."""
    left_alone: tuple[str, ...] = ()
    """Paths in our folder that are not ours."""
    roots: tuple[tuple[str, bool], ...] = ()
    """Our folders, and whether each is entirely ours."""

    @property
    def removable(self) -> tuple[InventoryPath, ...]:
        """The parts that no live run needs."""
        if not self.alive:
            return self.parts
        return tuple(part for part in self.parts if part.kind == "run" and _name(part.path) not in self.alive)

    @property
    def removable_size(self) -> int:
        """Bytes of these parts."""
        return sum(part.size for part in self.removable)

    @property
    def empty(self) -> bool:
        """Whether nothing of Muster is there."""
        return not (
            self.parts or self.keys or self.processes or self.alive or any(is_whole for _, is_whole in self.roots)
        )

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def survey(connection: Connection, blob: str, roots: Sequence[str] = (CACHE,)) -> Inventory:
    """List everything of Muster on a machine.

    Args:
        blob: base64 of our public key; empty where there is none.
        roots: our folders there.

    Raises:
        SshError: the connection was lost, or the machine does not answer in time.
    """
    done = connection.run(["sh", "-c", SURVEY, "sh", blob, *dict.fromkeys(roots)], timeout=_SURVEY_TIMEOUT)
    if b"\nps\n" not in b"\n" + done.stdout:
        problem = f"cannot look for Muster's files: {done.problem}"
        raise RemoteFileError(connection.machine, problem, "is sh there?")
    report, _, table = (b"\n" + done.stdout).decode(errors="replace").partition("\nps\n")
    answer, rows = _read(report), [row for line in table.splitlines() if (row := _row(line))]
    if answer.shell not in [pid for pid, _, _ in rows]:
        problem = "its processes cannot be listed, so nobody knows whether a run goes on there"
        raise RemoteFileError(connection.machine, problem, "install ps there (the package procps), or mount /proc")
    return _with_processes(connection, answer, rows, roots)


@dataclass(frozen=True)
class _Answer:
    """The output of a survey, without its table of processes."""

    inventory: Inventory
    groups: dict[int, str]
    """Runs by the process groups of their workers."""
    held: dict[str, str]
    """Runs that are alive on another machine with the same folder, with its name."""
    shell: int
    """Process id of the survey's shell; 0: unknown."""


def _read(text: str) -> _Answer:
    fields = [line.split("\t") for line in text.split("\n")]

    def of(kind: str, count: int) -> list[list[str]]:
        return [row[1:] for row in fields if row[0] == kind and len(row) == count + 1]

    roots = [(row[1], row[0] == "1") for row in of("root", 2)]
    paths = [_inventory_path(row[1], int(row[0]), roots) for row in of("part", 2) if _is_number(row[0])]
    inventory = Inventory(
        parts=tuple(path for path in paths if path is not None),
        keys=tuple(row[0] for row in of("key", 1)),
        foreign=tuple(row[0] for row in of("foreign", 1)),
        left_alone=tuple(row[0] for row in of("left", 1)),
        roots=tuple(roots),
    )
    now, system_identity = next(iter(of("here", 2)), ["", ""])
    clock = float(now) if _is_number(now) else 0.0  # with an unknown clock no lease counts as expired
    held = {run: name for run, lease in of("lease", 2) if (name := holder(lease, system_identity, clock))}
    groups = {int(row[0]): row[1] for row in of("group", 2) if _is_number(row[0])}
    shell = next((int(row[0]) for row in of("self", 1) if _is_number(row[0])), 0)
    return _Answer(inventory, groups, held, shell)


def _inventory_path(path: str, kilobytes: int, roots: Sequence[tuple[str, bool]]) -> InventoryPath | None:
    """Return the entry of a path; ``None`` outside our folders, as a machine's output is not trusted."""
    for root, _ in roots:
        inside = path.removeprefix(f"{root}/")
        if inside != path and ".." not in inside.split("/"):
            top_folder, _, remainder = inside.partition("/")
            kind = (
                "run"
                if top_folder == "runs" and remainder
                else "cache"
                if top_folder in _CACHE
                else "environment and other files"
            )
            return InventoryPath(path, kilobytes * 1024, kind)
    return None


def _with_processes(
    connection: Connection, answer: _Answer, rows: Sequence[tuple[int, int, str]], roots: Sequence[str]
) -> Inventory:
    """Add which runs are alive, and the remaining processes of the others."""
    inventory = answer.inventory
    folders = [*dict.fromkeys([*roots, *(root for root, _ in inventory.roots)])]
    alive = {run for _, _, command in rows if (run := _run_of_agent(command, folders))} | answer.held.keys()
    worker_groups = {pid: (pgid, run) for pid, pgid, command in rows if (run := _run_of_worker(command, folders))}
    orphaned_groups = {pgid for pgid, run in worker_groups.values() if run not in alive}
    possible_groups = {group for group, run in answer.groups.items() if run not in alive} - orphaned_groups
    candidates = [(pid, command) for pid, pgid, command in rows if pgid in possible_groups]
    pids_in_folders = _inside(connection, [pid for pid, _ in candidates], [root for root, _ in inventory.roots])
    left = [(pid, command) for pid, pgid, command in rows if pgid in orphaned_groups or pid in pids_in_folders]
    processes = tuple(OrphanProcess(pid, command) for pid, command in left)
    elsewhere = tuple(sorted(set(answer.held.values())))
    return replace(inventory, processes=processes, alive=tuple(sorted(alive)), elsewhere=elsewhere)


def _row(line: str) -> tuple[int, int, str] | None:
    fields = line.split(None, 2)
    numbers = len(fields) == 3 and _is_number(fields[0]) and _is_number(fields[1])
    return (int(fields[0]), int(fields[1]), fields[2].rstrip()[:_LONGEST_COMMAND]) if numbers else None


def _run_of_agent(command: str, folders: Sequence[str]) -> str:
    """Return the run whose agent, guard or session a process is, from the folder and the run in its command."""
    coming = re.search(r"agent\.py (.+) putfiles$", command)
    if coming and coming[1] in folders:
        return PREPARED
    match = re.search(r"agent\.py (.+) (?:start|attach) (\S+) \S+(?: |$)", command)
    return match[2] if match and match[1] in folders else ""


def _run_of_worker(command: str, folders: Sequence[str]) -> str:
    for folder in folders:
        match = re.search(rf"training\.worker.*{re.escape(folder)}/runs/([^/\s]+)", command)
        if match:
            return match[1]
    return ""


def _inside(connection: Connection, pids: Sequence[int], roots: Sequence[str]) -> set[int]:
    """Return the processes that work in a run folder of ours: a process id alone may have been reused."""
    if not pids:
        return set()
    done = connection.run(["sh", "-c", WHERE, "sh", *map(str, pids)])
    rows = [line.split("\t") for line in done.stdout.decode(errors="replace").splitlines()]
    tops = tuple(f"{root}/runs/" for root in roots)
    return {int(row[0]) for row in rows if len(row) == 2 and _is_number(row[0]) and row[1].startswith(tops)}


def remove(connection: Connection, blob: str, shown: Inventory, roots: Sequence[str] = (CACHE,)) -> Inventory:
    """Remove what was shown, and return what is left: an empty inventory on success.

    What is new or alive since it was shown is not touched. Our key is removed last, and only when nothing else is left:
    until then the machine stays accessible.

    Raises:
        SshError: the connection was lost.
    """
    current = survey(connection, blob, roots)
    orphan_pids = [str(process.pid) for process in current.processes if process in shown.processes]
    if orphan_pids:
        connection.run(["sh", "-c", END, "sh", *orphan_pids])
    shown_paths = {part.path for part in shown.parts}
    paths = [part for part in current.removable if part.path in shown_paths]
    if paths or current.roots:
        lines = "".join(f"{line}\n" for line in _removal(paths, current))
        connection.run(["sh", "-c", REMOVE], input=lines.encode("utf-8", "surrogateescape"), timeout=_REMOVAL_TIMEOUT)
    left = survey(connection, blob, roots)
    if left.keys and not (left.parts or left.processes or left.alive):
        done = connection.run(["sh", "-c", FORGET, "sh", blob])
        if not done.ok:
            problem = f"Muster's key stays in ~/.ssh/authorized_keys: {done.problem}"
            raise RemoteFileError(connection.machine, problem, "check the permissions and the free space there")
        left = survey(connection, blob, roots)
    return left


def _removal(paths: Sequence[InventoryPath], current: Inventory) -> list[str]:
    """Return the lines for the removal script; a folder that is entirely ours is removed entirely."""
    lines = [f"tree {part.path}" for part in paths]
    for root, is_whole in current.roots:
        lines.append(f"empty {root}/runs")
        if len(paths) == len(current.parts) and not current.alive:
            lines.append(f"tree {root}" if is_whole and _name(root) == "muster" else f"empty {root}")
    return lines


def leftovers(
    hosts: Hosts,
    run_id: str,
    prepare: Callable[[], object] = lambda: None,
    dial: Dial = link_to,
    on_snapshot: Callable[[SnapshotEvent], object] = lambda snapshot: None,
) -> dict[str, list[str] | MusterError]:
    """Return, by machine, the remaining processes of a run, or why the machine could not be asked.

    Args:
        prepare: called before the machines are asked, while connections are being made.
        on_snapshot: called with every snapshot on a machine, from any thread.
    """
    is_prepared = threading.Event()

    def ask(machine: Machine) -> list[str] | MusterError:
        link = dial(machine, hosts, None)
        try:
            link.connection()
            is_prepared.wait()
            answer = link.ask(ListRemains(run_id))
            left = answer.get("processes")
            for snapshot in _snapshots(answer.get("snapshots")):
                on_snapshot(snapshot)
            if not isinstance(left, list):
                raise SshError(machine.name, "it did not report which processes are left", "check there with ps -ax")
            return [str(process) for process in left]
        except MusterError as error:
            return error
        finally:
            link.close()

    with ThreadPoolExecutor(len(hosts.machines)) as pool:
        answers = pool.map(ask, hosts.machines)
        try:
            prepare()
        finally:
            is_prepared.set()
        return dict(zip((machine.name for machine in hosts.machines), answers))


def _snapshots(reported: object) -> Iterator[SnapshotEvent]:
    """Yield the snapshots reported by a machine; invalid entries are skipped."""
    for snapshot in reported if isinstance(reported, list) else ():
        with contextlib.suppress(ValidationError):
            fields = snapshot if isinstance(snapshot, dict) else {}
            yield SnapshotEvent.model_validate({"seconds": 0.0, **fields})


def _is_number(text: str) -> bool:
    """Whether a text is a number for ``int``; a machine may send anything."""
    return re.fullmatch("[0-9]{1,15}", text) is not None


def _name(path: str) -> str:
    return path.rpartition("/")[2]
