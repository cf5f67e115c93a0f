"""The box in which programs of others run: they see their own folder, this computer's Muster, and nothing else.

On Linux it is bubblewrap: name spaces of its own for files, processes and network. One box stays for all programs of a
pool, because they share a network whose loopback ports lead to the pool alone. On macOS it is sandbox-exec, one
process a program; loopback is shared with this computer there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Protocol

import psutil

from distributed.joining.guard import MARK, end_programs, is_marked
from distributed.joining.lending import inside
from distributed.joining.lending.inside import LONGEST
from distributed.joining.lending.terms import LendingTerms
from distributed.ssh.forward import LOOPBACK
from profiles.errors import BadInput
from profiles.installation import IS_CHECKOUT, training_code, training_python
from training.records.run_files import private_folder

HOME = Path("/home/lent")
"""Home folder in a box of Linux: the only one that is there, and the only folder that can be written."""
_PACKAGES = ("distributed", "muster", "profiles", "speech", "training")
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/sys", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/etc/localtime", "/etc/alternatives", "/nix/store", "/opt/rocm",
)  # fmt: skip
_DEVICES = ("/dev/dri", "/dev/kfd", "/dev/dxg")
_PASSED = (
    "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LANGUAGE", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE",
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "UV_INDEX_URL", "HF_HOME", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables of the process that has joined which programs without a box get; tokens and keys in others stay here."""
_PASSED_INSIDE = ("LANG", "TZ", "CUDA_VISIBLE_DEVICES")
_FOLDERS = """import os, sys
print(*dict.fromkeys([sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)]), sep="\\n")"""
_PATIENCE = 20.0
_ENDING = 5.0
"""Seconds for a box to end whose programs failed; one that goes on has no part in it."""
_WITHOUT = 137
"""Exit code of a program whose box has ended."""


class NoBox(BadInput):
    """There is no box on this computer, or it does not hold; the hint says what to do."""


class Program(Protocol):
    """A program that was started for a pool, as :class:`subprocess.Popen`."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self) -> int:
        """Wait for its end, and return its exit code, or the negative number of the signal that ended it."""


class ProgramBox(Protocol):
    """Where the programs of a pool run."""

    python: str
    """The Python there that has Muster and its packages; empty: the pool chooses."""
    home: Path
    """The home folder there."""

    def popen(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Program:
        """Start a program in its home folder.

        Raises:
            OSError: it cannot be started.
        """

    def listen(self, port: int) -> socket.socket:
        """Listen on a loopback port there, 0 for any.

        Raises:
            OSError: it is in use.
        """

    def processes(self) -> list[psutil.Process]:
        """Return the processes that run there."""

    def problem(self) -> str:
        """Return what the system says of a box that does not work; empty: nothing."""

    def close(self) -> None:
        """End them all. Idempotent; the next program begins with a new box."""


def box_for(terms: LendingTerms, folder: Path, mark: str, pool: str) -> ProgramBox:
    """Return the box of a pool.

    Args:
        folder: the only one that programs in a box may write; made if it is missing.
        mark: value of :data:`MARK` for what runs there.
        pool: identity of the pool, a part of the mark.

    Raises:
        NoBox: this system has none.
    """
    if terms.lend == "own":
        return OpenBox(terms, mark, pool)
    if sys.platform == "darwin":
        return SandboxExec(terms, folder, mark, pool)
    return Bubblewrap(terms, folder, mark)


def end_all(processes: Sequence[psutil.Process]) -> None:
    """Kill processes."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


class OpenBox:
    """No box: programs have the rights of this user, and the limits of the terms."""

    python = ""

    def __init__(self, terms: LendingTerms, mark: str, pool: str) -> None:
        self._terms, self._mark, self._pool = terms, mark, pool
        self.home = Path.home()

    def popen(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Program:
        return _popen(self._limited(argv), {**self._environment(), **(environment or {})}, self.home)

    def _environment(self) -> dict[str, str]:
        variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
        variables |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
        return {**variables, "HOME": os.environ.get("HOME", str(Path.home())), MARK: self._mark}

    def _limited(self, argv: Sequence[str]) -> list[str]:
        """Return the words that run a program within the limits on memory and cores."""
        memory, cores = self._terms.memory, self._terms.cores
        if not memory and not cores:
            return list(argv)
        script = f"import os, sys; sys.path.insert(0, {str(Path(inside.__file__).parent)!r}); import inside; "
        script += f"inside.limit({memory}, {cores}); os.execvp(sys.argv[1], sys.argv[1:])"
        return [sys.executable, "-IS", "-c", script, *argv]

    def listen(self, port: int) -> socket.socket:
        return socket.create_server((LOOPBACK, port))

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if is_marked(process, self._pool)]

    def problem(self) -> str:
        return ""

    def close(self) -> None:
        end_programs(self._pool)


def _popen(argv: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, env=environment, start_new_session=True
    )


class _BoxedProgram:
    """A program in a box, whose exit code comes through a pipe."""

    def __init__(self, send: socket.socket, request: dict[str, object]) -> None:
        pipes = [os.pipe() for _ in range(4)]
        (there_in, here_in), (here_out, there_out), (here_err, there_err), (self._result, result) = pipes
        try:
            socket.send_fds(send, [json.dumps(request).encode()], [there_in, there_out, there_err, result])
        except OSError:
            for descriptor in (here_in, here_out, here_err, self._result):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (there_in, there_out, there_err, result):
                os.close(descriptor)
        self.stdin: IO[bytes] | None = os.fdopen(here_in, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(here_out, "rb")
        self.stderr: IO[bytes] | None = os.fdopen(here_err, "rb")

    def wait(self) -> int:
        with os.fdopen(self._result, "rb") as result:
            text = result.read(8)
        try:
            return int(text)
        except ValueError:  # the box has ended
            return _WITHOUT


class Bubblewrap:
    """A box of bubblewrap, made for the first program and whenever it has ended."""

    def __init__(self, terms: LendingTerms, folder: Path, mark: str) -> None:
        self._terms, self._folder, self._mark = terms, folder, mark
        self._lock = threading.Lock()
        self._bwrap: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._problem = ""
        self.python, self.home = _trains_with(), HOME

    def popen(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Program:
        variables = {**self._variables(), **(environment or {})}
        try:
            return _BoxedProgram(self._connected(), {"argv": list(argv), "env": variables})
        except BrokenPipeError as error:  # the box has ended meanwhile
            raise OSError(self.problem() or str(error)) from error

    def _variables(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _PASSED_INSIDE if name in os.environ}
        path = os.pathsep.join([str(Path(self.python).parent), "/usr/local/bin", "/usr/bin", "/bin"])
        own = {"HOME": str(HOME), "PATH": path, "USER": "lent", "LOGNAME": "lent", "TMPDIR": "/tmp", MARK: self._mark}
        return {**passed, **own}

    def _connected(self) -> socket.socket:
        """Return the socket to the process inside, which is started where none runs.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            if self._bwrap is not None and self._bwrap.poll() is None and self._control is not None:
                return self._control
            self._close()
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
            started = threading.Event()
            with there:
                words = (there.fileno(), started)
                self._thread = threading.Thread(target=self._run, args=words, name="box", daemon=True)
                self._thread.start()
                started.wait()
            if self._bwrap is None:
                here.close()
                raise OSError(f"bubblewrap cannot be started: {self._problem}")
            self._control = here
            return here

    def _run(self, descriptor: int, started: threading.Event) -> None:
        """Start bubblewrap and wait for its end: it ends with the very thread that has started it."""
        limits = [str(self._terms.memory), str(self._terms.cores)]
        words = [self.python, "-IS", inside.__file__, str(descriptor), *limits]
        with tempfile.TemporaryFile() as errors:
            try:
                self._bwrap = subprocess.Popen(
                    [*self._command(), "--", *words], pass_fds=[descriptor], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=errors, env={MARK: self._mark}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._problem = str(error)
                return started.set()
            started.set()
            self._bwrap.wait()
            lines = os.pread(errors.fileno(), LONGEST, 0).decode(errors="replace").strip().splitlines()
            self._problem = lines[-1] if lines else ""

    def _command(self) -> list[str]:
        """Return bubblewrap's command line up to the program."""
        program = shutil.which("bwrap")
        if program is None:
            raise FileNotFoundError("bwrap")
        for path in (self._folder, self._folder / "home", self._folder / "tmp"):
            private_folder(path)
        shown = dict.fromkeys([*_SYSTEM, *_python_folders(self.python), *_code_paths(), inside.__file__])
        read_only = [word for path in shown for word in ("--ro-bind-try", path, path)]
        gpus = [str(path) for path in Path("/dev").glob("nvidia*")]
        devices = [word for path in (*_DEVICES, *gpus) for word in ("--dev-bind-try", path, path)]
        writable = ["--bind", str(self._folder / "home"), str(HOME), "--bind", str(self._folder / "tmp"), "/tmp"]
        variables = ["--clearenv", "--setenv", MARK, self._mark, "--setenv", "HOME", str(HOME)]
        isolated = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "lent"]
        mounts = ["--proc", "/proc", "--dev", "/dev", *devices, *read_only, *writable, "--remount-ro", "/"]
        return [program, *isolated, *variables, *mounts, "--chdir", str(HOME)]

    def listen(self, port: int) -> socket.socket:
        control = self._connected()
        here, there = socket.socketpair()
        with here:
            with there:
                socket.send_fds(control, [json.dumps({"port": port}).encode()], [there.fileno()])
            here.settimeout(_PATIENCE)
            _, descriptors, _, _ = socket.recv_fds(here, 1, 1)
        if not descriptors:
            raise OSError(f"port {port} is in use there")
        return socket.socket(fileno=descriptors[0])

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            if self._bwrap is not None and self._bwrap.poll() is None:
                bwrap = psutil.Process(self._bwrap.pid)
                return [bwrap, *bwrap.children(recursive=True)]
        return []

    def problem(self) -> str:
        if self._bwrap is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its sockets close a moment before it has ended
                self._bwrap.wait(_ENDING)
        if self._thread is not None and (self._bwrap is None or self._bwrap.poll() is not None):
            self._thread.join()
        return self._problem

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._bwrap is not None:
            end_all(self.processes())  # the first process of a name space takes all others with it
            self._bwrap = None


class SandboxExec(OpenBox):
    """A box of macOS: every program runs under a profile that denies what is not named."""

    def __init__(self, terms: LendingTerms, folder: Path, mark: str, pool: str) -> None:
        super().__init__(terms, mark, pool)
        self._folder = folder.resolve()
        self.python, self.home = _trains_with(), self._folder / "home"

    def popen(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Program:
        for path in (self._folder, self._folder / "home", self._folder / "tmp"):
            private_folder(path)
        profile = sandbox_profile(self._folder, [*_python_folders(self.python), *_code_paths(), inside.__file__])
        boxed = ["sandbox-exec", "-p", profile, *self._limited(argv)]
        return _popen(boxed, {**self._environment(), **(environment or {})}, self.home)

    def _environment(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _PASSED_INSIDE if name in os.environ}
        path = os.pathsep.join([str(Path(self.python).parent), "/usr/bin", "/bin"])
        own = {"HOME": str(self.home), "PATH": path, "TMPDIR": str(self._folder / "tmp"), "USER": "lent"}
        return {**passed, **own, "LOGNAME": "lent", MARK: self._mark}


def sandbox_profile(folder: Path, shown: Sequence[str]) -> str:
    """Return the profile of a program that may write below ``folder``, read what trains, and use loopback and Metal."""
    read = ["/usr", "/bin", "/sbin", "/System", "/Library", "/private/etc", "/private/var/db", "/dev", *shown]
    paths = " ".join(f"(subpath {json.dumps(path)})" for path in (*read, str(folder)))
    own = f"(subpath {json.dumps(str(folder))})"
    return f"""(version 1)
(deny default)
(allow process-fork process-exec signal sysctl-read file-read-metadata)
(allow file-read* (literal "/") {paths})
(allow file-write* {own} (literal "/dev/null") (literal "/dev/zero") (literal "/dev/tty"))
(allow file-ioctl (subpath "/dev"))
(allow network* (local ip "localhost:*") (remote ip "localhost:*") (local unix-socket {own}) (remote unix-socket {own}))
(allow ipc-posix-shm* ipc-posix-sem* system-socket)
(allow iokit-open) (allow mach-lookup (global-name-regex #"^com.apple.(MTLCompilerService|system|SystemConfiguration)"))
"""


def _trains_with() -> str:
    """Return the Python of this computer that trains.

    Raises:
        NoBox: there is none yet.
    """
    if not (python := training_python()):
        raise NoBox("what trains is not installed on this computer", "install it: muster machines setup")
    return python


@lru_cache
def _python_folders(python: str) -> tuple[str, ...]:
    """Return the folders that a Python needs: its environment, and where that comes from."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([python, "-I", "-c", _FOLDERS], capture_output=True, text=True, timeout=_PATIENCE)
        return tuple(path for path in done.stdout.splitlines() if path not in ("/", str(Path.home())))
    return ()


def _code_paths() -> list[str]:
    """Return where Muster's packages lie; a clone has runs and profiles beside them, which stay hidden."""
    code = training_code()
    return [str(code / name) for name in _PACKAGES] if IS_CHECKOUT else [str(code)]
