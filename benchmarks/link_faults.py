"""What a machine that cannot be reached for a while, or a slow link, costs a run on lab hosts, and how it comes back.

    python benchmarks/link_faults.py [--times 10] [--members 3] [--strategy allreduce] [FAULT ...]

Needs root on Linux; the runs are those of ``faults.py``. A fault is a name and seconds, as ``cut-12``, and befalls the
last host ``--times`` times in one run: its cable is ``cut``; all its processes are ``frozen`` (SIGSTOP), as in a
machine that sleeps; it is ``deaf`` (nothing reaches it, what it sends arrives), or ``mute`` (the other direction); its
link is ``slow`` (2 Mbit/s, with a model of 125,000 weights). ``join`` has no seconds: the machine is dropped, and added
again. Printed are, as median and maximum in seconds: until the loss is told; the longest time between two steps of
another member, less the median step; and from the end of the fault until the machine's next result with all others.
Weights that members report of the same round are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.faults import Trial
from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.processes import signal_all
from tests.lab.spec import HostSpec
from tests.waiting import until
from training.records.events import MemberEvent, SyncEvent

_FAULTS = ["cut-3", "cut-12", "cut-60", "frozen-12", "deaf-12", "mute-12", "slow-12", "join"]
_SLOW = 2.0
"""Mbit/s."""
_LARGE = "nn.Sequential(nn.Linear(2, 25000), nn.Linear(25000, 2))"
"""A model of 125,000 weights, where links are slow."""
_OFTEN = {"allreduce": ["--verify-interval", "1"]}
"""Options by which the weights are compared often."""
_SELDOM = ["--sync-interval", "10"]
_PATIENCE = 180.0


@dataclass(frozen=True)
class Cost:
    """Seconds; ``noticed``: ``None`` if no loss was told."""

    noticed: float | None
    pause: float
    back: float


@contextlib.contextmanager
def befallen(host: LabHost, kind: str) -> Iterator[None]:
    """A fault befalls a host as long as this lasts."""
    frozen = host.pids() if kind == "frozen" else []
    match kind:
        case "cut":
            host.cut()
        case "frozen":
            signal_all(frozen, signal.SIGSTOP)
        case "deaf" | "mute":
            host.cut_one_way(inwards=kind == "deaf")
        case "slow":
            host.set_rate(_SLOW)
        case _:
            raise SystemExit(f"there is no fault {kind}: {', '.join(_FAULTS)}")
    try:
        yield
    finally:
        host.mend()
        host.set_rate(None)
        signal_all(frozen, signal.SIGCONT)


class LinkTrial(Trial):
    """A run whose last member cannot be reached from time to time."""

    @property
    def victim(self) -> int:
        return self.members - 1

    def losses(self) -> list[MemberEvent]:
        events = self.muster.events(self.run_id)
        return [
            e for e in events if isinstance(e, MemberEvent) and e.status in ("lost", "left") and e.member == self.victim
        ]

    def results(self, member: int) -> list[SyncEvent]:
        return [e for e in self.muster.events(self.run_id) if isinstance(e, SyncEvent) and e.member == member]

    def suffer(self, host: LabHost, kind: str, seconds: float) -> Cost:
        """Let a fault pass; return what it cost."""
        self.reach(self.newest() + 20)
        begun, losses_before = time.time(), len(self.losses())
        if kind == "join":
            self._drop(host)
        else:
            with befallen(host, kind):
                time.sleep(seconds)
        ended = time.time()
        if kind == "join":
            added = self.muster.run("runs", "ask", self.run_id, "add", host.name)
            assert added.returncode == 0, added.stderr
        back = until(lambda: self._first_result(ended), _PATIENCE)
        losses = self.losses()[losses_before:]
        return Cost(losses[0].time - begun if losses else None, self.longest(begun, back), back - ended)

    def _drop(self, host: LabHost) -> None:
        dropped = self.muster.run("runs", "ask", self.run_id, "drop", host.name)
        assert dropped.returncode == 0, dropped.stderr

    def _first_result(self, since: float) -> float:
        """Return when the victim has its first result with all others after a moment; 0: it has none yet."""
        everybody = list(range(self.members))
        return next((e.time for e in self.results(self.victim) if e.time > since and e.members == everybody), 0.0)

    def longest(self, begun: float, back: float) -> float:
        """Return the longest pause of the others in seconds, until a second after the victim is back."""
        until(lambda: all(self.steps(member)[-1].time > back + 1 for member in range(self.victim)), _PATIENCE)
        pauses = []
        for member in range(self.victim):
            ends = [event.time for event in self.steps(member)]
            gaps = list(itertools.pairwise(ends))
            usual = statistics.median(b - a for a, b in gaps if b < begun)
            pauses.append(max(b - a for a, b in gaps if begun <= b and a <= back + 1) - usual)
        return max(pauses)

    def compare(self) -> int:
        """Return the number of rounds of which all members report the same weights.

        Raises:
            SystemExit: weights of a round differ.
        """
        hashes: dict[int, dict[int, str]] = {}
        for member in range(self.members):
            for event in self.results(member):
                if event.weight_hash:
                    hashes.setdefault(event.step, {})[member] = event.weight_hash
        if differing := [step for step, of in hashes.items() if len(set(of.values())) > 1]:
            raise SystemExit(f"weights of steps {differing} differ")
        return sum(len(of) == self.members for of in hashes.values())


def measured(lab: Lab, fault: str, times: int, strategy: str) -> str:
    """Return the row of a fault."""
    kind, _, seconds = fault.partition("-")
    with tempfile.TemporaryDirectory() as folder:
        trial = LinkTrial(lab, Path(folder), strategy, _OFTEN.get(strategy, _SELDOM),
                          *([_LARGE] if kind == "slow" else []))  # fmt: skip
        try:
            costs = [trial.suffer(list(lab)[-1], kind, float(seconds or 0)) for _ in range(times)]
            lacking, compared = trial.check(range(trial.members)), trial.compare()
        finally:
            trial.end()
    noticed = [cost.noticed for cost in costs if cost.noticed is not None]
    cells = [f"{len(costs)}", _figures(noticed), _figures([c.pause for c in costs]), _figures([c.back for c in costs])]
    return f"| {fault} | {' | '.join(cells)} | {lacking} | {compared} | {os.getloadavg()[0]:.0f} |"


def _figures(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} / {max(seconds):.2f} ({len(seconds)})" if seconds else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", default=_FAULTS)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--strategy", default="allreduce")
    options = parser.parse_args()
    columns = [
        "fault",
        "times",
        "told after, s",
        "others' pause, s",
        "back after, s",
        "steps without it",
        "rounds",
        "load",
    ]
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n", flush=True)
    lab = Lab(*(HostSpec(name) for name in "abcdefgh"[: options.members]))
    try:
        for fault in options.faults:
            print(measured(lab, fault, options.times, options.strategy), flush=True)
    finally:
        lab.close()


if __name__ == "__main__":
    main()
