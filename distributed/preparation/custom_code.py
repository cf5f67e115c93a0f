"""The Python code of the user's own that a profile runs (``task = custom``, an optimizer), as something that a person
looks at and agrees to.

Planning, measuring, a trial run and a training import and run it alike.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distributed.preparation.code_sync import JOB_CODE, user_sources
from profiles.errors import BadInput
from profiles.installation import SHARED
from profiles.schema import Profile
from training.approvals import approve, digest_of, has_changed, is_approved
from training.name_clashes import refuse_clash
from training.plan import JOB_FACTORY

_COMPILED = tuple(suffix for suffix in importlib.machinery.all_suffixes() if suffix != ".py")
"""Of modules that Python imports as readily as its texts, and before them."""
_OWN = SHARED / "examples"
"""Shipped with the program, as trustworthy as the program."""


@dataclass(frozen=True)
class CustomCode:
    """The code of one profile."""

    factory: str
    """``module:factory``, as the profile says it."""
    file: Path
    """The file with the factory."""
    beside: tuple[Path, ...]
    """The modules that it may import and that are not installed, compiled ones too."""

    @property
    def own(self) -> bool:
        """Whether it is an example that came with the program."""
        return self.file.is_relative_to(_OWN)

    @property
    def approved(self) -> bool:
        """Whether a person has agreed to this code with the content that it has."""
        return self.own or is_approved(self._digest)

    def approve(self) -> None:
        """Remember that a person stands behind it."""
        if not self.own:
            approve(self._digest, self._what)

    @property
    def changed(self) -> bool:
        """Whether a person has agreed to this code, and it is not the same any more."""
        return not self.approved and has_changed(self._what)

    @property
    def _what(self) -> str:
        return f"code {self.factory} ({self.file})"

    @property
    def _digest(self) -> str:
        return digest_of(f"code {self.factory}", (self.file, *self.beside))


def check_code(
    profile: Profile,
    source: object,
    hint: str,
    *,
    is_named: bool,
    ask: Callable[[CustomCode, str], bool] | None = None,
    option: str = "model_path",
) -> None:
    """Refuse a profile's code that no person stands behind; whom they stand behind is remembered.

    Args:
        option: the one that names the code.
        source: the file that does.
        hint: how to stand behind it.
        named: the person has named the code, or has said that it is to be trusted.
        ask: asks the person, of the code that ``source`` wants to run.

    Raises:
        BadInput: nobody does, or a package of this program hides it.
    """
    factory = profile.own_code.get(option, "")
    if factory and factory != JOB_FACTORY:
        refuse_clash(factory.rpartition(":")[0], option)
    code = code_of(profile, option)
    if code is None or code.approved:
        return
    requester = f"{source}, profile '{profile.name}'"
    if not is_named and (ask is None or not ask(code, requester)):
        if code.changed:
            message = f"its Python code, or what it imports, has changed since it was approved: {code.file}"
        else:
            message = f"it runs Python code that is not approved here: {code.file}"
        raise BadInput(f"{requester}: {message}", hint)
    code.approve()


def code_of(profile: Profile, option: str = "model_path") -> CustomCode | None:
    """Return the code that an option of a profile names; ``None`` where it names none, or none that can be found."""
    factory = profile.own_code.get(option, "")
    if not factory:
        return None
    if factory == JOB_FACTORY:
        objects = Path(profile.data.dataset_path)  # their index names what is imported
        folder = objects.parent / JOB_CODE
        modules = (path for path in folder.rglob("*") if path.name.endswith((".py", *_COMPILED)))
        return CustomCode(
            factory, folder, (*objects.glob("*.json"), *(p for p in modules if p.parent.name != "__pycache__"))
        )
    module = factory.rpartition(":")[0]
    file = Path(module).expanduser().resolve() if module.endswith(".py") else _source(module)
    if file is None or not file.is_file():
        return None  # whoever imports it says so
    return CustomCode(factory, file, tuple(_modules(module)))


def _modules(module: str) -> Iterator[Path]:
    """Yield the files that a module may import; of a kind of which there are too many to be sent to a machine, none."""
    for suffixes in ((".py",), _COMPILED):
        with contextlib.suppress(BadInput):
            yield from user_sources(module, suffixes)[0]


def _source(module: str) -> Path | None:
    """Return the file of a module, as a worker that is started here finds it, without importing anything."""
    search_path: list[str] | None = [str(Path.cwd()), *sys.path]
    spec: importlib.machinery.ModuleSpec | None = None
    for name in module.split("."):  # its last name only, or the finder asks for packages that nobody has imported
        spec = importlib.machinery.PathFinder.find_spec(name, search_path)
        if spec is None:
            return None
        search_path = list(spec.submodule_search_locations or [])
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None
