"""``setup``: the packages that train, installed on this computer ahead of the first training."""

from __future__ import annotations

from app.cli.arguments import Json
from app.cli.handover import equip_here
from app.cli.terminal import answer
from profiles.errors import ExitCode
from profiles.installation import training_python


def setup(as_json: Json = False) -> ExitCode:
    """Install what is missing, and say which Python trains here."""
    if not training_python():
        equip_here()
    python = training_python()
    return answer(as_json, {"python": python}, [f"ready to train, with {python}"])
