"""The guided set-up: ``python3 wizard.py``. From "I have three machines" to a run that trains, without a manual."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from profiles.bootstrap import end_process, ensure_environment, hold_keys

ensure_environment(__file__)
if __name__ == "__main__":
    hold_keys(["wizard", *sys.argv[1:]])

from app.cli.wizard import main  # noqa: E402 - the environment has to be known to be there

if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
