"""``profiles list|show|validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from app.cli.arguments import Json, Setting, new_app
from app.cli.terminal import answer
from app.console import show, show_line, visible
from profiles.errors import BadInput, ExitCode
from profiles.files.resolve import list_profiles, load_profile, validate_config
from profiles.options import options

profiles = new_app()


@profiles.callback()
def profiles_root(context: typer.Context, as_json: Json = False) -> ExitCode | None:
    """List, show and check profiles."""
    return list_command(as_json) if context.invoked_subcommand is None else None


@profiles.command("list")
def list_command(as_json: Json = False) -> ExitCode:
    """List the profiles of config.ini and the saved ones."""
    entries = list_profiles()
    if as_json:
        keys = ("name", "description", "source", "error", "needs")
        return answer(True, {"profiles": [{key: getattr(entry, key) for key in keys} for entry in entries]}, ())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("profile", "what it does", "needs"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        description = f"unusable: {entry.error}" if entry.error else entry.description
        table.add_row(*[Text(visible(cell)) for cell in (entry.name, description, entry.needs)])
    show(table)
    return ExitCode.DONE


@profiles.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the profile.")],
    settings: Setting = [],  # noqa: B006 - typer copies it
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value came from.")] = False,
    as_json: Json = False,
) -> ExitCode:
    """Show every value of a profile."""
    from app.cli.train.command import merged_overrides

    resolved = load_profile(name, merged_overrides(settings), complete=False)
    document = resolved.profile.model_dump(mode="json")
    if origin:
        document["origins"] = {option: str(came_from) for option, came_from in resolved.origins.items()}
    lines, section = [], ""
    for spec in options():
        if spec.section != section:
            section = spec.section
            lines.append(f"# {section}")
        came_from = f"  # {resolved.origins[spec.name]}" if origin else ""
        lines.append(visible(f"{spec.name} = {resolved.value(spec.name)}{came_from}"))
    return answer(as_json, document, lines)


@profiles.command("validate", help="Check config.ini and the saved profiles.")
def validate_command(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Another config.ini.")] = None,
    as_json: Json = False,
) -> ExitCode:
    """Check config.ini (or another file) with its saved profiles.

    Raises:
        BadInput: there is a problem; all of them were shown.
    """
    problems = validate_config(file)
    code = ExitCode.BAD_INPUT if problems else ExitCode.DONE
    answer(as_json, {"problems": problems}, map(visible, problems), code)
    if as_json:
        return code
    if problems:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise BadInput(f"{count} in the profiles", "correct the lines named above")
    show_line("all profiles are valid")
    return code
