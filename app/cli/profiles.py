"""``profiles``: its commands as typer sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Json, Setting, new_app
from profiles.errors import ExitCode

profiles = new_app(help="List, show and check profiles.")


@profiles.callback()
def profiles_root(context: typer.Context, as_json: Json = False) -> ExitCode | None:
    """List, show and check profiles."""
    return profiles_list(as_json) if context.invoked_subcommand is None else None


@profiles.command("list")
def profiles_list(as_json: Json = False) -> ExitCode:
    """List the profiles of config.ini and the saved ones."""
    from app.cli.profile_commands import list_command

    return list_command(as_json)


@profiles.command("show")
def profiles_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the profile.")],
    settings: Setting = [],  # noqa: B006 - typer copies it
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value came from.")] = False,
    as_json: Json = False,
) -> ExitCode:
    """Show every value of a profile."""
    from app.cli.option_flags import merged_overrides
    from app.cli.profile_commands import show_command

    return show_command(name, merged_overrides(settings, {}, {}), origin, as_json)


@profiles.command("validate")
def profiles_validate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Another config.ini.")] = None,
    as_json: Json = False,
) -> ExitCode:
    """Check config.ini and the saved profiles."""
    from app.cli.profile_commands import validate_command

    return validate_command(file, as_json)
