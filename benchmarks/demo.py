"""The demo by its command line: time from the command to the result, WER before and after, and who is misheard.

    .venv/bin/python benchmarks/demo.py --seeds 0 1 2
    .venv/bin/python benchmarks/demo.py --profile demo-scratch --seeds 0

The time is that of ``make demo`` without the set-up. The run itself measures part of the test split; here the model is
measured on all of it, at its full window, as ``evaluate`` does. The recorded person of the test split has a column.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "spoken_commands"
PERSON = "awb"


def command(*arguments: str) -> dict[str, Any]:
    """Run one command line with ``--json`` and return its document."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli_typer.py"), *arguments, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{arguments[0]} ended with {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def train(profile: str, seed: int, output: Path) -> dict[str, Any]:
    """Train the demo; seconds of the whole command, and of its steps alone (``trained``)."""
    begin = time.monotonic()
    settings = ["--set", f"seed={seed}", "--set", f"output_dir={output}"]
    settings += ["--strategy", "diloco"] if profile == "demo" else []
    found = command("distributed-train", profile, "--local", "2", *settings)
    seconds = time.monotonic() - begin
    return {"profile": found["profile"], "model": found["model"], "seconds": seconds, "trained": trained_for(found)}


def trained_for(found: dict[str, Any]) -> float:
    """Return the seconds that the steps took, by the times at which the first member ended each."""
    lines = (Path(found["run_dir"]) / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ends = [event["time"] for event in map(json.loads, lines) if event["kind"] == "step" and event["member"] == 0]
    return float((ends[-1] - ends[0]) * len(ends) / (len(ends) - 1))


def rates(model: str) -> dict[str, float]:
    """WER of a model on the whole test split, on the person in it, and on all others."""
    found = command("evaluate", model, str(DATA), "--split", "test")["breakdown"]
    person = next(part for part in found["speaker"] if part["name"] == PERSON)
    whole = found["overall"]
    others = (whole["edits"] - person["edits"]) / (whole["words"] - person["words"])
    return {"all": whole["wer"], "person": person["wer"], "others": others}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--profile", default="demo")
    parser.add_argument("--before", metavar="FOLDER", help="a model to measure as it is")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"| seed | whole command | training | all test voices | espeak-ng | recorded person {PERSON} |")
    print("|---|---|---|---|---|---|")
    results: dict[str, Any] = {}
    if arguments.before:
        results["before"] = rates(arguments.before)
        print(f"| before | | | {cells(results['before'])} |", flush=True)
    for seed in arguments.seeds:
        output = Path(tempfile.mkdtemp())
        try:
            trained = train(arguments.profile, seed, output)
            results[str(seed)] = trained | rates(trained["model"])
        finally:
            shutil.rmtree(output)
        took = " | ".join(minutes(trained[what]) for what in ("seconds", "trained"))
        print(f"| {seed} | {took} | {cells(results[str(seed)])} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def minutes(seconds: float) -> str:
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"


def cells(found: dict[str, Any]) -> str:
    return " | ".join(f"{found[part]:.1%}" for part in ("all", "others", "person"))


if __name__ == "__main__":
    main()
