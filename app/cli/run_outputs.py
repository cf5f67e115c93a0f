"""``report``, ``track`` and ``web``: a run for others: in one file, in other programs, in the browser."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import OUTPUT, Json, Output, RunReference
from app.cli.terminal import answer
from app.console import say, show_line, visible
from profiles.errors import BadInput, ExitCode

LOOPBACK = "127.0.0.1"


def report(
    run: RunReference,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write; default: report.html of the run.")
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Write one HTML file that holds everything about a run."""
    from app.html_report.page import show_report, write_report
    from training.runs import find_run

    folder = find_run(output, run)
    path = write_report(folder, out)
    if opens:
        say(visible(show_report(path)))
    document = {"run_dir": str(folder), "report": str(path), "bytes": path.stat().st_size}
    return answer(as_json, document, [visible(path)])


def track(
    run: RunReference,
    to: Annotated[str, typer.Option("--to", metavar="NAMES", help="csv, tensorboard, wandb, trackio; by comma.")],
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Give the events of a run to other programs, until it ends."""
    from app.trackers.tracking import Tracking, checked_trackers
    from training.runs import find_run

    folder = find_run(output, run)
    names = checked_trackers(to)
    if not names:
        raise BadInput("--to names no tracker", "write for example --to csv,tensorboard")
    with contextlib.redirect_stdout(sys.stderr):  # libraries talk, and stdout is for data
        tracking = Tracking(folder, names, say)
        tracking.follow()
    lines = [visible(f"{name}: {place}") for name, place in tracking.places.items()]
    code = ExitCode.DONE if len(tracking.places) == len(names) else ExitCode.RUN_FAILED
    return answer(as_json, {"run_dir": str(folder), "trackers": tracking.places}, lines, code)


def web(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run to show; none: the guided set-up.")] = "",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="TCP port; 0: any free one.")] = 0,
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="Let other machines connect: this machine's address.")
    ] = LOOPBACK,
    output: Output = OUTPUT,
) -> ExitCode:
    """Serve the dashboard of a run, or the guided set-up, until Ctrl-C."""
    from app.web import server
    from training.runs import find_run

    path = find_run(output, run) if run else None
    listener = server.listen(listen, port)
    if not ipaddress.ip_address(listen).is_loopback:
        for line in _meaning(listen, listener.getsockname()[1]):
            say(line)
    say("open this address (it works once); Enter makes a new one, Ctrl-C ends:")
    server.serve(path, listener, show_line)
    return ExitCode.DONE


def _meaning(address: str, port: int) -> list[str]:
    """Return what listening on the network means, in lines of a terminal."""
    lines = [
        f"warning: listening on {address}, port {port}, for other machines too",
        "  every machine that reaches it can try to connect",
        "  anybody who has the address below can watch and control this",
        "  nothing is encrypted: anybody who reads this network's traffic can do the same",
        f"  safer: leave out --listen, and run there: ssh -L {port}:{LOOPBACK}:{port} THIS_MACHINE",
    ]
    if ipaddress.ip_address(address).is_unspecified:
        from distributed.system import own_addresses  # starts a program

        found = [ipaddress.ip_address(one) for _, one in own_addresses()]
        others = ", ".join(str(one) for one in found if not one.is_loopback and not one.is_link_local)
        lines.append(f"  to connect from there, use instead of {LOOPBACK}: {others or 'no address found'}")
    return lines
