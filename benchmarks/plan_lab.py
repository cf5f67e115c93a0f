"""The lab of ``plan_accuracy.py``: slow machines on slow links, one of which measures and launches."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.hosts.schema import Hosts, Machine
from tests.lab import network
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from training.records.run_files import is_live
from training.records.run_folder import RunFolder

HERE = Path(__file__).resolve().parent
_UNLIMITED = 2.0
"""Cores of a host while it starts and ends: nothing is measured then."""
_PERIOD_US = 25_000
"""Over which a quota is counted; a quota is a millisecond at least. The usual 100 ms would make hosts wait for each
other's slices."""
_PRIORITY = 50_000
"""``cpu.shares`` of a host; 1024 is a control group's default."""
_POLL = 0.2
_PATIENCE = 300.0


class PlanLab:
    """Hosts in a row; the first is the one somebody sits at: it trains, carries the coordinator, measures and launches.

    Args:
        names: all hosts.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        first, *others = names
        self.lab = Lab(
            HostSpec(first, cores=_UNLIMITED, person=True), *(HostSpec(name, cores=_UNLIMITED) for name in others)
        )
        for number, _ in enumerate(names):
            group = self._group(number)
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.shares").write_text(str(_PRIORITY))
        self._seat = self.lab[first]
        self._driver: subprocess.Popen[str] | None = None
        self.traffic: list[tuple[float, float]] = []
        """Of the last run: bytes that the interface of a host sent and received, on average, and when that was read."""
        self.limit({}, None)

    def __enter__(self) -> PlanLab:
        log = (self.lab.folder / "driver.log").open("w")
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(HERE)!r}); import plan_host; plan_host.main()",
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        self._driver = self._seat.popen(command, cwd=HERE.parent, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()

    def _group(self, number: int) -> Path:
        return network.CPU_CGROUP / f"muster-lab-{self.lab.slot}-{number}"

    def limit(self, cores: Mapping[str, float], mbit: float | None) -> None:
        """Set quotas and rates; who is not named gets all."""
        for number, name in enumerate(self.names):
            quota = round(cores.get(name, _UNLIMITED) * _PERIOD_US)
            (self._group(number) / "cpu.cfs_quota_us").write_text(str(quota))
            self.lab[name].set_rate(mbit)

    def hosts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the hosts file as the first host sees the others."""
        found = [Machine(name=names[0], address="localhost", python=sys.executable)]
        found += [Machine(name=name, python=sys.executable) for name in names[1:]]
        return Hosts(machines=tuple(found), ssh_config="/root/.ssh/config").model_dump(mode="json")

    def order(self, **order: Any) -> dict[str, Any]:
        """Have the first host do something.

        Raises:
            SystemExit: it could not.
        """
        assert self._driver is not None and self._driver.stdin is not None and self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(order) + "\n")
        self._driver.stdin.flush()
        line = self._driver.stdout.readline()
        answer = dict(json.loads(line)) if line else {"error": (self.lab.folder / "driver.log").read_text()[-2000:]}
        if "error" in answer:
            raise SystemExit(f"{order['op']}: {answer['error']}")
        return answer

    def run(self, order: dict[str, Any], cores: Mapping[str, float], mbit: float, steps: int) -> RunFolder:
        """Carry out a run; quotas and rates hold from the moment all are ready to the last step.

        Raises:
            SystemExit: it did not complete.
        """
        path = self._seen(self.order(op="run", **order)["folder"])
        members, state, end = len(order["batches"]), "start", time.monotonic() + _PATIENCE
        self.traffic = []
        while is_live(path):
            text = (path / "events.jsonl").read_text()
            if state == "start" and text.count('"status":"ready"') >= members:
                self.limit(cores, mbit)
                state = "training"
            if state == "training" and text.count(f'"kind":"step","step":{steps},') >= members:
                self.limit({}, None)
                state = "done"
            if state != "start":
                found = [self.lab[name].traffic() for name in order["batches"]]
                self.traffic.append((time.time(), statistics.fmean(one.sent + one.received for one in found)))
            if time.monotonic() > end:
                raise SystemExit(f"{path}: too slow")
            time.sleep(_POLL)
        self.limit({}, None)
        run = RunFolder.open(path)
        if run.metadata.status != "completed":
            raise SystemExit(f"{path}: {run.metadata.status}: {run.metadata.error_message}")
        return run

    def _seen(self, folder: str) -> Path:
        """Return a folder under the first host's home as it is seen from here."""
        return self._seat.files / Path(folder).relative_to("/root")

    def forget(self, run: RunFolder) -> None:
        shutil.rmtree(run.path)
