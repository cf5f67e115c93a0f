"""The guided set-up: ``python3 wizard.py``. In this version it names the commands that do its work."""

from __future__ import annotations

import sys

from profiles.bootstrap import ensure_environment

ensure_environment(__file__)

COMMANDS = """The guided set-up is not part of this version. These commands do its work:

  make demo                                                     train a small Whisper on the shipped recordings
  .venv/bin/python cli_typer.py profiles list                   what can be trained
  .venv/bin/python cli_typer.py distributed-train PROFILE --local N --dataset FOLDER
                                                                train on your own recordings with N workers
  .venv/bin/python cli_typer.py runs list                       what was trained, and how well

README.md shows them in use; docs/options.md lists every setting.
"""


def main() -> int:
    """Say what to type; 2 because nothing was set up."""
    from profiles.errors import ExitCode  # after the environment is known to be there

    print(COMMANDS, end="", file=sys.stderr)
    return ExitCode.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
