"""Some recordings, a published Whisper and three machines: what was predicted, what came, and what the model hears.

    .venv/bin/python benchmarks/whisper_lab_walk.py MODEL [--steps 20] [--batch 8] [--screens] [--json FILE]
    .venv/bin/python benchmarks/whisper_lab_walk.py MODEL --headless [--set KEY=VALUE ...]

Needs root, Linux and tmux: the machines are network namespaces with an sshd each (``tests/lab``); they share the
processors of this machine, so their speeds depend on each other and on whatever else runs. 44 of the spoken commands
are trained on; the 16 held out are of a recorded person whom nobody heard in training. ``MODEL`` is a published
Whisper's folder. ``wizard.py`` runs in a terminal of 80x24 and gets the keys that a person would press, from Machines
to the end of the run; ``--headless`` runs the command that the wizard shows instead.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from distributed.planning.documents.document import Planning
from distributed.planning.feedback import PLANNING
from tests.demo.tmux_terminal import Tmux
from tests.lab.lab import Lab
from training.records.events import MachineEvent
from training.records.run_folder import RunFolder

COMMANDS = REPOSITORY / "examples" / "spoken_commands"
TRAINED, HELD_OUT, PERSON = 44, 16, "awb"
NAMES = ("one", "two", "three")
LEFT_OUT = (".git", ".venv", ".*_cache", "__pycache__", "output", "saved", "tests", "docs")
"""Of the project's copy, in which the wizard saves its profile."""
MOST_TRIES = 10
MOST_ANSWER = 20.0
PATIENCE = 300.0
TRAINING = 1800.0
"""Seconds."""


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


class Walk:
    """The wizard in a terminal; every screen that was waited for is kept."""

    def __init__(self, terminal: Tmux) -> None:
        self.terminal = terminal
        self.screens: list[str] = []

    def until(self, *texts: str, patience: float = PATIENCE) -> None:
        """Wait for a screen that shows all texts."""
        self.screens.append(self.terminal.until(*texts, patience=patience))

    def select(self, row: str) -> None:
        """Go down to the row that begins so; each key is answered before the next one."""
        self.until(f" {row} ")
        latest = time.monotonic() + PATIENCE
        while (place := self._selected()) != f"▌ {row}":
            self.terminal.press("Down")
            end = time.monotonic() + MOST_ANSWER
            while self._selected() == place and time.monotonic() < end:  # a new screen may not have taken the key
                time.sleep(0.1)
            assert time.monotonic() < latest, f"{row!r} is never selected on:\n{self.terminal.screen}"

    def _selected(self) -> str:
        """Return the first cell of the selected row; the others change by themselves."""
        line = next((line for line in self.terminal.screen.splitlines() if "▌" in line), "")
        return line.strip().partition("  ")[0]

    def leave(self, key: str, question: str) -> None:
        """Press a key that takes away what is asked; a screen that has just opened takes none: it is pressed again."""
        for _ in range(MOST_TRIES):
            self.terminal.press(key)
            end = time.monotonic() + MOST_ANSWER
            while time.monotonic() < end:
                if question not in self.terminal.screen:
                    return
                time.sleep(0.2)
        raise SystemExit(f"{question!r} stays:\n{self.terminal.screen}")

    def fill_in(self, row: str, value: str) -> None:
        """Change an option of Job."""
        self.select(row)
        self.terminal.press("Enter")
        self.until("esc Close")
        for _ in range(MOST_TRIES):  # a dialog that has just opened may lose keys
            self.terminal.press("C-u")
            self.terminal.write(value)
            time.sleep(1.0)
            if f" {value} " in self.terminal.screen:
                break
        self.terminal.press("Enter")
        self.terminal.until_gone("esc Close")

    def train(self, model: Path, recordings: Path, options: Mapping[str, int]) -> None:
        """Go from Home to the end of the run."""
        self.until("What do you want to do?", "New set-up")
        self.leave("n", "What do you want to do?")
        self.until("1 picked of", "(here)", *(f"[ ] {name} " for name in NAMES))
        self.leave("Space", "1 picked of")
        self.until("0 picked of")
        for name in sorted(NAMES):
            self.select(f"[ ] {name}")
            self.leave("Space", f"▌ [ ] {name} ")
            self.until(f"▌ [x] {name} ")
        self.until("3 picked of")
        self.leave("Enter", "Which machines take part?")
        self.until("Can Muster log in there?", "3 of 3 accept the login")
        self.leave("Enter", "Can Muster log in there?")
        self.until("Are they ready to train?", "3 of 3 ready")
        self.leave("Enter", "Are they ready to train?")
        self.until("How fast is the network", "Mbit/s, ms")
        self.leave("Enter", "How fast is the network")
        self.until("Which model, on which data?", "Continue")
        self.fill_in("model", str(model))
        self.fill_in("data set", str(recordings))
        for name, value in options.items():
            self.fill_in(name, str(value))
        self.until(f"{TRAINED} samples", "fits all 3 machines")
        self.leave("n", "Which model, on which data?")
        self.until("How should they train together?", "recommended")
        self.leave("Enter", "How should they train together?")
        self.until("Review and start", "enter Start")
        self.leave("Enter", "Review and start")
        self.until("1 Overview", "step 1")
        self.until("Completed", patience=TRAINING)
        self.terminal.press("Escape")
        self.until("The run has ended", "transcribe")
        self.terminal.press("C-c")
        self.until("exit code 130")


def train_by_wizard(lab: Lab, folder: Path, model: Path, options: Mapping[str, int], show_screens: bool) -> Path:
    """Train through the wizard's screens; return the run's folder."""
    project = folder / "muster"
    shutil.copytree(REPOSITORY, project, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(lab.hosts_file, project / "distributed_hosts.json")
    with Tmux([sys.executable, "wizard.py"], project) as terminal:
        walk = Walk(terminal)
        try:
            walk.train(model, make_recordings(folder / "recordings"), options)
        finally:
            if show_screens:
                print("\n".join(walk.screens))
    return next((project / "output").iterdir())


def train_headless(lab: Lab, folder: Path, model: Path, options: Iterable[str]) -> Path:
    """Train as the wizard's command does; return the run's folder."""
    settings = [word for option in options for word in ("--set", option)]
    recordings = str(make_recordings(folder / "recordings"))
    words = ["distributed-train", "demo", "--model", str(model), "--dataset", recordings]
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
    parser.add_argument("--headless", action="store_true", help="by one command, without the wizard")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="headless")
    parser.add_argument("--screens", action="store_true", help="print every screen on the way")
    parser.add_argument("--folder", type=Path, help="of the recordings and the run; else a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    if given.settings and not given.headless:
        parser.error("--set needs --headless")
    options = {"max_steps": given.steps, "batch_size": given.batch}
    model = given.model.resolve()
    with Lab(*NAMES) as lab, tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if given.headless:
            settings = [*(f"{name}={value}" for name, value in options.items()), *given.settings]
            run = train_headless(lab, folder, model, settings)
        else:
            run = train_by_wizard(lab, folder, model, options, given.screens)
        found = figures(run)
    show(found)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
