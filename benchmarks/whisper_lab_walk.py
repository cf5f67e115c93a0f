"""Some recordings, a published Whisper and three machines: what was predicted, what came, and what the model hears.

    .venv/bin/python benchmarks/whisper_lab_walk.py MODEL [--steps 20] [--batch 8] [--set KEY=VALUE ...] [--json FILE]

Needs root and Linux: the machines are network namespaces with an sshd each (``tests/lab``); they share the processors
of this machine, so their speeds depend on each other and on whatever else runs. 44 of the spoken commands are trained
on; the 16 held out are of a recorded person whom nobody heard in training. ``MODEL`` is a published Whisper's folder.
The command is the one that the wizard shows: it measures machines and links, plans, and trains.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from distributed.planning.document import Planning
from distributed.planning.feedback import PLANNING
from tests.lab.lab import Lab
from training.events import MachineEvent
from training.run_folder import RunFolder

COMMANDS = REPOSITORY / "examples" / "spoken_commands"
TRAINED, HELD_OUT, PERSON = 44, 16, "awb"
NAMES = ("one", "two", "three")


def rows_of(split: str) -> list[dict[str, str]]:
    """The clips of the spoken commands."""
    with (COMMANDS / f"{split}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write a table beside the recordings that it names."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "audio_path", "text", "speaker"))
        for row in rows:
            sound = path.parent / "clips" / Path(row["audio_path"]).name
            sound.parent.mkdir(parents=True, exist_ok=True)
            sound.write_bytes((COMMANDS / row["audio_path"]).read_bytes())
            writer.writerow((row["id"], f"clips/{sound.name}", row["text"], row["speaker"]))


def make_recordings(folder: Path, seed: int = 0) -> Path:
    """Write a data set of 60 recordings."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    person = [row for row in rows_of("test") if row["speaker"] == PERSON]
    write_table(folder / "train.csv", draw.sample(rows_of("train"), TRAINED))
    write_table(folder / "validation.csv", draw.sample(person, HELD_OUT))
    return folder


def train(lab: Lab, folder: Path, model: Path, options: Iterable[str]) -> Path:
    """Train as the wizard's command does; return the run's folder."""
    settings = [word for option in options for word in ("--set", option)]
    words = [
        "distributed-train",
        "demo",
        "--model",
        str(model),
        "--dataset",
        str(make_recordings(folder / "recordings")),
    ]
    hosts = ["--hosts", str(lab.hosts_file), "--strategy", "auto", "--no-input"]
    command = [sys.executable, str(REPOSITORY / "cli_typer.py"), *words, *hosts, *settings]
    subprocess.run(command, check=True, cwd=folder)
    return next((folder / "output").iterdir())


def figures(path: Path) -> dict[str, Any]:
    """Return what was predicted beside what came, of one run."""
    run, planning = RunFolder.open(path), Planning.read(path / PLANNING)
    assert planning.best is not None
    peaks: dict[int, int] = {}
    for event in run.events():
        if isinstance(event, MachineEvent) and event.member is not None:
            peaks[event.member] = max(peaks.get(event.member, 0), event.memory_used)
    predicted = {member.name: member.memory for member in planning.best.members}
    members = run.plan().members
    memory = {one.name: {"predicted": predicted.get(one.name), "peak": peaks.get(one.rank)} for one in members}
    metrics = run.metadata.metrics
    wer = {when: {split: told.get("wer") for split, told in metrics[when].items()} for when in ("before", "after")}
    return {
        "strategy": run.metadata.strategy,
        "prediction": metrics.get("prediction"),
        "memory": memory,
        "wer": wer,
        "seconds": metrics["seconds"],
    }


def show(found: Mapping[str, Any]) -> None:
    """Print them as tables."""
    print(f"strategy {found['strategy']}, {found['seconds']:.0f} s of training")
    print("| | predicted | measured |\n|---|---|---|")
    if prediction := found["prediction"]:
        for name, label in (("step", "seconds a step"), ("wait", "of these waited")):
            print(f"| {label} | {prediction[f'predicted_{name}']:.2f} | {prediction[f'measured_{name}']:.2f} |")
        for one in prediction["members"]:
            print(f"| seconds a step, compute of {one['name']} | {one['predicted']:.2f} | {one['measured']:.2f} |")
    for name, one in found["memory"].items():
        cells = ("-" if value is None else f"{value / 1e6:.0f} MB" for value in (one["predicted"], one["peak"]))
        print(f"| memory of {name} | {' | '.join(cells)} |")
    for split, before in found["wer"]["before"].items():
        print(f"\nWER on {split}: {before:.1%} before, {found['wer']['after'][split]:.1%} after")


def main() -> None:
    """Build the lab, train, and print what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, help="of the recordings and the run; else a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    options = [f"max_steps={given.steps}", f"batch_size={given.batch}", *given.settings]
    with Lab(*NAMES) as lab, tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = figures(train(lab, folder, given.model.resolve(), options))
    show(found)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
