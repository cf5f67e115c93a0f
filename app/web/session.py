"""One screen of the web server: ``session.py [RUN_FOLDER]``. Its terminal is the browser.

It is started by path in the folder where ``web`` was typed, from which runs are looked for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_LOOK = 1.0


def _exit_with_server(server: int) -> None:
    """Exit when the server is gone, even if it was killed: otherwise this screen would never end."""
    while os.getppid() == server:
        time.sleep(_LOOK)
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Show the run, or the guided set-up if no run is named."""
    threading.Thread(target=_exit_with_server, args=(os.getppid(),), daemon=True).start()
    from app.screens.own_keys import own_keys

    if arguments:
        from app.dashboard.app import run_dashboard
        from app.html_report.page import SERVED

        os.environ[SERVED] = "/report"
        return run_dashboard(Path(arguments[0]), keymap=own_keys())
    from app.screens.app import run_wizard
    from app.wizard.services.services import Services

    return run_wizard(Services(), "", False, keymap=own_keys())


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # instead of this file's own folder
    from profiles.bootstrap import end_process

    end_process(main(sys.argv[1:]))
