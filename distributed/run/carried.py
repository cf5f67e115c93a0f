"""Runs of which a member works on this machine, wherever they were started: found by the folders of their agents."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distributed.agent.requests import Attach
from distributed.machine.link import CACHE, link_to, this_machine
from distributed.workers.agent_records import AgentHello, Record
from profiles.errors import BadInput, ExitCode
from training.records.events import Event, from_line

_FOR_EVER = 1e6
_SILENCE = 8.0
"""Seconds after which an agent that says nothing is gone: it sends a beat every second."""


@dataclass(frozen=True)
class CarriedRun:
    """A run of which a member works here."""

    run_id: str
    rank: str

    def follow(self, stop_reason: str = "") -> Iterator[Event | ExitCode]:
        """Yield what the member reports, from the first event that its agent still has; last, how it ended.

        Args:
            stop_reason: not empty: ask all members to stop, with snapshots.

        Raises:
            BadInput: it has just ended; or it is to be stopped here, and who started it is in touch with it.
        """
        hosts = this_machine()
        link = link_to(hosts.machines[0], hosts)
        with contextlib.closing(link.stream(Attach(self.run_id, self.rank, 0, _FOR_EVER))) as process:
            hello = AgentHello.parse(process.read_line(_SILENCE))
            if hello.gone:
                raise BadInput(f"run {self.run_id} has ended on this machine", "look at it where it was started")
            if stop_reason and not hello.unattended:
                problem = f"the machine that started run {self.run_id} is in touch with it"
                raise BadInput(problem, "stop it there, or wait until its lease is over")
            if stop_reason:
                process.write(json.dumps({"stop": stop_reason}).encode() + b"\n")
            while (line := process.read_line(_SILENCE)).endswith(b"\n"):
                record = Record.model_validate_json(line)
                if record.event:
                    yield from_line(record.event)
                elif record.end is not None:
                    with contextlib.suppress(ValueError):
                        yield ExitCode(record.end)
                    return


def find_carried(reference: str) -> CarriedRun | None:
    """Return the run of this id, or its beginning or end, of which a member works here; if empty, the newest one."""
    sockets = sorted((Path(CACHE).expanduser() / "runs").glob("*/*/agent.sock"), reverse=True)
    carried = [CarriedRun(path.parent.parent.name, path.parent.name) for path in sockets]
    fitting = [run for run in carried if run.run_id.startswith(reference) or run.run_id.endswith(reference)]
    return next((run for run in fitting if run.rank.isdecimal()), None)
