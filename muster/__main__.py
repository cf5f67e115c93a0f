"""The command ``muster``, also ``python -m muster``: the guided set-up without a word, else a command.

An installed Muster is a light core. What trains on this computer lies in an environment of its own, as on every other
machine; once it is there, commands are carried out by its Python.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from profiles.bootstrap import answer_interrupts

_ROOMS = ("app", "distributed", "profiles", "training")


def main() -> int:
    """Carry out the command line and return its exit code."""
    stranger = _foreign_room()
    if stranger:
        print(f"error: {stranger}\nhint: install Muster on its own: uv tool install muster-train", file=sys.stderr)
        return 2
    answer_interrupts()
    sys.argv[0] = "muster"  # what a run records as its command, and its command.sh starts again
    from app.cli.handover import hand_over
    from app.cli.main import main as run

    hand_over(sys.argv[1:])
    return run(sys.argv[1:], "muster")


def _foreign_room() -> str:
    """Return whose package stands where one of ours should; empty where all are ours."""
    top = Path(__file__).resolve().parent.parent
    for room in _ROOMS:
        spec = importlib.util.find_spec(room)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin != top / room / "__init__.py":
            return f"'{room}' is another package here ({origin or 'it is missing'}), and hides Muster's"
        if not (top / room / "py.typed").is_file():
            return f"another package has overwritten Muster's '{room}' in {top}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
