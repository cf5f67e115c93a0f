"""The tour: recorded machines and a recorded run behind the seams of the real ones.

It needs no network and no training, and serves the pictures and the screens' tests too. Names, chips and health of the
machines are invented; links, speeds and the run were recorded on lab hosts (``record/README.md``). All machines are
named ``demo-...`` and the profile of a run ``scripted-demo``, so that nothing can be taken for a measurement of yours.
"""

from __future__ import annotations

from pathlib import Path

RECORD = Path(__file__).parent / "record"
CONFIG = RECORD / "config.ini"
MOST = 8
"""Machines."""
PROFILE = "scripted-demo"
JOB = "demo"
"""The profile that the set-up begins with."""
