"""Answers questions to a machine before and after a run: its identity, its files, what is left of a run there.

Standard library only, Python >= 3.9: part of :mod:`distributed.agent.program`.

Files are kept by the SHA-256 of their content under ``blobs/``; a tree under ``trees/`` is a folder of hard links to
them, so that what two runs have in common is sent and stored once.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.agent.requests import (
    Forget,
    GetFiles,
    ListMissing,
    ListRemains,
    ProbeMachine,
    PutFiles,
)
from distributed.agent.run_folders import snapshots
from distributed.system import interface_of, output, read
from training.hardware.resources import count_gpus, gpu_memory, gpus_are_alike, gpus_have_bf16, memory_limit
from training.records.lease import held_elsewhere

DIAL_SECONDS = 2.0
_PIECE = 1 << 16
"""Maximum bytes of a file that are lost when its stream breaks."""
_SLOW = ("transformers",)
"""Packages without compiled code of their own, which take seconds to load."""
_LOADS = """import ctypes, importlib, importlib.util, os, signal, sys
signal.alarm(15)  # a slow disk is no error
end = "dylib" if sys.platform == "darwin" else "so"
for name in sys.argv[1:]:
    print(name, flush=True)
    try:
        origin = importlib.util.find_spec(name).origin or ""
        library = os.path.join(os.path.dirname(origin), "lib", f"libtorch_python.{end}")
        if os.path.exists(library):  # all of torch's libraries, in a fifth of the time that its modules take
            try:
                ctypes.CDLL(library)
                continue
            except OSError:  # where it finds CUDA's by itself
                pass
        importlib.import_module(name)
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        os._exit(1)
os._exit(0)"""
"""``MODULE...``: loads each, and prints the first that fails."""
_HASH = re.compile(r"[0-9a-f]{64}")


def probe(root: Path, request: ProbeMachine) -> dict[str, Any]:
    """Return a report on this machine, with the secret word read from the port that is to be dialled."""
    replies: list[str] = []
    dialling = threading.Thread(target=lambda: replies.append(read_word(request.dial)), daemon=True)
    dialling.start()
    report = report_on(root, request.modules)
    dialling.join(2 * DIAL_SECONDS)
    return {**report, "dialled": replies[0] if replies else ""}


def read_word(dial: str) -> str:
    """Return the first data sent at ``HOST PORT``; empty where the connection fails."""
    try:
        host, port = dial.split()
        with socket.create_connection((host, int(port)), timeout=DIAL_SECONDS) as connection:
            return connection.recv(64).decode("ascii", "replace")
    except (OSError, ValueError):
        return ""


def report_on(root: Path, modules: Sequence[str]) -> dict[str, Any]:
    folder = next(parent for parent in (root, *root.parents) if parent.exists())
    address = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2] or "127.0.0.1"
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    loading = start_loading([module for module in modules if module not in (*missing, *_SLOW)])
    gpus = count_gpus()  # the driver's program may hang, and is then not run again
    report = {
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "torch": version("torch"),
        "missing": missing,
        "free": shutil.disk_usage(folder).free,
        "free_files": free_files(folder),
        "writable": os.access(folder, os.W_OK),
        "root": str(root),
        "system": platform.system(),
        "gpus": gpus,
        "memory": memory(),
        "gpu_memory": gpu_memory() if gpus else 0,
        "gpu_bf16": gpus > 0 and gpus_have_bf16(),
        "gpus_alike": gpus > 1 and gpus_are_alike(),
        "address": address,
        "interface": interface_of(address),
        "unloadable": load_problem(loading),
        "identity": identity(),
    }
    return {**report, "time": time.time()}  # last: it is compared with the time at which this arrives


def identity() -> list[str]:
    """Return what distinguishes machines cloned from one image: host name, system id, and boot id."""
    mac = output("sysctl", "-n", "kern.uuid", "kern.bootsessionuuid").split() if sys.platform == "darwin" else []
    return [platform.node(), *(mac or (read("/etc/machine-id"), read("/proc/sys/kernel/random/boot_id")))]


def start_loading(modules: list[str]) -> subprocess.Popen[str]:
    """Start loading modules in a separate process, which a module built for another processor would kill."""
    words = [sys.executable, "-c", _LOADS, *modules]
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def load_problem(loading: subprocess.Popen[str]) -> str:
    """Return the first module that cannot be loaded, and why; empty on success or timeout."""
    printed, _ = loading.communicate()
    if loading.returncode == -signal.SIGALRM:
        return ""
    if loading.returncode < 0:
        return f"{printed.split()[-1] if printed.split() else 'its packages'}: killed by signal {-loading.returncode}"
    return printed.splitlines()[-1][:500] if loading.returncode else ""


def free_files(folder: Path) -> int:
    """Return the number of free inodes; -1 where the file system does not limit them."""
    file_system = os.statvfs(folder)
    return file_system.f_favail if file_system.f_files else -1


def version(package: str) -> str:
    import importlib.metadata  # a third of this program's start

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def memory() -> int:
    """Return the bytes of memory, or the limit of its control groups; 0: unknown."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
    return min(total, memory_limit() or total)


def blob_path(root: Path, name: str) -> Path:
    """Return the path of the content with this hash.

    Raises:
        ValueError: not a SHA-256 in hexadecimal.
    """
    if not _HASH.fullmatch(name):
        raise ValueError(f"not a content hash: {name!r:.80}")
    return root / "blobs" / name[:2] / name


def missing(root: Path, request: ListMissing) -> dict[str, Any]:
    """Return the trees and blobs that are missing, and how many bytes of each blob have arrived."""
    blobs = [name for name in request.blobs if not blob_path(root, name).is_file()]
    begun = {name: max(map(size_of, partial_files(root, name)), default=0) for name in blobs}
    return {
        "root": str(root),
        "trees": [name for name in request.trees if not (root / "trees" / name).is_dir()],
        "blobs": blobs,
        "begun": {name: size for name, size in begun.items() if size},
    }


def partial_files(root: Path, name: str) -> list[Path]:
    """Return the partial files that interrupted transfers of a blob have left."""
    # One pattern for all: each new one would be compiled, and a data set has thousands of blobs.
    return [path for path in blob_path(root, name).parent.glob("*.part") if path.name.startswith(f"{name}.")]


def size_of(path: Path) -> int:
    """Return the size of a file that another transfer may remove at any moment; 0 if it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def put(root: Path, request: PutFiles) -> dict[str, Any]:
    """Receive blobs and build trees of them."""
    # tarfile itself would read only the first of several gzip members
    with gzip.open(sys.stdin.buffer) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                store(root, member.name, content, request.begun.get(member.name, 0))
    for name, files in request.trees.items():
        build_tree(root, name, files)
    return {}


def store(root: Path, name: str, content: Any, begun: int = 0) -> None:
    """Write one blob; it appears atomically, and only if its content has the claimed hash.

    Partial data is kept when the stream breaks; the next transfer continues after its first ``begun`` bytes.

    Raises:
        ValueError: it has another hash, or its beginning is gone.
    """
    path = blob_path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{name}.{_token()}.part")
    digest = take_over(root, name, partial, begun)
    try:
        with open(partial, "ab") as out:
            while chunk := content.read(_PIECE):
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != name:
            raise ValueError(f"{name}: damaged in transfer")
        os.chmod(partial, 0o444)
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        if not (isinstance(error, FileNotFoundError) and path.is_file()):  # else another transfer was faster
            raise
    for left in partial_files(root, name):
        with contextlib.suppress(FileNotFoundError):
            left.unlink()


def _token() -> str:
    """Return a word of one's own: process numbers are equal in containers that share a folder."""
    return os.urandom(8).hex()


def take_over(root: Path, name: str, partial: Path, size: int) -> Any:
    """Make the arrived data of a blob the beginning of ``partial``; return its hash so far.

    A transfer that still waits on a dead connection keeps the old file open and writes nothing more.
    """
    digest = hashlib.sha256()
    if not size:
        return digest
    existing = next((path for path in partial_files(root, name) if size_of(path) >= size), None)
    if existing is None:
        raise ValueError(f"{name}: its first part is missing")
    os.rename(existing, partial)
    os.truncate(partial, size)
    with open(partial, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest


def build_tree(root: Path, name: str, files: Mapping[str, str]) -> None:
    """Link blobs into a folder, which appears atomically.

    Raises:
        ValueError: two files have one name here, or a path leaves the folder.
    """
    folder = root / "trees" / name
    partial = folder.with_name(f".{name}.{_token()}.part")
    try:
        for relative, blob in files.items():
            place_blob(blob_path(root, blob), partial, relative)
        partial.rename(folder)
    except (OSError, ValueError):
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():  # else another run was faster
            raise


def place_blob(blob: Path, folder: Path, relative: str) -> None:
    """Give a blob a path in a folder."""
    target = Path(os.path.normpath(folder / relative))
    if folder not in target.parents:
        raise ValueError(f"a path that leaves its tree: {relative!r:.200}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):  # to write there would change the other one's blob
        raise ValueError(f"two files have the name {relative!r:.200} there: it takes names that differ in case as one")
    try:
        os.link(blob, target)
    except OSError:
        shutil.copyfile(blob, target)


def get(root: Path, request: GetFiles) -> None:
    """Send a folder of a worker."""
    fetch(root / "runs" / request.run / request.rank, request.name, sys.stdout.buffer)


def fetch(folder: Path, name: str, out: Any) -> None:
    """Write the names and sizes of the plain files under ``folder / name`` as one line, then their content.

    Raises:
        OSError: a file cannot be read, or has changed.
    """
    paths = sorted(path for path in (folder / name).rglob("*") if path.is_file() and not path.is_symlink())
    sizes = {path: path.stat().st_size for path in paths}
    names = {path.relative_to(folder).as_posix(): size for path, size in sizes.items()}
    out.write(json.dumps({"files": names}).encode() + b"\n")
    for path, size in sizes.items():
        with open(path, "rb") as content:
            while size:
                piece = content.read(min(1 << 20, size))
                if not piece:
                    raise OSError(f"{path} became shorter while it was sent")
                out.write(piece)
                size -= len(piece)
    out.flush()


def processes() -> list[tuple[int, int, str]]:
    """Return process id, group and command of all live processes.

    Raises:
        OSError: they cannot be listed.
    """
    table = [line.split(None, 2) for line in output("ps", "-axww", "-o", "pid=,pgid=,command=").splitlines()]
    rows = [(int(row[0]), int(row[1]), row[2]) for row in table if len(row) == 3]
    rows = rows or [row for folder in Path("/proc").glob("[0-9]*") if (row := process_at(folder))]
    if os.getpid() not in [pid for pid, _, _ in rows]:
        raise OSError("no ps (the package procps) and no /proc: what runs here cannot be listed")
    return [row for row in rows if not row[2].endswith("<defunct>")]


def process_at(folder: Path) -> tuple[int, int, str] | None:
    """Return process id, group and command for a folder of ``/proc``; ``None`` if the process is gone."""
    try:
        state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        words = (folder / "cmdline").read_bytes().split(b"\0")
        row = int(folder.name), int(state[2]), b" ".join(words).decode(errors="replace").strip()
        return row if state[0] != "Z" else None
    except (OSError, ValueError, IndexError):
        return None


def forget_worker(root: Path, request: Forget) -> dict[str, Any]:
    """Remove the keys of a worker."""
    forget(root, request.run, request.rank)
    return {}


def forget(root: Path, run: str, rank: str) -> None:
    """Remove the keys of a worker whose agent and guard were killed before they could."""
    folder = root / "runs" / run / rank
    agent = re.compile(rf"agent\.(?:py|program) {re.escape(str(root))} start {re.escape(run)} {re.escape(rank)}( |$)")
    if not held_elsewhere(folder) and not any(agent.search(command) for _, _, command in processes()):
        shutil.rmtree(folder / "secrets", ignore_errors=True)


def left(root: Path, request: ListRemains) -> dict[str, list[Any]]:
    """Return the remaining processes of a run (its agents, its workers and their descendants) and its snapshots. Keys
    are removed where no agent is left to do it."""
    rows, run = processes(), request.run
    agent = re.compile(rf"agent\.(?:py|program) {re.escape(str(root))} (start|attach) {re.escape(run)}( |$)")
    folder = f"{root / 'runs' / run}/"
    worker_processes = [(pid, pgid) for pid, pgid, command in rows if "-m training." in command and folder in command]
    groups = {pgid for _, pgid in worker_processes}
    for state in Path(folder).glob("*/agent.json"):  # written by the agent
        # Else it has ended its worker, or that is on another machine: the process id may have been reused.
        if state.with_name("agent.sock").exists() and not held_elsewhere(state.parent):
            with contextlib.suppress(OSError, ValueError, KeyError):
                groups.add(int(json.loads(state.read_text())["worker"]))
    run_processes = [(pid, command) for pid, pgid, command in rows if pgid in groups or agent.search(command)]
    for secrets in Path(folder).glob("*/secrets"):
        forget(root, run, secrets.parent.name)
    lines = [f"{pid} {command[:200]}" for pid, command in run_processes]
    return {"processes": lines, "snapshots": [one for one in snapshots(Path(folder)) if not one["part"][0]]}
