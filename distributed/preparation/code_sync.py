"""Code, data and model for remote machines: missing files are sent by content hash, in one compressed stream.

The worker of a run finds everything under ``inputs/`` of its folder, so that the plan is the same on every machine.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import platformdirs

from distributed.preparation.transfer import Tree, sources_of
from profiles.errors import BadInput
from profiles.installation import DISTRIBUTION, PLUGINS_FILE, TOP, plugins
from profiles.locations import with_files
from profiles.options import auxiliary_models
from profiles.quantities import bytes_text
from profiles.schema import Profile
from training.records.plan import JOB_FACTORY, RunPlan
from training.records.run_files import explain, sha256, write_atomically
from training.strategies.user_strategy import as_user_code
from training.tasks.registry import ENTRY_POINTS, inputs_of

IGNORED = frozenset(
    {".git", ".venv", "venv", "__pycache__", "output", "outputs", "node_modules", ".mypy_cache", ".ruff_cache"}
)
CODE_FOLDERS = tuple(f"inputs/{part}" for part in ("code", "user", "optimizer", "outer", "strategy"))
"""Trees of Python files, by their path under a worker's folder; the first is Muster's own."""
JOB_CODE = "code"
"""Folder beside the job's objects with the Python files that it needs."""
MOST_FILES, MOST_BYTES = 2000, 20_000_000
"""Limits on a user's Python files in one run."""
MOST_LAUNCHED = 1_000_000_000
"""Limit on the folder of a launched script, in bytes."""
_CODE = ("muster", "profiles", "speech", "training")
_PUBLIC_API = ("distributed/__init__.py", "distributed/network_trainer.py")
"""Modules that a user's script may import at its top; they import the machine and SSH modules inside functions only."""
_CODE_SUFFIXES = frozenset({".py", ".pyi"})
SMALLEST = 1_000_000
"""Bytes; hashing a smaller file is faster than looking it up."""
_MOST_ENTRIES = 200_000
_LARGEST_CACHE = 100_000_000
_SETTLED = 3.0
"""Seconds since its last change after which the hash of a file is cached."""
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Inputs:
    """The files that the workers of a run need."""

    trees: Mapping[str, Tree]
    """Trees by their path under the worker's folder."""
    plan: RunPlan
    """The plan with the paths on the remote machines."""

    @property
    def links(self) -> dict[str, str]:
        """Folders of the trees on a machine, relative to Muster's folder, by their path under the worker's folder."""
        return {path: f"trees/{tree.name}" for path, tree in self.trees.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes, by SHA-256."""
        return {blob: path.stat().st_size for blob, path in sources_of(self.trees.values()).items()}

    @property
    def bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(self.sizes.values())


def collect(plan: RunPlan) -> Inputs:
    """Collect the code, the data and the model of a plan on this machine; data that stay on machines are left out.

    Raises:
        BadInput: a file cannot be read, or the module of a custom job cannot be found.
    """
    profile = plan.profile
    trees = {"inputs/code": _joined([muster_code(), *_task_code(profile.model.task)])}
    if plan.launch is not None:
        top = Path(plan.launch.folder)
        trees["inputs/user"] = _tree(launched_files(top), top)
        return Inputs(trees, plan.model_copy(update={"launch": plan.launch.relocated("inputs/user")}))
    model_path, data_path = profile.model.model_path, profile.data.dataset_path
    if model_path == JOB_FACTORY:
        trees["inputs/user"], _ = _location(str(Path(data_path).parent / JOB_CODE), "inputs/user")
    elif profile.model.trait == "own code":
        trees["inputs/user"], model_path = _user_code(model_path, "inputs/user")
    elif _is_local(model_path):
        trees["inputs/model"], model_path = _location(model_path, "inputs/model")
    auxiliary_paths = {}
    for name, path in auxiliary_models(profile).items():
        if path and path == profile.model.model_path:
            auxiliary_paths[name] = model_path
        elif _is_local(path):
            folder = f"inputs/{name.removesuffix('_path')}"
            trees[folder], auxiliary_paths[name] = _location(path, folder)
    stays_on_machines = profile.data.local_data and model_path != JOB_FACTORY
    if _is_local(data_path) and not stays_on_machines:
        trees["inputs/dataset"], data_path = _location(
            data_path, "inputs/dataset", _table_companions(profile, Path(data_path))
        )
    training = profile.training
    if training.user_optimizer:
        trees["inputs/optimizer"], remote_name = _user_code(training.user_optimizer, "inputs/optimizer")
        training = training.model_copy(update={"optimizer": remote_name})
    strategy = profile.strategy
    for name, code in strategy.user_code.items():
        owner, _, field = name.partition(".")
        trees["inputs/outer"], remote_name = _user_code(code, "inputs/outer")
        strategy = strategy.with_options_of(owner, **{field: remote_name})
    strategy = as_user_code(strategy)
    if strategy.user_strategy:
        trees["inputs/strategy"] = _package_code(strategy.user_strategy.rpartition(":")[0])
        renamed = with_files(strategy.strategy, lambda file: f"inputs/strategy/{Path(file).name}")
        strategy = strategy.model_copy(update={"strategy": renamed})
    data = profile.data.model_copy(update={"dataset_path": data_path, "cache_dir": ""})
    model = profile.model.model_copy(update={"model_path": model_path, **auxiliary_paths})
    updates = {"data": data, "model": model, "training": training, "strategy": strategy}
    return Inputs(trees, plan.model_copy(update={"profile": profile.model_copy(update=updates)}))


def muster_code(top: Path = TOP) -> Tree:
    """Return the tree of Muster's own code that a worker needs, from the folder of its packages."""
    own_files = chain.from_iterable(sorted((top / package).rglob("*")) for package in _CODE)
    files = filter(_is_code, own_files)
    return _tree(chain(files, (top / name for name in _PUBLIC_API)), top)


def _is_code(path: Path) -> bool:
    return path.suffix in _CODE_SUFFIXES or path.name == PLUGINS_FILE


def launched_files(folder: Path) -> list[Path]:
    """Return the files that are sent to other machines with a launched script.

    Raises:
        BadInput: the folder has too many or too large files.
    """
    return _job_files(folder, ("",), MOST_LAUNCHED)


def left_out(folder: Path) -> list[str]:
    """Describe the entries of a launched script's folder that are not sent, such as links to folders and sockets."""
    entries = []
    for directory, folders, files in os.walk(folder):
        names = sorted(name for name in (*files, *folders) if not name.startswith(".") and _is_included(name))
        entries += [(Path(directory, name), kind) for name in names if (kind := _kind_of(Path(directory, name)))]
        folders[:] = sorted(name for name in folders if _is_included(name) and _is_job_folder(Path(directory, name)))
    return [f"{path.relative_to(folder)} ({kind})" for path, kind in entries]


def _kind_of(path: Path) -> str:
    """Describe a path that is no plain file or folder; empty for a file, a link to one, and a folder."""
    if path.is_file() or (path.is_dir() and not path.is_symlink()):
        return ""
    if path.is_dir():
        return "a link to a folder"
    if path.is_symlink() and not path.exists():
        return "a link to nothing"
    return "a named pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"


def _is_local(location: str) -> bool:
    return os.path.isabs(location) and os.path.exists(location)


def folder_tree(folder: Path, cache: HashCache | None = None) -> Tree:
    """Return the tree of all files in a folder; ``cache`` is this user's by default."""
    return _tree(_walk(folder), folder, cache)


def _table_companions(profile: Profile, table: Path) -> Iterator[Path]:
    """Yield the files that a single table needs: those that its task names; nothing else of its folder."""
    if table.is_file():
        for path in inputs_of(profile.model.task).files_of_table(profile, table):
            yield from _walk(path) if path.is_dir() else (path,)


def _location(location: str, folder: str, companions: Iterable[Path] = ()) -> tuple[Tree, str]:
    """Return the tree of a file, with its companions, or of a folder, and its path on the remote machine."""
    path = Path(location)
    if path.is_file():
        return _tree([path, *companions], path.parent), f"{folder}/{path.name}"
    return _tree(_walk(path), path), folder


def _user_code(location: str, folder: str) -> tuple[Tree, str]:
    """Return the tree of Python files that a user's function needs, and its name on the remote machine."""
    module, _, factory = location.rpartition(":")
    files, top = user_sources(module)
    if module.endswith(".py"):
        location = f"{folder}/{Path(module).name}:{factory}"
    return _tree(files, top), location


def _package_code(module: str) -> Tree:
    """Return the tree of Python files that a module needs; for an installed package, all files of the package."""
    files, top = user_sources(module)
    spec = None if files else importlib.machinery.PathFinder.find_spec(module.partition(".")[0])
    if spec is not None and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations)))
        files, top = _job_files(folder, (".py",)), folder.parent
    elif spec is not None and spec.origin:
        files, top = [Path(spec.origin)], Path(spec.origin).parent
    return _tree(files, top)


def _task_code(task: str) -> Iterator[Tree]:
    """Yield the files of another package that adds the task, and its metadata, by which it is found on a machine."""
    for point in plugins(ENTRY_POINTS):
        if point.name == task and point.dist is not None and point.dist.name != DISTRIBUTION:
            yield _package_code(point.module)
            metadata = [file for file in point.dist.files or () if file.name in ("METADATA", PLUGINS_FILE)]
            yield _tree((Path(str(file.locate())) for file in metadata), Path(str(point.dist.locate_file(""))))


def _joined(trees: Iterable[Tree]) -> Tree:
    merged = list(trees)
    files = {name: blob for tree in merged for name, blob in tree.files.items()}
    return Tree(files, {blob: path for tree in merged for blob, path in tree.sources.items()})


def user_sources(module: str, suffixes: tuple[str, ...] = (".py",)) -> tuple[list[Path], Path]:
    """Return the Python files that are sent with a module, and the folder from which they are imported.

    For a package these are the files of its top package; for a single file (``name`` or ``path/name.py``) those of its
    folder and below; for an installed module none: it has to be installed on the machine too.

    Raises:
        BadInput: there is no such module, or its folder has too many or too large files.
    """
    if module.endswith(".py"):
        folder = Path(module).expanduser().resolve().parent
        return _job_files(folder, suffixes), folder
    top = _top_package(module)
    if top is None:
        return [], Path.cwd()
    return _job_files(top if top.is_dir() else top.parent, suffixes), top.parent


def _top_package(module: str) -> Path | None:
    """Return the folder of the top package, or the file; ``None`` for an installed module and for Muster's own."""
    spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], [*sys.path, str(Path.cwd())])
    if spec is None:
        raise BadInput(f"module {module}: not found from {Path.cwd()}", "start from the folder that holds it")
    locations = list(spec.submodule_search_locations or []) or [spec.origin or ""]
    location = Path(locations[0])
    standard_library = [Path(sysconfig.get_paths()[kind]) for kind in ("stdlib", "platstdlib")]
    own_packages = [TOP / package for package in (*_CODE, "distributed")]
    is_third_party = {"site-packages", "dist-packages"} & set(location.parts) or not location.is_absolute()
    return (
        None
        if is_third_party or any(location.is_relative_to(root) for root in (*standard_library, *own_packages))
        else location
    )


def _job_files(folder: Path, suffixes: tuple[str, ...], max_bytes: int = MOST_BYTES) -> list[Path]:
    """Return the files of a folder and its subfolders, without hidden folders and virtual environments."""
    paths, size = [], 0
    for path in _walk(folder, _is_job_folder):
        if path.name.endswith(suffixes):
            paths.append(path)
            size += path.stat().st_size
        if len(paths) > MOST_FILES or size > max_bytes:
            kind = "files" if "" in suffixes else "Python files"
            message = f"{folder}: more than {MOST_FILES} {kind} or {bytes_text(max_bytes)} of them"
            raise BadInput(message, "put the files of the job into a folder of their own")
    return paths


def _is_job_folder(folder: Path) -> bool:
    return not folder.name.startswith(".") and not (folder / "pyvenv.cfg").exists()


def _is_included(name: str) -> bool:
    return name not in IGNORED and not name.endswith(".egg-info")


def _walk(folder: Path, enters: Callable[[Path], bool] = lambda folder: True) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if _is_included(name) and enters(Path(directory, name)))
        paths = (Path(directory, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _tree(paths: Iterable[Path], top: Path, cache: HashCache | None = None) -> Tree:
    files, sources, cache = {}, {}, cache or HashCache()
    for path in paths:
        blob = _hash(path, cache)
        files[str(path.relative_to(top))] = blob
        sources[blob] = path
    cache.save()
    return Tree(files, sources)


def _hash(path: Path, cache: HashCache) -> str:
    try:
        stat = path.stat()
        cached = cache.get(path, stat) if stat.st_size >= SMALLEST else ""
        digest = cached or sha256(path)
    except OSError as error:
        raise BadInput(*explain(error, path)) from None
    if stat.st_size >= SMALLEST and not cached:
        cache.put(path, stat, digest)
    return digest


class HashCache:
    """Cache of the hashes of large unchanged files, so that hours of audio are not read again.

    A file is identified by path, size, inode and modification time, as in git's index. A file that changed within the
    last seconds is not cached: it might change again within the same tick of the clock.

    Args:
        path: ``None`` for the user's cache folder of this operating system.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "hashes.json"
        self._cached: dict[str, Any] | None = None
        self._changed = False

    def get(self, path: Path, stat: os.stat_result) -> str:
        """Return the cached hash of an unchanged file; empty where there is none."""
        digest = self._entries().get(_identity(path, stat))
        return digest if isinstance(digest, str) and _HASH.fullmatch(digest) else ""

    def put(self, path: Path, stat: os.stat_result, digest: str) -> None:
        """Cache the hash of a file; ``stat`` was taken before it was read."""
        if time.time() - stat.st_mtime > _SETTLED:
            self._entries()[_identity(path, stat)] = digest
            self._changed = True

    def save(self) -> None:
        """Write new entries to disk; a cache that cannot be written is ignored."""
        if not self._changed:
            return
        entries = dict(list(self._entries().items())[-_MOST_ENTRIES:])
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(entries).encode())
        self._changed = False

    def _entries(self) -> dict[str, Any]:
        if self._cached is None:
            self._cached = {}
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if self.path.stat().st_size < _LARGEST_CACHE:
                    parsed = json.loads(self.path.read_bytes())
                    self._cached = parsed if isinstance(parsed, dict) else {}
        return self._cached


def _identity(path: Path, stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino} {path}"
