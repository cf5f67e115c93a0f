"""Fine-tunes of a published Whisper by kind of tuning, workers and strategy: WER, steps, minutes, memory, bytes.

    .venv/bin/python benchmarks/whisper_table.py --json table.json [--only full lora-16 ...] [--steps 300]

Every row is one run of the command line on the spoken commands, from the same model and for the same samples: with
more workers there are fewer steps. A row that is in the JSON file already is not run again. About four minutes a row
on two cores. WER is that of the full 30 s window, on a third of the synthetic test voices' clips and on all clips of
the recorded person, none of whom is in training.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "spoken_commands"
PERSON = "awb"
BATCH = 16
"""Samples of one step, over all workers."""

LORA = {"tuning": "lora", "learning_rate": "1e-3", "lora_dropout": "0", "weight_decay": "0"}
FULL = {"tuning": "full", "learning_rate": "1e-4"}
ROWS: dict[str, dict[str, str]] = {
    "full": FULL,
    "encoder-frozen": FULL | {"freeze_encoder": "true"},
    **{f"lora-{rank}": LORA | {"lora_rank": str(rank), "lora_alpha": str(2 * rank)} for rank in (8, 16, 32)},
    **{f"full-{n}-allreduce": FULL | {"workers": str(n), "strategy": "allreduce"} for n in (2, 4)},
    **{f"full-{n}-diloco": FULL | {"workers": str(n), "strategy": "diloco"} for n in (2, 4)},
    "lora-16-2-allreduce": LORA | {"lora_rank": "16", "workers": "2", "strategy": "allreduce"},
    "lora-16-2-diloco": LORA | {"lora_rank": "16", "workers": "2", "strategy": "diloco", "sync_interval": "20"},
    "lora-16-dropout": LORA | {"lora_rank": "16", "lora_dropout": "0.05"},
    "lora-16-slow": LORA | {"lora_rank": "16", "learning_rate": "3e-4"},
    "full-augmented": FULL | {"augmentation": "0.5"},
    "full-slow": FULL | {"learning_rate": "3e-5"},
    "full-no-warm-up": FULL | {"warmup_steps": "0"},
}


def data_folder(folder: Path) -> None:
    """Write the tables: all that is for training, and a third of the test clips beside all of the person's."""
    for split in ("train", "test"):
        with (DATA / f"{split}.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if split == "test":
            rows = [row for i, row in enumerate(rows) if PERSON in row["voice"] or i % 3 == 0]
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row | {"audio_path": str(DATA / row["audio_path"])} for row in rows)


def train(model: str, data: Path, settings: dict[str, str], steps: int, output: Path) -> dict[str, Any]:
    """Run one row; return what its table line needs."""
    workers = int(settings.get("workers", 1))
    fixed = {"warmup_steps": "30", "lr_schedule": "linear", "eval_interval": "0", "snapshot_interval": "0", "seed": "0"}
    fixed |= {"augmentation": "0", "max_eval_samples": "0"}  # the demo has both
    shared = {"batch_size": str(BATCH), "max_steps": str(steps // workers), "lr_scaling": "sqrt"}
    values = {**fixed, **shared, **settings, "output_dir": str(output), "from_scratch": "false"}
    command = [sys.executable, str(ROOT / "cli_typer.py"), "distributed-train", "demo", "--json", "--model", model]
    command += ["--dataset", str(data), "--local", str(workers)]
    command += [part for key, value in values.items() if key != "workers" for part in ("--set", f"{key}={value}")]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        document = out.read()
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    run = Path(json.loads(document)["run_dir"])
    return {
        **steps_of(run),
        "minutes_in_all": (time.monotonic() - begin) / 60,
        "largest_process_mb": usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024 * 1024),
        "before": rates(run / "evaluation" / "before.csv"),
        "after": rates(run / "evaluation" / "predictions.csv"),
    }


def steps_of(run: Path) -> dict[str, float]:
    """Steps, minutes of training without evaluations and snapshots, and MB that the busiest member sent."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [event for event in map(json.loads, lines) if event["kind"] == "step"]
    first = [event for event in steps if event["member"] == 0]
    sent: Counter[int] = Counter()
    for event in steps:
        sent[event["member"]] += event["bytes_sent"]
    minutes = sum(event["compute"] + event["wait"] for event in first) / 60
    return {"steps": first[-1]["step"], "minutes": minutes, "mb_sent": max(sent.values()) / 1e6}


def rates(predictions: Path) -> dict[str, float]:
    """WER of the synthetic voices and of the person."""
    edits: Counter[str] = Counter()
    words: Counter[str] = Counter()
    with predictions.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            who = "person" if PERSON in row["speaker"] else "synthetic"
            edits[who] += int(row["edits"])
            words[who] += int(row["words"])
    return {who: edits[who] / words[who] for who in words}


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    print("| row | steps | min of training | WER synthetic | WER person | largest process | sent a worker |")
    print("|---|---|---|---|---|---|---|")
    for name, row in results.items():
        synthetic, person = (f"{row['before'][w]:.1%} -> {row['after'][w]:.1%}" for w in ("synthetic", "person"))
        print(
            f"| {name} | {row['steps']:.0f} | {row['minutes']:.1f} | {synthetic} | {person} "
            f"| {row['largest_process_mb'] / 1000:.2f} GB | {row['mb_sent']:.0f} MB |"
        )


def main() -> None:
    """Run the rows that are not in the file yet, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="openai/whisper-tiny.en")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--steps", type=int, default=320, help="of one worker; n workers make an n-th of them")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name in arguments.only:
        if name in results:
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            data_folder(folder)
            results[name] = train(arguments.model, folder, ROWS[name], arguments.steps, folder / "output")
        finally:
            shutil.rmtree(folder)
        arguments.json.write_text(json.dumps(results, indent=1))
    show(results)


if __name__ == "__main__":
    main()
