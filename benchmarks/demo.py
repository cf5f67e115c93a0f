"""The demo by its command line: time from the command to the result, WER before and after, and who is misheard.

    .venv/bin/python benchmarks/demo.py --seeds 0 1

About five minutes a seed: the time is that of ``make demo`` without the set-up. By voice, the transcripts of
``transcribe`` are counted on plain words: Whisper's normaliser, which the run itself uses, joins number words.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jiwer

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "spoken_commands"


def command(*arguments: str) -> dict[str, Any]:
    """Run one command line with ``--json`` and return its document."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli_typer.py"), *arguments, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{arguments[0]} ended with {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def train(seed: int, output: Path) -> dict[str, Any]:
    """Train the demo; ``{"model", "seconds", split: (WER before, WER after)}``."""
    begin = time.monotonic()
    settings = ["--set", f"seed={seed}", "--set", f"output_dir={output}"]
    found = command("distributed-train", "demo", "--local", "2", *settings)
    rates = {split: (at["first"]["wer"], at["last"]["wer"]) for split, at in found["evaluations"].items()}
    return {"model": found["model"], "seconds": time.monotonic() - begin, **rates}


def by_speaker(model: str) -> dict[str, float]:
    """WER of the test split on plain words: in all, on synthetic timbres, and by recorded person."""
    with (DATA / "test.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    heard = command("transcribe", model, *(str(DATA / row["audio_path"]) for row in rows))["transcripts"]
    pairs: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row, transcript in zip(rows, heard, strict=True):
        voice = row["voice"]
        speaker = "espeak-ng" if voice.startswith("espeak") else "-".join(voice.split("-")[:2])
        for group in ("all", speaker):
            pairs[group].append((row["text"], transcript["text"].strip()))
    return {group: jiwer.wer([a for a, _ in found], [b for _, b in found]) for group, found in pairs.items()}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for seed in arguments.seeds:
        output = Path(tempfile.mkdtemp())
        try:
            trained = train(seed, output)
            results[seed] = {**trained, "by_speaker": by_speaker(trained["model"])}
        finally:
            shutil.rmtree(output)
    print("| seed | time | test before | test after | validation after | plain words by speaker |")
    print("|---|---|---|---|---|---|")
    for seed, found in results.items():
        minutes, seconds = divmod(round(found["seconds"]), 60)
        (before, after), (_, validation) = found["test"], found["validation"]
        speakers = ", ".join(f"{name} {rate:.1%}" for name, rate in found["by_speaker"].items())
        print(
            f"| {seed} | {minutes} min {seconds} s | {before:.1%} | **{after:.1%}** | {validation:.1%} | {speakers} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
