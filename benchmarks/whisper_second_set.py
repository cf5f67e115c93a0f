"""A second data set of another kind, and what is forgotten of the first: WER and CER of three models on both.

    .venv/bin/python benchmarks/whisper_second_set.py --clips 900 --seeds 0 1

The models are the published tiny.en, the demo's result (fine-tuned on spoken commands), and that one fine-tuned further
on the sentences that ``examples/make_sentences.py`` makes, with the demo's own settings. All are measured at Whisper's
full window on the test splits, whose voices are in no training split; ``--part 4`` takes every fourth spoken command.
With ``--first MODEL`` the demo is not trained anew. The synthesizers must be installed.
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

from demo import DATA, ROOT, command

sys.path.insert(0, str(ROOT))

from profiles.schema import ModelSettings
from training.tasks.published_models import ensure_available, local_folder

NAME = "openai/whisper-tiny.en"


def train(seed: int, output: Path, *options: str) -> dict[str, Any]:
    """Train the demo with these options; ``{"model", "seconds"}``."""
    begin = time.monotonic()
    settings = ["--set", f"seed={seed}", "--set", f"output_dir={output}", "--set", "eval_before=false"]
    found = command("distributed-train", "demo", "--local", "2", *settings, *options)
    return {"model": found["model"], "seconds": time.monotonic() - begin}


def some_commands(part: int, folder: Path) -> Path:
    """Make a data set of every ``part``-th clip of the commands' test split."""
    folder.mkdir()
    (folder / "audio").symlink_to(DATA / "audio")
    title, *rows = (DATA / "test.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "test.csv").write_text("".join([title, *rows[::part]]), encoding="utf-8")
    return folder


def rates(model: str, sentences: Path, commands: Path) -> dict[str, dict[str, float]]:
    """WER and CER of a model on both test splits."""
    found = {}
    for name, data in (("sentences", sentences), ("commands", commands)):
        metrics = command("evaluate", model, str(data), "--split", "test")["metrics"]
        found[name] = {"wer": metrics["wer"], "cer": metrics["cer"]}
    return found


def compare(seed: int, sentences: Path, output: Path, first: str, part: int, further: list[str]) -> dict[str, Any]:
    """Measure the three models; the further options are those of the second training."""
    ensure_available(ModelSettings(model_path=NAME), print)
    first = first or train(seed, output / "first")["model"]
    second = train(seed, output / "second", "--set", f"model={first}", "--dataset", str(sentences), *further)
    models = {"tiny.en": local_folder(NAME), "commands": first, "then sentences": second["model"]}
    commands = some_commands(part, output / "commands")
    return {name: rates(model, sentences, commands) for name, model in models.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=900)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the second training")
    parser.add_argument("--first", default="", metavar="MODEL", help="a result of the demo")
    parser.add_argument("--part", type=int, default=1, metavar="N", help="measure every Nth spoken command")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    further = [part for setting in arguments.set for part in ("--set", setting)]
    results = {}
    for seed in arguments.seeds:
        output = Path(tempfile.mkdtemp())
        try:
            maker = [sys.executable, str(ROOT / "examples" / "make_sentences.py"), str(output / "sentences")]
            subprocess.run([*maker, "--clips", str(arguments.clips), "--seed", str(seed)], check=True)
            results[seed] = compare(seed, output / "sentences", output, arguments.first, arguments.part, further)
        finally:
            shutil.rmtree(output)
    print("| seed | model | sentences WER | sentences CER | commands WER | commands CER |")
    print("|---|---|---|---|---|---|")
    for seed, models in results.items():
        for name, found in models.items():
            cells = " | ".join(
                f"{found[data][rate]:.1%}" for data in ("sentences", "commands") for rate in ("wer", "cer")
            )
            print(f"| {seed} | {name} | {cells} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
