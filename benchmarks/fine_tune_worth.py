"""What the others' samples are worth in a fine-tune of a published Whisper, by the rounds of DiLoCo.

    .venv/bin/python benchmarks/fine_tune_worth.py --model TINY_EN --dataset FOLDER [--seeds 0 1] [--json FILE]

Beside it two workers that average every step, and one worker alone that takes as many steps. Batches of 8, windows that
follow the clips, validation loss of 96 clips at whole windows. ``kept`` is the share of the gain of averaging every
step over one worker that is left with so many rounds. Prints a Markdown table.
About four minutes a seed on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = (3, 10)


def last_loss(model: str, dataset: str, seed: int, steps: int, workers: int, *options: str) -> float:
    """Train, and return the validation loss after the last step."""
    rate = 1e-4 * workers**0.5
    settings = [
        *("eval_interval=0", "eval_generate=false", "eval_before=false", "max_eval_samples=96", "snapshot_interval=0"),
        *("warmup_steps=8", "lr_scaling=off", f"learning_rate={rate:.3g}", "augmentation=0", f"seed={seed}", *options),
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "cli_typer.py"), "distributed-train", "demo", "--json"]
        command += [
            "--model",
            model,
            "--dataset",
            dataset,
            "--local",
            str(workers),
            "--max-steps",
            str(steps),
            "--batch-size",
            "8",
        ]
        command += ["--output-dir", folder, *(word for setting in settings for word in ("--set", setting))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return float(json.loads(done.stdout)["evaluations"]["validation"]["last"]["loss"])


def main() -> None:
    """Measure what was not measured before, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True, help="such as examples/make_sentences.py makes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kept = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    ways: dict[str, tuple[int, tuple[str, ...]]] = {
        "one worker": (1, ()),
        "every step": (2, ("strategy=allreduce",)),
        **{f"{n} rounds": (2, ("strategy=diloco", f"sync_interval={arguments.steps // n}")) for n in ROUNDS},
    }
    print("| seed | way | loss | kept | loss over every step |\n|---|---|---|---|---|")
    for seed in arguments.seeds:
        for way, (workers, options) in ways.items():
            name = f"{seed}: {way}"
            kept[name] = kept.get(name) or last_loss(
                arguments.model, arguments.dataset, seed, arguments.steps, workers, *options
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(kept, indent=1))
            alone, every = kept[f"{seed}: one worker"], kept.get(f"{seed}: every step", 0.0)
            share = f"{(alone - kept[name]) / (alone - every):.2f} | {kept[name] / every - 1:+.1%}" if every else " | "
            print(f"| {seed} | {way} | {kept[name]:.4f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
