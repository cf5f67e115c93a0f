"""What the learning-rate rule and the strategy cost in loss at equal samples.

    .venv/bin/python benchmarks/learning_rate_rule.py [--samples 9600] [--workers 1 2 4]

Trains the causal language model of the ``nanogpt`` profile from the same start on the same number of samples: with
``n`` workers each takes ``1/n`` of them, so there are ``n`` times fewer steps of an ``n`` times larger batch.
About an hour; with 800 samples five minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from local_runs import train

STRATEGIES = {
    "allreduce": {"strategy": "allreduce"},
    "diloco": {"strategy": "diloco", "codec": "mxfp4", "sync_interval": 20},
}


def final_loss(workers: int, samples: int, rule: str, strategy: dict[str, object], seed: int) -> float:
    """Train and return the validation loss at the end."""
    options = {
        "batch_size": 8,
        "max_steps": samples // (8 * workers),
        "lr_scaling": rule,
        "warmup_steps": samples // (8 * workers) // 10,
        "eval_interval": 0,
        "eval_before": "false",
        "snapshot_interval": 0,
        "seed": seed,
    }
    return train("nanogpt", workers, options | strategy).final_loss()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=9600)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for workers in arguments.workers:
        for name, strategy in STRATEGIES.items() if workers > 1 else [("one worker", STRATEGIES["allreduce"])]:
            for rule in ("off", "sqrt", "linear") if workers > 1 else ("off",):
                losses = [final_loss(workers, arguments.samples, rule, strategy, seed) for seed in arguments.seeds]
                rows.append((workers, name, rule, statistics.mean(losses)))
                print(rows[-1], flush=True)
    base = rows[0][3]
    print("\n| workers | strategy | lr_scaling | validation loss | against one worker |\n|---|---|---|---|---|")
    for workers, name, rule, loss in rows:
        print(f"| {workers} | {name} | {rule} | {loss:.4f} | {100 * (loss / base - 1):+.1f} % |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
