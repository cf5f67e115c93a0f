"""Arguments shared by several commands, with one name, meaning and help line each; settings of typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from profiles.installation import RUNS_FOLDER, USUAL_HOSTS

OUTPUT = RUNS_FOLDER

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder that holds the runs.")]
Ascii = Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters only.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def _choose_notified(target: str) -> None:
    if target:
        from app.trackers import notify  # with the events of runs, which --help does without

        notify.choose(target)


Notified = Annotated[
    str,
    typer.Option(
        "--notify",
        callback=_choose_notified,
        metavar="TARGET",
        help="Tell the desktop, a web address or a command when the run ends, fails or loses a machine. "
        "For all runs: the variable MUSTER_NOTIFY.",
    ),
]
BEFORE_START, OTHER_MACHINES = "Before it starts", "Other machines"
"""Panels of the help."""
Details = Annotated[
    bool,
    typer.Option(
        "--details",
        "-v",
        help="Also name the strategy, its codec and engine, and the plan's hash.",
        rich_help_panel=BEFORE_START,
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="Run in the background.")]
RunReference = Annotated[str, typer.Argument(metavar="RUN", help="Run id or a part of it, a profile, or a path.")]
LiveRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id or a part of it, a profile, or a path; default: the live one.")
]
AnyRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id or a part of it, a profile, or a path; default: the newest run.")
]
Statuses = Annotated[
    list[str],
    typer.Option(
        "--status", help="Only runs that are running, completed, failed, cancelled, interrupted ...; may be repeated."
    ),
]
ProfileName = Annotated[
    str, typer.Argument(metavar="PROFILE", help="Name of a profile: of config.ini, or a saved one.")
]
Setting = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any option of the profile; may be repeated.")
]
Together = Annotated[
    int, typer.Option("--local", min=1, metavar="N", help="Let N workers of this machine hold the model together.")
]
ModelReference = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder, run id, or profile (its newest run with a model).")
]
Language = Annotated[str, typer.Option("--language", help="Spoken language; empty: the model detects it.")]
Prompt = Annotated[
    str, typer.Option("--prompt", metavar="TEXT", help="Text the decoder sees first: names, spelling, style.")
]
Timestamps = Annotated[
    bool | None,
    typer.Option("--timestamps/--no-timestamps", help="Write timestamps; default: the model's own setting."),
]
MixedPrecision = Annotated[
    Literal["auto", "off", "bf16", "fp16"],
    typer.Option("--mixed-precision", help="Numeric precision; auto: as in training here."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
HostNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="HOST", help="Machine, as you type it after ssh (ada@studio), or its name in the hosts file."
    ),
]
_HOSTS = "FILE|A,B"
_TYPED = "or machines as you type them after ssh, with commas"
AllHosts = Annotated[
    Path | None, typer.Option("--hosts", metavar=_HOSTS, help=f"Hosts file: all machines in it; {_TYPED}.")
]
HostsOfProfile = Annotated[
    Path | None,
    typer.Option("--hosts", metavar=_HOSTS, help=f"Hosts file, {_TYPED}; empty: the profile's, or this machine alone."),
]
CheckedHosts = Annotated[
    Path | None, typer.Option("--hosts", metavar=_HOSTS, help=f"Hosts file, {_TYPED}; empty: {USUAL_HOSTS}.")
]
AllowMissing = Annotated[
    bool,
    typer.Option(
        "--allow-missing", help="Go on without machines that cannot be reached.", rich_help_panel=OTHER_MACHINES
    ),
]
OfflineWheels = Annotated[
    bool,
    typer.Option("--offline-wheels", help="Send missing packages from this machine.", rich_help_panel=OTHER_MACHINES),
]
TrustNew = Annotated[
    bool, typer.Option("--trust-new", help="Accept the host keys of new machines.", rich_help_panel=OTHER_MACHINES)
]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Run the Python code that the profile or the run names.")]
RareTrustCode = Annotated[
    bool, typer.Option("--trust-code", hidden=True, help="Run the Python code that the profile or the run names.")
]
"""Of a command with ``--help-all``, which alone shows it: the error without it names it."""


HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


def new_app(add_completion: bool = False, **settings: Any) -> typer.Typer:
    """Return a command, or a group of commands, with our settings."""
    return typer.Typer(
        add_completion=add_completion, context_settings=HELP_OPTIONS, rich_markup_mode="rich", **settings
    )
