"""Steps a second of a run while a stranger holds 1,000 connections open at the coordinator, and without.

    .venv/bin/python benchmarks/strangers.py [--pairs 3] [--members 3] [--connections 1000] [--json FILE]

Root on Linux: members and the stranger are hosts of a lab, over real SSH. A pair is one run: stretches of its steps
take turns without and with the stranger, so that both meet the same load of the machine, and the ratio of a pair is
that of its two stretches. The stranger keeps its connections open, opens again those that are ended, and a second one
speaks rubbish once a second. They may use a tenth of a core; a step's compute is a fixed sleep, so that what is left
of the processors does for members and coordinator. A few minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from distributed.hosts.file import save_hosts
from tests.distributed.muster_runs import Muster
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec
from tests.waiting import until
from training.records.events import StepEvent

STRANGER = Path(__file__).resolve().parent.parent / "tests" / "distributed" / "stranger.py"
WIDTH = 500
MODEL = f"nn.Sequential(nn.Linear(2, {WIDTH}), nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, 2))"
WARM_UP = 20
PAUSE = 0.03
BETWEEN = 1.0
PATIENCE = 600.0


def coordinator_port(muster: Muster, run_id: str) -> int:
    """Return the port on which the run's coordinator listens; 0 before it does."""
    for process in psutil.Process(muster.supervisor(run_id)).children():
        with contextlib.suppress(psutil.Error):
            if "training.exchange.group.coordinator_main" in process.cmdline():
                return next((c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN), 0)
    return 0


@contextlib.contextmanager
def strangers(lab: Lab, port: int, connections: int) -> Iterator[None]:
    """Hold connections and speak rubbish, from a host that is no member, as long as the block lasts."""
    base = [sys.executable, "-I", str(STRANGER), lab.address, str(port)]
    end = threading.Event()

    def speak() -> None:
        while not end.wait(BETWEEN):
            lab["x"].run([*base, "rubbish", "1"], timeout=PATIENCE)

    speaking = threading.Thread(target=speak)
    with lab["x"].popen([*base, "hold", str(connections)], stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout is not None
        assert int(holding.stdout.readline()) == connections
        speaking.start()
        try:
            yield
        finally:
            end.set()
            speaking.join()
            for pid in lab["x"].pids("stranger.py"):
                os.kill(pid, signal.SIGTERM)


def step_seconds(muster: Muster, run_id: str, first: int, last: int, members: int) -> float:
    """Let the run go on from ``first`` to ``last`` and return the median seconds of a step between them."""
    muster.let_pass(last)
    for rank in range(members):
        until(lambda r=rank: any(s >= last for s, _ in muster.losses(run_id, r)), PATIENCE)
    # The first steps of a stretch begin at the gate.
    times = [e.time for e in muster.events(run_id) if isinstance(e, StepEvent) and e.member == 0 and e.step > first + 1]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def measure(lab: Lab, pairs: int, steps: int, connections: int) -> list[float]:
    """Return, a pair, the seconds of a step with the strangers over those without."""
    members = [host.name for host in lab if host.name != "x"]
    with tempfile.TemporaryDirectory() as folder:
        save_hosts(lab.hosts(*members), Path(folder) / "hosts.json")
        muster = Muster(Path(folder), Path(folder) / "hosts.json", PAUSE, lab.folder / "gate", MODEL)
        muster.let_pass(WARM_UP)
        run_id = muster.detach("--max-steps", str(WARM_UP + 2 * pairs * steps + 1), "--eval-interval", "0")
        until(lambda: any(step >= WARM_UP for step, _ in muster.losses(run_id)), PATIENCE)
        port, at, ratios = coordinator_port(muster, run_id), WARM_UP, []
        for pair in range(pairs):
            seconds = {}
            for strange in (False, True) if pair % 2 else (True, False):
                with strangers(lab, port, connections) if strange else contextlib.nullcontext():
                    seconds[strange] = step_seconds(muster, run_id, at, at + steps, len(members))
                at += steps
            ratios.append(seconds[True] / seconds[False])
            print(json.dumps({"without": seconds[False], "with": seconds[True], "ratio": ratios[-1]}), file=sys.stderr)
        muster.let_pass(at + 1)
        muster.wait_for_end(run_id)
        if muster.metadata(run_id)["status"] != "completed" or muster.metadata(run_id)["metrics"]["lost_members"]:
            raise SystemExit(f"the run did not end well: {muster.metadata(run_id)}")
    return ratios


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of a stretch")
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with Lab(*(f"m{number}" for number in range(arguments.members)), HostSpec("x", cores=0.1)) as lab:
        ratios = measure(lab, arguments.pairs, arguments.steps, arguments.connections)
    result = {"ratio of step times": statistics.median(ratios), "pairs": sorted(ratios)}
    print(json.dumps(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
