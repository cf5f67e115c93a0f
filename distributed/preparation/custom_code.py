"""Approval of a user's Python code that a profile runs (``task = custom``, an optimizer).

Planning, measuring, trial runs and training all import and run it.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distributed.hosts.approvals import approve, digest_of, has_changed, is_approved
from distributed.preparation.code_sync import JOB_CODE, user_sources
from profiles.errors import BadInput
from profiles.installation import SHARED
from profiles.schema import Profile
from training.records.plan import JOB_FACTORY
from training.tasks.name_clashes import refuse_clash

_COMPILED = tuple(suffix for suffix in importlib.machinery.all_suffixes() if suffix != ".py")
"""Suffixes of compiled modules, which Python imports in preference to source files."""
_EXAMPLES = SHARED / "examples"
"""Shipped with the program, so as trustworthy as the program."""


@dataclass(frozen=True)
class CustomCode:
    """The custom code behind one option of a profile."""

    factory: str
    """``module:factory``, as in the profile."""
    file: Path
    """The file with the factory."""
    importable: tuple[Path, ...]
    """The files of modules that it may import and that are not installed, including compiled ones."""

    @property
    def is_bundled(self) -> bool:
        """Whether it is an example shipped with the program."""
        return self.file.is_relative_to(_EXAMPLES)

    @property
    def approved(self) -> bool:
        """Whether the user has approved this code with its current content."""
        return self.is_bundled or is_approved(self._digest)

    def approve(self) -> None:
        """Record the user's approval."""
        if not self.is_bundled:
            approve(self._digest, self._description)

    @property
    def changed(self) -> bool:
        """Whether the code was approved and has changed since."""
        return not self.approved and has_changed(self._description)

    @property
    def _description(self) -> str:
        return f"code {self.factory} ({self.file})"

    @property
    def _digest(self) -> str:
        return digest_of(f"code {self.factory}", (self.file, *self.importable))


def check_code(
    profile: Profile,
    source: object,
    hint: str,
    *,
    is_named: bool,
    ask: Callable[[CustomCode, str], bool] | None = None,
    option: str = "model_path",
) -> None:
    """Refuse a profile's code that the user has not approved; record the approval.

    Args:
        option: the option that names the code.
        source: the file that names it.
        hint: how to approve it.
        is_named: the user has named the code, or has said that it is trusted.
        ask: asks the user to approve the code; its second argument says who requests to run it.

    Raises:
        BadInput: it is not approved, or a package of this program hides it.
    """
    factory = profile.user_code.get(option, "")
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
    """Return the code that an option of a profile names; ``None`` where it names none, or the file is not found."""
    factory = profile.user_code.get(option, "")
    if not factory:
        return None
    if factory == JOB_FACTORY:
        objects = Path(profile.data.dataset_path)  # their index names the imported modules
        folder = objects.parent / JOB_CODE
        modules = (path for path in folder.rglob("*") if path.name.endswith((".py", *_COMPILED)))
        return CustomCode(
            factory, folder, (*objects.glob("*.json"), *(p for p in modules if p.parent.name != "__pycache__"))
        )
    module = factory.rpartition(":")[0]
    file = Path(module).expanduser().resolve() if module.endswith(".py") else _source(module)
    if file is None or not file.is_file():
        return None  # the import will report it
    return CustomCode(factory, file, tuple(_modules(module)))


def _modules(module: str) -> Iterator[Path]:
    """Yield the files that a module may import; source or compiled files are left out if there are too many to send."""
    for suffixes in ((".py",), _COMPILED):
        with contextlib.suppress(BadInput):
            yield from user_sources(module, suffixes)[0]


def _source(module: str) -> Path | None:
    """Return the file of a module, as a worker started here would find it, without importing anything."""
    search_path: list[str] | None = [str(Path.cwd()), *sys.path]
    spec: importlib.machinery.ModuleSpec | None = None
    for name in module.split("."):  # only the last component: the finder would need the parent packages imported
        spec = importlib.machinery.PathFinder.find_spec(name, search_path)
        if spec is None:
            return None
        search_path = list(spec.submodule_search_locations or [])
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None
