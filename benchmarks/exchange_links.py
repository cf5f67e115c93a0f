"""Seconds for one mean over shaped links, as times of what the links allow: the mesh as a process group and as a run
uses it (with equal shards, and with those that the planner takes), and gloo.

    .venv/bin/python benchmarks/exchange_links.py [--mbit 20 100 1000] [--megabytes 40] [--repeats 3] [--json FILE]

Needs root: four members in network namespaces (``tests/lab``), links shaped both ways. What they allow is
``2 (n - 1) / n`` of the payload at the rate of a link; with a slow one among them, what they allow with the best
shards. Engines take turns. ``--slow 50`` makes the last member's link that slow (Wi-Fi among cables). Processors are
shared by all; at 1000 Mbit/s they count too. Five minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from operator import mul
from pathlib import Path
from typing import Any

from exchange_engines import Members, served

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from distributed.planning.cost_model import bottlenecks_of, star_flows
from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link
from distributed.planning.documents.document import Choice
from distributed.planning.exchange_cost import ExchangeCosts
from tests.lab.lab import Lab

NAMES = ("a", "b", "c", "d")
ENGINES = {"mesh": "mesh", "run": "run", "run, planned": "run", "gloo": "gloo"}
"""What is measured, as ``exchange_engines.py`` calls the engines."""


def planned(size: int, rates: dict[str, float]) -> tuple[list[float], float]:
    """Return the planner's shards for these links, and the seconds that they allow with the best ones."""
    machines = tuple(ClusterMachine(name=name) for name in NAMES)
    pairs = ((a, b, min(rates[a], rates[b])) for a, b in itertools.combinations(NAMES, 2))
    links = tuple(Link(source=a, target=b, mbit=rate, mbit_back=rate) for a, b, rate in pairs)
    there = Cluster(machines=machines, links=links)
    way = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=NAMES)
    shards = ExchangeCosts(there, size // 4).forecast(way).shards.values()
    stars = [bottlenecks_of(there, star_flows(NAMES, owner, size, size)) for owner in NAMES]
    keys = {key for star in stars for key in star}
    times = ([star[key].seconds if key in star else 0.0 for star in stars] for key in keys)
    return [*shards], max(sum(map(mul, shards, each)) for each in times)


def measure(lab: Lab, size: int, repeats: int, shards: list[float]) -> dict[str, list[float]]:
    """Return seconds of every repeat, by engine."""
    hosts = [lab[name] for name in NAMES]

    def prefixes(engine: str) -> list[list[str]]:
        owned = f"BENCH_SHARES={json.dumps(shards if engine == 'run, planned' else [])}"
        return [
            ["nsenter", "-t", f"{host.pid}", "-n", "env", f"MUSTER_LISTEN={host.address}", "GLOO_SOCKET_IFNAME=eth0",
             owned] for host in hosts
        ]  # fmt: skip

    found: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    with ExitStack() as stack:
        members = {}
        for engine, kind in ENGINES.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            address = stack.enter_context(served(kind, len(NAMES), size // 4, folder, lab.address))
            members[engine] = Members(kind, len(NAMES), address, folder, "fp32", prefixes(engine))
            stack.callback(members[engine].close)
        for _ in range(repeats):
            for engine in ENGINES:
                found[engine].append(members[engine].measure(size // 4, 1)[0])
    return found


def main() -> None:
    """Measure, and print a row for every rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[20.0, 100.0, 1000.0])
    parser.add_argument("--slow", type=float, help="Mbit/s of the last member's link")
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    size = int(given.megabytes * 1e6) // 4 * 4
    rows: list[dict[str, Any]] = []
    print(f"| Mbit/s | allowed, s | {' | '.join(ENGINES)} | load |\n|" + " ---: |" * (3 + len(ENGINES)))
    with Lab(*NAMES) as lab:
        for mbit in given.mbit:
            rates = dict.fromkeys(NAMES, mbit) | ({NAMES[-1]: given.slow} if given.slow else {})
            for name, rate in rates.items():
                lab[name].set_rate(rate)
            shards, allowed = planned(size, rates)
            found = measure(lab, size, given.repeats, shards)
            rows.append({"mbit": mbit, "slow": given.slow, "bytes": size, "allowed": allowed, **found})
            cells = " | ".join(f"{statistics.median(found[engine]) / allowed:.2f}" for engine in ENGINES)
            print(f"| {mbit:g} | {allowed:.2f} | {cells} | {os.getloadavg()[0]:.1f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
