"""The set-up among scripted machines, as a program for a terminal.

``--ascii``: without any other characters. ``--fault``: a key that the home screen names raises.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> int:
    sys.path[0] = str(Path(__file__).parents[2])
    from app.screens import app, home
    from tests.wizard.fake_services import FakeServices

    if "--fault" in sys.argv:
        screen: Any = home.HomeScreen
        screen.action_new = lambda self: 1 / 0
    return app.run_wizard(FakeServices(), "", "--ascii" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
