"""A second data set of another kind, and what is forgotten of the first: WER and CER of three models on both.

    .venv/bin/python benchmarks/whisper_second_set.py --clips 900 --seeds 0 1

The models are the published tiny.en, the demo's result (fine-tuned on spoken commands), and that one fine-tuned further
on the sentences that ``examples/make_sentences.py`` makes, with the demo's own settings. All are measured at Whisper's
full window on the test splits, whose voices are in no training split. The synthesizers must be installed.
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
from training.tasks.published_models import local_folder, obtain

NAME = "openai/whisper-tiny.en"


def train(seed: int, output: Path, *options: str) -> dict[str, Any]:
    """Train the demo with these options; ``{"model", "seconds"}``."""
    begin = time.monotonic()
    settings = ["--set", f"seed={seed}", "--set", f"output_dir={output}", "--set", "eval_before=false"]
    found = command("distributed-train", "demo", "--local", "2", *settings, *options)
    return {"model": found["model"], "seconds": time.monotonic() - begin}


def rates(model: str, sentences: Path) -> dict[str, dict[str, float]]:
    """WER and CER of a model on both test splits."""
    found = {}
    for name, data in (("sentences", sentences), ("commands", DATA)):
        metrics = command("evaluate", model, str(data), "--split", "test")["metrics"]
        found[name] = {"wer": metrics["wer"], "cer": metrics["cer"]}
    return found


def compare(seed: int, sentences: Path, output: Path, further: list[str]) -> dict[str, Any]:
    """Measure the three models; the further options are those of the second training."""
    obtain(ModelSettings(model_path=NAME), print)
    first = train(seed, output / "first")
    second = train(seed, output / "second", "--set", f"model={first['model']}", "--dataset", str(sentences), *further)
    models = {"tiny.en": local_folder(NAME), "commands": first["model"], "then sentences": second["model"]}
    return {name: rates(model, sentences) for name, model in models.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=900)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the second training")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    further = [part for setting in arguments.set for part in ("--set", setting)]
    results = {}
    for seed in arguments.seeds:
        output = Path(tempfile.mkdtemp())
        try:
            maker = [sys.executable, str(ROOT / "examples" / "make_sentences.py"), str(output / "sentences")]
            subprocess.run([*maker, "--clips", str(arguments.clips), "--seed", str(seed)], check=True)
            results[seed] = compare(seed, output / "sentences", output, further)
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
