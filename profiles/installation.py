"""Locations of Muster's files and of the user's: in a checkout next to the code; when installed, in the package and the
user's folders. And what packages add to Muster."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from configparser import ConfigParser
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from profiles.errors import BadInput, where_it_failed

DISTRIBUTION = "muster-train"
TOP = Path(__file__).resolve().parent.parent
"""Folder that contains the packages."""
IS_CHECKOUT = (TOP / "config.ini").is_file()
"""Whether this is a clone of the sources rather than an installed package."""
SHARED = TOP if IS_CHECKOUT else TOP / "muster" / "shared"
"""``config.ini``, the examples and the list of tested packages."""
PLUGINS_FILE = "entry_points.txt"
"""File in a package beside ours that names what it adds to Muster."""
NOTIFICATION_TARGET = "MUSTER_NOTIFY"
"""Variable with the desktop, web address or command that hears of runs; see :mod:`app.trackers.notify`."""
TYPED_PROGRAM = "MUSTER_PROGRAM"
"""Environment variable with the words by which a person starts this program, for processes that it starts."""
_SCRIPT = "cli_typer.py"


def user_folder(kind: str) -> Path:
    """Return the user's folder of a kind that ``platformdirs`` knows: ``data``, ``config``, ``cache``, ``state``."""
    import platformdirs  # only an installed Muster needs it this early

    return Path(getattr(platformdirs, f"user_{kind}_dir")("muster", appauthor=False))


RUNS_FOLDER = Path("output") if IS_CHECKOUT else user_folder("data") / "runs"
"""Default folder of the run folders."""
USUAL_HOSTS = Path("distributed_hosts.json")
"""Hosts file, in the current folder, that is used where none is named."""


def program_words() -> list[str]:
    """Return the words that start this program from the current folder, as its user types them."""
    if typed := os.environ.get(TYPED_PROGRAM):
        return shlex.split(typed)
    return ["python3", relative_path(TOP / _SCRIPT)] if IS_CHECKOUT else ["muster"]


GROUPED_NAMES = {"distributed-train": ("train",), "distributed-check": ("machines", "check")}
"""Commands as the help lists them, by the names that the script of a checkout has besides."""


def command_words(*words: str) -> list[str]:
    """Return the words of a Muster command, by the name that the help lists."""
    command = words[:1]
    return [*program_words(), *GROUPED_NAMES.get("".join(command), command), *words[1:]]


def command_line(*words: str) -> str:
    """Return the command line of a Muster command from the current folder."""
    return shlex.join(command_words(*words))


def command_about(run_dir: Path, *words: str) -> str:
    """Return the command line for a run: ``words``, its id, and ``--output`` where it is not in the usual folder."""
    folder = run_dir.parent
    usual = folder.resolve() == RUNS_FOLDER.resolve()
    return command_line(*words, run_dir.name[:20], *([] if usual else ["--output", str(folder)]))


def way_to_add(run_dir: Path, machine: str) -> str:
    """Return the command line that adds a lost machine, or another one, to a live run."""
    return f"{command_about(run_dir, 'runs', 'ask')} add {shlex.quote(machine)}"


def program(*words: str) -> str:
    """Return the command line of a Muster command whose ``words`` are not quoted, for messages."""
    return " ".join(command_words(*words))


def wizard_line(*options: str) -> str:
    """Return the command line of the guided set-up from the current folder."""
    *start, program = program_words()
    words = [f"{program[: -len(_SCRIPT)]}wizard.py"] if program.endswith(_SCRIPT) else [program, "wizard"]
    return shlex.join([*start, *words, *options])


def make_line(target: str, installed: str) -> str:
    """Return ``make TARGET`` for a checkout, from the current folder; else the installed program's command."""
    if not IS_CHECKOUT:
        return program(installed)
    is_current = TOP.samefile(Path.cwd())
    return f"make {target}" if is_current else f"make -C {shlex.quote(str(TOP))} {target}"


def setup_line() -> str:
    """Return the command that installs the packages needed to train on this computer."""
    return make_line("setup", "machines setup")


def _has_pip() -> bool:
    """Whether this Python has pip. Only folders are searched: before Python 3.12 setuptools has a finder that takes the
    search for the beginning of an installation, and then setuptools cannot be imported, as compiled steps need it."""
    return importlib.machinery.PathFinder.find_spec("pip") is not None


def package_line(*packages: str) -> str:
    """Return the command that adds packages, in their tested versions, to the Python of this process, from any folder:
    one that pipx or uv made has no pip of its own."""
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return shlex.join(["pipx", "inject", DISTRIBUTION, *packages])
    tested = SHARED / "constraints.txt"
    pins = ["-c", str(tested)] if tested.is_file() else []
    pip = [sys.executable, "-m", "pip", "install"]
    if not _has_pip():
        from shutil import which  # not needed to start

        beside = Path(sys.prefix).parent / ".uv" / "bin" / "uv"  # of the environments that Muster makes
        pip = ["uv" if which("uv") else str(beside), "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *pins, *packages])


def demo_line() -> str:
    """Return the command that trains the example."""
    return make_line("demo", "train demo")


def relative_path(path: str | Path) -> str:
    """Return a path relative to the current folder, or unchanged where it lies outside."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def shown_path(path: str | Path) -> str:
    """Return a path in short, to be read: relative to the current folder, or below ``~`` where it lies outside."""
    shown, home = Path(relative_path(path)), Path.home()
    return f"~/{shown.relative_to(home)}" if shown.is_relative_to(home) else str(shown)


def saved_profiles(config: Path) -> Path:
    """Return the folder of the saved profiles that belong to ``config``: beside it, or the user's."""
    if IS_CHECKOUT or config.parent != SHARED:
        return config.parent / "profiles" / "saved"
    return user_folder("config") / "profiles"


@lru_cache
def can_train() -> bool:
    """Whether this Python has the packages needed to train; the light core has not."""
    return importlib.util.find_spec("torch") is not None


def training_python() -> str:
    """Return the Python that trains on this computer; empty if no environment was made yet."""
    return sys.executable if can_train() else str(training_environment().get("python", ""))


def training_code() -> Path:
    """Return the folder from which the training Python imports our packages."""
    return TOP if can_train() else Path(training_environment().get("code", TOP))


def training_environment() -> dict[str, str]:
    """Return ``python`` and ``code`` of this installation's training environment on this computer; empty if none."""
    try:
        environment = json.loads(_record().read_text())
        valid = environment["made_for"] == installation_digest() and os.access(environment["python"], os.X_OK)
        return {name: str(environment[name]) for name in ("python", "code")} if valid else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def record_training_environment(python: str, code: Path) -> None:
    """Make later commands of this installation run in ``python`` with the copy of its ``code``."""
    _record().parent.mkdir(parents=True, exist_ok=True)
    document = {"python": python, "code": str(code), "made_for": installation_digest()}
    temporary = _record().with_suffix(".part")
    temporary.write_text(json.dumps(document))
    temporary.replace(_record())


@lru_cache
def installation_digest() -> str:
    """Return a hash of this installation's files and of the package versions it was tested with."""
    record = importlib.metadata.distribution(DISTRIBUTION).read_text("RECORD") or ""
    pins = (SHARED / "constraints.txt").read_text() + (SHARED / "requirements.lock").read_text()
    return hashlib.sha256((record + pins).encode()).hexdigest()[:16]


def _record() -> Path:
    return user_folder("cache") / "training.json"


@cache
def plugins(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group by which packages add to Muster, without loading them.

    An installed package names them in its metadata. A package that lies beside ours names them in its own folder, in
    the same format: a clone may have older metadata, and on other machines nothing is installed.
    """
    points = list(entry_points(group=group))
    for file in sorted(TOP.glob(f"*/{PLUGINS_FILE}")):
        if (file.parent / "__init__.py").is_file():  # else it is the metadata of an installed package
            named = ConfigParser(delimiters=("=",), interpolation=None)
            named.optionxform = str  # type: ignore[assignment,method-assign]  # as its docs say: names keep their case
            named.read(file, encoding="utf-8")
            points += (EntryPoint(*item, group) for item in (named.items(group) if named.has_section(group) else ()))
    return tuple({(point.name, point.value): point for point in points}.values())


def load_plugin(point: EntryPoint) -> Any:
    """Return what an entry point names.

    Raises:
        BadInput: it cannot be imported; names its package.
    """
    try:
        return point.load()
    except Exception as error:  # user code may raise anything
        problem = f"package {point.module}: '{point.name}' cannot be used: {where_it_failed(error)}"
        raise BadInput(problem, "repair the package, or remove it") from error
