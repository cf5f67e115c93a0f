"""``web [RUN]``: the dashboard, or the guided set-up, in the browser."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from profiles.errors import ExitCode

LOOPBACK = "127.0.0.1"


def web(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run to show; none: the guided set-up.")] = "",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="TCP port; 0: any free one.")] = 0,
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="Let other machines connect: this machine's address.")
    ] = LOOPBACK,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder that holds the runs.")] = Path(
        "output"
    ),
) -> ExitCode:
    """Show a run, or the guided set-up, in the browser of this machine."""
    from app.console import say, show_line
    from app.web.server import listen as listen_on
    from app.web.server import serve
    from training.runs import find_run

    path = find_run(output, run) if run else None
    listener = listen_on(listen, port)
    if not ipaddress.ip_address(listen).is_loopback:
        for line in _meaning(listen, listener.getsockname()[1]):
            say(line)
    say("open this address (it works once); Enter makes a new one, Ctrl-C ends:")
    serve(path, listener, show_line)
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
        from distributed.measuring.own_interfaces import own_addresses  # starts a program

        found = [ipaddress.ip_address(one) for _, one in own_addresses()]
        others = ", ".join(str(one) for one in found if not one.is_loopback and not one.is_link_local)
        lines.append(f"  to connect from there, use instead of {LOOPBACK}: {others or 'no address found'}")
    return lines
