"""The agent on a machine: starts one worker, outlives the connection, and leaves nothing behind.

Standard library only, Python >= 3.9: part of :mod:`distributed.agent.program`, and run before anything else exists.

``start`` leaves a daemon in a session of its own. It numbers every line of the worker and keeps it on disk until the
supervisor has written it down, and serves a socket in the run's folder (mode 0700). ``attach`` carries lines between
that socket and an SSH session: a supervisor that reconnects sends the last number it has and gets the later records, so
that no event is lost or doubled. Its commands are numbered too.

Every line that arrives renews the lease. When it expires, the worker is told to stop with a snapshot and is killed
after a grace time with all its descendants; then the daemon ends. A guard process does the same if the daemon itself is
killed. The worker of a run that can go on by itself, and has begun, trains to the end instead. Its records stay on the
disk, where a supervisor that returns gets them (:func:`attach`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.agent.requests import Attach, Start
from distributed.agent.run_folders import SECRETS, write_files, write_keys
from distributed.agent.spool import Spool, stored_records
from distributed.system import keep_awake
from profiles.quantities import span_text
from training.records.lease import Lease, held_elsewhere

SOCKET = "agent.sock"
BEAT = 1.0
LONGEST_LINE = 1 << 18
"""Bytes of a worker's line in one record; even six times as long in JSON it is a line that the remote side accepts."""
LOG_BUDGET = 64 << 20  # bytes of a worker's log that are kept
NO_MORE_COMMANDS = 1 << 50
"""Number of commands that an agent which has ended names: it carries out no other."""
TIMEOUT = 10.0
START_SILENCE = 60.0
"""Seconds without the machine that started the run after which a worker that is not ready to train is ended."""
_READY = b'"status":"ready"'
_TICK, _MOST_FILES = 0.1, 4096


def run_folder(root: Path, run: str, rank: str) -> Path:
    """Return the folder of one worker of a run on this machine."""
    return root / "runs" / run / rank


class Daemon:
    """The agent of one worker.

    Args:
        folder: the worker's folder; the current one.
        order: what is to be started.
    """

    def __init__(self, folder: Path, order: Start) -> None:
        self._folder, self._order = folder, order
        self._lease, self._grace = float(order.lease), float(order.grace)
        self._spool = Spool(folder / "spool")
        self._renewed = time.monotonic()
        self._commands = 0
        self._why, self._over = "", False
        self._is_told, self._ended, self._is_ready = False, 0.0, False
        """Whether the worker knows that the lease is over; when it has ended; whether it has the starting state."""
        self._farewell: dict[str, Any] | None = None
        self._dismissed = threading.Event()
        self._lock = threading.Lock()
        self._guard_pid, self._guard = start_guard(self._grace)

    def run(self, ready: int) -> None:
        """Serve until dismissed or the lease expires; write to ``ready`` as soon as it can be attached to."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(SOCKET)
        listener.listen(16)
        os.write(ready, b"1")
        awake, lease = keep_awake(), Lease(self._folder)
        self._worker = self._start_worker()
        follower = threading.Thread(target=self._follow, daemon=True)
        for thread in (follower, threading.Thread(target=self._accept, args=(listener,), daemon=True)):
            thread.start()
        try:
            while self._farewell is None and (self._is_leased() or self._goes_on()):
                self._dismissed.wait(_TICK)
                self._replace_guard()
            if self._farewell is None:
                self._expire()
        finally:
            self._kill()
            follower.join(1.0)
            if awake is not None:
                awake.kill()
            lease.release()
            self._tidy()

    def _replace_guard(self) -> None:
        """Start another guard if it alone was killed."""
        if not self._over and os.waitpid(self._guard_pid, os.WNOHANG)[0]:
            os.close(self._guard)
            self._guard_pid, self._guard = start_guard(self._grace)
            os.write(self._guard, b"%d" % self._worker.pid)

    def _is_leased(self) -> bool:
        return time.monotonic() - max(self._renewed, self._ended) < self._lease

    def _goes_on(self) -> bool:
        """Whether the worker goes on though the lease is over."""
        if self._order.unattended == "stop" or self._over:
            return False
        is_waiting = self._order.unattended == "train" and not self._is_ready
        if is_waiting and time.monotonic() - self._renewed > START_SILENCE:
            return False  # the start may have failed: nobody else would tell it
        if not self._is_told:
            self._is_told = True
            command = "unattended" if self._order.unattended == "train" else "stop"  # a coordinator then serves on
            self._tell_worker({"command": command, "reason": self._silence, "within": self._grace})
        return True

    @property
    def _silence(self) -> str:
        return f"the machine that started the run has not been heard for {span_text(self._lease)}"

    def _start_worker(self) -> subprocess.Popen[bytes]:
        folder = str(self._folder)
        words = [w.replace("{folder}", folder).replace("{python}", sys.executable) for w in self._order.argv]
        extra = {key: value.replace("{folder}", folder) for key, value in self._order.env.items()}
        environment = {**self._order.defaults, **os.environ, **extra}
        pipe = subprocess.PIPE
        worker = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=folder, start_new_session=True
        )
        os.write(self._guard, b"%d" % worker.pid)
        (self._folder / "agent.json").write_text(json.dumps({"agent": os.getpid(), "worker": worker.pid}))
        self._spool.append({"pid": worker.pid})
        return worker

    def _follow(self) -> None:
        """Record the worker's output, and how it ended."""
        pumps = [
            threading.Thread(target=self._pump, args=(stream, kind), daemon=True)
            for stream, kind in ((self._worker.stdout, "event"), (self._worker.stderr, "log"))
        ]
        for pump in pumps:
            pump.start()
        code = self._worker.wait()
        self._ended = time.monotonic()
        self._kill()  # its descendants may hold its streams open
        self._over = True  # its process group id may be reused from now on
        for pump in pumps:
            pump.join(TIMEOUT)  # a process that left its group may hold them open for ever
        self._spool.append({"end": code, "why": self._why})
        with contextlib.suppress(OSError):
            os.write(self._guard, b" over")

    def _pump(self, stream: Any, kind: str) -> None:
        left = LOG_BUDGET if kind == "log" else sys.maxsize
        for line in iter(lambda: stream.readline(LONGEST_LINE), b""):
            left -= len(line)
            if kind == "event" and _READY in line:
                self._is_ready = True
            if left > 0:  # beyond the budget it is read and dropped, so that the worker does not block
                self._spool.append({kind: line.decode("utf-8", "replace")})

    def _accept(self, listener: socket.socket) -> None:
        while True:
            threading.Thread(target=self._serve, args=listener.accept()[:1], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                message = json.loads(line)
                if "stop" in message:  # typed on this machine
                    self._tell_worker({"command": "stop", "reason": message["stop"], "within": self._grace})
                    continue
                if "after" not in message:  # which a reader on this machine sends, too
                    self._renewed, self._is_told = time.monotonic(), False
                if "after" in message:
                    threading.Thread(target=self._send, args=(connection, message["after"]), daemon=True).start()
                elif "n" in message:
                    self._carry_out(message)
                else:
                    self._note_beat(message)

    def _note_beat(self, message: Mapping[str, Any]) -> None:
        self._spool.forget(message.get("recorded", 0))
        if message.get("grace", 0.0) > self._grace:
            self._grace = float(message["grace"])
            with contextlib.suppress(OSError):  # it was killed, and another one is about to be started
                os.write(self._guard, b" %d" % self._grace)

    def _send(self, connection: socket.socket, after: int) -> None:
        """Send all records after ``after``, and beats while there are none."""
        with contextlib.suppress(OSError):
            is_unattended = self._is_told and not self._is_leased()
            hello = {"commands": self._commands, **({"unattended": True} if is_unattended else {})}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            while True:
                number, record = self._spool.read(after + 1, BEAT)
                after = number if record else after
                connection.sendall(record or b'{"beat": 1}\n')

    def _carry_out(self, message: dict[str, Any]) -> None:
        """Carry out a command once, however often it is sent."""
        with self._lock:
            if message["n"] != self._commands + 1:
                return
            self._commands += 1
            if "files" in message:
                write_keys(self._folder, message["files"])
            if "worker" in message:
                self._tell_worker(message["worker"])
            if "signal" in message:
                self._signal(int(message["signal"]))
            if "bye" in message:
                self._farewell = message
                self._dismissed.set()

    def _tell_worker(self, message: Any) -> None:
        assert self._worker.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._worker.stdin.write(json.dumps(message).encode() + b"\n")
            self._worker.stdin.flush()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._over:
                os.killpg(self._worker.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._worker.wait()

    def _expire(self) -> None:
        self._why = self._silence
        self._tell_worker({"command": "stop", "reason": self._why, "within": self._grace})
        end = time.monotonic() + self._grace
        while self._worker.poll() is None and self._farewell is None and time.monotonic() < end:
            self._dismissed.wait(_TICK)

    def _tidy(self) -> None:
        """Remove the keys, and also the snapshots unless the supervisor needs them."""
        with contextlib.suppress(OSError):
            os.unlink(SOCKET)
        shutil.rmtree(self._folder / SECRETS, ignore_errors=True)
        if self._farewell is not None and not self._farewell.get("keep"):
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()


def start_guard(grace: float) -> tuple[int, int]:
    """Fork a process that ends the worker's group and removes the keys if this one dies; return its number, and the
    descriptor to write the group's id to, then longer graces, and ``over`` when the group has ended."""
    read_end, write_end = os.pipe()
    if child := os.fork():
        os.close(read_end)
        return child, write_end
    os.closerange(3, read_end)  # among them the worker's input, if it takes the place of another one
    os.closerange(read_end + 1, _MOST_FILES)
    os.setsid()
    words = b"".join(iter(lambda: os.read(read_end, 64), b"")).split()
    with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
        group, *longer = map(int, words)
        end = time.monotonic() + max([grace, *longer])
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(_TICK)
        os.killpg(group, signal.SIGKILL)
    if not can_connect() and not held_elsewhere(Path.cwd()):  # else they belong to another attempt
        shutil.rmtree(SECRETS, ignore_errors=True)
    os._exit(0)


def start(root: Path, order: Start) -> dict[str, Any]:
    """Start the daemon of a worker and wait until it can be attached to.

    Raises:
        OSError: it cannot be started.
    """
    folder = run_folder(root, order.run, order.rank)
    try:
        _start(folder, order)
    except (OSError, ValueError) as error:
        raise OSError(f"{folder}: {error}") from None
    return {"started": True}


def _start(folder: Path, order: Start) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chdir(folder)
    end_old_agent()
    write_files(folder, order.files)
    for name, target in order.links.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(Path(target).expanduser().resolve())
    ready, ready_writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            become_daemon(folder, order, ready_writer)
        os._exit(0)
    os.close(ready_writer)
    if not (select.select([ready], [], [], TIMEOUT)[0] and os.read(ready, 1)):
        raise OSError("the agent did not start: " + (folder / "agent.log").read_text()[-500:])


def become_daemon(folder: Path, order: Start, ready: int) -> None:
    """Detach from the session's streams and serve; never returns."""
    log = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        Daemon(folder, order).run(ready)
    except Exception:  # noqa: BLE001 - the process boundary: only the log is left to report it to
        traceback.print_exc()
    os._exit(0)


def can_connect() -> bool:
    """Whether an agent listens in the current folder."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(SOCKET) in (0, errno.EAGAIN)  # its queue is full: it exists, but is stopped


def end_old_agent(timeout: float = TIMEOUT) -> None:
    """End an agent that an earlier attempt of the same run left here; one on another machine ends with its lease."""
    end = time.monotonic() + timeout
    while holder := held_elsewhere(Path.cwd()):
        if time.monotonic() > end:
            raise OSError(f"{holder} shares this folder and still works in it; end the run there, or wait 3 minutes")
        time.sleep(_TICK)
    while can_connect():
        if time.monotonic() > end:
            raise OSError("another agent of this run is active here and does not end")
        with socket.socket(socket.AF_UNIX) as old, contextlib.suppress(OSError, ValueError):
            old.settimeout(timeout)  # it may be stopped
            old.connect(SOCKET)
            old.sendall(b'{"after": 0}\n')
            commands = json.loads(old.makefile("rb").readline())["commands"]
            old.sendall(json.dumps({"n": commands + 1, "bye": True, "keep": True}).encode() + b"\n")
        time.sleep(_TICK)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET)


def attach(root: Path, request: Attach) -> None:
    """Carry lines between the daemon and this session; end as soon as either ends, or is silent for too long."""
    daemon = socket.socket(socket.AF_UNIX)
    folder = run_folder(root, request.run, request.rank)
    try:
        os.chdir(folder)
        daemon.connect(SOCKET)
    except OSError:
        return write_stored(folder, request.after)
    daemon.sendall(json.dumps({"after": request.after}).encode() + b"\n")
    threading.Thread(target=forward_records, args=(daemon,), daemon=True).start()
    while select.select([0], [], [], request.silence)[0]:
        data = os.read(0, 65536)
        if not data:
            break
        daemon.sendall(data)
    os._exit(0)


def write_stored(folder: Path, after: int) -> None:
    """Write the records that an agent which has ended has left, as if it were there; or that it is gone."""
    records = list(stored_records(folder / "spool", after))
    hello = {"commands": NO_MORE_COMMANDS} if records else {"gone": True}
    for line in (json.dumps(hello).encode() + b"\n", *records):
        while line:
            line = line[os.write(1, line) :]


def forward_records(daemon: socket.socket) -> None:
    """Write the daemon's records to stdout."""
    try:
        while data := daemon.recv(65536):
            while data:
                data = data[os.write(1, data) :]
    finally:
        os._exit(0)
