"""``wizard.py``: its options, and the choice between screens and plain text."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from app.console import can_only_print, say, say_error
from profiles.bootstrap import release_keys, restore_interrupts
from profiles.errors import BadInput, ExitCode, MusterError
from profiles.installation import demo_line, program, wizard_line

if TYPE_CHECKING:
    from app.wizard.services.services import Services

_INSTEAD = {
    "profiles list": "list what can be trained",
    "machines discover": "find machines",
    "machines access USER@HOST": "set up the login there",
    "distributed-check --hosts FILE": "check whether they can train",
    "machines plan PROFILE --hosts FILE": "find the fastest way",
    "distributed-train PROFILE": "train",
}
"""Commands that replace the steps of the set-up, with their purpose."""


def headless() -> str:
    """Return the message shown without a terminal."""
    lines = {demo_line(): "train a small Whisper on the shipped recordings"}
    lines |= {program(*command.split(" ", 1)): about for command, about in _INSTEAD.items()}
    width = max(map(len, lines))
    shown = "\n".join(f"  {command:{width}}   {about}" for command, about in lines.items())
    return f"The guided set-up needs a terminal. Without one, use these commands:\n\n{shown}\n"


class _Options(argparse.ArgumentParser):
    """Options of the set-up; what it refuses is an error like those of the other commands."""

    def error(self, message: str) -> NoReturn:
        helps = program("tour", "--help") if self.prog.endswith("tour") else wizard_line("--help")
        raise BadInput(message.removeprefix("argument "), f"{helps} lists the options")


def options(name: str = "wizard.py", tour: bool = False) -> argparse.ArgumentParser:
    """Return the option parser of the set-up, called ``name``; a tour uses recorded machines by default."""
    about = "Find machines, check them, choose a job and a way to train, and start it."
    recorded = " In the tour everything is recorded: nothing is changed, and no network is needed."
    parser = _Options(prog=name, description=about + (recorded if tour else ""))
    parser.add_argument("--plain", action="store_true", help="questions and answers, for screen readers too")
    parser.add_argument("--hosts", metavar="FILE|A,B", type=Path, help="begin with these machines")
    parser.add_argument("--profile", metavar="NAME", help="start at the plan of this profile; measures its machines")
    parser.add_argument(
        "--demo",
        metavar="N",
        type=int,
        default=3 if tour else None,
        help="show N recorded machines; nothing is changed",
    )
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    return parser


def main(arguments: Sequence[str], name: str = "wizard.py", tour: bool = False) -> int:
    """Run the set-up and return its exit code."""
    parser = options(name, tour)
    try:
        chosen, unknown = parser.parse_known_args(arguments)
        if unknown and (line := _intended(unknown)):
            raise BadInput(f"{name} takes no {unknown[0]}", f"type: {line}")
        if unknown:
            parser.error(f"{name} takes no {unknown[0]}")
        services, profile = _chosen(chosen)
        if not sys.stdin.isatty() or not sys.stdout.isatty():
            sys.stderr.write(headless())
            return ExitCode.BAD_INPUT
        if chosen.plain or can_only_print():
            from app.cli.runs.attach import show_run
            from app.wizard.plain.plain import run_plain

            restore_interrupts()
            release_keys()
            return run_plain(services, profile, watch=lambda run: show_run(run, as_json=False))
        from app.screens.app import run_wizard  # textual takes a while to import, which --help does without
        from app.screens.own_keys import own_keys

        restore_interrupts()
        return run_wizard(services, profile, chosen.ascii, left=_tell_of_run, keymap=own_keys())
    except MusterError as error:
        say_error(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            say("closed; a run that was started goes on")
        return ExitCode.STOPPED


def _tell_of_run(run: Path) -> None:
    from app.cli.runs.attach import tell_of_run  # the reader of runs, which the first paint does without

    tell_of_run(run)


def _intended(unknown: Sequence[str]) -> str:
    """Return what to type in place of words that are no options of the set-up; empty if their meaning is not plain."""
    from app.cli.spellings import is_hosts, is_profile  # the commands, which the first paint does without

    if is_profile(unknown[0]):
        return wizard_line("--profile", *unknown)
    return wizard_line("--hosts", *unknown) if is_hosts(unknown[0]) else ""


def _chosen(chosen: argparse.Namespace) -> tuple[Services, str]:
    """Return the services, recorded or real, and the profile to begin with; empty for none.

    Raises:
        BadInput: there are not so many scripted machines, or no such profile or hosts file, or it cannot be used.
    """
    demo, name, hosts = chosen.demo, chosen.profile, chosen.hosts
    if demo is None:
        from app.wizard.services.services import Services

        if name is not None:
            from profiles.files.resolve import load_profile  # with pydantic, which the first paint does without

            load_profile(name, complete=False)
        if hosts is not None:
            from app.cli.approval import read_hosts

            read_hosts(hosts, named=True, person=sys.stdin.isatty())
        return Services(hosts=hosts), name or ""
    from app.demo import JOB
    from app.demo.services import DemoServices

    if hosts is not None:
        hint = f"without the tour: {wizard_line('--hosts', str(hosts))}"
        raise BadInput(f"--hosts {hosts}: the tour has recorded machines only", hint)
    if name not in (None, JOB):
        raise BadInput(f"--profile {name}: the recorded machines have only one profile", f"--profile {JOB}")
    return DemoServices(demo), name or ""
