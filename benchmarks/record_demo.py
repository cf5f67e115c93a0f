"""Record the run that the tour plays (app/demo/record): eight lab hosts train for real, one is lost and comes back.

    .venv/bin/python benchmarks/record_demo.py run FOLDER [--model FOLDER]    # needs root; some minutes
    .venv/bin/python benchmarks/record_demo.py keep FOLDER                    # writes the package's record from it

The hosts have a share of a core and a shaped link each. One link gets slow for a while, then its cable is pulled; when
the machine is lost the cable is put back, and the machine is added again. What `keep` writes is what happened, with
times from the start on, figures rounded, and this computer's network under the names of the tour's machines.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.demo import RECORD
from distributed.launcher import DistributedLauncher
from distributed.measuring.measure import MeasureOptions, measure
from distributed.run.requests import leave_request
from profiles.resolve import load_profile
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from training.events import (
    EvaluationEvent,
    Event,
    MachineEvent,
    MemberEvent,
    ProgressEvent,
    RunEvent,
    StepEvent,
    WarningEvent,
)
from training.run_files import is_live
from training.run_folder import RunFolder


class Host(NamedTuple):
    """One host of the record."""

    cores: float
    mbit: float
    share: int


HOSTS = {
    "demo-macbook": Host(0.1, 300, 8),
    "demo-studio": Host(0.14, 60, 12),
    "demo-pc": Host(0.2, 300, 18),
    "demo-laptop": Host(0.06, 20, 2),
    "demo-mini": Host(0.09, 300, 6),
    "demo-server": Host(0.08, 300, 5),
    "demo-air": Host(0.09, 60, 6),
    "demo-tower": Host(0.16, 300, 14),
}
VICTIM = "demo-studio"
STEPS = 240
SLOW_AT, LOST_AT, BACK_AT = 70, 100, 125
"""Steps: the victim's link gets slow, its cable is pulled, it is added again."""
SLOW_MBIT = 0.5
STARTS, TRAINS = 9.0, 130.0
"""Seconds that start and training take in the record."""
WARM_UP = 20
_COORDINATOR = "192.168.7.20:47100"
_WHILE_STARTING = 1.0
_DURATIONS = ("seconds", "compute", "wait", "transfer", "cpu")
_POLL = 0.25
OPTIONS = {
    "batch_size": 9,
    "shares": ",".join(str(host.share) for host in HOSTS.values()),
    "max_steps": STEPS,
    "learning_rate": 2e-4,
    "warmup_steps": 10,
    "lr_schedule": "linear",
    "augmentation": 0.3,
    "eval_interval": 40,
    "eval_batch_size": 20,
    "max_eval_samples": 160,
    "max_train_samples": 1600,
    "snapshot_interval": 80,
    "strategy": "diloco",
    "sync_interval": 10,
    "codec": "mxfp4",
    "engine": "mesh",
    "threads": 1,
    "lease": 12,
}


def record(folder: Path, model: Path | None) -> None:
    """Train on the hosts, and leave the run and the figures of the links in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {name: str(value) for name, value in OPTIONS.items()} | {"output_dir": str(folder / "output")}
    if model is not None:
        given |= {"model_path": str(model), "from_scratch": "false"}
    profile = load_profile("demo-scratch", given).profile
    with Lab(*(HostSpec(name, cores=_WHILE_STARTING) for name in HOSTS)) as lab:
        hosts = lab.hosts()
        for name, host in HOSTS.items():
            lab[name].set_rate(host.mbit)
        if not (folder / "pairs.json").exists():
            told = MeasureOptions(True, False, 0.0, tell=lambda line: print(line, flush=True))
            found = measure(hosts, profile, told)
            pairs = [pair.model_dump(mode="json") for pair in found.pairs]
            (folder / "pairs.json").write_text(json.dumps({"pairs": pairs}))
        launcher = DistributedLauncher(hosts, profile)
        path = launcher.start(launcher.plan(), ["record_demo.py"])
        print(path, flush=True)
        happen(path, lab)
    metadata = RunFolder.open(path).metadata
    print(metadata.status, metadata.error_message, metadata.metrics.get("after"))


def happen(path: Path, lab: Lab) -> None:
    """Let the happenings of the record happen, each when it is due, until the run ends."""
    victim = lab[VICTIM]

    def quotas() -> None:
        for name, host in HOSTS.items():
            lab[name].set_cores(host.cores)

    def lost_at() -> None:
        victim.set_rate(HOSTS[VICTIM].mbit)
        victim.cut()

    def back() -> None:
        victim.set_cores(_WHILE_STARTING)
        leave_request(path, "add", VICTIM)

    def slow_again() -> None:
        victim.set_cores(HOSTS[VICTIM].cores)

    def end() -> None:
        for name in HOSTS:
            lab[name].set_cores(_WHILE_STARTING)

    def ready(events: list[Event], number: int) -> bool:
        return sum(isinstance(e, MemberEvent) and e.status == "ready" for e in events) >= number

    def lost(events: list[Event]) -> bool:
        return any(isinstance(e, MemberEvent) and e.status == "lost" for e in events)

    plan: list[tuple[Callable[[list[Event]], bool], Callable[[], None]]] = [
        (lambda events: ready(events, len(HOSTS)), quotas),
        (_step(SLOW_AT), lambda: victim.set_rate(SLOW_MBIT)),
        (_step(LOST_AT), lost_at),
        (lost, victim.mend),
        (_step(BACK_AT), back),
        (lambda events: ready(events, len(HOSTS) + 1), slow_again),
        (_step(STEPS), end),
    ]
    while is_live(path):
        events = list(RunFolder.open(path).events())
        while plan and plan[0][0](events):
            print(f"{time.strftime('%H:%M:%S')} {plan[0][1].__name__}", flush=True)
            plan.pop(0)[1]()
        time.sleep(_POLL)


def _step(number: int) -> Callable[[list[Event]], bool]:
    return lambda events: any(isinstance(e, StepEvent) and e.member == 0 and e.step >= number for e in events)


# ---------------------------------------------------------------------------------------------------------------- keep


def keep(folder: Path) -> None:
    """Write the package's record from a run that was recorded."""
    (path,) = (folder / "output").iterdir()
    run = RunFolder.open(path)
    known = json.loads((RECORD / "machines.json").read_text())
    machines = {machine["name"]: machine for machine in known["machines"]}
    shortened = Shortened(list(run.events()), [machines[member.name] for member in run.plan().members])
    lines = sorted(shortened.lines(), key=lambda line: line["time"])
    header = {"kind": "record", "time": 0, "members": list(HOSTS)}
    with gzip.GzipFile(RECORD / "run.jsonl.gz", "wb", mtime=0) as stream:
        stream.writelines(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in (header, *lines))
    for rank, name in enumerate(HOSTS):
        machines[name]["speed"]["measurements"] = [shortened.measurement(rank)]
    found = json.loads((folder / "pairs.json").read_text())["pairs"]
    known["pairs"] = [_pair(pair, machines) for pair in found if {pair["source"], pair["target"]} <= machines.keys()]
    (RECORD / "machines.json").write_text(json.dumps(known, indent=1) + "\n")
    print(f"{len(lines)} lines, {(RECORD / 'run.jsonl.gz').stat().st_size} bytes")


class Shortened:
    """A run as the package keeps it.

    The start, which eight processes on two cores make long, takes :data:`STARTS` seconds, the rest :data:`TRAINS`.

    Args:
        events: of the run, whole.
        machines: of the members, by rank: as ``machines.json`` has them.
    """

    def __init__(self, events: list[Event], machines: list[dict[str, Any]]) -> None:
        self._events = sorted(events, key=lambda event: event.time)
        self._machines = machines
        self._begin = self._events[0].time
        self._running = next(e.time for e in events if isinstance(e, RunEvent) and e.status == "running")
        last = max(event.time for event in events if isinstance(event, StepEvent))
        self._before = (self._running - self._begin) / STARTS
        self._after = (last - self._running) / TRAINS
        self._told: dict[object, float] = {}

    def measurement(self, rank: int) -> dict[str, Any]:
        """Return a machine's speed as its steps show it."""
        steps = [e for e in self._events if isinstance(e, StepEvent) and e.member == rank and e.step > WARM_UP]
        seconds = [event.compute / self._after for event in steps]
        used = [e.memory_used for e in self._events if isinstance(e, MachineEvent) and e.member == rank]
        spread = statistics.stdev(seconds)
        return {
            "batch": steps[0].samples,
            "seconds": round(statistics.fmean(seconds), 4),
            "spread": round(spread, 4),
            "error": round(spread / len(seconds) ** 0.5, 5),
            "peak": max(used),
        }

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield events and lines of logs, each with its time from the start on."""
        for event in self._events:
            if self._is_kept(event):
                yield self._line(event)
            if isinstance(event, MemberEvent | EvaluationEvent) and event.member is not None:
                yield from self._logged(event, self._machines[event.member])

    def _at(self, moment: float) -> float:
        early = min(moment, self._running) - self._begin
        return round(early / self._before + max(0.0, moment - self._running) / self._after, 3)

    def _is_kept(self, event: Event) -> bool:
        match event:
            case RunEvent():
                return event.status not in ("completed", "failed", "cancelled")
            case WarningEvent():
                return "is lost" in event.message
            case ProgressEvent():
                key = (event.member, event.phase)
                often = event.time < self._told.get(key, 0.0) + 0.5 * self._before and event.done != event.total
                self._told[key] = self._told.get(key, 0.0) if often else event.time
                return not often
        return True

    def _line(self, event: Event) -> dict[str, Any]:
        said = event.model_dump(mode="json", exclude={"v", "seq", "details", "others_percent"}, exclude_none=True)
        factor = self._before if event.time < self._running else self._after
        said |= {
            name: said[name] / factor for name in ("seconds", "compute", "wait", "transfer", "cpu") if name in said
        }
        rounded = {name: float(f"{value:.4g}") for name, value in said.items() if isinstance(value, float)}
        words = {"message": _disguised(said["message"])} if said.get("message") else {}
        if isinstance(event, MemberEvent) and event.device:
            words["device"] = self._machines[event.member or 0]["speed"]["device"]
        load = self._load(event) if isinstance(event, MachineEvent) else {}
        return {**said, **rounded, **words, **load, "time": self._at(event.time)}

    def _load(self, event: MachineEvent) -> dict[str, Any]:
        """Return what the invented machine would tell of heat and power; nobody measured it."""
        machine = self._machines[event.member or 0]
        worked = max(0.0, event.time - self._running) / self._after
        heat = 1 - math.exp(-worked / 40)
        told: dict[str, Any] = {"memory_total": machine["memory"]}
        if machine["speed"]["system"] == "linux":
            told["celsius"] = round(41 + 33 * heat, 1)
        if machine["speed"]["device"] == "cuda":
            watts = 120.0 + 40 * heat
            told |= {"throttled": False, "watts": round(watts), "joules": round(watts * worked), "meters": ["gpu"]}
        if machine["health"]["power"]["source"] == "battery":
            told |= {"battery_percent": round(64 - worked / 90, 1), "on_mains": False}
        return told

    def _logged(self, event: MemberEvent | EvaluationEvent, machine: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what the logs of the invented machines say of an event."""
        name, at = machine["name"], self._at(event.time)
        if isinstance(event, EvaluationEvent):
            text = f"INFO {event.split} at step {event.step}: WER {event.metrics['wer']:.1%}, loss {event.loss:.3f}"
            yield _log(at, name, text)
        elif event.status == "joined":
            yield _log(at, "coordinator", f"INFO {name} joined")
        elif event.status == "lost":
            silence = 5 / self._after
            yield _log(at - silence, name, f"ERROR network: {machine['interface']}: link is down")
            yield _log(
                at - 0.7 * silence,
                name,
                f"ERROR exchange: connection to the coordinator {_COORDINATOR} broke: No route to host",
            )
            yield _log(at, "coordinator", f"WARNING {name}: {event.message}; dropped")


def _log(at: float, name: str, text: str) -> dict[str, Any]:
    return {"time": round(at, 3), "kind": "log", "log": name, "text": text}


def _disguised(text: str) -> str:
    return re.sub(r"198\.18\.\d+\.\d+:\d+", _COORDINATOR, text)


def _pair(pair: dict[str, Any], machines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a link's figures under the interfaces and addresses of the invented machines."""
    ends = machines[pair["source"]], machines[pair["target"]]
    here, there = (end["interface"] for end in ends)
    figures = {name: round(value, 2) if isinstance(value, float) else value for name, value in pair["figures"].items()}
    return pair | {
        "figures": figures
        | {"interface": here, "interface_back": there, "address": ends[1]["address"], "loss": 0, "loss_back": 0}
        | {"wireless": ends[0]["kind"] == "wifi", "wireless_back": ends[1]["kind"] == "wifi"}
        | {"paths": [[ends[1]["address"], here, there, figures["mbit"]]]}
    }


def main() -> None:
    """Record, or keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "keep"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="trained weights that the run goes on from")
    given = parser.parse_args()
    if given.what == "run":
        record(given.folder, given.model)
    else:
        keep(given.folder)


if __name__ == "__main__":
    main()
