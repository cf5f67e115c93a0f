"""Process entry of the hub::

    python -m training.exchange.hub_main --config hub.json

It prints ``{"port": N}`` when it listens and then one event a line; it ends when stdin closes or on SIGTERM. A line
``{"ban": RANK}`` on stdin drops a member for good, ``{"admit": RANK}`` lets it in again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from profiles.errors import BadInput, ExitCode, MusterError
from training.bounded import first_problem
from training.events import EventSink, MemberEvent, WarningEvent

if TYPE_CHECKING:
    from training.exchange.hub import Hub
    from training.exchange.seat import HubConfig

_MOST_FILES = 8192
"""Connections in their handshake included, at some 100 kB each: what strangers may cost is bounded."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a hub until stdin closes or SIGTERM comes; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.exchange.hub_main", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.json")
    path: Path = parser.parse_args(arguments).config
    try:
        _serve(path)
    except MusterError as error:
        print(f"hub: {error}", file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.DONE)


def _serve(path: Path) -> None:
    gc.disable()  # a fifth of the time that torch takes to import goes into looking for garbage
    import torch  # after the arguments are known to be right: it takes seconds

    from training.exchange.hub import Hub

    gc.freeze()
    gc.enable()
    # Several members' chunks are averaged side by side in their own threads; more threads inside each only fight.
    torch.set_num_threads(1)
    _allow_connections()
    end = threading.Event()
    write = EventSink(sys.stdout)

    def log(event: MemberEvent | WarningEvent) -> None:
        try:
            write(event)
        except BrokenPipeError:  # nobody reads any more: whoever started the hub is gone
            end.set()

    hub = Hub(_read_config(path), log)
    port = hub.start()
    _watch_for(end, hub)
    print(json.dumps({"port": port}), flush=True)
    end.wait()
    hub.stop()


def _allow_connections() -> None:
    """Take more open files than the usual 256 or 1024, so that idle strangers cannot use them up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _read_config(path: Path) -> HubConfig:
    from training.exchange.seat import HubConfig

    try:
        return HubConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "name the hub's configuration file") from error
    except ValidationError as error:
        raise BadInput(f"{path}: {first_problem(error)}", "write the hub's configuration again") from error


def _watch_for(end: threading.Event, hub: Hub) -> None:
    """Obey stdin; set ``end`` when a signal to end comes or stdin closes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())

    def watch() -> None:
        # os.read, not sys.stdin: a daemon thread inside a buffered read would block the interpreter's exit.
        rest = b""
        while part := os.read(0, 4096):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if "ban" in command:
                    hub.ban(int(command["ban"]))
                elif "admit" in command:
                    hub.admit(int(command["admit"]))
        end.set()

    threading.Thread(target=watch, name="stdin", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
