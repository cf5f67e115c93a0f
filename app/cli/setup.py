"""``setup``: install the training packages on this computer before the first training."""

from __future__ import annotations

from app.cli.arguments import Json
from app.cli.handover import equip_here
from app.cli.terminal import answer
from profiles.errors import ExitCode
from profiles.installation import training_python


def setup(as_json: Json = False) -> ExitCode:
    """Install what is missing, and report the Python that trains here."""
    if not training_python():
        equip_here()
    python = training_python()
    return answer(as_json, {"python": python}, [f"ready to train, with {python}"])
