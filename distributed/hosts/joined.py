"""The machines that have joined this computer with a code, and how one of them is called.

They dial this computer, and cannot be dialled. A process of it, the door (:mod:`distributed.joining.door`), holds the
connection that each has opened; a caller asks it for a new one through a Unix socket that only this user can open.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distributed.hosts.lending import CLASSES, LendClass
from profiles.installation import TOP, program, user_folder
from training.records.run_files import explain_errors, private_file, private_folder, write_atomically

SUFFIX = ".joined"
"""End of the address of a machine that has joined; no name service knows it."""
DEFAULT_PORT = 7799
_DOOR = "distributed.joining.door"
_START_PATIENCE = 60.0
_ANSWER_PATIENCE = 40.0
"""Seconds that a door takes at most to answer."""
_LARGEST = 1 << 16
_LONGEST_SOCKET = 103
"""Bytes of a Unix socket's path, on macOS; Linux has 107."""
_LONGEST_TEXT = 120
_known_hosts_lock = threading.Lock()
_forgetting = threading.Lock()


class NotConnected(Exception):
    """A machine that has joined cannot be called now: problem and hint."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


@dataclass(frozen=True)
class JoinedMachine:
    """A machine that has joined. What it says of itself is for display only: escape it."""

    name: str
    """Unique here: letters, digits and hyphens."""
    key: str
    """Its host key, Ed25519 in SSH's wire format, base64."""
    user: str = ""
    """The user there whose rights it gives us."""
    system: str = ""
    devices: str = ""
    memory: int = 0
    """Bytes."""
    lend: LendClass = "own"
    """What it lets this computer run; it refuses the rest by itself."""
    limits: str = ""
    """When and how much, in its words."""

    @property
    def address(self) -> str:
        """The address by which commands and hosts files name it."""
        return f"{self.name}{SUFFIX}"

    @property
    def identity(self) -> str:
        return identity_of(self.key)


def identity_of(key: str) -> str:
    """Return the 32 letters by which a key, base64 of its wire format, is named in the protocol."""
    return hashlib.sha256(base64.b64decode(key)).hexdigest()[:32]


def joining_folder() -> Path:
    """Return the folder with the keys and the machines of this user, made if it is missing; nobody else can read it.

    Raises:
        BadInput: it cannot be made.
    """
    folder = user_folder("config") / "joining"
    with explain_errors(folder, "the configuration folder"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        return private_folder(folder)


def pool_key() -> Path:
    """Return the file of the key by which this computer logs in to machines that have joined."""
    return user_folder("config") / "joining" / "pool_key"


def known_hosts_file() -> Path:
    """Return the file with the host keys of the machines that have joined."""
    return user_folder("config") / "joining" / "known_hosts"


def joined_machines() -> list[JoinedMachine]:
    """Return the machines that have joined, by name; files that cannot be read are left out."""
    folder = user_folder("config") / "joining" / "machines"
    documents = (read_document(path) for path in sorted(folder.glob("*.json")))
    return [JoinedMachine(**document) for document in documents if _is_machine(document)]


def joined_machine(identity: str) -> JoinedMachine | None:
    """Return the machine with an identity; ``None`` where it has not joined, or was removed.

    Raises:
        OSError: a file cannot be read, so it may have joined; a machine that is sent away forgets this computer.
    """
    machine = next((machine for machine in joined_machines() if machine.identity == identity), None)
    if machine is None:
        for path in (joining_folder() / "machines").iterdir():
            if path.suffix == ".json":
                path.read_bytes()
    return machine


def joined_name(address: str) -> str:
    """Return the name of a machine that has joined from an address such as ``studio.joined``; empty for other kinds."""
    return address.casefold().removesuffix(SUFFIX) if address.casefold().endswith(SUFFIX) else ""


def is_joined(name: str) -> bool:
    """Whether a machine has joined under a name."""
    return name in (machine.name for machine in joined_machines())


def lend_class(name: str) -> LendClass:
    """Return what a machine that has joined under a name lets this computer run; all, where none has."""
    return next((machine.lend for machine in joined_machines() if machine.name == name), "own")


def save_joined(machine: JoinedMachine) -> None:
    """Remember a machine and its key.

    Raises:
        OSError: nothing can be written.
    """
    folder = private_folder(joining_folder() / "machines")
    write_atomically(folder / f"{machine.name}.json", json.dumps(asdict(machine)).encode())
    write_known_hosts()


def on_terms(machine: JoinedMachine, document: dict[str, Any]) -> JoinedMachine:
    """Return a machine with the terms on which it lends itself now, and remember them.

    Args:
        document: ``lend`` and ``limits``, as it says them; of a machine that says none, those of before.

    Raises:
        OSError: nothing can be written.
    """
    lend, limits = document.get("lend", machine.lend), one_line(document.get("limits"))
    if lend not in CLASSES or (lend, limits) == (machine.lend, machine.limits):
        return machine
    changed = replace(machine, lend=lend, limits=limits)
    with _forgetting:
        if is_joined(machine.name):  # else it was removed meanwhile
            save_joined(changed)
    return changed


def one_line(text: object) -> str:
    """Return a short text of another machine in one line, without control characters; empty where it is none."""
    return "".join(letter for letter in text[:_LONGEST_TEXT] if letter.isprintable()) if isinstance(text, str) else ""


def forget_joined(name: str) -> None:
    """Forget a machine. Idempotent."""
    with _forgetting:
        (joining_folder() / "machines" / f"{name}.json").unlink(missing_ok=True)
    write_known_hosts()


def write_known_hosts() -> None:
    """Write the host keys of the machines that have joined: also after an end between the two files of one machine.

    Raises:
        OSError: nothing can be written.
    """
    with _known_hosts_lock:
        lines = [f"{machine.address} ssh-ed25519 {machine.key}\n" for machine in joined_machines()]
        write_atomically(known_hosts_file(), "".join(lines).encode())


def read_document(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file; empty where it is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with path.open("rb") as stream:
            document = json.loads(stream.read(_LARGEST))
        if isinstance(document, dict):
            return document
    return {}


def _is_machine(document: dict[str, Any]) -> bool:
    fields = {"name": str, "key": str, "user": str, "system": str, "devices": str, "memory": int}
    later = {"lend": str, "limits": str}  # of machines that joined before, there are none
    is_known = fields.keys() <= document.keys() <= {*fields, *later} and document.get("lend", "own") in CLASSES
    return is_known and all(type(value) is {**fields, **later}[name] for name, value in document.items())


# ------------------------------------------------------------------------------------------------------------- the door


def door_socket() -> Path:
    """Return the Unix socket of this user's door: beside its keys, or where that path is too long below ``/tmp``.

    Raises:
        OSError: the folder there belongs to somebody else.
    """
    path = user_folder("config") / "joining" / "door.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        return path
    folder = Path("/tmp", f"muster-{os.getuid()}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}")
    if private_folder(folder).lstat().st_uid != os.getuid():  # root can change the mode of other users' folders, too
        raise PermissionError(f"{folder} belongs to another user: remove it")
    return folder / path.name


def ask_door(request: dict[str, Any], start: bool = True) -> socket.socket:
    """Return a connection to this user's door with a request sent; the door is started where none runs.

    Raises:
        NotConnected: it cannot be started, or ``start`` is unset and none runs.
    """
    stream = _connected()
    if stream is None and start:
        _start_door()
        stream = _connected()
    if stream is None:
        raise NotConnected("no door runs here for machines that join", f"start one: {program('machines', 'share')}")
    stream.sendall(json.dumps(request).encode() + b"\n")
    return stream


def call_joined(name: str, seconds: float) -> socket.socket:
    """Return a connection that a machine opens to us, on which it is an SSH server.

    Raises:
        NotConnected: it is away or has left, or opens none within ``seconds``.
    """
    machines = joined_machines()
    if name not in [machine.name for machine in machines]:
        addresses = ", ".join(machine.address for machine in machines)
        hint = f"joined: {addresses}" if addresses else f"let it join: {program('machines', 'share')}"
        raise NotConnected(f"no machine '{name}{SUFFIX}' has joined this computer", hint)
    with ask_door({"call": name, "seconds": seconds}) as door:
        door.settimeout(seconds + _ANSWER_PATIENCE)
        try:
            data, descriptors, _, _ = socket.recv_fds(door, _LARGEST, 1)
        except OSError:
            data, descriptors = b"", []
    if descriptors:
        return socket.socket(fileno=descriptors[0])
    answer = parse_line(data)
    hint = str(answer.get("hint") or "try again")
    raise NotConnected(str(answer.get("problem") or "the door of this computer has ended"), hint)


def door_status() -> dict[str, Any]:
    """Return what the door knows of each machine, by name; empty where no door runs."""
    with contextlib.suppress(NotConnected, OSError), ask_door({"status": True}, start=False) as door:
        door.settimeout(_ANSWER_PATIENCE)
        with door.makefile("rb") as lines:
            return parse_line(lines.readline(_LARGEST))
    return {}


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; empty where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(line)
        if isinstance(document, dict):
            return document
    return {}


def is_door_open() -> bool:
    """Whether this user's door runs."""
    stream = _connected()
    if stream is not None:
        stream.close()
    return stream is not None


def _connected() -> socket.socket | None:
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.settimeout(_ANSWER_PATIENCE)
        stream.connect(str(door_socket()))
    except OSError:
        stream.close()
        return None
    return stream


def _start_door() -> None:
    """Start the door in the background, and wait until it listens.

    Raises:
        NotConnected: it has ended, or takes too long.
    """
    from training.run.processes import environment  # 0.2 s, and only the first caller needs it

    log = joining_folder() / "door.log"
    with open(log, "wb", opener=private_file) as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", _DOOR],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment(0, TOP), cwd=os.sep,
            start_new_session=True,
        )  # fmt: skip
    end = time.monotonic() + _START_PATIENCE
    while time.monotonic() < end:
        if (stream_to_door := _connected()) is not None:
            stream_to_door.close()
            threading.Thread(target=process.wait, daemon=True).start()  # no zombie, where this process goes on
            return
        if process.poll() not in (None, 0):  # 0: another one was quicker
            break
        time.sleep(0.05)
    lines = log.read_text(errors="replace").strip().splitlines() or ["it did not start in time"]
    raise NotConnected(f"the door for machines that join does not start: {lines[-1][:300]}", f"see {log}")
