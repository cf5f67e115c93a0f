"""``profiles list|show|validate``."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from app.console import show, show_json, show_line, visible
from profiles.errors import BadInput, ExitCode
from profiles.options import options
from profiles.resolve import Resolved, list_profiles, load_profile, validate_config


def list_command(as_json: bool) -> ExitCode:
    """Show all profiles."""
    entries = list_profiles()
    if as_json:
        keys = ("name", "description", "source", "error", "needs")
        show_json({"profiles": [{key: getattr(entry, key) for key in keys} for entry in entries], "exit_code": 0})
        return ExitCode.DONE
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("profile", "what it does", "needs"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        what = f"unusable: {entry.error}" if entry.error else entry.description
        table.add_row(*[Text(visible(cell)) for cell in (entry.name, what, entry.needs)])
    show(table)
    return ExitCode.DONE


def show_command(name: str, overrides: dict[str, str], origin: bool, as_json: bool) -> ExitCode:
    """Show every value of a profile, with ``origin`` also where it came from."""
    resolved = load_profile(name, overrides, complete=False)
    if as_json:
        show_json({**_document(resolved, origin), "exit_code": 0})
        return ExitCode.DONE
    section = ""
    for spec in options():
        if spec.section != section:
            section = spec.section
            show_line(f"# {section}")
        came_from = f"  # {resolved.origins[spec.name]}" if origin else ""
        show_line(visible(f"{spec.name} = {resolved.value(spec.name)}{came_from}"))
    return ExitCode.DONE


def validate_command(path: Path | None, as_json: bool) -> ExitCode:
    """Check ``config.ini`` (or another file) with its saved profiles.

    Raises:
        BadInput: there is a problem; all of them were shown.
    """
    problems = validate_config(path)
    if as_json:
        code = ExitCode.BAD_INPUT if problems else ExitCode.DONE
        show_json({"problems": problems, "exit_code": int(code)})
        return code
    for problem in problems:
        show_line(visible(problem))
    if problems:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise BadInput(f"{count} in the profiles", "correct the lines named above")
    show_line("all profiles are valid")
    return ExitCode.DONE


def _document(resolved: Resolved, origin: bool) -> dict[str, object]:
    document: dict[str, object] = resolved.profile.model_dump(mode="json")
    if origin:
        document["origins"] = {name: str(came_from) for name, came_from in resolved.origins.items()}
    return document
