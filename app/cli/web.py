"""``web [RUN]``: the dashboard, or the guided set-up, in the browser."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from profiles.errors import ExitCode

LOOPBACK = "127.0.0.1"


def web(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="Run to show; none: the guided set-up.")] = "",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="TCP port; 0: any free one.")] = 0,
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="Let other machines in: this machine's address there.")
    ] = LOOPBACK,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder of the run folders.")] = Path(
        "output"
    ),
) -> ExitCode:
    """Show a run, or the guided set-up, in the browser of this machine."""
    from app.console import say, show_line
    from app.web.serving import listen as listen_on
    from app.web.serving import serve
    from distributed.runs import find_run

    path = find_run(output, run) if run else None
    listener = listen_on(listen, port)
    if not ipaddress.ip_address(listen).is_loopback:
        say(f"warning: listening on {listen}: every machine that reaches it can try to come in; whoever is given the")
        say("address below can watch and command what is shown; and nothing is encrypted: whoever reads the traffic of")
        say("this network reads the screen and can take it over. Safer: leave --listen out, and from the other machine")
        say(f"ssh -L {listener.getsockname()[1]}:{LOOPBACK}:{listener.getsockname()[1]} THIS_MACHINE")
    say("open this address; it works once, Enter makes another one, Ctrl-C ends:")
    serve(path, listener, show_line)
    return ExitCode.DONE
