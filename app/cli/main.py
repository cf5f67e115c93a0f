"""The commands as typer sees them. Bodies are imported when their command runs, so that ``--help`` stays quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from app.cli.arguments import (
    HostNames,
    Json,
    Output,
    PlanFile,
    RunReference,
    Setting,
    Statuses,
    TrustCode,
    TrustNew,
    new_app,
)
from app.cli.blacklist import blacklist
from app.cli.boundary import run_app
from app.cli.compare import compare
from app.cli.demo_run import demo_run
from app.cli.discover import announce, discover
from app.cli.evaluate import evaluate
from app.cli.export import export
from app.cli.measure import measure
from app.cli.patches import patches
from app.cli.plan import plan
from app.cli.prepare import prepare
from app.cli.profiles import profiles
from app.cli.pseudo_label import pseudo_label
from app.cli.replay import replay
from app.cli.report import report
from app.cli.segment import segment
from app.cli.track import track
from app.cli.transcribe import transcribe
from app.cli.web import web
from profiles.errors import BadInput, ExitCode

OUTPUT = Path("output")
OWN_FILES = (
    transcribe,
    evaluate,
    export,
    compare,
    prepare,
    segment,
    patches,
    blacklist,
    pseudo_label,
    discover,
    announce,
    measure,
    plan,
    report,
    replay,
    track,
    web,
    demo_run,
)
"""Commands whose signature stands beside their body."""


runs = new_app(help="List, show, compare and clean runs.")


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # slow, and --help does not need it

        try:
            version = importlib.metadata.version("muster-train")
        except importlib.metadata.PackageNotFoundError:  # started from a folder that was never installed
            version = "unknown"
        typer.echo(f"muster {version}")
        raise typer.Exit


def _show_all_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in context.command.params:
            if hasattr(parameter, "hidden"):
                parameter.hidden = False
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train one model on the machines you already own."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def distributed_train(
    flags: dict[str, str],
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile of config.ini or a saved one.")] = "",
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="Model of config.ini, folder or hub name.")
    ] = "",
    dataset: Annotated[
        str, typer.Option("--dataset", metavar="PATH", help="Data folder, a hub name, or a data set of config.ini.")
    ] = "",
    settings: Setting = [],  # noqa: B006 - typer copies it
    resume: Annotated[str, typer.Option("--resume", metavar="RUN", help="Resume a stopped run.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run a few real steps, print their cost, keep nothing.")
    ] = False,
    plan_file: PlanFile = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Watch it in the dashboard.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Plan with the reachable machines only.")
    ] = False,
    no_input: Annotated[bool, typer.Option("--no-input", help="Never ask anything.")] = False,
    offline_wheels: Annotated[
        bool, typer.Option("--offline-wheels", help="Send missing packages from this machine.")
    ] = False,
    trust_new: TrustNew = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
    help_all: Annotated[
        bool,
        typer.Option("--help-all", callback=_show_all_help, is_eager=True, help="Help with the advanced options."),
    ] = False,
) -> ExitCode:
    """Train a model with workers of this machine or of several, live progress, and a result to use."""
    from app.cli.option_flags import merged_overrides
    from app.cli.train import TrainRequest, hosts_file_of
    from app.cli.train import distributed_train as run

    references = {name: value for name, value in (("model", model), ("dataset", dataset)) if value}
    overrides = merged_overrides(settings, flags, references)
    request = TrainRequest(profile, overrides, resume, dry_run, as_json, tuple(sys.argv), trust_code, no_input)
    hosts = hosts_file_of(request)
    if hosts is not None:
        from app.cli.distributed import MachineRequest, train_on_hosts

        machines = MachineRequest(
            hosts, plan_file, detach, allow_missing, no_input, offline_wheels, trust_new, dashboard
        )
        return train_on_hosts(request, machines)
    if plan_file is not None:
        raise BadInput("--plan needs machines", "name a hosts file with --hosts FILE")
    if dry_run:
        from app.cli.dry_run import rehearse

        return rehearse(request)
    if detach or dashboard:
        from app.cli.background import start_in_background
        from app.cli.distributed import leave_or_show

        return leave_or_show(start_in_background(request), detach, dashboard, as_json)
    return run(request)


def distributed_check(
    profile: Annotated[str, typer.Argument(metavar="[PROFILE]", help="Check for this profile's task.")] = "",
    hosts: Annotated[
        Path | None, typer.Option("--hosts", metavar="FILE", help="Hosts file; empty: distributed_hosts.json.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Install missing packages into Muster's folder there.")] = False,
    offline_wheels: Annotated[
        bool, typer.Option("--offline-wheels", help="With --fix: send the packages from this machine.")
    ] = False,
    trust_new: TrustNew = False,
    as_json: Json = False,
) -> ExitCode:
    """Ask all machines whether they are ready to train, and mend what can be mended."""
    from app.cli.check import check_command

    return check_command(profile, hosts, trust_new, as_json, fix or offline_wheels, offline_wheels)


def access(
    hosts: HostNames = None,
    hosts_file: Annotated[Path | None, typer.Option("--hosts", metavar="FILE", help="All machines in it.")] = None,
    trust_new: TrustNew = False,
    as_json: Json = False,
) -> ExitCode:
    """See whether machines let us in, and why not; a password, given once, installs our key."""
    from app.cli.access import access_command

    return access_command(hosts or [], hosts_file, trust_new, as_json)


def clean(
    hosts: HostNames = None,
    hosts_file: Annotated[Path | None, typer.Option("--hosts", metavar="FILE", help="All machines in it.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> ExitCode:
    """Take everything of ours off machines again, after showing it; live runs are not touched."""
    from app.cli.clean import clean_command

    return clean_command(hosts or [], hosts_file, yes, as_json)


def attach(
    run: RunReference,
    plain: Annotated[bool, typer.Option("--plain", help="Print progress instead of the dashboard.")] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters only.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Watch a run that goes on in the background; any number of terminals may. On a terminal: the dashboard."""
    from app.cli.attach import watch

    return watch(output, run, plain, ascii_only, as_json)


def logs(
    run: RunReference,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends.")] = False,
    output: Output = OUTPUT,
) -> ExitCode:
    """Show what the processes of a run have logged."""
    from app.cli.distributed import logs_command

    return logs_command(output, run, follow)


def stop(
    run: RunReference,
    kill: Annotated[bool, typer.Option("--kill", help="End at once, without a snapshot.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Stop a run in the background, and show for every machine that nothing of it is left."""
    from app.cli.distributed import stop_command

    return stop_command(output, run, kill, as_json)


def ask(
    run: RunReference,
    action: Annotated[
        Literal["pause", "resume", "snapshot", "drop", "add", "stop", "kill"],
        typer.Argument(metavar="ACTION", help="pause, resume, snapshot, drop, add, stop or kill."),
    ],
    machine: Annotated[
        str, typer.Argument(metavar="[MACHINE]", help="For drop and add: a machine of the run, or user@host.")
    ] = "",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Ask a live run for something: a pause, a snapshot, a machine more or less."""
    from app.cli.requests import ask_command

    return ask_command(output, run, action, machine, as_json)


@runs.callback()
def runs_root(context: typer.Context, output: Output = OUTPUT, as_json: Json = False) -> ExitCode | None:
    """List, show, compare and clean runs."""
    return runs_list(output, as_json) if context.invoked_subcommand is None else None


@runs.command("list")
def runs_list(
    output: Output = OUTPUT,
    as_json: Json = False,
    statuses: Statuses = [],  # noqa: B006 - typer copies it
    profile: Annotated[str, typer.Option("--profile", metavar="NAME", help="Only runs of this profile.")] = "",
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only newer ones: 2026-11-20, 2026-11-20T08:00, 7d or 12h.")
    ] = "",
) -> ExitCode:
    """List the runs, newest first."""
    from app.cli.runs import list_command

    return list_command(output, as_json, statuses, profile, since)


@runs.command("show")
def runs_show(run: RunReference, output: Output = OUTPUT, as_json: Json = False) -> ExitCode:
    """Show one run: its settings, course and result."""
    from app.cli.runs import show_command

    return show_command(output, run, as_json)


@runs.command("compare")
def runs_compare(
    references: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs, as for 'show'.")],
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Compare runs: the settings that differ, and the metrics."""
    from app.cli.runs import compare_command

    return compare_command(output, references, as_json)


@runs.command("clean")
def runs_clean(
    older_than: Annotated[float | None, typer.Option("--older-than", metavar="DAYS", min=0, help="By age.")] = None,
    statuses: Statuses = [],  # noqa: B006 - typer copies it
    keep: Annotated[int | None, typer.Option("--keep", metavar="N", min=0, help="Keep the newest N runs.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Remove runs after showing which; all conditions given must hold, and a live run is never touched."""
    from app.cli.runs import clean_command

    return clean_command(output, older_than, statuses, keep, yes, as_json)


def _only_listed() -> None:
    """Stand in for the command whose options are not needed."""


def command_tree(with_options: bool, only: str = "") -> typer.Typer:
    """Return all commands; without the flags of the options, which cost 0.1 s, where only the tree is needed.

    Args:
        only: the command that is called: typer looks at every signature, so the others are left out. A name that is
            none leaves nothing out.
    """
    app = new_app(help="Train one model on the machines you already own.")
    app.callback(invoke_without_command=True)(root)
    own = (distributed_train, distributed_check, access, clean, attach, logs, ask, stop, *OWN_FILES)
    bodies: dict[str, Callable[..., Any]] = {body.__name__.replace("_", "-"): body for body in own}
    groups = {"runs": runs, "profiles": profiles}
    for name, body in bodies.items():
        if only in (name, "") or only not in bodies | groups:
            app.command(name, help=body.__doc__)(_with_flags(body, with_options))
    for name, group in groups.items():
        if only in (name, "") or only not in bodies | groups:
            app.add_typer(group, name=name, invoke_without_command=True)
    return app


def _with_flags(body: Callable[..., Any], with_options: bool) -> Callable[..., Any]:
    """Give ``distributed-train`` a flag for each option, or none at all."""
    if body is not distributed_train:
        return body
    if not with_options:
        return _only_listed
    from app.cli.option_flags import with_option_flags

    return with_option_flags(distributed_train)


def main(arguments: Sequence[str], name: str = "cli_typer.py") -> int:
    """Run one command line and return its exit code."""
    called = next((word for word in arguments if not word.startswith("-")), "")
    return run_app(command_tree(called == "distributed-train", called), arguments, name)
