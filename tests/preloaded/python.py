"""A Python for the processes that tests start, which has loaded already what takes seconds.

It stands as ``sys.executable`` in all tests and has the face of this Python. Muster's own modules and commands,
scripts of tests and of ``launch``, the children of ``multiprocessing`` and pytest's workers are done by copies of
a preloaded process (:mod:`tests.preloaded.server`); help, and coordinators that are not of a run on this machine, which
tests stop, by Python itself, as everything else. A test of a whole start asks :func:`python_itself`, or sets
``MUSTER_TESTS_COLD``.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_PRELOADED, _ITSELF = "MUSTER_TESTS_PRELOADED_PYTHON", "MUSTER_TESTS_PYTHON"
_HERE = Path(__file__).parent
_PROGRAM = """#!/bin/bash
case "$MUSTER_TESTS_COLD$*" in
*--help*) ;;
"-m training.exchange.group.coordinator_main --config "*/secrets/coordinator.json*)
    exec {python} -IS {client} {socket} "$@" ;;
"-m training.exchange.group.coordinator_main"*) ;;
"-m training."*|"-m distributed."*|"-m app."*|"-m tests.counting."*|\\
*"-c from multiprocessing."*|*"-c import sys;exec(eval("*|\\
"-c import ctypes, importlib"*|*" readhealth"|\\
{project}/cli_typer.py*|{project}/wizard.py*|{project}/examples/*.py*|{project}/docs/*.py*|{project}/tests/*_process.py*|\\
/*/training/script/script_start.py*|/*/pytest-of-*/script/*.py*|/*/pytest-of-*/wizard.py*)
    exec {python} -IS {client} {socket} "$@" ;;
esac
exec -a {program} {python} "$@"
"""
"""The second name makes it the ``sys.executable`` of what it runs, so that children begin in the same way."""


def use_preloaded() -> None:
    """Start processes with it from now on, if there is one."""
    sys.executable = os.environ.get(_PRELOADED, sys.executable)
    multiprocessing.set_executable(sys.executable)


def python_itself() -> str:
    """Return the program of this Python."""
    return os.environ.get(_ITSELF, sys.executable)


class PreloadedPython:
    """The program and its server, which end with the process that made them.

    Nothing where there is one already, and on other systems than Linux.

    Args:
        at_once: load before anybody asks; else the first one waits.
    """

    def __init__(self, at_once: bool) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux" or not shutil.which("bash") or _PRELOADED in os.environ:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="muster-python-", dir="/var/tmp"))  # hosts of labs see that
        self._folder.chmod(0o755)
        program = self._write_program()
        # Hugging Face's packages choose the places of their caches when they are loaded.
        environment = {**os.environ, "XDG_CACHE_HOME": str(self._folder / "cache")}
        environment.pop("PYTHONPATH", None)
        with open(self._folder / "log", "wb") as log, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / "socket"))
            listener.listen(64)
            words = [program, str(_HERE / "server.py"), str(listener.fileno()), *(["now"] if at_once else [])]
            self._server = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd="/",
                pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip
        os.environ[_PRELOADED], os.environ[_ITSELF] = program, sys.executable

    def _write_program(self) -> str:
        """Write a virtual environment with this one's packages and another program."""
        (self._folder / "bin").mkdir()
        shutil.copy(Path(sys.prefix) / "pyvenv.cfg", self._folder)
        (self._folder / "lib").symlink_to(Path(sys.prefix) / "lib")
        program = self._folder / "bin" / "python"
        given = {
            "program": program,
            "python": sys.executable,
            "client": _HERE / "client.py",
            "project": _HERE.parents[1],
        }
        program.write_text(_PROGRAM.format(**given, socket=self._folder / "socket"))
        program.chmod(0o755)
        return str(program)

    def close(self) -> None:
        """End the server and all its copies."""
        if self._server is not None:
            os.environ.pop(_PRELOADED)
            self._server.communicate()
