"""``wizard.py --demo 3``, six times as fast."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    sys.path[0] = str(Path(__file__).parents[2])
    from app.demo.services import DemoServices
    from app.screens.app import run_wizard

    return run_wizard(DemoServices(3, speed=6.0), "", False)


if __name__ == "__main__":
    sys.exit(main())
