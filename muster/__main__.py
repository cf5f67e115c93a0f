"""The command ``muster``, also ``python -m muster``: the guided set-up without arguments, else a command.

An installed Muster is a light core. The packages that train on this computer are in a separate environment, as on every
other machine; once that exists, its Python runs the commands.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from profiles.bootstrap import end_process, hold_keys, silence_interrupts

_PACKAGES = ("app", "distributed", "profiles", "speech", "training")


def main() -> int:
    """Run the command line and end this process; return the exit code where that cannot begin."""
    silence_interrupts()
    hold_keys(sys.argv[1:])
    problem = _package_conflict()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        print("hint: install Muster on its own: uv tool install muster-train; in a clone: make setup", file=sys.stderr)
        return 2
    typed = os.environ.setdefault("MUSTER_PROGRAM", _typed_program(sys.argv[0]))  # before our packages read it
    sys.argv[0] = shlex.split(typed)[-1]  # what a run records as its command, and its command.sh starts again
    from app.cli.entry import called_set_up
    from app.cli.handover import hand_over
    from app.cli.train.first_line import say_first_line

    hand_over(sys.argv[1:])
    say_first_line(sys.argv[1:])
    if (open_set_up := called_set_up(sys.argv[1:], "muster")) is not None:
        end_process(open_set_up())
    from app.cli.main import main as run  # typer, which the set-up does without

    end_process(run(sys.argv[1:], "muster"))


def _typed_program(path: str) -> str:
    """Return the words by which a shell starts this program again: its path where another folder is searched."""
    if Path(path).name != "muster" or not Path(path).is_file():
        return "muster"
    installed = shutil.which("muster")
    is_same = installed is not None and Path(installed).resolve() == Path(path).resolve()
    return "muster" if is_same else shlex.quote(path)


def _package_conflict() -> str:
    """Return the problem if another distribution's package hides or overwrites one of ours; else empty."""
    top = Path(__file__).resolve().parent.parent
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None:  # an older installation of a clone does not list it
            return f"Muster's package '{package}' is missing here"
        if origin != top / package / "__init__.py":
            return f"'{package}' is another package here ({origin}), and hides Muster's"
        if not (top / package / "py.typed").is_file():
            return f"another package has overwritten Muster's '{package}' in {top}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
