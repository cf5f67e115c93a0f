"""What a fine-tune of few recordings gains: WER on held-out recordings of the same voices, by settings.

    .venv/bin/python benchmarks/few_recordings.py --model FOLDER --sentences FOLDER --json FILE \\
        [--recordings 40 160] [--wrong 0 2] [--seeds 0 1] [--try "epochs=3" "epochs=10 learning_rate=3e-4"] \\
        [--voices 4] [--profile whisper-tiny-lora] [--workers 2]

``--sentences`` is what ``examples/make_sentences.py`` has made, or a folder that is empty: sentences with rare names
are spoken by espeak-ng into it. Its voices with the most clips are taken: as many recordings as asked for are trained
on, 60 others are held out. ``--wrong`` of the transcripts trained on belong to another recording. Every row is one run
of the profile on workers of this machine, with the settings of ``--try``; the whole window is heard. A row that is in
the JSON file already is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = 60
ESPEAK = ("en-us", "en-gb", "en-us+f2", "en-gb+f3", "en-us+m4")
NAMES = (
    "Szymborska Przybylski Nguyen Siobhan Niamh Caoimhe Joaquin Xochitl Ekaterina Bjornstad Vercingetorix Llewellyn "
    "Wojciech Oyelaran Nakagawa Tchaikovsky"
).split()
SHAPES = (
    "{} called {} about the boat",
    "please send the letter to {}",
    "the meeting with {} is on Friday",
    "{} and {} painted the kitchen",
    "did {} find the keys of {}",
    "I met {} at the market",
    "the book by {} is too long for {}",
    "nobody but {} can repair the radio",
)


def speak_names(folder: Path) -> None:
    """Make a table of sentences with rare names: every voice speaks 24, each with names of its own draw."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    with (folder / "names.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "audio_path", "text", "speaker"))
        for voice in ESPEAK:
            for number in range(24):
                text = SHAPES[number % len(SHAPES)].format(*chance.sample(NAMES, 2))
                path = f"{voice}-{number}.wav"
                subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", str(folder / path), text], check=True)
                writer.writerow((path.removesuffix(".wav"), path, text, voice))


def split(sentences: Path, recordings: int, wrong: int, seed: int, folder: Path, number_of_voices: int) -> None:
    """Write ``train.csv`` and ``validation.csv`` of some recordings of a few voices."""
    by_speaker: dict[str, list[dict[str, str]]] = defaultdict(list)
    for table in sorted(sentences.glob("*.csv")):
        with table.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                by_speaker[row["speaker"]].append(row)
    chance = random.Random(seed)
    voices = sorted(by_speaker, key=lambda one: (-len(by_speaker[one]), one))[:number_of_voices]
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for voice in voices:
        rows = chance.sample(by_speaker[voice], len(by_speaker[voice]))
        train += rows[: recordings // number_of_voices]
        held_out += rows[-(HELD_OUT // number_of_voices) :]
    if len(train) < recordings or {row["id"] for row in train} & {row["id"] for row in held_out}:
        raise SystemExit(
            f"{sentences}: too few clips for {recordings} and {HELD_OUT} of {number_of_voices} voices; make more"
        )
    astray = chance.sample(train, wrong)
    for row, text in zip(astray, [one["text"] for one in (*astray[1:], *astray[:1])], strict=True):
        row["text"] = text
    for name, rows in (("train", train), ("validation", held_out)):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ("id", "audio_path", "text", "speaker"), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row | {"audio_path": str(sentences / row["audio_path"])} for row in rows)


def train(profile: str, workers: int, model: str, dataset: Path, settings: str, seed: int) -> dict[str, float]:
    """Run one fine-tune; return its steps and WER on the held-out recordings."""
    output = dataset / "output"
    values = [f"seed={seed}", "eval_before=true", "eval_interval=0", f"output_dir={output}", *settings.split()]
    command = [sys.executable, str(ROOT / "cli_typer.py"), "distributed-train", profile, "--json"]
    command += ["--local", str(workers), "--strategy", "allreduce", "--model", model, "--dataset", str(dataset)]
    command += [part for value in values for part in ("--set", value)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    found = json.loads(done.stdout)
    heard = found["evaluations"]["validation"]
    return {"steps": heard["last"]["step"], "before": heard["first"]["wer"], "wer": heard["last"]["wer"]}


def main() -> None:
    """Run the rows that are not in the file yet, and print each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--recordings", type=int, nargs="+", default=[40])
    parser.add_argument("--wrong", type=int, nargs="+", default=[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--try", nargs="+", default=[""], dest="settings", metavar="KEY=VALUE ...")
    parser.add_argument("--voices", type=int, default=4)
    parser.add_argument("--profile", default="whisper-tiny-lora")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    sentences = arguments.sentences.resolve()
    if not list(sentences.glob("*.csv")):
        speak_names(sentences)
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    print("| recordings | wrong | seed | settings | steps | WER before | WER |")
    print("|---|---|---|---|---|---|---|")
    for recordings in arguments.recordings:
        for wrong in arguments.wrong:
            for settings in arguments.settings:
                for seed in arguments.seeds:
                    name = f"{recordings} | {wrong} | {seed} | {settings}"
                    if name not in results:
                        with tempfile.TemporaryDirectory() as folder:
                            split(sentences, recordings, wrong, seed, Path(folder), arguments.voices)
                            results[name] = train(
                                arguments.profile, arguments.workers, arguments.model, Path(folder), settings, seed
                            )
                        arguments.json.write_text(json.dumps(results, indent=1))
                    found = results[name]
                    print(f"| {name} | {found['steps']} | {found['before']:.1%} | {found['wer']:.1%} |", flush=True)


if __name__ == "__main__":
    main()
