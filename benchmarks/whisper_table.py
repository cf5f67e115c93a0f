"""Fine-tunes of a published Whisper by kind of tuning, workers and strategy: WER, steps, minutes, memory, bytes.

    .venv/bin/python benchmarks/whisper_table.py --json table.json [--only full lora-16 ...] [--steps 300]

Every row is one run of the command line on the spoken commands, from the same model and for the same samples: with
more workers there are fewer steps. A row that is in the JSON file already is not run again. WER is that of the whole
30 s window, on the validation voices and on the recorded person of the test split, none of whom is in training. The
processor's minutes are those of all processes, start included, so that they hold on a busy machine too; the minutes by
the clock do not.
"""

from __future__ import annotations

import argparse
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

from whisper_windows import rates

ROOT = Path(__file__).resolve().parent.parent
BATCH = 16
"""Samples of one worker in a step."""

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


def train(model: str, settings: dict[str, str], steps: int, output: Path) -> dict[str, Any]:
    """Run one row; return what its table line needs."""
    workers = int(settings.get("workers", 1))
    fixed = {"warmup_steps": "30", "lr_schedule": "linear", "eval_interval": "0", "snapshot_interval": "0", "seed": "0"}
    fixed |= {"augmentation": "0", "max_eval_samples": "1"}  # the demo has others
    shared = {"batch_size": str(BATCH), "max_steps": str(steps // workers), "lr_scaling": "sqrt"}
    values = {**fixed, **shared, **settings, "output_dir": str(output), "from_scratch": "false"}
    command = [sys.executable, str(ROOT / "cli_typer.py"), "distributed-train", "demo", "--json", "--model", model]
    command += ["--local", str(workers)]
    command += [part for key, value in values.items() if key != "workers" for part in ("--set", f"{key}={value}")]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        document = out.read()
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    found = json.loads(document)
    return {
        **steps_of(Path(found["run_dir"])),
        "minutes_in_all": (time.monotonic() - begin) / 60,
        "processor_minutes": (usage.ru_utime + usage.ru_stime) / 60,
        "largest_process_mb": usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024 * 1024),
        "wer": rates(found["model"], splits=("validation", "person")),
    }


def steps_of(run: Path) -> dict[str, float]:
    """Steps, minutes of training without evaluations and snapshots, and MB that the busiest member sent."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["kind"] == "step"]
    first = [event for event in steps if event["member"] == 0]
    sent: Counter[tuple[str, int]] = Counter()
    for event in events:
        if event["kind"] in ("step", "sync"):  # a step has what was sent in it, or a synchronisation has it
            sent[event["kind"], event["member"]] += event["bytes_sent"]
    minutes = sum(event["compute"] + event["wait"] for event in first) / 60
    return {"steps": first[-1]["step"], "minutes": minutes, "mb_sent": max(sent.values(), default=0) / 1e6}


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    print("| row | steps | processor's minutes | WER validation | WER person | largest process | sent a worker |")
    print("|---|---|---|---|---|---|---|")
    for name, row in results.items():
        wer = " | ".join(f"{row['wer'][f'{who} whole']:.1%}" for who in ("validation", "person"))
        memory = f"{row['largest_process_mb'] / 1000:.2f} GB"
        print(
            f"| {name} | {row['steps']:.0f} | {row['processor_minutes']:.1f} | {wer} | {memory} "
            f"| {row['mb_sent']:.0f} MB |"
        )


def main() -> None:
    """Run the rows that are not in the file yet, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="openai/whisper-tiny.en")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--steps", type=int, default=160, help="of one worker; n workers make an n-th of them")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name in arguments.only:
        if name in results:
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            results[name] = train(arguments.model, ROWS[name], arguments.steps, folder)
        finally:
            shutil.rmtree(folder)
        arguments.json.write_text(json.dumps(results, indent=1))
    show(results)


if __name__ == "__main__":
    main()
