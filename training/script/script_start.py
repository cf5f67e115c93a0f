"""Runs a user's script in this process, as ``python script.py`` would, and gives it the mesh as its process group.

``python script_start.py RUN KIND TARGET ARGUMENTS``: the id of the run, by which its processes are known, and ``file``
or ``module``. Standard input is a socket: an uncaught error is written to it as one JSON object, a session
(:mod:`training.session.session`) writes events there and gets commands, and when its other end closes, the script is no
longer supervised and the process group is killed. Standard library only, until the script
itself loads torch: what it sets before that still counts.

``torch.distributed.init_process_group``, ``new_group`` and ``monitored_barrier`` are replaced as soon as
``torch.distributed`` is loaded, and so before the script can take hold of them. A ``sitecustomize`` would do it in the
script's own children too, but is hidden by any other one on the path and by ``python -I``; this file is what is
started, so nothing can come before it.
"""

from __future__ import annotations

import sys

if sys.path and sys.path[0] and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]  # modules beside this one are not the script's

import atexit
import contextlib
import functools
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
OURS = ("training", "profiles")
PACKAGES = (*OURS, "app", "distributed", "muster")
_HOLD = 5.0
"""Seconds for which a rank that only lost its connections waits, so that the failed rank reports first."""
_PATIENCE = 1800.0
"""Seconds to wait for all ranks if the script sets no timeout: as torch does."""
_LOSSES = (
    "PeerLost", "the connection with", "no connection with", "rendezvous store",
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError",
)  # fmt: skip
"""Parts of the error of a rank that only lost another: of the mesh, of gloo, of NCCL."""


class Finder(importlib.machinery.PathFinder):
    """Finds ``torch.distributed``, and gives it the mesh as soon as it is loaded. Packages with the name of one of
    Muster's are the script's, even folders without ``__init__.py``, which Python would look for last; Muster's are not
    on the path, where children of the script would find them, too."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is None and fullname in PACKAGES and sys.path[:1] != [ROOT]:
            theirs = super().find_spec(fullname, [entry for entry in sys.path if entry != ROOT])
            return theirs or super().find_spec(fullname, [ROOT])
        if fullname != "torch.distributed":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                install_backend(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


def install_backend(distributed: Any) -> None:
    """Replace the functions that make process groups."""
    if not distributed.is_available():
        return
    c10d = distributed.distributed_c10d
    stock_init_process_group, stock_new_group = c10d.init_process_group, c10d.new_group

    @functools.wraps(stock_init_process_group)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *others: Any,
        **options: Any,
    ) -> None:
        import_muster("training.exchange.torch_backend.process_group")
        if store is None and init_method in (None, "env://"):
            store, init_method = _store(timeout.total_seconds() if timeout is not None else _PATIENCE), None
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        stock_init_process_group(
            backend_for(backend), init_method, timeout, world_size, rank, store, *others, **options
        )

    @functools.wraps(stock_new_group)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *others: Any, **options: Any
    ) -> Any:
        return stock_new_group(ranks, timeout, backend and backend_for(backend), *others, **options)

    for name, module in list(sys.modules.items()):  # that of device meshes has taken hold of them already
        for stock, replacement in ((stock_init_process_group, init_process_group), (stock_new_group, new_group)):
            if name.startswith("torch.distributed") and vars(module).get(replacement.__name__) is stock:
                setattr(module, replacement.__name__, replacement)
    import_muster("training.exchange.torch_backend.monitored").give_monitored_barrier(distributed)


def backend_for(requested: str | None) -> str | None:
    """Return the backend of a group for which the script requests ``requested``.

    On one machine with a GPU for each process NCCL stays: nothing leaves the machine, and nothing is faster there.
    Processes that share a GPU cannot use it. If the script leaves the choice to torch, which would take NCCL alone, CPU
    tensors use gloo: torch would use a group written in Python, like the mesh's, for all devices.
    """
    setting = os.environ["MUSTER_BACKEND"]
    if setting == "script" or requested == "muster":
        return requested
    torch: Any = sys.modules["torch"]
    kinds = {item.rpartition(":")[2] for item in (requested or "").lower().split(",")} - {""}
    own_gpu = os.environ.get("MUSTER_NCCL") == "1" and torch.cuda.is_available()
    if setting == "auto" and (not kinds <= {"gloo", "nccl"} or (own_gpu and "nccl" in kinds)):
        return requested
    return "muster" if setting != "auto" or not own_gpu or kinds else "cpu:gloo,cuda:nccl"


_stores: list[Any] = []
"""Keeps the stores alive: torch holds only the C++ half of each."""


def _store(seconds: float) -> Any:
    """Return the run's store, with a new key prefix for every default group that the script makes."""
    server = import_muster("training.exchange.torch_backend.store_server")
    token = server.read_token(Path(os.environ["MUSTER_CERTIFICATES"]))
    client = import_muster("training.exchange.torch_backend.store_client").StoreClient
    _stores.append(client(os.environ["MUSTER_STORE"], token, seconds, prefix=f"{len(_stores)}/"))
    return _stores[-1]


def import_muster(name: str) -> Any:
    """Import a module of Muster even if the script has modules of the same name, which it keeps."""
    loaded = sys.modules.get(name)
    if loaded is not None and (loaded.__file__ or "").startswith(ROOT):
        return loaded
    if name in _imported:
        return _imported[name]
    others = [entry for entry in sys.path if entry != ROOT]
    hidden = any(importlib.machinery.PathFinder.find_spec(package, others) for package in OURS)
    theirs, path = _pop_own_modules(), list(sys.path)
    sys.path.insert(0, ROOT)
    sys.modules.update(_imported)
    try:
        module = importlib.import_module(name)
    finally:
        sys.path[:] = path
        if theirs or hidden:
            _imported.update(_pop_own_modules())
            sys.modules.update(theirs)
    return module


_imported: dict[str, ModuleType] = {}
"""Modules of Muster whose names are the script's."""


def _pop_own_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in OURS]
    return {name: sys.modules.pop(name) for name in names}


def leave_group() -> None:
    """Leave the process group properly if the script has not."""
    distributed: Any = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):  # it is the end anyway
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()


class WatcherChannel:
    """The connection with the watching process, for a session of the script: events there, commands here."""

    def __init__(self, watcher: socket.socket) -> None:
        self._watcher = watcher
        self.writer = watcher.makefile("w", encoding="utf-8")
        """Takes one event a line."""
        self.on_command: Callable[[bytes], object] = lambda line: None
        """Called with every command, a JSON object."""

    def end_with(self) -> None:
        """Hand commands on; kill this process and its process group when the watching process is gone."""
        with contextlib.suppress(OSError), self._watcher.makefile("rb") as lines:
            for line in lines:
                self.on_command(line)
        os.killpg(0, signal.SIGKILL)


channel: WatcherChannel
"""That of this process; the script's session finds it here (``launched_run.py``)."""


def is_peer_loss(text: str) -> bool:
    """Whether an error only says that another rank is gone."""
    return any(sign in text for sign in _LOSSES)


def tell(watcher: socket.socket, error: BaseException) -> None:
    """Report an uncaught error in the log and to the watching process."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    report(watcher, traceback.format_exception_only(type(error), error)[-1].strip(), text)
    print(text, file=sys.stderr, end="", flush=True)


def report(watcher: socket.socket, problem: str, traceback_text: str = "") -> None:
    """Tell the watching process why the script ends; a rank that only lost others lets them report first."""
    if is_peer_loss(problem + traceback_text):
        time.sleep(_HOLD)
    with contextlib.suppress(OSError):
        watcher.sendall(json.dumps({"error": problem, "traceback": traceback_text}).encode() + b"\n")


def run(kind: str, target: str) -> None:
    """Run the script as the module ``__main__`` and keep that: threads and ``atexit`` may need it later."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if kind == "module":
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what python -m calls
    elif pkgutil.get_importer(target) is not None:
        runpy.run_path(target, run_name="__main__")  # an archive
    else:
        main.__file__ = os.path.abspath(target)
        with io.open_code(target) as file:
            exec(compile(file.read(), target, "exec", dont_inherit=True), vars(main))


def main() -> int:
    """Run the script; return its exit code."""
    kind, target, *arguments = sys.argv[2:]
    watcher = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    global channel
    channel = WatcherChannel(watcher)
    sys.modules["muster_script_start"] = sys.modules["__main__"]  # before the script takes that name
    threading.Thread(target=channel.end_with, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [target, *arguments]
    sys.path[:0] = [os.getcwd() if kind == "module" else os.path.dirname(os.path.abspath(target))]
    if "torch.distributed" in sys.modules:  # a sitecustomize loads it
        install_backend(sys.modules["torch.distributed"])
    sys.meta_path.insert(0, Finder)
    atexit.register(leave_group)
    try:
        run(kind, target)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):  # Python writes it, and ends with exit code 1
            report(watcher, str(end.code))
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary: all ranks end, and this one says why
        tell(watcher, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
