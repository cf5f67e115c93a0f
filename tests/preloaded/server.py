"""A Python process that has loaded what takes seconds, and copies itself for others: ``python server.py DESCRIPTOR``
of a socket that listens.

A copy does the work of one :mod:`tests.preloaded.client`: it has the client's arguments, folder, variables, files,
limits, CPU quota and namespaces, but a process number and a session of its own. It is killed when its client ends.
Linux only. Nothing is loaded before the first client comes, unless ``now`` is the last argument: then what pytest's
workers need too, and Muster itself, which a copy keeps where its client would find the same files. The server ends with
its standard input, and removes the folder of its socket.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.machinery
import io
import marshal
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_PRELOADED = (
    "numpy",
    "paramiko",
    "psutil",
    "pydantic",
    "rich.console",
    "safetensors.torch",
    "torch._dynamo",  # the first optimizer loads it
    "transformers.models.whisper.modeling_whisper",
    "typer",
)
_OF_TESTS = (
    "aiohttp",
    "cryptography.x509",
    "datasets",
    "hypothesis.strategies",
    "peft",
    "pytest",
    "textual.app",
    "textual.widgets",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "xdist.remote",
    "zeroconf",
)
"""What besides them pytest's workers load, who are copies too."""
_PROJECT = Path(__file__).resolve().parents[2]
_OURS = ("profiles", "training", "distributed", "app", "speech")
_ONCE = ("training.exchange.torch_backend.process_group", "training.exchange.torch_backend.group_base")
"""What leaves something in torch, or for the end of the process, as soon as it is loaded."""
_OPTIONAL = ("speech.export.coreml_model", "speech.export.ctranslate2_model")
_NAMESPACES = ("net", "mnt", "uts", "ipc", "pid")
_HIGH = 500
"""Above the numbers of a client's files."""
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU)
_HUGE, _COLLAPSE = 2 << 20, 25
"""Bytes of a large page, and ``MADV_COLLAPSE``, of Linux 6.1."""
_EXITING = 4
"""``PF_EXITING`` of Linux' flags of a process."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Copy:
    """One that runs."""

    pid: int
    end: int
    """Of the process: readable when it has ended."""
    connection: int
    """With its client."""

    def listen(self) -> bool:
        """Pass its client's signals on; end it where the client has ended, and return whether it has not."""
        numbers = b""
        with contextlib.suppress(ConnectionError):
            numbers = os.read(self.connection, 64)
        for number in numbers:
            os.kill(self.pid, number)
        if not numbers:
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
            os.kill(self.pid, signal.SIGKILL)
        return bool(numbers)

    def answer(self) -> None:
        """Tell its client how it has ended."""
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            os.write(self.connection, os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
        os.close(self.connection)
        os.close(self.end)


def serve(listener: socket.socket, loaded: bool) -> dict[str, Any]:
    """Copy this process for each client, and watch both until either ends; only a copy returns, with what its client
    wants."""
    ready, tell = os.pipe()
    poll, copies = select.poll(), dict[int, Copy]()
    for number in (0, listener.fileno(), ready):
        poll.register(number, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            if number == 0:
                shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
                os._exit(0)
            if number == listener.fileno():
                connection = listener.accept()[0].detach()
                if not loaded:
                    load(_PRELOADED)
                    loaded = True
                pid = os.fork()
                if not pid:
                    listener.close()
                    die_with_parent()
                    return wishes(connection, tell)
                copy = Copy(pid, os.pidfd_open(pid), connection)
                copies[copy.end] = copies[connection] = copy
                poll.register(copy.end, select.POLLIN)
            elif number == ready:  # what comes from its client from now on is for this process
                pid = int.from_bytes(os.read(ready, 4), "big")
                for copy in copies.values():
                    if copy.pid == pid:
                        poll.register(copy.connection, select.POLLIN)
            elif (known := copies.get(number)) is None:
                continue  # it ended in this round
            elif number == known.end:
                for one in (known.end, known.connection):
                    del copies[one]
                    with contextlib.suppress(KeyError):
                        poll.unregister(one)
                known.answer()
            elif not known.listen():
                poll.unregister(number)


def load(names: tuple[str, ...]) -> None:
    gc.disable()  # modules are none; to look for it among them takes a quarter of the time
    for name in names:
        __import__(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    use_huge_pages()


def use_huge_pages() -> None:
    """Put what is in memory into pages of 2 MB, where the system has them: to copy a process takes a tenth of the time.

    A copy that writes to one gets 4 kB of it, as usual.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *path = line.split(None, 5)
        begin, end = (int(address, 16) for address in span.split("-"))
        first, size = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE - -(-begin // _HUGE) * _HUGE
        if access == "rw-p" and path in ([], ["[heap]"]) and size > 0:
            _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _COLLAPSE)


def load_project() -> None:
    """Load Muster's modules, but those that are programs."""
    sys.path.insert(0, str(_PROJECT))
    found = [path for package in _OURS for path in sorted((_PROJECT / package).rglob("*.py"))]
    modules = (
        ".".join(path.relative_to(_PROJECT).with_suffix("").parts).removesuffix(".__init__")
        for path in found
        if "__main__" not in path.read_text(encoding="utf-8")
    )
    names = tuple(name for name in modules if name not in _ONCE + _OPTIONAL)
    load(names)
    sys.path.remove(str(_PROJECT))
    files = {name: Path(str(sys.modules[name].__file__)) for name in names}
    _sources.update((name, (path.relative_to(_PROJECT), path.read_bytes())) for name, path in files.items())


_sources: dict[str, tuple[Path, bytes]] = {}
"""File and text of Muster's modules that are loaded."""
_forgotten: dict[str, Any] = {}
"""Nothing is gained by taking apart what is not used."""


def forget_other_code(script: str) -> None:
    """Let modules of Muster be found anew, unless this process would find those that are loaded, or a worker their
    equals: of another checkout a program finds other settings, which a worker has in its plan."""
    finder = importlib.machinery.PathFinder
    packages = [name for name in _OURS if name in sys.modules]
    wanted = [] if script.endswith("script_start.py") else packages  # in it the names are a person's
    found = {name: spec.origin for name in wanted if (spec := finder.find_spec(name)) is not None}
    kept = [name for name, origin in found.items() if origin and is_loaded(name, Path(origin), not script)]
    others = [name for name in packages if name not in kept or len(kept) < len(found)]
    if not others:
        return  # to look at all names would copy the memory in which they are
    for name in [name for name in sys.modules if name.partition(".")[0] in others]:
        _forgotten[name] = sys.modules.pop(name)


def is_loaded(package: str, origin: Path, or_equal: bool) -> bool:
    """Return whether a package is the loaded one; ``or_equal``: that becomes one with the same files, as machines get
    them. A machine gets few of some package: its other modules are none then."""
    if str(origin) == sys.modules[package].__file__ or not or_equal:
        return str(origin) == sys.modules[package].__file__
    sources = {name: source for name, source in _sources.items() if name.partition(".")[0] == package}
    top, absent = origin.parents[1], list[str]()
    for name, (relative, text) in sources.items():
        try:
            if (top / relative).read_bytes() != text:
                return False
        except OSError:
            absent.append(name)
    for name in absent:
        del sources[name]
        _forgotten[name] = sys.modules.pop(name)
    for name, (relative, _) in sources.items():
        module: Any = sys.modules[name]
        module.__file__ = module.__spec__.origin = str(top / relative)
        if relative.name == "__init__.py":
            module.__path__[:] = [str((top / relative).parent)]
    return True


def die_with_parent() -> None:
    _LIBC.prctl(1, signal.SIGKILL)


def wishes(connection: int, tell: int) -> dict[str, Any]:
    """Return what a client wants, where it is; the server is told then."""
    client = socket.socket(fileno=connection)
    head, files, _, _ = socket.recv_fds(client, 8, 250)
    document: dict[str, Any] = marshal.loads(received(client, int.from_bytes(head, "big")))
    document["received"] = files
    pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    document["limits"] = [(kind, resource.prlimit(pid, kind)) for kind in _LIMITS]
    document["client"] = pid
    if not join(pid):
        os.write(tell, os.getpid().to_bytes(4, "big"))
    elif child := os.fork():
        watch(Copy(child, os.pidfd_open(child), connection), files)
    else:
        document["client"] = 0  # it has another number there
        die_with_parent()
    client.detach()
    return document


def watch(copy: Copy, files: list[int]) -> NoReturn:
    """Do what else the server does, for a copy in another namespace of processes: only a child can be in one."""
    for number in files:
        os.close(number)
    while True:
        ready, _, _ = select.select([copy.connection, copy.end], [], [])
        if copy.end in ready:
            copy.answer()
            os._exit(0)
        if not copy.listen():
            os._exit(0)


def received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data)) or sys.exit("the client went away")
    return data


def join(client: int) -> bool:
    """Go where the client is: into its CPU quota and its namespaces; return whether that of processes is another."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    for line in Path(f"/proc/{client}/cgroup").read_text().splitlines():
        _, kinds, place = line.split(":", 2)
        if "cpu" in kinds.split(",") and line not in own:
            Path(f"/sys/fs/cgroup/cpu{place}/tasks").write_text(str(os.getpid()))
    places = {kind: f"/proc/{client}/ns/{kind}" for kind in _NAMESPACES}
    other = [kind for kind, place in places.items() if os.readlink(place) != os.readlink(f"/proc/self/ns/{kind}")]
    descriptors = [os.open(places[kind], os.O_RDONLY) for kind in other]
    for descriptor in descriptors:
        if _LIBC.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    return "pid" in other


def become(document: dict[str, Any]) -> None:
    """Take over all that makes a process this client's one."""
    os.setsid()
    at = [os.dup2(number, _HIGH + place, inheritable=True) for place, number in enumerate(document["received"])]
    os.closerange(0, _HIGH)
    for number, wanted in zip(at, document["files"]):
        os.dup2(number, wanted, inheritable=True)
        os.close(number)
    os.chdir(document["folder"])
    os.umask(document["umask"])
    os.environ.clear()
    os.environ.update(document["environment"])
    for number in _HANDLED:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in document["ignored"] else usual)
    for kind, limit in document["limits"]:
        resource.setrlimit(kind, limit)
    sys.stdin = sys.__stdin__ = standard_input(document["client"])
    sys.stdout = sys.__stdout__ = stream(1, "w")
    sys.stderr = sys.__stderr__ = stream(2, "w", errors="backslashreplace", buffering=1)


class Input(io.FileIO):
    """Standard input of a copy. A client that was killed is dead before its copy is: where its starter closes this
    then, the copy has not seen the end of the input."""

    client = 0
    """Its number; 0: unknown."""

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if count == 0 and self.client and has_ended(self.client):
            os.kill(os.getpid(), signal.SIGKILL)
        return count


def has_ended(pid: int) -> bool:
    """Whether a process has ended, is ending, or is killed as soon as it has its turn."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    state, flags, pending = fields[0], int(fields[6]), int(fields[28])  # from the third on, see proc(5)
    return state in "ZX" or flags & _EXITING != 0 or pending & 1 << signal.SIGKILL - 1 != 0


def standard_input(client: int) -> Any:
    try:
        raw = Input(0, closefd=False)
    except OSError:  # the client's is closed
        return None
    raw.client = client
    return io.TextIOWrapper(io.BufferedReader(raw))


def stream(number: int, mode: str, errors: str = "strict", buffering: int = -1) -> Any:
    try:
        lines = 1 if os.isatty(number) else buffering
        return open(number, mode, lines, errors=errors, closefd=False)
    except OSError:  # the client's is closed
        return None


def carry_out(argv: list[str]) -> None:
    """Do what ``python ARGV`` does; of the options before the work itself, ``-u`` and ``-B`` are all that come."""
    while argv[0] in ("-u", "-B"):
        sys.dont_write_bytecode |= argv[0] == "-B"
        argv = argv[1:]
    place = [*os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:0] = [path for path in place if path]
    own_folder = not os.environ.get("PYTHONSAFEPATH")
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path[:0] = [os.getcwd()] if own_folder else []
        forget_other_code("")
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path[:0] = [""] if own_folder else []
        forget_other_code("")
        exec(compile(argv[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = argv
        sys.path[:0] = [os.path.dirname(os.path.abspath(argv[0]))] if own_folder else []
        forget_other_code(argv[0])
        runpy.run_path(argv[0], run_name="__main__")


def leave(code: list[int]) -> None:
    """End without taking apart what was preloaded. What is registered first for the end is done last."""
    for one in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            one.flush()
    if code[0] < 0:
        signal.signal(-code[0], signal.SIG_DFL)
        os.kill(os.getpid(), -code[0])
    os._exit(code[0])


def main() -> None:
    code = [1]
    sys.path.pop(0)
    at_once = sys.argv[2:] == ["now"]
    if at_once:
        load(_PRELOADED + _OF_TESTS)
        load_project()
    os.fsync = lambda descriptor: None  # no test has a power failure
    wanted = serve(socket.socket(fileno=int(sys.argv[1])), at_once)
    atexit.register(leave, code)
    become(wanted)
    try:
        carry_out(wanted["argv"])
        code[0] = 0
    except SystemExit as error:
        code[0] = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        code[0] = -signal.SIGINT
        raise


if __name__ == "__main__":
    main()
