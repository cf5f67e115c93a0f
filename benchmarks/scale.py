"""Loss against simulated time for more and more members at home, by strategy; and what a step of larger models costs.

Every member trains a byte-level model of 0.1 M parameters on the shipped text, in one process that takes turns; their
time is that of laptops with a line of 100 Mbit/s each (docs/how-to/scale.md). The losses are real for every number of
members in ``--members``; ``--clock`` prints the cost of steps alone, which trains nothing. Ten minutes where nothing
else runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed.planning.simulated import ClusterClock, Groups, Machines
from profiles.files.resolve import profile_from_options
from training.local_trainer import LocalTrainer
from training.records.events import EvaluationEvent, Event, MemberEvent, StepEvent
from training.run.local_plan import plan_local_run

TEXT = Path(__file__).resolve().parent.parent / "examples/nanogpt/input.txt"
CONTEXT, BLOCK, HELD_OUT = 8, 64, 64
STRATEGIES = {
    "allreduce": {},
    "diloco": {"diloco.sync_interval": 4},
    "noloco": {"noloco.sync_interval": 4},
}
LAPTOP = {"name": "laptop", "samples_per_s": 40, "link": {"mbit": 100, "latency_ms": 20}}


class Bytes(nn.Module):
    """The next byte from the last eight: an embedding and two layers (Bengio et al. 2003)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.Sequential(nn.Linear(16 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256))

    def forward(self, block: torch.Tensor) -> torch.Tensor:
        """Return the loss of blocks of bytes, ``[samples, BLOCK]``."""
        before = self.embedding(block.unfold(1, CONTEXT, 1)[:, :-1]).flatten(2)
        return nn.functional.cross_entropy(self.layers(before).flatten(0, 1), block[:, CONTEXT:].flatten())


class Blocks:
    """The text in blocks of bytes, the first ones or all others."""

    def __init__(self, held_out: bool) -> None:
        data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
        whole = data[: len(data) // BLOCK * BLOCK].view(-1, BLOCK)
        self.blocks = (whole[:HELD_OUT] if held_out else whole[HELD_OUT:]).clone()

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.blocks[index].long()


def train(members: int, strategy: str, steps: int, lost_per_hour: float = 0.0) -> list[Event]:
    """Return the events of one run."""
    events: list[Event] = []
    laptops = {**LAPTOP, "count": members, "lost_per_hour": lost_per_hour, "back_after_minutes": 0.02}
    options = {"learning_rate": 3e-3, "lr_scaling": "off", "warmup_steps": 4, "batch_size": 4}
    options |= {"max_steps": steps, "eval_interval": max(1, steps // 5), "threads": 1, "snapshot_interval": 0}
    with tempfile.TemporaryDirectory() as folder:
        trainer = LocalTrainer(
            Bytes(),
            Blocks(held_out=False),
            Blocks(held_out=True),
            output_dir=folder,
            simulate=members,
            cluster=Machines(Groups.model_validate({"groups": [laptops]})),
            on_event=events.append,
        )
        trainer.fit(strategy=strategy, **options, **STRATEGIES[strategy])
    return events


def row(events: Iterable[Event]) -> list[str]:
    """Return the cells of a run: milliseconds of a step, share of waiting, MB sent by a member, losses and when."""
    events = list(events)
    steps = [event for event in events if isinstance(event, StepEvent)]
    clock = {0: 0.0} | {event.step: event.clock or 0.0 for event in steps}
    ranks = {event.member for event in steps}
    waiting = sum(event.wait for event in steps) / sum(event.seconds for event in steps)
    sent = sum(event.bytes_sent for event in steps) / len(ranks) / 1e6
    course = {event.step: event.loss for event in events if isinstance(event, EvaluationEvent)}
    cells = [f"{1e3 * max(clock.values()) / max(clock):.0f}", f"{waiting:.0%}", f"{sent:.1f}"]
    return [*cells, *(f"{loss:.3f} ({clock[step]:.1f} s)" for step, loss in sorted(course.items()) if step)]


def real(arguments: argparse.Namespace) -> None:
    for members in arguments.members:
        for strategy in arguments.strategies:
            found = train(members, strategy, arguments.steps)
            print("| " + " | ".join([str(members), strategy, *row(found)]) + " |", flush=True)
    if arguments.lost_per_hour:
        found = train(16, "diloco", arguments.steps, arguments.lost_per_hour)
        lost = sum(isinstance(event, MemberEvent) and event.status == "lost" for event in found)
        print(f"| 16, {lost} losses | diloco | " + " | ".join(row(found)) + " |", flush=True)


def clock(members: Iterable[int], strategies: Iterable[str]) -> None:
    """Print what a step costs with larger models, where nothing is trained."""
    own = {"diloco": {"diloco.sync_interval": 50}, "noloco": {"noloco.sync_interval": 50}}
    for parameters in (1_000_000, 37_000_000):
        for count in members:
            for strategy in strategies:
                machines = Machines(Groups.model_validate({"groups": [{**LAPTOP, "count": count}]}))
                options = {"task": "custom", "model_path": "a.py:b", "strategy": strategy, **own.get(strategy, {})}
                plan = plan_local_run(profile_from_options("custom", options), count, simulated=True)
                found = ClusterClock(machines.with_clock(plan)).cost(tuple(range(count)), parameters, 10_000)
                wait = found.wait(0) / found.seconds
                cells = (f"{parameters / 1e6:.0f} M", str(count), strategy, f"{found.seconds:.3f} s", f"{wait:.0%}")
                print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lost-per-hour", type=float, default=360.0)
    parser.add_argument("--clock", action="store_true")
    arguments = parser.parse_args()
    if arguments.clock:
        clock(arguments.members, arguments.strategies)
    else:
        real(arguments)


if __name__ == "__main__":
    main()
