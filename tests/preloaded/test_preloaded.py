"""A copy of the preloaded Python is, for whoever started it, the process that he wanted."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import profiles
from tests.lab.processes import is_dead
from tests.preloaded.python import python_itself
from tests.waiting import until

COPY = "from multiprocessing.util import os, sys; import signal, time; "
"""So begins what multiprocessing starts, which a copy does."""

pytestmark = pytest.mark.skipif(python_itself() == sys.executable, reason="needs Linux and bash")


def copy(code: str, *words: str, **options: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", COPY + code, *words]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_it_has_loaded_already_what_a_cold_one_has_not() -> None:
    code = "print('torch' in sys.modules)"
    assert copy(code).communicate(timeout=60)[0] == "True\n"
    cold = subprocess.run([python_itself(), "-c", COPY + code], capture_output=True, text=True, check=True)
    assert cold.stdout == "False\n"


def test_it_has_the_arguments_folder_variables_files_and_limits(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    code = (
        "print(sys.argv, os.getcwd(), os.environ['OWN'], sys.stdin.read(), sys.executable); "
        "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]); "
        "print('bad', file=sys.stderr); os.write(int(sys.argv[1]), b'more')"
    )

    def fewer() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 4096))

    process = copy(
        code, str(writing), cwd=tmp_path, env={**os.environ, "OWN": "x"}, pass_fds=[writing], preexec_fn=fewer
    )
    out, err = process.communicate("said", timeout=60)
    assert (out, err) == (f"['-c', '{writing}'] {tmp_path} x said {sys.executable}\n300\n", "bad\n")
    os.close(writing)
    with open(reading) as pipe:
        assert pipe.read() == "more"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('no')", 1),
        ("1 / 0", 1),
        ("os._exit(9)", 9),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_it_ends_as_it_would_alone(end: str, code: int) -> None:
    process = copy(end)
    process.communicate(timeout=60)
    assert process.returncode == code


def test_muster_is_that_of_the_folder_that_its_client_would_find(tmp_path: Path) -> None:
    shutil.copytree(Path(profiles.__file__).parent, tmp_path / "profiles")
    (tmp_path / "app").mkdir()  # a folder of one of its names is none of its packages
    code = "import profiles.errors as errors; print(errors.__file__, errors.BadInput.__module__)"
    for _ in range(2):
        out, err = copy(code, cwd="/", env={**os.environ, "PYTHONPATH": str(tmp_path)}).communicate(timeout=60)
        assert (out, err) == (f"{tmp_path / 'profiles' / 'errors.py'} profiles.errors\n", "")
        (tmp_path / "profiles" / "errors.py").write_text(Path(profiles.__path__[0], "errors.py").read_text() + "\n")


def started(code: str) -> tuple[subprocess.Popen[str], int]:
    """Return a copy that says its number, once it has done so."""
    process = copy(f"print(os.getpid(), flush=True); {code}")
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_signals_reach_it() -> None:
    wait = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('ready', flush=True); time.sleep(60)"
    process, _ = started(wait)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 5


@pytest.mark.slow
def test_it_does_not_outlive_whom_it_stands_for() -> None:
    process, number = started("time.sleep(60)")
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not psutil.pid_exists(number))


@pytest.mark.slow
def test_one_that_is_killed_does_not_see_its_input_end(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    process, number = started(f"sys.stdin.read(1); open({str(seen)!r}, 'w')")
    server = psutil.Process(number).parent()
    assert server is not None
    server.suspend()  # which kills it otherwise
    try:
        with process:  # closes its input at once, when it is hardly dead
            process.kill()
        until(lambda: is_dead(number))
    finally:
        server.resume()
    assert not seen.exists()
