"""How many wrong transcripts ``blacklist`` finds, and what ``pseudo-label`` keeps of what it hears.

    .venv/bin/python benchmarks/blacklist.py MODEL [--folder DIR] [--clips 200] [--wrong 20] [--steps 60]

``MODEL`` is a published Whisper, whose window is cut to 2 s here. Of the spoken commands ``--clips`` are taken to train
on. Half of ``--wrong`` of them exchange their transcripts, the others get random words. They are looked for by the
model that was trained on all, and by ``--folds`` models that were not trained on what they judge; ``--unlabelled`` test
clips, of voices that nobody heard, are labelled then. What is made is kept in ``--folder``, and used again.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

if TYPE_CHECKING:
    from profiles.schema import Profile
    from speech.whisper.cleaning.blacklist import SuspectClip

COMMANDS = REPOSITORY / "examples" / "spoken_commands"
SECONDS = 2


def cut_window(model: Path, folder: Path) -> Path:
    """Save a Whisper that hears :data:`SECONDS`, with the first positions of one that hears 30 s."""
    import torch
    from transformers import WhisperFeatureExtractor

    from profiles.schema import ModelSettings
    from speech.whisper.model import WhisperModelWrapper

    wrapper = WhisperModelWrapper(ModelSettings(model_path=str(model)))
    whisper: Any = wrapper.build()
    positions = SECONDS * 50
    table = whisper.get_parameter("model.encoder.embed_positions.weight")[:positions].detach().clone()
    encoder = whisper.get_submodule("model.encoder")
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(table, freeze=True)
    whisper.config.max_source_positions = encoder.max_source_positions = positions
    wrapper.extractor = WhisperFeatureExtractor(wrapper.log_mel.mels, chunk_length=SECONDS)
    folder.mkdir(parents=True)
    wrapper.save(whisper, folder, "en")
    return folder


def rows_of(split: str) -> list[dict[str, str]]:
    """The clips of the spoken commands that fit into the window."""
    with (COMMANDS / f"{split}.csv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if float(row["duration"]) < SECONDS]


def write_table(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write a table of clips that stay where they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "audio_path", "text"))
        writer.writerows((row["id"], COMMANDS / row["audio_path"], row["text"]) for row in rows)


def make_data(folder: Path, clips: int, wrong: int, seed: int) -> None:
    """Write a data set of which ``wrong`` clips have another transcript, and in which way beside it."""
    rows = rows_of("train")
    draw = random.Random(seed)
    rows = draw.sample(rows, len(rows))[:clips]
    texts = [row["text"] for row in rows]
    words = sorted({word for text in texts for word in text.split()})
    swapped = [0] * (wrong - wrong // 2)
    while any(texts[swapped[i]] == texts[swapped[i - 1]] for i in range(len(swapped))):
        chosen = draw.sample(range(clips), wrong)
        swapped, invented = chosen[: len(swapped)], chosen[len(swapped) :]
    for before, after in zip(swapped, [*swapped[1:], swapped[0]]):
        rows[before]["text"] = texts[after]
    for index in invented:
        while rows[index]["text"] == texts[index]:
            rows[index]["text"] = " ".join(draw.choices(words, k=len(texts[index].split())))
    write_table(folder / "train.csv", rows)
    write_table(folder / "validation.csv", rows_of("validation")[:20])
    kinds = {index: kind for kind, ones in (("swapped", swapped), ("random", invented)) for index in ones}
    (folder / "wrong.json").write_text(json.dumps({rows[index]["id"]: kind for index, kind in kinds.items()}))


def train(folder: Path, steps: int, whole: bool) -> Path:
    """Train the cut model's decoder, or the whole model, with one worker; return its folder."""
    options = {
        "learning_rate": 1e-4,
        "warmup_steps": steps // 8,
        "max_steps": steps,
        "batch_size": 16,
        "gradient_accumulation": 1,
        "gradient_checkpointing": "false",
        "eval_interval": 0,
        "window": "full",
        "freeze_encoder": str(not whole).lower(),
        "eval_batch_size": 20,
        "snapshot_interval": 0,
        "output_dir": folder / "output",
    }
    given = ["--model", folder / "model", "--dataset", folder / "data", "--local", "1", "--no-input"]
    settings = [f"--set={name}={value}" for name, value in options.items()]
    command = [
        sys.executable,
        REPOSITORY / "cli_typer.py",
        "distributed-train",
        "whisper-small-full",
        *given,
        *settings,
    ]
    subprocess.run([str(word) for word in command], check=True)
    return next((folder / "output").glob("*/model"))


def profile_of(model: Path) -> Profile:
    """Return the profile of the run that made ``model``."""
    from training.records.run_folder import RunFolder

    return RunFolder.open(model.parent).plan().profile


def heard_by_trained(model: Path) -> list[SuspectClip]:
    """Return what the model that was trained on the clips hears in them."""
    from speech.whisper.cleaning.blacklist import find_suspects, plan_passes

    return find_suspects(profile_of(model), plan_passes([model], 1), "cpu", 16, report)


def heard_in_turns(model: Path, folds: int, rounds: int) -> list[SuspectClip]:
    """Return what models hear that were not trained on what they judge."""
    from speech.commands.transcripts import judge_in_turns
    from training.records.runs import summarise

    how = ("cpu", 16, report)
    return judge_in_turns(summarise(model.parent), profile_of(model), folds, rounds, 1, True, how)


def report(phase: str, done: int, total: int | None) -> None:
    """Say how far it is."""
    print(f"{phase}: {done}/{total}", file=sys.stderr, flush=True)


def show_blacklist(title: str, found: Sequence[SuspectClip], wrong: Mapping[str, str]) -> None:
    """Print what would be listed by each pair of bounds."""
    from speech.whisper.cleaning.blacklist import Bounds

    again = len(found[0].wers)
    print(f"\n{title}: {len(found)} clips, {len(wrong)} with a wrong transcript, {again} listens")
    print("| --wer | --margin | listed | swapped found | random found | precision | recall |")
    print("|---|---|---|---|---|---|---|")
    for wer in (0.3, 0.5, 1.0):
        for margin in (0.0, 1.0, 2.0, 3.0, 4.0):
            bounds = Bounds(wer, margin, again)
            listed = {one.clip.id for one in found if one.failed_passes(bounds) >= again}
            hits = [sum(wrong.get(name) == kind for name in listed) for kind in ("swapped", "random")]
            precision = f"{sum(hits) / len(listed):.0%}" if listed else "-"
            cells = (wer, margin, len(listed), *hits, precision, f"{sum(hits) / len(wrong):.0%}")
            print(f"| {' | '.join(map(str, cells))} |")


def show_labels(folder: Path, model: Path, count: int) -> None:
    """Label test clips and print the WER of the texts above and below each bound."""
    from speech.scoring.word_errors import ErrorRates, count_errors
    from speech.whisper.cleaning.pseudo_label import LabellingJob, label

    rows = random.Random(1).sample(rows_of("test"), count)
    truth = {row["id"]: row["text"] for row in rows}
    files = [(row["id"], COMMANDS / row["audio_path"]) for row in rows]
    found = label(LabellingJob(model, None, device="cpu", batch_size=16), files, folder / "pseudo.csv", report)
    rates = ErrorRates()

    def wer(names: set[str]) -> str:
        pairs = [(truth[row.id], row.text) for row in found if row.id in names]
        texts = [tuple(rates.normalised(text, "en") for text in pair) for pair in pairs]
        counted = count_errors([text for text, _ in texts], [text for _, text in texts])
        return f"{100 * counted['word_edits'] / counted['words']:.1f} %" if texts else "-"

    everything = {row.id for row in found}
    print(f"\n{len(found)} recordings, WER {wer(everything)}")
    print("| bound | kept | WER of these | left out | WER of these |\n|---|---|---|---|---|")
    bounds: list[tuple[str, set[str]]] = [("the defaults", {row.id for row in found if not row.left_out})]
    for least in (0.5, 0.7, 0.9, 1.0):
        bounds.append((f"agreement {least}", {row.id for row in found if row.agreement >= least}))
    for sure in (-1.0, -0.5, -0.2, -0.1, -0.05):
        bounds.append((f"confidence {sure}", {row.id for row in found if row.confidence >= sure}))
    for sure in (-0.2, -0.1, -0.05):
        both = {row.id for row in found if row.confidence >= sure and row.agreement >= 1}
        bounds.append((f"confidence {sure} and agreement 1", both))
    for name, kept in bounds:
        out = everything - kept
        print(f"| {name} | {len(kept)} | {wer(kept)} | {len(out)} | {wer(out)} |")


def main() -> None:
    """Make what is missing, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/muster-blacklist"))
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--wrong", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="train the encoder too")
    parser.add_argument("--unlabelled", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not (given.folder / "model").exists():
        cut_window(given.model, given.folder / "model")
    if not (given.folder / "data").exists():
        make_data(given.folder / "data", given.clips, given.wrong, given.seed)
    model = next((given.folder / "output").glob("*/model"), None) or train(given.folder, given.steps, given.whole)
    wrong = json.loads((given.folder / "data" / "wrong.json").read_text())
    show_blacklist("trained on all of them", heard_by_trained(model), wrong)
    show_blacklist(f"{given.folds} folds held out in turns", heard_in_turns(model, given.folds, given.rounds), wrong)
    if given.unlabelled:
        show_labels(given.folder, model, given.unlabelled)


if __name__ == "__main__":
    main()
