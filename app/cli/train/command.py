"""``distributed-train``, with every declared option as a flag.

``--learning-rate 1e-3`` is ``--set learning_rate=1e-3``: the flag hands its text on to
:func:`profiles.files.resolve.load_profile`, so that one place checks values, whichever way they came.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from app.cli.arguments import (
    BEFORE_START,
    AllowMissing,
    Detach,
    Details,
    Json,
    Notified,
    OfflineWheels,
    ProfileName,
    RareTrustCode,
    Setting,
    TrustNew,
)
from profiles.errors import BadInput, ExitCode
from profiles.installation import NOTIFICATION_TARGET
from profiles.options import OptionSpec, options

if TYPE_CHECKING:
    from app.cli.train.request import TrainRequest

ALIASES = {"output_dir": "--output", "workers": "--local"}
"""Shorter names of some options."""
_FIRST = ("hosts",)
"""Options of the profile that stand in the first box of the help, behind ``--dataset``: a newcomer needs them."""
_METAVARS = {
    "integer": "N",
    "number": "X",
    "path": "PATH",
    "location": "PATH|NAME",
    "code": "NAME|FILE",
    "text": "TEXT",
    "choice": "NAME",
}


def with_option_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add a flag for every option to ``command``, which receives those used as ``flags: dict[str, str]``."""

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> Any:
        flags: dict[str, str] = {}
        for spec in options():
            name = _parameter_name(spec)
            value, off = arguments.pop(name), arguments.pop(f"no_{name}", False)
            if value is not None or off:
                flags[spec.name] = _text(spec, value, off)
            if (alias_value := arguments.pop(spec.alias, None)) is not None:
                flags[spec.alias] = alias_value
        return command(**arguments, flags=flags)

    signature = inspect.signature(command, eval_str=True)
    declared = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "flags"
    ]
    first, others = (
        [parameter for spec in options() if (spec.name in _FIRST) == is_first for parameter in _parameters(spec)]
        for is_first in (True, False)
    )
    at = next((n for n, parameter in enumerate(declared, 1) if parameter.name == "dataset"), len(declared))
    all_parameters = [*declared[:at], *first, *declared[at:], *others]
    wrapped.__signature__ = signature.replace(parameters=all_parameters)  # type: ignore[attr-defined]  # typer reads it
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in all_parameters}
    return wrapped


def _parameter_name(spec: OptionSpec) -> str:
    return spec.name.replace(".", "__")


def _parameters(spec: OptionSpec) -> list[inspect.Parameter]:
    flag, name = "--" + spec.name.replace("_", "-"), _parameter_name(spec)
    names = [*([ALIASES[spec.name]] if spec.name in ALIASES else []), flag]
    if spec.type != "flag":
        alias = f"--{spec.alias.replace('_', '-')}"
        # Both names in one parameter would cut the names of all others short in the help.
        about, metavar = f"the same as {flag}", _METAVARS.get(spec.type)
        alias_option = typer.Option(
            None, alias, hidden=True, metavar=metavar, help=about, rich_help_panel="Shorter names"
        )
        alias_parameters = [_parameter(spec.alias, str | None, alias_option)] if spec.alias else []
        return [_parameter(name, str | None, _option(spec, names, spec.about)), *alias_parameters]
    # A pair in one parameter would fill two columns of the help and cut the long names short.
    opposite = f"--no-{flag[2:]}"
    return [
        _parameter(name, bool | None, _option(spec, names, f"{spec.about} (or {opposite})")),
        _parameter(f"no_{name}", bool, typer.Option(False, opposite, hidden=True)),
    ]


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _option(spec: OptionSpec, names: list[str], about: str) -> Any:
    is_first, box = spec.name in _FIRST, "Snapshots" if spec.section == "snapshot" else spec.section.capitalize()
    return typer.Option(
        None,
        *names,
        metavar=_METAVARS.get(spec.type),
        help=escape(f"{about[0].upper()}{about[1:]}." if is_first else about),
        hidden=spec.advanced or "." in spec.name,
        rich_help_panel=None if is_first else box,
        show_default=False,
    )


def _text(spec: OptionSpec, value: bool | str | None, off: bool) -> str:
    """Return the option's value as written in an INI file.

    Raises:
        BadInput: a flag and its opposite.
    """
    if value is not None and off:
        flag = spec.name.replace("_", "-")
        raise BadInput(f"--{flag} and --no-{flag} contradict each other", "pass one of the two")
    return "false" if off else str(value).lower() if isinstance(value, bool) else str(value)


def merged_overrides(settings: Sequence[str], *groups: Mapping[str, str]) -> dict[str, str]:
    """Merge ``--set`` pairs with flags, ``--model`` and ``--dataset``.

    Raises:
        BadInput: a pair without ``=``, or one option given twice with different values.
    """
    overrides: dict[str, str] = {}
    pairs = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise BadInput(f"--set {setting}: not of the form key=value", "write for example --set learning_rate=1e-3")
        pairs.append((name.strip().replace("-", "_"), value.strip()))
    for name, value in [*pairs, *(item for group in groups for item in group.items())]:
        if overrides.get(name, value) != value:
            raise BadInput(f"'{name}' is set twice: {overrides[name]} and {value}", "give it once")
        overrides[name] = value
    return overrides


_EARLIER_NAME = "dry_run"
"""Former name of ``--try``; hidden, as it says the opposite of what it does."""


def _show_all_help(context: typer.Context, is_requested: bool) -> None:
    if is_requested:
        for parameter in context.command.params:
            if hasattr(parameter, "hidden"):
                parameter.hidden = parameter.name == _EARLIER_NAME
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


_before = functools.partial(typer.Option, rich_help_panel=BEFORE_START)


@with_option_flags
def distributed_train(
    flags: dict[str, str],
    profile: ProfileName = "",
    model: Annotated[str, typer.Option(metavar="NAME", help="Model of config.ini, folder or hub name.")] = "",
    dataset: Annotated[str, typer.Option(metavar="PATH", help="Data folder, hub name or data set of config.ini.")] = "",
    settings: Setting = [],  # noqa: B006 - typer copies it
    resume: Annotated[str, typer.Option(metavar="RUN", help="Resume a stopped run.")] = "",
    trial: Annotated[bool, _before("--try", help="Run a few real steps, show their cost, save nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = False,
    plan_only: Annotated[bool, _before("--plan-only", help="Show what would run, and start nothing.")] = False,
    out: Annotated[
        Path | None, _before("--out", metavar="FILE", help="Write the plan of --try or --plan-only to this file.")
    ] = None,
    plan_file: Annotated[
        Path | None, _before("--plan", metavar="FILE", help="Carry out a plan that 'machines plan --out' wrote.")
    ] = None,
    details: Details = False,
    detach: Detach = False,
    notified: Notified = "",
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Show the dashboard.")] = False,
    allow_missing: AllowMissing = False,
    no_input: Annotated[bool, typer.Option("--no-input", help="Never ask anything.")] = False,
    offline_wheels: OfflineWheels = False,
    trust_new: TrustNew = False,
    trust_code: RareTrustCode = False,
    on: Annotated[str, typer.Option("--on", metavar="slurm", hidden=True, help="In a job of SLURM.")] = "",
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", hidden=True, help="Nodes of the job.")] = 2,
    as_json: Json = False,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", callback=_show_all_help, is_eager=True, help="Show this message with the advanced options."
        ),
    ] = False,
) -> ExitCode:
    """Start or resume a run with workers of this machine or of several; ``flags`` are the options by name."""
    from app.cli.train.request import TrainRequest

    references = {"model": model, "dataset": dataset}
    overrides = merged_overrides(settings, flags, {name: value for name, value in references.items() if value})
    request = TrainRequest(
        profile, overrides, resume, trial or dry_run, as_json, tuple(sys.argv), trust_code, no_input, detach, dashboard,
        plan_file, allow_missing, offline_wheels, trust_new, plan_only, out, details,
    )  # fmt: skip
    _check(request)
    if on and (code := _in_job(on, nodes)) is not None:
        return code
    return _started(request)


def _in_job(engine: str, nodes: int) -> ExitCode | None:
    """Run this command in a job of an engine; ``None``: this is one of its processes."""
    from app.cli.train.engines import slurm

    if engine != "slurm":
        raise BadInput(f"--on {engine}: there is no such engine", "known: slurm; others start it as torchrun does")
    if not slurm.is_task():
        return slurm.submit(nodes)
    os.environ |= slurm.variables_of_torchrun()
    return None


def _check(request: TrainRequest) -> None:
    try:
        request.check_names()
    except BadInput:
        if os.environ.get(NOTIFICATION_TARGET):
            from app.trackers.notify import failed_start_notified  # with the events of runs

            with failed_start_notified(request.title):
                raise
        raise


def _started(request: TrainRequest) -> ExitCode:
    from app.cli.runs import attach  # 0.4 s of processor time, which a wrong name need not spend
    from app.cli.train import start as train

    if os.environ.get("WORLD_SIZE") and not (request.trial or request.plan_only):
        from app.cli.train.engines.ranked import train_as_rank

        if (code := train_as_rank(request)) is not None:
            return code
    hosts = train.hosts_file_of(request)
    if hosts is None and request.plan_file is not None:
        raise BadInput("--plan needs machines", "name a hosts file with --hosts FILE")
    if request.dashboard:
        attach.refuse_bad_keys()
    if request.trial or request.plan_only:
        from app.cli.train.trial_run import not_for_real, rehearse, show_plan

        if hosts is not None:
            return train.train_on_hosts(request, hosts, not_for_real)
        return rehearse(request) if request.trial else show_plan(train.plan_of(request), request)
    if hosts is not None:
        return train.train_on_hosts(request, hosts)
    if request.detach or request.dashboard:
        return train.train_in_background(request)
    return train.distributed_train(request)
