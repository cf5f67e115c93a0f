"""How exact the planner's predictions are: a grid of small clusters, each predicted, then run.

    .venv/bin/python benchmarks/plan_accuracy.py [--hosts 1 2 3 4] [--mbit 20 100 1000] [--resume] [--out FILE]
    .venv/bin/python benchmarks/plan_accuracy.py --hosts 4 --quotas equal --sizes large --strategies all
    .venv/bin/python benchmarks/plan_accuracy.py --report [--of-hosts 3]

Needs root. Each cell is a number of lab hosts, the rate of all links, equal CPU quotas or 3:1, a model, and a strategy.
The first host is a machine somebody sits at: there the product's own ``measure`` runs (the task once for each quota,
model and rate, the links once for each quota and rate), its launcher starts the runs, and the coordinator is there, in
its quota. Predicted is exactly the choice that is run, before it runs. Quotas and rates hold while task and links are
measured, and from the first step of a run to the last. All quotas together are at most one core. Exchanges are
real; the compute of the small and the large model is emulated, ``--sizes computed wide`` is real (``plan_job.py``).
The whole grid takes about 40 minutes, a cell 25 s.

Figures and steps go to a file as they come; ``--report`` predicts again from the figures with the model as it is now.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plan_cells import BATCHES, EMULATED, INTERVAL, NAMES, QUOTAS, WAYS, Cell, options, texts
from plan_lab import PlanLab
from plan_traffic import Traffic

from distributed.measuring.link_figures import PairFigures
from distributed.measuring.machine_figures import SpeedFigures
from distributed.measuring.measure import MeasurementResult
from distributed.planning.documents.document import Candidate, Figures, Job, job_of
from distributed.planning.feedback import PredictionComparison, compare
from distributed.planning.prediction import Predictor
from distributed.planning.ranking import about_equal, simplicity
from training.records.events import Event, StepEvent

WITHIN = 0.10
SLOWER = 1.03
"""How far from the fastest a pick may be."""


# ------------------------------------------------------------------------------------------------------------------ log


class Log:
    """Everything that was measured, a JSON object a line, and what it says of the predictions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, **line: Any) -> None:
        line |= {"at": time.time(), "load": os.getloadavg()[0]}
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def find(self, **wanted: Any) -> dict[str, Any] | None:
        """Return the last line with these values."""
        return next((x for x in reversed(self.lines) if all(x.get(k) == v for k, v in wanted.items())), None)

    def figures(self, cell: Cell) -> Figures:
        """Return what was measured of a cell's machines and links, as ``measure`` says it."""
        speeds = self.find(kind="speeds", quota=cell.quota, size=cell.size, mbit=cell.mbit)
        links = self.find(kind="links", quota=cell.quota, mbit=cell.mbit)
        assert speeds is not None and links is not None
        measured = [SpeedFigures.model_validate(one) for one in speeds["measured"]]
        if cell.size in EMULATED:
            measured = [
                one.model_copy(update={"machine": one.machine.model_copy(update={"device": "mps"})}) for one in measured
            ]
        pairs = [PairFigures.model_validate(one) for one in links["measured"]]
        whole = MeasurementResult(list(NAMES), pairs, measured, local_name=NAMES[0]).figures
        return whole.model_copy(update={"cluster": whole.cluster.subset(cell.names)})

    def job(self, cell: Cell) -> Job:
        return job_of(cell.profile(1000), self.figures(cell).workload)

    def predict(self, cell: Cell) -> Candidate:
        return Predictor(self.figures(cell).cluster, self.job(cell)).predict(cell.choice)

    def runs(self) -> dict[Cell, dict[str, Any]]:
        """Return every cell's last run, in the order in which they were made."""
        found: dict[Cell, dict[str, Any]] = {}
        for line in self.lines:
            if line["kind"] == "run":
                found.pop(cell := Cell(**line["cell"]), None)
                found[cell] = line
        return found

    def traffic(self) -> Iterator[Traffic]:
        """Return what every run of a group moved, and how fast it was."""
        for cell, line in self.runs().items():
            if line.get("interface"):
                rows = list(line["steps"].values())
                yield Traffic(cell, self.predict(cell), rows, line["interface"], line["load"])

    def results(self) -> Iterator[Result]:
        """Return every run that is compared as a plan's are."""
        for cell, line in self.runs().items():
            candidate = self.predict(cell)
            comparison = compare(candidate, list(events(line["steps"])), self.job(cell).trainable)
            if comparison is not None:
                yield Result(cell, candidate, comparison)


def events(steps: dict[str, list[list[float]]]) -> Iterator[Event]:
    """Return the steps that were written down."""
    for rank, rows in steps.items():
        for number, compute, wait, transfer, sent, received, *_ in rows:
            yield StepEvent(member=int(rank), step=int(number), epoch=0, loss=0, learning_rate=0, samples=0, weight=0,
                            compute=compute, wait=wait, transfer=transfer, bytes_sent=int(sent),
                            bytes_received=int(received))  # fmt: skip


def written(found: Iterable[Event]) -> dict[str, list[list[float]]]:
    """Return the steps of a run as they are written down, by rank."""
    steps: dict[str, list[list[float]]] = {}
    for e in found:
        if isinstance(e, StepEvent):
            times = [round(x, 5) for x in (e.compute, e.wait, e.transfer)]
            steps.setdefault(str(e.member), []).append([e.step, *times, e.bytes_sent, e.bytes_received, e.time,
                                                     e.samples])  # fmt: skip
    return steps


# ----------------------------------------------------------------------------------------------------------------- runs


class Grid:
    """Fills a log."""

    def __init__(self, lab: PlanLab, log: Log) -> None:
        self.lab = lab
        self.log = log

    def run(self, cell: Cell) -> None:
        """Measure what is missing, predict, run."""
        self._need("speeds", cell, quota=cell.quota, size=cell.size, mbit=cell.mbit)
        self._need("links", cell, quota=cell.quota, mbit=cell.mbit)
        candidate = self.log.predict(cell)
        count = cell.steps(candidate.step)
        order = {
            "hosts": self.lab.hosts(cell.names),
            "options": texts(cell.options(count)),
            "batches": {one.name: one.micro_batch for one in candidate.members},
        }
        begin = time.monotonic()
        run = self.lab.run(order, self._cores(cell.quota), cell.mbit, count)
        steps, interface = written(run.events()), self.lab.traffic
        self.log.add(kind="run", cell=asdict(cell), predicted=candidate.step, steps=steps, interface=interface)
        self.lab.forget(run)
        print(f"{list(self.log.traffic())[-1].row}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    def _cores(self, quota: str) -> dict[str, float]:
        return dict(zip(NAMES, QUOTAS[quota], strict=True))

    def _need(self, kind: str, cell: Cell, **key: Any) -> None:
        """Measure all hosts, unless that was done for this shape."""
        if self.log.find(kind=kind, **key) is not None:
            return
        folder = "/root/figures/" + "-".join([kind, *map(str, key.values())])
        order = {"hosts": self.lab.hosts(NAMES), "options": texts(options(cell.size)), "cache": folder}
        self.lab.limit(self._cores(cell.quota), cell.mbit if kind == "links" else None)
        try:
            answer = self.lab.order(op=kind, **order)
        finally:
            self.lab.limit({}, None)
        self.log.add(kind=kind, **key, **answer)
        print(f"{kind} {key}: measured", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Result:
    """One cell, predicted and measured."""

    cell: Cell
    candidate: Candidate
    comparison: PredictionComparison

    @property
    def ratio(self) -> float:
        return self.comparison.ratio

    @cached_property
    def measured_rate(self) -> float:
        return self.candidate.global_batch / self.comparison.measured_step

    @property
    def row(self) -> dict[str, str]:
        found, cell = self.comparison, self.cell
        slowest = max(found.members, key=lambda one: one.measured)
        return {
            "hosts": str(cell.hosts),
            "Mbit/s": f"{cell.mbit:g}",
            "cores": cell.quota,
            "model": cell.size,
            "strategy": cell.strategy if cell.hosts > 1 else "alone",
            "predicted, s": f"{found.predicted_step:.3f}",
            "measured, s": f"{found.measured_step:.3f}",
            "ratio": f"{self.ratio:.2f}{_mark(self)}",
            "compute": f"{slowest.predicted:.3f} / {slowest.measured:.3f}",
            "wait": f"{found.predicted_wait:.3f} / {found.measured_wait:.3f}",
        }


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return rows as markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])


def matrix(results: Sequence[Result]) -> list[dict[str, str]]:
    """Return measured over predicted, a row for each strategy, model and quotas."""
    found = {(r.cell.strategy, r.cell.size, r.cell.quota, r.cell.hosts, r.cell.mbit): r for r in results}
    columns = sorted({(r.cell.hosts, r.cell.mbit) for r in results})
    rows = []
    for strategy, size, quota in sorted({(r.cell.strategy, r.cell.size, r.cell.quota) for r in results}):
        row = {"strategy": strategy, "model": size, "cores": quota}
        for hosts, mbit in columns:
            one = found.get((strategy, size, quota, hosts, mbit))
            row[f"{hosts} at {mbit:g}"] = f"{one.ratio:.2f}{_mark(one)}" if one else ""
        rows.append(row)
    return rows


def _mark(result: Result) -> str:
    return "" if abs(result.ratio - 1) <= WITHIN else " *"


def picks(results: Sequence[Result]) -> list[dict[str, str]]:
    """Return the planner's pick beside the best measured way, for every place."""
    alone = {(r.cell.quota, r.cell.size): r for r in results if r.cell.hosts == 1}
    rows = []
    ways = [r for r in results if r.cell.hosts > 1]
    for place, group in itertools.groupby(sorted(ways, key=lambda r: r.cell.place), key=lambda r: r.cell.place):
        found = list(group)
        if (one := alone.get((place[2], place[3]))) is not None:
            found.append(one)
        row = {"hosts": str(place[0]), "Mbit/s": f"{place[1]:g}", "cores": str(place[2]), "model": str(place[3])}
        row |= _pick("samples/s", found, max(found, key=lambda r: r.candidate.samples_per_second), lambda c: 1.0)
        row |= _pick("useful", found, _taken(found), lambda c: c.token_efficiency)
        rows.append(row)
    return rows


def _taken(found: Sequence[Result]) -> Result:
    """Return the way that the planner takes: the simplest of those that are about as fast as the fastest."""
    fastest = max(found, key=lambda r: r.candidate.useful_speed_up)
    near = (r for r in found if about_equal(r.candidate, fastest.candidate))
    return min(near, key=lambda r: simplicity(r.candidate))


def _pick(word: str, found: Sequence[Result], pick: Result, counts: Callable[[Candidate], float]) -> dict[str, str]:
    """Return the way that the prediction takes and the best one, and how much better that is as measured.

    Args:
        counts: which share of a way's samples/s counts.
    """

    def worth(result: Result) -> float:
        return result.measured_rate * counts(result.candidate)

    best = max(found, key=worth)
    lost = worth(best) / worth(pick)
    names = [r.cell.strategy if r.cell.hosts > 1 else "alone" for r in (pick, best)]
    return {
        f"by {word}": f"{names[0]} / {names[1]}",
        f"behind by {word}": f"{lost:.2f}" + ("" if lost <= SLOWER else " *"),
    }


def report(results: Sequence[Result]) -> None:
    """Print tables and shares."""
    ordered = sorted(results, key=lambda r: (r.cell.strategy, r.cell.size, r.cell.quota, r.cell.mbit, r.cell.hosts))
    print(table([r.row for r in ordered]), end="\n\n")
    print(table(matrix([r for r in ordered if r.cell.hosts > 1])), end="\n\n")
    chosen = picks(ordered)
    if chosen:
        print(table(chosen), end="\n\n")
    shared = [r for r in ordered if r.cell.hosts > 1]
    for name, group in [("all", shared), *((f"{n} hosts", [r for r in shared if r.cell.hosts == n]) for n in (2, 3, 4)),
                        *((s, [r for r in shared if r.cell.strategy == s]) for s in WAYS)]:  # fmt: skip
        if group:
            within = sum(abs(r.ratio - 1) <= WITHIN for r in group)
            middle = statistics.median(abs(r.ratio - 1) for r in group)
            print(f"{name}: {within} of {len(group)} within {WITHIN:.0%}, error {middle:.1%} in the median")


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--quotas", nargs="+", default=["equal", "3:1"], choices=list(QUOTAS))
    parser.add_argument("--sizes", nargs="+", default=["small", "large"], choices=list(BATCHES))
    parser.add_argument("--strategies", nargs="+", default=["allreduce", "diloco"], choices=[*WAYS, "all"])
    parser.add_argument("--interval", type=int, default=INTERVAL, help="steps between exchanges of weights")
    parser.add_argument("--out", type=Path, default=Path("output/plan_accuracy.jsonl"), help="JSON lines")
    parser.add_argument("--resume", action="store_true", help="leave out cells that are in the file")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--of-hosts", type=int, nargs="+", default=[1, 2, 3, 4], help="report on these only")
    arguments = parser.parse_args()
    log = Log(arguments.out)
    if not arguments.report:
        strategies = list(WAYS) if "all" in arguments.strategies else arguments.strategies
        wanted = itertools.product(arguments.sizes, arguments.quotas, arguments.mbit, arguments.hosts, strategies)
        cells = [Cell(hosts, mbit, quota, size, way, arguments.interval) for size, quota, mbit, hosts, way in wanted]
        cells = [c for c in cells if c.hosts > 1 or (c.strategy == "allreduce" and c.mbit == max(arguments.mbit))]
        with PlanLab(NAMES) as lab:
            grid = Grid(lab, log)
            for cell in cells:
                if not (arguments.resume and log.find(kind="run", cell=asdict(cell))):
                    grid.run(cell)
    report([r for r in log.results() if r.cell.hosts in arguments.of_hosts])
    if rows := [one.row for one in log.traffic() if one.cell.hosts in arguments.of_hosts]:
        print(table(rows))


if __name__ == "__main__":
    main()
