"""Where Muster's files and a person's lie: in a checkout all beside the code; installed, in the package and the user's
folders."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

DISTRIBUTION = "muster-train"
TOP = Path(__file__).resolve().parent.parent
"""The folder of the packages."""
IS_CHECKOUT = (TOP / "config.ini").is_file()
"""Whether this is a clone of the sources, and no installed package."""
SHARED = TOP if IS_CHECKOUT else TOP / "muster" / "shared"
"""``config.ini``, the examples and the list of tested packages."""
PROGRAM = ("python3", "cli_typer.py") if IS_CHECKOUT else ("muster",)
"""What a person types before a command, in the folder of a checkout."""
DEMO = "make demo" if IS_CHECKOUT else "muster train demo"
"""What trains the example."""
SETUP = "make setup" if IS_CHECKOUT else "muster setup"
"""What installs the packages that train on this computer."""
WIZARD = "python3 wizard.py" if IS_CHECKOUT else "muster wizard"
"""What a person types for the guided set-up, in the folder of a checkout, before its options."""


def user_folder(kind: str) -> Path:
    """Return the user's folder of a kind, as ``platformdirs`` has it: ``data``, ``config``, ``cache``, ``state``."""
    import platformdirs  # an installed Muster alone needs it so early

    return Path(getattr(platformdirs, f"user_{kind}_dir")("muster", appauthor=False))


_INSTALLED_NAMES = {"distributed-train": ("train",), "distributed-check": ("machines", "check")}
RUNS_FOLDER = Path("output") if IS_CHECKOUT else user_folder("data") / "runs"
"""Where run folders lie unless a person says otherwise."""


def spoken(words: Sequence[str]) -> list[str]:
    """Return a command's words with the name that the installed program lists in its help."""
    first, rest = words[:1], words[1:]
    return [*(first if IS_CHECKOUT else _INSTALLED_NAMES.get("".join(first), first)), *rest]


def program(*words: str) -> str:
    """Return what to type for a command of Muster, as a text shows it."""
    return " ".join((*PROGRAM, *spoken(words)))


def saved_profiles(config: Path) -> Path:
    """Return the folder of the saved profiles that belong to ``config``: beside it, or the user's."""
    if IS_CHECKOUT or config.parent != SHARED:
        return config.parent / "profiles" / "saved"
    return user_folder("config") / "profiles"


@lru_cache
def can_train() -> bool:
    """Whether this Python has the packages that train; the light core has not."""
    return importlib.util.find_spec("torch") is not None


def training_python() -> str:
    """Return the Python that trains on this computer; empty where none was made yet."""
    return sys.executable if can_train() else str(training_environment().get("python", ""))


def training_code() -> Path:
    """Return the folder of our packages that the Python which trains here imports."""
    return TOP if can_train() else Path(training_environment().get("code", TOP))


def training_environment() -> dict[str, str]:
    """Return ``python`` and ``code`` of the environment made for this installation on this computer; empty: none."""
    try:
        environment = json.loads(_record().read_text())
        valid = environment["made_for"] == installation_digest() and os.access(environment["python"], os.X_OK)
        return {name: str(environment[name]) for name in ("python", "code")} if valid else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def record_training_environment(python: str, code: Path) -> None:
    """Let later commands of this installation be carried out by ``python`` with the copy of its ``code``."""
    _record().parent.mkdir(parents=True, exist_ok=True)
    document = {"python": python, "code": str(code), "made_for": installation_digest()}
    part = _record().with_suffix(".part")
    part.write_text(json.dumps(document))
    part.replace(_record())


@lru_cache
def installation_digest() -> str:
    """Return a hash of this installation's files and of the packages that it was tested with."""
    record = importlib.metadata.distribution(DISTRIBUTION).read_text("RECORD") or ""
    pins = (SHARED / "constraints.txt").read_text() + (SHARED / "requirements.lock").read_text()
    return hashlib.sha256((record + pins).encode()).hexdigest()[:16]


def _record() -> Path:
    return user_folder("cache") / "training.json"
