"""Every declared option as a flag of a command.

``--learning-rate 1e-3`` is ``--set learning_rate=1e-3``: the flag hands its text on to
:func:`profiles.resolve.load_profile`, so that one place checks values, whichever way they came.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import typer
from rich.markup import escape

from profiles.errors import BadInput
from profiles.options import OptionSpec, canonical, options

ALIASES = {"output_dir": "--output", "workers": "--local"}
"""Shorter names of some options."""
_PANELS = {
    "model": "Model",
    "data": "Data",
    "training": "Training",
    "evaluation": "Evaluation",
    "snapshot": "Snapshots",
    "strategy": "Strategy",
    "run": "Run",
}
_METAVARS = {
    "integer": "N",
    "number": "X",
    "path": "PATH",
    "location": "PATH|NAME",
    "text": "TEXT",
    "choice": "NAME",
}


def with_option_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` one flag an option; it gets those that were used as ``flags: dict[str, str]``."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> Any:
        flags: dict[str, str] = {}
        for spec in options():
            name = _parameter_name(spec)
            value, off = arguments.pop(name), arguments.pop(f"no_{name}", False)
            if value is not None or off:
                flags[spec.name] = _text(spec, value, off)
            if (other := arguments.pop(spec.alias, None)) is not None:
                flags[spec.name] = _same(spec, flags.get(spec.name, other), other)
        return command(**arguments, flags=flags)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
    every = [*own, *[parameter for spec in options() for parameter in _parameters(spec)]]
    wrapped.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]  # typer reads it
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return wrapped


def _parameter_name(spec: OptionSpec) -> str:
    return spec.name.replace(".", "__")


def _same(spec: OptionSpec, one: str, other: str) -> str:
    """Return the value that was given by two names.

    Raises:
        BadInput: they are two values.
    """
    if one != other:
        raise BadInput(f"'{spec.name}' is set twice: {one} and {other}", "give it once")
    return one


def _parameters(spec: OptionSpec) -> list[inspect.Parameter]:
    flag, name = "--" + spec.name.replace("_", "-"), _parameter_name(spec)
    names = [*([ALIASES[spec.name]] if spec.name in ALIASES else []), flag]
    if spec.type != "flag":
        alias = f"--{spec.alias.replace('_', '-')}"
        # Both names in one parameter would cut the names of all others short in the help.
        about, metavar = f"the same as {flag}", _METAVARS.get(spec.type)
        also = typer.Option(None, alias, hidden=True, metavar=metavar, help=about, rich_help_panel="Shorter names")
        other = [_parameter(spec.alias, str | None, also)] if spec.alias else []
        return [_parameter(name, str | None, _option(spec, names, spec.about)), *other]
    # A pair in one parameter would fill two columns of the help and cut the long names short.
    opposite = f"--no-{flag[2:]}"
    return [
        _parameter(name, bool | None, _option(spec, names, f"{spec.about} (or {opposite})")),
        _parameter(f"no_{name}", bool, typer.Option(False, opposite, hidden=True)),
    ]


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _option(spec: OptionSpec, names: list[str], about: str) -> Any:
    return typer.Option(
        None,
        *names,
        metavar=_METAVARS.get(spec.type),
        help=escape(about),
        hidden=spec.advanced,
        rich_help_panel=_PANELS.get(spec.section, spec.section.capitalize()),
        show_default=False,
    )


def _text(spec: OptionSpec, value: bool | str | None, off: bool) -> str:
    """Return the option's value as an INI file would hold it.

    Raises:
        BadInput: a flag and its opposite.
    """
    if value is not None and off:
        flag = spec.name.replace("_", "-")
        raise BadInput(f"--{flag} and --no-{flag} contradict each other", "pass one of the two")
    return "false" if off else str(value).lower() if isinstance(value, bool) else str(value)


def merged_overrides(settings: list[str], flags: dict[str, str], references: dict[str, str]) -> dict[str, str]:
    """Join ``--set`` pairs, flags, and ``--model``/``--dataset``.

    Raises:
        BadInput: a pair without ``=``, or one option given twice with different values.
    """
    overrides: dict[str, str] = {}
    pairs = [_pair(setting) for setting in settings]
    for given, value in [*pairs, *flags.items(), *references.items()]:
        name = canonical(given)
        if overrides.get(name, value) != value:
            raise BadInput(f"'{name}' is set twice: {overrides[name]} and {value}", "give it once")
        overrides[name] = value
    return overrides


def _pair(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not equals or not name.strip():
        raise BadInput(f"--set {setting}: not of the form key=value", "write for example --set learning_rate=1e-3")
    return name.strip().replace("-", "_"), value.strip()
