"""Runs on lab hosts for the benchmarks: hosts with a share of a core and a shaped link, and other programs on them.

The controller (this machine, outside the quotas and with an unshaped link) runs the supervisor and the coordinator, or
the lighthouse of torchft: it is not one of the machines that are counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from local_runs import Measured

from distributed.launcher import DistributedLauncher
from profiles.files.resolve import load_profile
from tests.lab import network
from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from training.records.events import Event, UnknownEvent, from_line
from training.records.run_files import is_live
from training.records.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parent.parent
_UNLIMITED = 2.0
"""Cores of a host while it starts and while it evaluates: nothing is measured then."""
_POLL = 0.25
_PRIORITY = 50_000
"""``cpu.shares`` of a host; 1024 is a cgroup's default."""


class BenchLab:
    """Equal hosts that are slow only while they train: neither start nor end is measured.

    Args:
        names: hosts.
        cores: CPU quota of each.
        mbit: rate of their links in both directions; may be set between runs.
    """

    def __init__(self, names: Sequence[str], cores: float, mbit: float) -> None:
        self.names = tuple(names)
        self.cores = cores
        self.mbit = mbit
        self.lab = Lab(*(HostSpec(name, cores=_UNLIMITED) for name in names))
        for number, _ in enumerate(names):
            group = network.CPU_CGROUP / f"muster-lab-{self.lab.slot}-{number}"
            (group / "cpu.shares").write_text(str(_PRIORITY))

    def __enter__(self) -> BenchLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()

    def train(self, names: Sequence[str], profile: str, options: Mapping[str, Any]) -> Measured:
        """Run a profile on some hosts as ``distributed-train`` does.

        Raises:
            SystemExit: the run did not complete.
        """
        hosts = self.lab.hosts(*names)
        with tempfile.TemporaryDirectory() as folder:
            given = {key: str(value) for key, value in options.items()} | {"output_dir": folder}
            launcher = DistributedLauncher(hosts, load_profile(profile, given).profile)
            path = launcher.start(launcher.plan(), sys.argv)
            steps = int(options["max_steps"])
            with self._quota(names) as quota:
                while is_live(path):
                    quota.follow([path / "events.jsonl"], len(names), steps)
                    time.sleep(_POLL)
            run = RunFolder.open(path)
            if run.metadata.status != "completed":
                raise SystemExit(f"{profile}: {run.metadata.status}: {run.metadata.error_message}")
            return Measured(run.metadata.metrics, list(run.events()))

    def run_programs(self, commands: Mapping[str, Sequence[str]], steps: int, deadline: float = 300.0) -> Measured:
        """Run one program a host, whose standard output is events, and wait for all.

        Raises:
            SystemExit: one failed.
        """
        with tempfile.TemporaryDirectory() as folder, self._quota(list(commands)) as quota:
            outputs = {name: Path(folder, f"{name}.jsonl") for name in commands}
            started = {name: self._start(name, command, outputs[name]) for name, command in commands.items()}
            end = time.monotonic() + deadline
            while any(process.poll() is None for process in started.values()):
                quota.follow(list(outputs.values()), len(commands), steps)
                time.sleep(_POLL)
                failed = [name for name, process in started.items() if process.poll()]
                if failed or time.monotonic() > end:
                    self._end(commands)
                    log = outputs[(failed or list(outputs))[0]].with_suffix(".log").read_text()
                    raise SystemExit(f"{failed or 'too slow'}: {log[-3000:]}")
            return Measured({}, [event for path in outputs.values() for event in _events(path)])

    def _start(self, name: str, command: Sequence[str], output: Path) -> Any:
        with output.open("w") as stdout, output.with_suffix(".log").open("w") as stderr:
            return self.lab[name].popen(command, cwd=REPOSITORY, stdout=stdout, stderr=stderr)

    def _end(self, names: Mapping[str, Any]) -> None:
        for name in names:
            for pid in self.lab[name].pids("benchmarks/peers"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _quota(self, names: Sequence[str]) -> Iterator[_Quota]:
        quota = _Quota([self.lab[name] for name in names], self.cores, self.mbit)
        try:
            yield quota
        finally:
            quota.lift()


class _Quota:
    """Holds hosts to their quota, and their links to their rate, from the moment they are ready to the last step."""

    def __init__(self, hosts: Sequence[LabHost], cores: float, mbit: float) -> None:
        self._hosts = hosts
        self._cores = cores
        self._mbit = mbit
        self._state = "start"

    def follow(self, logs: Sequence[Path], members: int, steps: int) -> None:
        """Look into what the members have said."""
        if self._state == "done":
            return
        text = "".join(log.read_text() for log in logs if log.exists())
        if self._state == "start" and text.count('"status":"ready"') >= members:
            self._set(self._cores, self._mbit)
            self._state = "training"
        if self._state == "training" and text.count(f'"kind":"step","step":{steps},') >= members:
            self.lift()
            self._state = "done"

    def lift(self) -> None:
        self._set(_UNLIMITED, None)

    def _set(self, cores: float, mbit: float | None) -> None:
        for host in self._hosts:
            host.set_cores(cores)
            host.set_rate(mbit)


def _events(path: Path) -> Iterator[Event]:
    for line in path.read_text().splitlines():
        if line.startswith('{"') and not isinstance(event := from_line(line), UnknownEvent):
            yield event


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path | None) -> None:
    """Print rows as a markdown table and write them as JSON."""
    if not rows:
        return
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join("" if value is None else str(value) for value in row.values()) + " |", flush=True)
    if path is not None:
        path.write_text(json.dumps(list(rows), indent=1))
