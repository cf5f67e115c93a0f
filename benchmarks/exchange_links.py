"""Seconds for one mean over shaped links, as times of what the links allow: the mesh beside gloo.

    .venv/bin/python benchmarks/exchange_links.py [--mbit 20 100 1000] [--megabytes 40] [--repeats 3] [--json FILE]

Needs root: four members in network namespaces (``tests/lab``), links shaped both ways. What they allow is
``2 (n - 1) / n`` of the payload at the rate of a link. Engines take turns. ``--slow 50`` makes the last member's link
that slow (Wi-Fi among cables). Processors are shared by all; at 1000 Mbit/s they count too. Five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from exchange_engines import Members, served

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.lab.lab import Lab

NAMES = ("a", "b", "c", "d")
ENGINES = ("mesh", "gloo")


def measure(lab: Lab, size: int, repeats: int) -> dict[str, list[float]]:
    """Return seconds of every repeat, by engine."""
    hosts = [lab[name] for name in NAMES]
    prefixes = [
        ["nsenter", "-t", str(host.pid), "-n", "env", f"MUSTER_LISTEN={host.address}", "GLOO_SOCKET_IFNAME=eth0"]
        for host in hosts
    ]
    found: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    with ExitStack() as stack:
        members = {}
        for engine in ENGINES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            address = stack.enter_context(served(engine, len(NAMES), size // 4, folder))
            members[engine] = Members(engine, len(NAMES), address, folder, "fp32", prefixes)
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
    print("| Mbit/s | allowed, s | mesh | gloo | load |\n| ---: | ---: | ---: | ---: | ---: |")
    with Lab(*NAMES) as lab:
        for mbit in given.mbit:
            for name in NAMES:
                lab[name].set_rate(given.slow if given.slow and name == NAMES[-1] else mbit)
            found = measure(lab, size, given.repeats)
            slowest = min(mbit, given.slow or mbit)
            allowed = 2 * (len(NAMES) - 1) / len(NAMES) * size * 8 / (slowest * 1e6)
            rows.append({"mbit": mbit, "slow": given.slow, "bytes": size, "allowed": allowed, **found})
            cells = " | ".join(f"{statistics.median(found[engine]) / allowed:.2f}" for engine in ENGINES)
            print(f"| {mbit:g} | {allowed:.2f} | {cells} | {os.getloadavg()[0]:.1f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
