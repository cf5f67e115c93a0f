"""Seconds of ``distributed-check`` on lab hosts that have nothing of Muster yet.

    .venv/bin/python benchmarks/check_time.py [--hosts 4] [--repeats 3] [--profiles "" demo]

Needs root and Linux: the hosts are network namespaces with an sshd each (``tests/lab``). They share the processors of
this machine with the command, so its CPU seconds are shown beside the wall time: machines of their own share nothing.
The command is the real one, in a process of its own; one before the first counted one leaves its byte code behind. CPU
seconds are those of the whole machine: run nothing else meanwhile. About two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from start_and_stop import REPOSITORY, busy_seconds

from tests.lab.lab import Lab

PATIENCE = 120.0


def check(words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return seconds and CPU seconds of one check that found all machines ready."""
    busy, begin = busy_seconds(), time.monotonic()
    command = [sys.executable, str(REPOSITORY / "cli_typer.py"), "distributed-check", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    took, spent = time.monotonic() - begin, busy_seconds() - busy
    unready = [machine for machine in json.loads(done.stdout)["machines"] if not machine["ready"]]
    if done.returncode or unready:
        raise SystemExit(f"not ready: {done.stderr or unready}")
    return took, spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profiles", nargs="+", default=["", "demo-scratch"], help="empty: none", metavar="PROFILE")
    arguments = parser.parse_args()
    with Lab(*(f"host{n}" for n in range(arguments.hosts))) as lab, tempfile.TemporaryDirectory() as folder:
        dropped = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        environment = {**kept, "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
        for profile in arguments.profiles:
            words = [*filter(None, [profile]), "--hosts", str(lab.hosts_file)]
            rows = [check(words, environment) for _ in range(arguments.repeats + 1)][1:]
            times = ", ".join(f"{took:.1f}" for took, _ in rows)
            cpu = statistics.median(spent for _, spent in rows)
            print(f"{arguments.hosts} hosts, {profile or 'no profile':12} {times} s (CPU {cpu:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
