"""What a simulation costs: a step of N members in one process, as times of N steps of one member alone.

    .venv/bin/python benchmarks/simulation.py [--members 4 16 64] [--strategies allreduce diloco] [--steps 12]

The model is nanoGPT's shape of ``examples/nanogpt`` (0.9 million weights). Alone and simulated take turns in one call.
Times are means, without the first step of each member, in whichever order they make the others. Memory is the peak of
the whole process. Nothing else may run. Ten minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from profiles.files.resolve import load_profile
from training.records.events import Event, MachineEvent, StepEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.run_controller import RunController

PROFILE = "nanogpt"


def seconds(members: int, strategy: str, steps: int, folder: Path) -> tuple[float, int]:
    """Return the mean seconds of a step of all members, and the peak of the process's memory in bytes."""
    own = {"max_steps": str(steps), "strategy": strategy, "eval_interval": "0", "output_dir": str(folder)}
    own |= {"eval_before": "false", "snapshot_interval": "0"}
    plan = plan_local_run(load_profile(PROFILE, own).profile, members, simulated=True)
    events: list[Event] = []
    with RunFolder.create(folder, plan, ["benchmark"]) as held:
        run = RunController(plan, held, events.append)
        run.start()
        outcome = run.wait()
    assert outcome.status == "completed", outcome.message
    times = sorted(event.time for event in events if isinstance(event, StepEvent))
    memory = [event.memory_used for event in events if isinstance(event, MachineEvent)]
    return (times[-1] - times[members - 1]) / (len(times) / members - 1), max(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--strategies", nargs="+", default=["allreduce", "diloco"])
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    print(f"{'strategy':<12} {'members':>7} {'alone ms':>9} {'step ms':>9} {'times N':>8} {'peak GB':>8}")
    with tempfile.TemporaryDirectory() as name:
        for strategy in arguments.strategies:
            for members in arguments.members:
                alone = [seconds(1, strategy, 4 * arguments.steps, Path(name))[0]]
                step, memory = seconds(members, strategy, arguments.steps, Path(name))
                alone.append(seconds(1, strategy, 4 * arguments.steps, Path(name))[0])
                one = statistics.mean(alone)
                print(
                    f"{strategy:<12} {members:>7} {1e3 * one:>9.1f} {1e3 * step:>9.1f} {step / members / one:>8.2f} "
                    f"{memory / 1e9:>8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
