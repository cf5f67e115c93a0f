"""A student of two decoder layers: trained on the transcripts alone, and with its teacher, in the same steps.

    .venv/bin/python benchmarks/distill.py --base FOLDER_OF_TINY_EN --steps 150

``--base`` is a Whisper that hears English. It is fine-tuned on the spoken commands first, and becomes the teacher; its
students begin from it. One process, windows that follow the clips in training, WER on the test split at full windows.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo import DATA, command

COMMON = {
    "lr_schedule": "linear", "warmup_steps": 20, "batch_size": 16, "learning_rate": 1e-4, "max_grad_norm": 1,
    "eval_before": "false", "eval_interval": 0, "snapshot_interval": 0, "eval_batch_size": 16, "window": "auto",
}  # fmt: skip


def train(profile: str, output: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train on the spoken commands; ``{"model", "wer", "loss"}`` of the test split."""
    given = {**COMMON, "output_dir": output, "dataset_path": DATA, **options}
    flags = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    found = command("distributed-train", profile, "--local", "1", *flags)
    last = found["evaluations"]["test"]["last"]
    return {"model": found["model"], "wer": last["wer"], "loss": last["loss"]}


def measure(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Train the teacher and the students; results by name."""
    limits = {"max_eval_samples": arguments.samples, "seed": arguments.seed}
    whole = {"model_path": arguments.base, "tuning": "full", "max_steps": arguments.steps}
    results = {"teacher": train("whisper-small-full", output, {**limits, **whole, "gradient_checkpointing": "false"})}
    teacher = results["teacher"]["model"]
    for alpha in arguments.alphas:
        student = {"teacher_path": teacher, "student_layers": 2, "max_steps": arguments.student_steps}
        name = "student, transcripts alone" if alpha == 1 else f"student, alpha {alpha:g}"
        results[name] = train("whisper-distil", output, {**limits, **student, "distill_alpha": alpha})
    return results


def main() -> None:
    """Print a line a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--steps", type=int, default=150, help="of the teacher")
    parser.add_argument("--student-steps", type=int, default=60)
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0, 0.5, 0.0])
    parser.add_argument("--samples", type=int, default=0, help="of the test split; 0: all")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(arguments, Path(folder))
    for name, found in results.items():
        print(f"{name:28} WER {found['wer']:6.1%}  loss {found['loss']:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
