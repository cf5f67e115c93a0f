"""Muster's command line: ``python3 cli_typer.py --help``."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from profiles.bootstrap import end_process, ensure_environment, hold_keys

if __name__ == "__main__":
    ensure_environment(__file__)
    hold_keys(sys.argv[1:] or ["--help"])
    from app.cli.train.first_line import say_first_line  # before anything large

    say_first_line(sys.argv[1:])

from app.cli.main import main

if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
