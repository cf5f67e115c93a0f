"""What windows that follow the clips cost: the same fine-tune with each setting of ``window``, heard cut and whole.

    .venv/bin/python benchmarks/whisper_windows.py --model FOLDER [--windows auto full] [--seeds 0 1] [--json FILE]

Every row is one run of the command line on the spoken commands, all weights, one worker; then the saved model writes
all clips of the validation and test voices, with the whole window and with the clips' own. WER is that of the
normalised texts. ``--set KEY=VALUE`` changes the runs. A row that is in the JSON file already is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from profiles.schema import DataSettings, ModelSettings, Profile
from speech.data.speech_dataset import clips_of_split
from speech.whisper.task import WhisperTask
from training.hardware.device import Precision, select_precision

DATA = ROOT / "examples" / "spoken_commands"
PERSON = "awb"
BATCH = 40
DEVICE = torch.device("cpu")


def train(model: str, window: str, seed: int, steps: int, extra: list[str], output: str) -> str:
    """Run one fine-tune; return the folder of its model."""
    values = {"window": window, "seed": seed, "max_steps": steps, "batch_size": 16, "learning_rate": 1e-4}
    values |= {"max_eval_samples": 1, "eval_interval": 0, "snapshot_interval": 0, "output_dir": output}
    command = [sys.executable, str(ROOT / "cli_typer.py"), "distributed-train", "demo", "--json", "--local", "1"]
    command += ["--model", model]
    pairs = [f"{key}={value}" for key, value in values.items()] + extra
    command += [part for pair in pairs for part in ("--set", pair)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return str(json.loads(done.stdout)["model"])


@torch.no_grad()
def rates(model: str, splits: Sequence[str] = ("validation", "test", "person")) -> dict[str, float]:
    """WER of synthetic ``validation`` and ``test`` voices and of the ``person``, by window (``cut`` or ``whole``)."""
    task = WhisperTask(
        Profile(
            name="windows",
            model=ModelSettings(model_path=model),
            data=DataSettings(dataset_path=str(DATA), window="auto"),
        )
    )
    network = task.wrapper.build().eval()
    precision = Precision(select_precision("auto", DEVICE, task.bf16_is_faster), DEVICE)
    edits: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for split in splits:
        table = "test" if split == "person" else split
        clips = [
            clip
            for clip in clips_of_split(str(DATA), table)
            if (clip.columns["speaker"] == PERSON) == (split == "person")
        ]
        data = task.prepare_split(table, clips, lambda *_: None)
        order = sorted(range(len(data)), key=lambda index: data.frames[index])
        for start in range(0, len(order), BATCH):
            samples = [data[index] for index in order[start : start + BATCH]]
            batch = task.collate(samples, None)
            whole = batch["input_features"]
            for heard, features in (("cut", whole[..., : max(one.frames for one in samples)]), ("whole", whole)):
                with precision.autocast():
                    _, answers = task.answer(network, {**batch, "input_features": features}, generate=True)
                for one in task.predictions_of(data, answers):
                    edits[f"{split} {heard}"] += one.edits
                    words[f"{split} {heard}"] += one.words
    return {name: edits[name] / words[name] for name in words}


def main() -> None:
    """Run the rows that are not in the file yet, and print each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--windows", nargs="+", default=["auto", "full"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--splits", nargs="+", default=["validation", "test", "person"], metavar="SPLIT")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    print(f"| window | seed | heard | {' | '.join(arguments.splits)} |")
    print("|---|---|---|" + "---|" * len(arguments.splits))
    for window in arguments.windows:
        for seed in arguments.seeds:
            name = " ".join([window, str(seed), str(arguments.steps), *arguments.set])
            if name not in results:
                with tempfile.TemporaryDirectory() as output:
                    model = train(arguments.model, window, seed, arguments.steps, arguments.set, output)
                    results[name] = rates(model, arguments.splits)
            for heard in ("cut", "whole"):
                cells = " | ".join(f"{results[name][f'{who} {heard}']:.2%}" for who in arguments.splits)
                print(f"| {window} | {seed} | {heard} | {cells} |", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
