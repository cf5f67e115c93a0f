"""Tests a box before anything of others runs in it: a program inside tries what it must not be able to do."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distributed.hosts.joined import joining_folder
from distributed.joining.lending.box import NoBox, ProgramBox, box_for
from distributed.joining.lending.terms import LendingTerms
from distributed.joining.pairing.introductions import own_addresses

_ATTEMPTS = """import json, os, socket, sys
secret, folder, ports, parent, programs = json.loads(sys.argv[1])
done = []
def attempt(name, work):
    try:
        work()
        done.append(name)
    except (OSError, ValueError):
        pass
def reach(address):
    socket.create_connection(address, timeout=2).close()
attempt("read a file of its owner", lambda: open(secret).read())
attempt("list the owner's folder", lambda: os.listdir(folder))
attempt("write outside its folder", lambda: open(os.path.join(folder, "written"), "w").close())
for name, address in ports:
    attempt(name, lambda: reach(address))
def meet():
    if sys.platform == "darwin":
        os.kill(parent, 0)
    elif os.readlink("/proc/self/ns/pid") != programs:
        raise OSError
attempt("meet programs outside", meet)
open(os.path.join(os.environ["HOME"], "written"), "w").close()
print(json.dumps(done))
"""
_APPARMOR = (
    r"printf 'abi <abi/4.0>,\ninclude <tunables/global>\nprofile bwrap /usr/bin/bwrap flags=(unconfined) { userns, }\n'"
    " | sudo tee /etc/apparmor.d/bwrap && sudo systemctl reload apparmor"
)
_LONGEST = 1 << 16


def require_box(terms: LendingTerms) -> None:
    """Test the box for these terms with a real program.

    Raises:
        NoBox: there is none here, or it lets something through.
    """
    if terms.lend == "own":
        return
    if terms.lend == "tasks" and sys.version_info < (3, 11):
        raise NoBox("class tasks needs Python 3.11 or newer", "lend it with another Python, or as --lend friend")
    with tempfile.TemporaryDirectory(prefix="muster-box-") as scratch:
        box = box_for(terms, Path(scratch), f"test/{secrets.token_hex(8)}", "test")
        try:
            breaches = _attempts(box)
        except (OSError, ValueError) as error:
            raise NoBox(*_unavailable(error)) from None
        finally:
            box.close()
    if breaches:
        raise NoBox(f"the box of this computer lets a program {', '.join(breaches)}", "it is not used")


def _attempts(box: ProgramBox) -> list[str]:
    """Return what a program in a box could do that it must not.

    Raises:
        OSError, ValueError: none runs there.
    """
    folder = joining_folder()
    secret = folder / f".box-{secrets.token_hex(4)}"
    secret.write_text("secret")
    try:
        with _listeners() as ports:
            programs = "" if sys.platform == "darwin" else os.readlink("/proc/self/ns/pid")
            question = json.dumps([str(secret), str(folder), ports, os.getpid(), programs])
            program = box.popen([box.python, "-IS", "-c", _ATTEMPTS, question])
            assert program.stdin is not None and program.stdout is not None and program.stderr is not None
            with program.stdin, program.stdout, program.stderr:
                answer, problem = program.stdout.read(_LONGEST), program.stderr.read(_LONGEST)
            if program.wait() != 0:
                raise OSError(box.problem() or problem.decode(errors="replace").strip()[-300:])
    finally:
        secret.unlink()
        (folder / "written").unlink(missing_ok=True)
    return [str(name) for name in json.loads(answer)]


@contextlib.contextmanager
def _listeners() -> Iterator[list[tuple[str, tuple[str, int]]]]:
    """Yield addresses at which this computer answers, with what reaching them would be."""
    with contextlib.ExitStack() as stack:
        ports = []
        for host in own_addresses()[:2]:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with contextlib.suppress(OSError):
                listener = stack.enter_context(socket.create_server((host, 0), family=family))
                ports.append(("reach the network", (host, int(listener.getsockname()[1]))))
        if sys.platform != "darwin":  # loopback is shared there
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(("reach services of this computer", ("127.0.0.1", int(listener.getsockname()[1]))))
        yield ports


def _unavailable(error: Exception) -> tuple[str, str]:
    """Return problem and hint of a box in which nothing runs."""
    if sys.platform == "darwin":
        return f"sandbox-exec does not work here ({error})", "lend this computer as --lend own, to yourself alone"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed", "install it: apt install bubblewrap (dnf, pacman and zypper have it, too)"
    restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    with contextlib.suppress(OSError):
        if restricted.read_text().strip() == "1":
            return (
                "AppArmor forbids bubblewrap what it needs (Ubuntu 23.10 and newer)",
                f"allow it to bwrap alone: {_APPARMOR}",
            )
    settings = "sysctl user.max_user_namespaces kernel.unprivileged_userns_clone"
    hint = f"does this kernel allow name spaces of users? They are set by {settings}"
    return f"bubblewrap does not work here ({error})", hint
